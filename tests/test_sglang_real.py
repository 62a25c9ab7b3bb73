"""What only a real SGLang server shows: launches, deaths, routing records, the router, determinism.

They need an interpreter that has sglang (see ``test_engine.py``) and minutes: most start a server of their
own, which ends with the test, for an idle one takes half a core. Those that share a pair come last.
"""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from engines import sglang_config, start_sglang
from policies import save_tiny_policy
from served import dtype_of, routed

from tasks.embedded.ports import HOST
from tasks.engine import sglang_server
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import Fleet
from tasks.engine.sglang_client import SglangError
from tasks.engine.sglang_model import served_folder
from tasks.engine.sglang_server import LaunchedServer

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("leave_servers")]
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def kill_server(folder):
    """SIGKILL for whatever has the folder in its command line: the server, or the guard it ends with."""
    found = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    assert found
    for pid in found:
        os.kill(int(pid), signal.SIGKILL)


def workers_of(url):
    with urllib.request.urlopen(f"{url}/workers", timeout=5) as response:
        return json.load(response)["workers"]


def wait_for_router(url, log):
    """Until it has met both of its workers."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if len(workers_of(url)) == 2:
                return
        except OSError:
            pass
        time.sleep(0.5)
    pytest.fail(log.read_text()[-2000:])


def test_an_unknown_argument_of_the_installed_version_ends_the_launch_with_its_name(
    folder, tmp_path, monkeypatch
):
    real = sglang_server.server_arguments
    monkeypatch.setattr(
        sglang_server, "server_arguments", lambda *a, **k: [*real(*a, **k), "--enable-deepep-moe"]
    )
    with pytest.raises(RuntimeError, match="enable-deepep-moe"):
        start_sglang(tmp_path).load(folder, 0)


def test_a_killed_server_is_replaced_by_the_next_load(folder, tmp_path):
    """Start-up has a budget of its own; a server that is dead, not slow, is started again (complaint 28)."""
    engine = start_sglang(tmp_path / "server")
    engine.load(folder, 1)
    said = (tmp_path / "server" / "server.log").read_text()
    assert all(f"Freezing GC in {name}" in said for name in ("Scheduler", "Tokenizer Manager"))
    kill_server(tmp_path / "server")
    with pytest.raises(SglangError, match=r"broke off|no SGLang server"):
        engine.generate(REQUESTS, PARAMS)
    engine.load(folder, 2)
    assert engine.generate(REQUESTS, PARAMS)


def test_routing_records_are_those_of_transformers(folder, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    engine = start_sglang(tmp_path, routing=True)
    engine.load(folder, 1)
    (group,) = engine.generate([REQUESTS[0]], replace(PARAMS, record_routing="experts"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for done in group:
        ids = torch.tensor([[*REQUESTS[0].prompt_ids, *done.response_ids]])[:, :-1]
        logits = model(ids, output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2).indices.sort().values for layer in logits], dim=1)
        assert done.routed_experts is not None
        assert (np.sort(done.routed_experts, axis=-1) == chosen.numpy()).all()


@contextmanager
def reward_server(folder, scratch):
    """SGLang with a reward model, as one would start it by hand."""
    config = sglang_config()
    dtype = dtype_of(config)
    port = 28_000 + os.getpid() % 1_000
    arguments = sglang_server.server_arguments(
        config, model=folder, version=0, dtype=dtype, port=port, routing=False
    )
    arguments[arguments.index("--skip-tokenizer-init")] = "--is-embedding"
    environment = LaunchedServer(config, scratch, dtype=dtype, routing=False).environment()
    command = [config.python, "-m", "sglang.launch_server", *arguments]
    with (scratch / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=scratch, env=environment, start_new_session=True
        )
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://{HOST}:{port}/model_info", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (scratch / "server.log").read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://{HOST}:{port}", 1e-5 if dtype == "float32" else 0.05
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)


def test_a_reward_model_scores_through_classify_as_it_does_in_this_process(tmp_path):
    """SGLang's head has a bias and fills it at random where the checkpoint has none; ours states zero."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from tasks.environments.remote import ClassifyClient
    from tasks.environments.reward_model import RewardModel
    from tasks.environments.reward_training import save_model
    from tasks.policy.models.tokenizer import character_tokenizer
    from tasks.reward_config import ClassifyConfig, RewardModelConfig

    folder, tokenizer = tmp_path / "model", character_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64, "num_labels": 1,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    save_model(Qwen3ForSequenceClassification(Qwen3Config(**shape)), folder)
    talks = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in (("1+1=", "2"), ("say a long word", "abcdefghijk"), ("x", "y"), ("9*9=", "81"))
    ]
    here = RewardModel(RewardModelConfig(folder=str(folder))).grade(talks)
    with reward_server(folder, tmp_path) as (url, atol):
        config = ClassifyConfig(url=url, model="m", tokenizer=str(folder), batch_size=3)
        served = ClassifyClient(config).grade(talks)
    assert [grade.part.kind for grade in served] == ["score"] * 4, served
    for one, other in zip(served, here, strict=True):
        assert one.part.value == pytest.approx(other.part.value, abs=atol)
        assert one.reward == pytest.approx(other.reward, abs=atol)
    assert len({round(grade.part.value, 3) for grade in served}) == 4


def test_weights_are_swapped_under_a_response_and_each_token_has_its_version(folder, tmp_path):
    """Pause, swap, continue: the tokens behind the swap have the log-probabilities of the new weights, which
    no cache of the old ones would give (complaint 11)."""
    import torch

    from tasks.policy.dispatch.dispatcher import LocalDispatcher
    from tasks.policy.models.model import load_policy

    second = save_tiny_policy(tmp_path / "second", seed=1)
    engine = start_sglang(tmp_path, in_flight="pause")
    try:
        engine.load(folder, 7)
    except ValueError as error:
        assert "0.5.21 or newer, got 0.5.1" in str(error)
        pytest.skip(str(error))
    long = replace(PARAMS, max_new_tokens=400, stop_ids=frozenset())
    swap = threading.Timer(0.5, engine.load, (second, 8))
    swap.start()
    groups = engine.generate(REQUESTS[:2], long)
    swap.join()
    assert engine.version == 8
    atol = 1e-4 if engine.fleet.config.device == "cpu" else 1e-3
    models = {
        version: load_policy(path, dispatcher=LocalDispatcher())
        for version, path in ((7, folder), (8, second))
    }
    for done in (completion for group in groups for completion in group):
        assert done.finish_reason == "length" and done.version_spans is not None
        (old, count), (new, rest) = done.version_spans
        assert (old, new, count + rest) == (7, 8, 400) and count and rest
        ids = torch.tensor([[*REQUESTS[0].prompt_ids, *done.response_ids]])
        with torch.no_grad():
            expected = {
                version: model(ids).logits[0, len(REQUESTS[0].prompt_ids) - 1 : -1].float().log_softmax(-1)
                for version, model in models.items()
            }
        index = torch.tensor(done.response_ids)[:, None]
        before, after = (expected[version].gather(1, index)[:, 0] for version in (7, 8))
        found = torch.tensor(done.logprobs)
        torch.testing.assert_close(found[:count], before[:count], rtol=0, atol=atol)
        torch.testing.assert_close(found[count:], after[count:], rtol=0, atol=atol)
        assert (before[count:] - after[count:]).abs().max() > 10 * atol
    (after, *_), *_ = engine.generate(REQUESTS[:1], PARAMS)
    assert after.version_spans == ((8, len(after.response_ids)),)


def test_in_deterministic_mode_a_sample_depends_on_its_seed_alone(folder, tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("SGLang's deterministic mode needs a CUDA device")
    engine = start_sglang(tmp_path)
    engine.load(folder, 1)
    requests = [
        Request(prompt_ids=(2, 9, 10, 11, 3), seeds=(11, 12, 13)),
        Request(prompt_ids=(2, 5, 6, 7, 8, 9, 10, 3), seeds=(31,)),
    ]
    together = engine.generate(requests, PARAMS)
    assert together == engine.generate(requests, PARAMS)
    alone = [engine.generate([request], PARAMS)[0] for request in requests]
    assert alone == together


class Pair:
    """Two servers for the tests that lose some of them. Each starts those that are not there."""

    def __init__(self, policy, scratch):
        self.config = sglang_config()
        self.dtype = dtype_of(self.config)
        self.served = served_folder(policy, scratch)
        self.servers = [
            LaunchedServer(self.config, scratch / name, dtype=self.dtype, routing=False) for name in "ab"
        ]

    def start(self):
        return [server.start(self.served, 0) for server in self.servers]


@pytest.fixture(scope="module")
def pair(folder, tmp_path_factory):
    found = Pair(folder, tmp_path_factory.mktemp("pair"))
    yield found
    for server in found.servers:
        server.stop()


def test_losing_one_of_two_servers_behind_the_router_costs_no_sample(folder, pair, tmp_path):
    """One server is killed while both sample; the router still believes in it, the client does not."""
    urls = pair.start()
    with routed(pair.config, urls, tmp_path) as router:
        changes = {"urls": urls, "router_url": router, "startup_seconds": 60.0}
        engine = Fleet(pair.config.model_copy(update=changes), dtype=pair.dtype, folder=tmp_path).view()
        wait_for_router(router, tmp_path / "router.log")
        engine.load(folder, 1)
        long = SamplingParams(max_new_tokens=200, temperature=1.0, top_p=1.0, stop_ids=frozenset())
        timer = threading.Timer(1.0, kill_server, (pair.servers[0].folder,))
        timer.start()
        groups = engine.generate(REQUESTS * 4, long)
        assert [len(c.response_ids) for group in groups for c in group] == [200] * 64
        assert not sglang_server.answers(urls[0]), (
            "one was lost; the router or the client asked the other again"
        )
        assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
        engine.load(folder, 2)
        assert "1 of 2 attached" in engine.describe()
        assert len(workers_of(router)) == 1, "the router was told"
        assert pair.start() == urls
        engine.load(folder, 3)
        assert "2 of 2 attached" in engine.describe()
        wait_for_router(router, tmp_path / "router.log")  # it asks the new one first
        assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4


def test_an_attached_server_that_is_lost_is_left_out_until_it_can_adopt_a_version_again(
    folder, pair, tmp_path
):
    """Before, the next load failed for the whole fleet. Now it fails when nobody is left."""
    urls = pair.start()
    config = pair.config.model_copy(update={"urls": urls})
    engine = Fleet(config, dtype=pair.dtype, folder=tmp_path).view()
    engine.load(folder, 1)
    assert "2 of 2 attached" in engine.describe()
    kill_server(pair.servers[0].folder)
    engine.load(folder, 2)
    assert [address.is_out for address in engine.fleet.addresses] == [True, False]
    assert f"out of service: {urls[0]}" in engine.describe()
    assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
    assert pair.start() == urls, "on its port"
    assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
    assert engine.fleet.addresses[0].is_out, "it holds another version until the next one is loaded"
    engine.load(folder, 3)
    assert "2 of 2 attached" in engine.describe()
    for server in pair.servers:
        kill_server(server.folder)
    with pytest.raises(SglangError, match="could adopt version 4") as caught:
        engine.load(folder, 4)
    assert all(url in str(caught.value) for url in urls)
