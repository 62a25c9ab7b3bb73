"""What users of other frameworks report of rollout engines, one claim a test; the row of the complaints is in
each.

The claims that other files test better name their row there: 7, 11, 12 in test_sglang_fleet.py, 7 in
test_standing.py, 10 in test_corrections.py, 10, 11, 12 and 26 in test_in_flight.py, 11 and 28 in
test_sglang_real.py, 13 in test_turns.py, 11, 12 and 14 in test_engine.py, 26 in test_partial.py.
"""

import contextlib
import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from policies import save_tiny_policy
from recorded_sglang import answer, attached, recorded
from test_partial import answer as part
from test_partial import joined
from test_rl import config, scored

from tasks.engine import embedded
from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang_client import SglangError
from tasks.engine.sglang_format import completion
from tasks.engine.sglang_server import LaunchedServer, answers
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.models.tokenizer import stop_ids
from tasks.policy.step.trainer import token_logprobs_and_entropy
from tasks.rl.assembly import assemble_frame
from tasks.rl.mismatch import mismatch_report
from tasks.schema import RolloutFrame, ScoredFrame, make_frame
from tasks.sglang_config import SglangConfig

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 2


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Two versions of a policy that are served as they are."""
    root = tmp_path_factory.mktemp("policies")
    return [save_tiny_policy(root / str(seed), family="deepseek_v3", seed=seed) for seed in (0, 1)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_engine_with_the_trainers_model_code_agrees_with_it_to_the_last_bits(family, tmp_path):
    """Row 10. The sums of a step with a cache and of a whole pass differ in the last bits of float32; nothing
    else may."""
    folder = save_tiny_policy(tmp_path, family=family)
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folder, 0)
    model = load_policy(folder, dispatcher=LocalDispatcher())
    trainer, behavior = [], []
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, PARAMS), strict=True):
        for done in group:
            ids = torch.tensor([[*request.prompt_ids, *done.response_ids]])
            logprob, _ = token_logprobs_and_entropy(model, ids, torch.ones_like(ids), 1.0)
            trainer.append(logprob[0, len(request.prompt_ids) :].detach())
            behavior.append(torch.tensor(done.logprobs))
    report = mismatch_report(torch.cat(trainer), torch.cat(behavior))
    assert report["max"] < 4 * torch.finfo(torch.float32).eps * 4  # four units of a value of about 4
    assert abs(report["k1"]) < 1e-6 and report["k3"] < 1e-11 and report["effective_share"] > 1 - 1e-10


def test_every_update_forgets_the_cache_of_the_weights_before(untied):
    """Row 11: keys and values of other weights were used again, without a word."""
    with recorded() as server:
        engine = attached(server)
        for version, folder in enumerate(untied):
            engine.load(folder, version)
        assert [body["flush_cache"] for body in server.state["updates"]] == [True, True]


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_log_probability_that_is_no_number_is_refused_with_its_request(value):
    """Row 12: an update that raced with a pass gave NaN, which was trained on."""
    entries = [[-0.5, 9, None], [value, 1, None]]
    with pytest.raises(
        ValueError, match=r"request r must have .* numbers, got (None|nan|-inf) at token 1 of 2"
    ):
        completion(answer(output_token_logprobs=entries), routing_shape=(2, 2))


def test_every_end_id_of_the_checkpoint_stops_a_response(tmp_path):
    """Row 14: one of several was honoured, and 97 % of the responses counted as cut off."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    assert stop_ids(tmp_path) == frozenset({7, 3})


@pytest.mark.parametrize("value", ["true", "[7, true]", "[]", '"7"'])
def test_an_end_id_that_is_no_number_is_refused(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ValueError, match="must be a token's id or a list of them"):
        stop_ids(tmp_path)


def test_an_end_token_is_trained_also_where_it_pads():
    """Row 14: a mask made of "is not padding" left the end untrained, and the policy never stopped."""
    pad = 0
    rows = [
        scored("a", i, r) | {"response_ids": [5, pad], "finish_reason": "stop"}
        for i, r in enumerate((0.0, 1.0))
    ]
    train, _, _ = assemble_frame(make_frame(rows, ScoredFrame), config(), iteration=3, policy_version=7)
    assert train["loss_mask"].to_list() == [[True, True]] * 2
    assert [ids[-1] for ids in train["response_ids"].to_list()] == [pad, pad]


def test_a_resumed_response_has_a_mask_value_and_a_log_probability_a_token():
    """Row 26: the mask kept the length of the first piece."""
    rest = (part([2, 1], "stop", num_rows=3), part([8, 1], "stop", num_rows=5), part([], "abort", num_rows=0))
    resumed = joined(*rest)
    rows = [row for row in resumed if row["finish_reason"] == "stop"]
    make_frame(rows, RolloutFrame)
    judged = {"outcome": "score", "is_exact": False, "reason": "", "parts": None}
    frame = make_frame([row | judged | {"reward": float(i % 2)} for i, row in enumerate(rows)], ScoredFrame)
    train, _, _ = assemble_frame(
        frame, config(schedule={"max_staleness": 1}), iteration=rows[0]["iteration"], policy_version=6
    )
    assert sorted(map(len, train["response_ids"].to_list())) == [2, 2, 4]
    for row in train.rows(named=True):
        assert len(row["loss_mask"]) == len(row["response_ids"]) == len(row["behavior_logprob"])
        assert all(row["loss_mask"])


def test_a_server_that_fails_now_and_then_stays_in_service(untied):
    """Row 28: a healthy engine was killed by the first probe that failed. Here it takes failures in a row."""
    with recorded(stumbles={2, 4}) as server:
        engine = attached(server, max_failures=2)
        engine.load(untied[0], 3)
        for _ in range(3):
            assert [len(group) for group in engine.generate(REQUESTS[:1], PARAMS)] == [4]
        assert [address.failures for address in engine.fleet.addresses] == [0]
    with recorded(stumbles={1, 2}) as server:
        engine = attached(server, max_failures=2)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match="broke off"):
            engine.generate(REQUESTS[:1], PARAMS)
        assert "2 failures in a row" in engine.describe()


COMPILES = """#!{python}
import runpy, sys, time
time.sleep({seconds})
port = sys.argv[sys.argv.index("--port") + 1]
sys.argv = ["canned", "--port", port, "--tokens", "2"]
runpy.run_path({canned!r}, run_name="__main__")
"""


@pytest.mark.parametrize(("budget", "is_given_up"), [(60.0, False), (0.7, True)])
def test_a_server_that_still_compiles_is_given_its_start_up_budget_and_no_more(tmp_path, budget, is_given_up):
    """Row 28: the first probe that found nobody killed it. The server here is canned; its start is real."""
    interpreter = tmp_path / "python"
    canned = str(Path(__file__).with_name("canned_sglang.py"))
    interpreter.write_text(COMPILES.format(python=sys.executable, seconds=2, canned=canned))
    interpreter.chmod(0o755)
    config = SglangConfig(
        python=str(interpreter), startup_seconds=budget, device="cpu", attention="torch_native",
        cuda_graphs=False,
    )  # fmt: skip
    server = LaunchedServer(config, tmp_path / "server", dtype="float32", routing=False)
    start = time.monotonic()
    too_slow = pytest.raises(RuntimeError, match=r"must answer on .* within 1 s, got: no answer")
    with too_slow if is_given_up else contextlib.nullcontext():
        url = server.start(tmp_path, 0)
        assert answers(url) and time.monotonic() - start > 2, "a hundred probes before found nobody"
    server.stop()


class Slow:
    """Sampling parameters under which a decoding step takes a while."""

    record_routing, max_new_tokens, top_p, stop_ids = "none", 99, 1.0, frozenset()

    def __init__(self):
        self.is_in_step = threading.Event()

    @property
    def temperature(self):
        self.is_in_step.set()
        time.sleep(0.3)
        self.is_in_step.clear()
        return 1.0


@pytest.mark.parametrize("is_sampling", [False, True])
def test_the_weights_before_are_freed_before_the_next_ones_are_read(tmp_path, monkeypatch, is_sampling):
    """Row 33, in the worker's process: two versions at once did not fit. Under responses that run as well."""
    folder, slow = save_tiny_policy(tmp_path), Slow()
    engine, found = EmbeddedEngine(batch_size=4), []

    def read(*arguments, **named):
        found.append(slow.is_in_step.is_set())
        gc.collect()
        found.append(before() is not None)
        return load_policy(*arguments, **named)

    engine.load(folder, 0)
    before = weakref.ref(engine.model)
    monkeypatch.setattr(embedded, "load_policy", read)
    if is_sampling:
        threading.Thread(target=engine.generate, args=(REQUESTS, slow)).start()
        assert slow.is_in_step.wait(5)
    engine.load(folder, 1)
    assert found == [False, False] and engine.version == 1


def test_no_version_is_loaded_beside_the_one_before(untied):
    """Row 33: weights and cache of two versions at once did not fit. A server updates in place, and it is not
    asked before its requests have ended, so their cache is free by then."""
    with recorded(seconds=0.3) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        thread = threading.Thread(target=engine.generate, args=(REQUESTS, PARAMS))
        thread.start()
        while not server.state.get("running"):
            pass
        engine.load(untied[1], 4)
        thread.join()
        assert server.state["running_at_update"] == [0, 0]
