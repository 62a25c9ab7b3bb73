"""SGLang beyond the engine contract: arguments, refusals, servers that die, versions that do not fit.

The error paths are driven by a small HTTP server that answers as SGLang was recorded to; whether SGLang
itself keeps the contract is tested in ``test_engine.py`` and ``test_sglang_real.py``.
"""

import asyncio
import json
import os
import shutil
import socket
import threading
import time
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from policies import save_tiny_policy
from pydantic import ValidationError

from tasks.engine.partial import group_rows
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import Fleet
from tasks.engine.sglang_client import Budget, SglangError
from tasks.engine.sglang_format import completion, request_body, single_bodies
from tasks.engine.sglang_model import served_folder
from tasks.engine.sglang_server import server_arguments
from tasks.rollout_config import RolloutConfig
from tasks.schema import RolloutFrame, make_frame
from tasks.sglang_config import SglangConfig

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


# --- configuration


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 8, "ep": 3}, "ep must divide tp"),
        ({"tp": 8, "ep": 4, "moe_a2a": "deepep"}, "ep must equal tp"),
        ({"deepep_mode": "low_latency"}, "deepep_mode goes with moe_a2a"),
        ({"tp": 8, "ep": 8, "moe_a2a": "deepep", "deepep_mode": "normal"}, "cuda_graphs must be off"),
        ({"dp_attention": True}, "tp of at least 2"),
        ({"device": "cpu"}, "torch_native"),
        ({"deterministic": True, "sampling": "flashinfer"}, "alone takes seeds"),
        ({"router_url": "http://router:1"}, "router_url needs urls"),
        ({"quantization": "fp8", "urls": ["http://engine:1"]}, "FP8 weights are not updated in place"),
        ({"max_runing_requests": 8}, "Did you mean max_running_requests"),
    ],
)
def test_combinations_that_sglang_gets_wrong_are_refused_at_launch(values, message):
    with pytest.raises(ValidationError, match=message):
        SglangConfig(**values)


def test_the_engine_decides_what_a_worker_may_ask_of_it():
    with pytest.raises(ValidationError, match="portions_at_once must be 1"):
        RolloutConfig(portions_at_once=2)
    with pytest.raises(ValidationError, match="expert ids only"):
        RolloutConfig(engine="sglang", record_routing="experts_and_weights")
    assert RolloutConfig().is_repeatable
    assert not RolloutConfig(engine="sglang").is_repeatable


def test_a_pool_with_deepep_is_rendered_to_the_servers_arguments():
    config = SglangConfig(
        tp=8, ep=8, moe_a2a="deepep", dp_attention=True, quantization="fp8", memory_share=0.8,
        moe_runner="deep_gemm", attention="fa3",
    )  # fmt: skip
    arguments = server_arguments(
        config, model=Path("/model"), version=7, dtype="bfloat16", port=1234, routing=True
    )
    text = " ".join(arguments)
    for part in (
        "--model-path /model", "--weight-version 7", "--tp-size 8 --ep-size 8", "--moe-a2a-backend deepep",
        "--deepep-mode auto", "--dp-size 8", "--enable-dp-attention", "--quantization fp8",
        "--enable-return-routed-experts", "--skip-tokenizer-init",
    ):  # fmt: skip
        assert part in text
    assert "--disable-cuda-graph" not in text and "--enable-deepep-moe" not in text
    plain = server_arguments(
        SglangConfig(), model=Path("/model"), version=0, dtype="bfloat16", port=1, routing=False
    )
    assert not {"--moe-a2a-backend", "--deepep-mode", "--dp-size", "--quantization"} & set(plain)


# --- what a server reads


def test_a_tied_head_gets_a_tensor_of_its_own(folder, tmp_path):
    from safetensors.torch import load_file

    served = served_folder(folder, tmp_path)
    assert served != folder and not json.loads((served / "config.json").read_text())["tie_word_embeddings"]
    index = json.loads((served / "model.safetensors.index.json").read_text())["weight_map"]
    head = load_file(served / index["lm_head.weight"])["lm_head.weight"]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert (head == embedding).all()
    assert index["model.embed_tokens.weight"] == "model.safetensors"
    assert (served / "model.safetensors").resolve() == (folder / "model.safetensors").resolve()


def test_an_untied_policy_is_served_as_it_is(tmp_path):
    folder = save_tiny_policy(tmp_path / "deepseek", family="deepseek_v3")
    assert served_folder(folder, tmp_path) == folder


def test_experts_in_one_tensor_are_refused_since_sglang_would_skip_them(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "fused")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = tensors.pop(
        "model.layers.0.mlp.experts.0.up_proj.weight"
    )
    save_file(tensors, tmp_path / "fused/model.safetensors")
    with pytest.raises(ValueError, match="each expert's weights"):
        served_folder(tmp_path / "fused", tmp_path)


# --- what is said and understood


def test_a_request_carries_seeds_stop_ids_and_what_is_to_be_returned():
    params = SamplingParams(max_new_tokens=5, temperature=0.5, top_p=0.9, stop_ids=frozenset({7, 3}))
    body = request_body(Request(prompt_ids=(1, 2), seeds=(5, 2**64 - 1)), ["a", "b"], params, vocab_size=54)
    assert body["input_ids"] == [[1, 2], [1, 2]] and body["rid"] == ["a", "b"]
    assert [one["sampling_seed"] for one in body["sampling_params"]] == [5, 2**63 - 1]
    first = body["sampling_params"][0]
    assert first["stop_token_ids"] == [3, 7] and not first["ignore_eos"]
    assert first["top_k"] == 54 and body["return_sampling_mask"], (
        "its renormalised values need a finite top_k"
    )


def test_through_the_router_each_sample_is_a_request_of_its_own():
    body = request_body(REQUESTS[0], ["a", "b", "c", "d"], PARAMS, vocab_size=54)
    parts = single_bodies(body)
    assert [part["rid"] for part in parts] == ["a", "b", "c", "d"]
    assert all(part["input_ids"] == [2, 9, 10, 11, 3] and part["return_logprob"] for part in parts)
    assert [part["sampling_params"]["sampling_seed"] for part in parts] == [0, 1, 2, 3]


def answer(**meta):
    entries = [[-0.5, 9, None], [-0.25, 1, None]]
    return {
        "output_ids": [9, 1],
        "meta_info": {
            "id": "r", "output_token_logprobs": entries, "finish_reason": {"type": "stop", "matched": 1},
            "weight_version": "7", **meta,
        },
    }  # fmt: skip


def test_an_answer_gives_the_sampled_ids_with_the_end_token_and_its_logprob():
    done = completion(answer(), routing_shape=(2, 2))
    assert (done.response_ids, done.logprobs, done.finish_reason) == ([9, 1], [-0.5, -0.25], "stop")
    truncated = completion(answer(output_token_sampling_logprobs=[-0.1, 0.0]), routing_shape=(2, 2))
    assert truncated.logprobs == [-0.1, 0.0]


def test_a_logprob_that_is_missing_is_an_error_and_not_a_shorter_list():
    with pytest.raises(ValueError, match="each of 2 tokens, got 1"):
        completion(answer(output_token_sampling_logprobs=[-0.1]), routing_shape=(2, 2))


@pytest.mark.parametrize(("highest", "kind"), [(255, np.uint8), (256, np.int16)])
def test_routing_records_take_as_few_bytes_as_their_ids_need(highest, kind):
    import base64

    ids = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    ids[0, 0, 0] = highest
    encoded = base64.b64encode(ids.tobytes()).decode()
    done = completion(answer(routed_experts=encoded), routing_shape=(2, 2))
    assert done.routed_experts is not None and done.routed_experts.dtype == kind
    assert (done.routed_experts == ids).all()


# --- servers that fail


class Recorded(BaseHTTPRequestHandler):
    """Answers as SGLang 0.5.17 does, with the faults that a test asks for."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        state = self.server.state
        if state.get("is_dead"):
            return self.hang_up()
        if self.path.startswith("/v1/loads"):
            return self.reply({"version": "0.5.17"})
        return self.reply({"is_generation": True, "weight_version": state["version"]})

    def do_POST(self):
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if state.get("is_dead"):
            return self.hang_up()
        if self.path == "/update_weights_from_disk":
            if state.get("refuses_updates"):
                return self.reply({"success": False, "message": "torn"}, 400)
            state["version"] = state.get("claims", body["weight_version"])
            if not state.get("keeps_weights"):
                files = sorted(Path(body["model_path"]).glob("*.safetensors"))
                content = b"".join(path.read_bytes() for path in files)
                state["weights"] = zlib.crc32(content) + state.get("drift", 0)
            return self.reply({"success": True})
        if self.path == "/abort_request":
            return self.reply({})
        if body["rid"] == ["probe"]:
            values = [[-float(state["weights"]), token, None] for token in body["input_ids"][0]]
            return self.reply([{"meta_info": {"input_token_logprobs": values}}])
        state["generated"] = state.get("generated", 0) + 1
        if state.get("dies_at") == state["generated"]:
            state["is_dead"] = True
            return self.hang_up()
        time.sleep(state.get("seconds", 0.0))
        meta = {"weight_version": state.get("lies", state["version"])}
        reason = state.get("reason", {"type": "stop", "matched": 1})
        return self.reply([answer(**meta, id=rid, finish_reason=reason) for rid in body["rid"]])

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def reply(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def recorded(**state):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorded)
    server.state = {"version": "none", "weights": 0, **state}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def attached(*servers, **changes):
    urls = tuple(f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    values = {"device": "cpu", "attention": "torch_native", "cuda_graphs": False, "max_running_requests": 8}
    return Fleet(SglangConfig(urls=urls, **(values | changes)), dtype="float32", folder=Path()).view()


@pytest.fixture
def untied(tmp_path):
    """Two versions of a policy with a head of its own, served as they are."""
    return [save_tiny_policy(tmp_path / str(seed), family="deepseek_v3", seed=seed) for seed in (0, 1)]


def test_no_traffic_before_the_engine_reports_exactly_the_required_version(untied):
    """A recovered engine that serves base weights under any name is out of service (complaint 7)."""
    with recorded(claims="base") as server:
        engine = attached(server)
        with pytest.raises(SglangError, match=r"must hold weight version 3, got 'base'"):
            engine.load(untied[0], 3)
        assert engine.version is None
        with pytest.raises(RuntimeError, match="load a policy version"):
            engine.generate(REQUESTS, PARAMS)


def test_a_torn_update_takes_the_engine_out_of_service(untied):
    """Complaint 12: an update that fails never leaves old weights under a new name."""
    with recorded() as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        server.state["refuses_updates"] = True
        with pytest.raises(SglangError, match="torn"):
            engine.load(untied[1], 4)
        assert engine.version is None


def test_weights_that_did_not_change_with_their_files_are_noticed(untied):
    with recorded() as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        server.state["keeps_weights"] = True
        with pytest.raises(SglangError, match="reports the same weights than before"):
            engine.load(untied[1], 4)


def test_the_same_weights_in_other_files_are_no_fault_of_the_server(untied, tmp_path):
    """A step may move no weight by a whole unit: then the next version has the files of the one before, or
    copies of them, and weights that did not change are right."""
    shutil.copytree(untied[0], tmp_path / "copied")
    (tmp_path / "linked").mkdir()
    for path in untied[0].iterdir():
        os.link(path, tmp_path / "linked" / path.name)
    with recorded() as server:
        engine = attached(server)
        for version, folder in enumerate((untied[0], tmp_path / "copied", untied[0], tmp_path / "linked")):
            engine.load(folder, version)
        server.state["drift"] = 1
        with pytest.raises(SglangError, match="reports other weights than before"):
            engine.load(untied[0], 9)


def test_tokens_of_another_version_are_refused(untied):
    """Each answer names the version that sampled it; a mismatch is an error, not data (complaint 11)."""
    with recorded(lies="2") as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match=r"must be sampled by version 3, the server reports '2'"):
            engine.generate(REQUESTS, PARAMS)


def test_an_abort_that_nobody_asked_for_is_an_error(untied):
    with recorded(reason={"type": "abort", "message": "out of memory"}) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match="out of memory"):
            engine.generate(REQUESTS, PARAMS)


def test_a_server_that_dies_hands_its_requests_to_the_others(untied):
    with recorded() as first, recorded(dies_at=2) as second:
        engine = attached(first, second)
        engine.load(untied[0], 3)
        groups = engine.generate(REQUESTS * 4, PARAMS)
        assert [len(group) for group in groups] == [4] * 16
        assert [address.is_out for address in engine.fleet.addresses] == [False, True]


def test_the_last_server_that_dies_ends_the_call_and_is_named(untied):
    with recorded(dies_at=1) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match=r"broke off on http://127.0.0.1|no SGLang server is left"):
            engine.generate(REQUESTS, PARAMS)


def test_a_server_that_cannot_adopt_a_version_is_left_out_and_named_until_it_can(untied):
    """Its requests go to the other; the next version asks it again (complaints 7 and 12)."""
    with recorded() as first, recorded() as second:
        engine = attached(first, second)
        engine.load(untied[0], 3)
        assert "2 of 2 attached" in engine.describe()
        second.state["refuses_updates"] = True
        engine.load(untied[1], 4)
        second.state["generated"] = 0
        assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
        assert second.state["generated"] == 0
        url = f"http://127.0.0.1:{second.server_address[1]}"
        assert "1 of 2 attached" in engine.describe()
        assert f"out of service: {url}/update_weights_from_disk answered 400" in engine.describe()
        second.state["refuses_updates"] = False
        engine.load(untied[0], 5)
        assert engine.generate(REQUESTS, PARAMS) and second.state["generated"] > 0
        assert "out of service" not in engine.describe()


def test_a_version_is_refused_when_no_server_is_left_to_adopt_it(untied):
    with recorded(is_dead=True) as first, recorded(refuses_updates=True) as second:
        engine = attached(first, second)
        with pytest.raises(SglangError, match="could adopt version 3") as caught:
            engine.load(untied[0], 3)
        assert all(f":{server.server_address[1]}/" in str(caught.value) for server in (first, second))
        assert engine.version is None


def test_a_server_left_out_takes_its_share_of_requests_on_their_way_with_it(untied):
    with recorded() as first, recorded() as second:
        engine = attached(first, second, max_running_requests=16)
        engine.load(untied[0], 3)
        assert engine.fleet.budget.size == 40
        second.state["is_dead"] = True
        engine.load(untied[1], 4)
        assert engine.fleet.budget.size == 20


def test_a_server_that_cannot_swap_under_requests_is_refused_with_the_version_that_can(untied):
    with recorded() as server:
        engine = attached(server, in_flight="pause")
        with pytest.raises(ValueError, match=r"must have SGLang 0\.5\.21 or newer, got 0\.5\.17"):
            engine.load(untied[0], 3)
        assert engine.version is None


def test_a_response_under_which_the_weights_changed_says_which_version_sampled_what():
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    done = completion(answer(weight_version="8", weight_versions=spans), routing_shape=(2, 2))
    assert done.version_spans == ((7, 1), (8, 1))
    assert completion(answer(weight_versions=spans[:1]), routing_shape=(2, 2)).version_spans is None
    prompt = {"iteration": 0, "prompt_id": "p", "prompt_ids": [2, 3]}
    (row,) = group_rows(prompt, {}, [[done]], group_size=1, policy_version=7, params=PARAMS)
    assert row["policy_version"] == 7
    assert row["version_spans"] == [
        {"policy_version": 7, "num_tokens": 1},
        {"policy_version": 8, "num_tokens": 1},
    ]
    make_frame([row], RolloutFrame)
    cut = {("p", 0): row | {"finish_reason": "abort"}}
    later = completion(
        answer(weight_version="9", weight_versions=[spans[1], {"version": "9", "start": 2, "end": 3}]),
        routing_shape=(2, 2),
    )
    (whole,) = group_rows(prompt, cut, [[later]], group_size=1, policy_version=8, params=PARAMS)
    assert [(s["policy_version"], s["num_tokens"]) for s in whole["version_spans"]] == [
        (7, 1),
        (8, 2),
        (9, 1),
    ]
    make_frame([whole], RolloutFrame)


# --- what is on its way


def on_their_way(size, counts):
    """The order in which requests of so many sequences go, and the most sequences at once."""

    async def main():
        budget, order, most = Budget(size), [], 0

        async def one(index, count):
            nonlocal most
            async with budget.share(count):
                order.append(index)
                most = max(most, budget.used)
                await asyncio.sleep(0.001)

        await asyncio.gather(*(one(index, count) for index, count in enumerate(counts)))
        assert budget.used == 0
        return order, most

    return asyncio.run(main())


def test_requests_go_in_the_order_they_came_and_never_more_than_fit():
    counts = [3, 5, 1, 8, 2, 2, 30, 1]  # 30 goes alone
    assert on_their_way(8, counts) == (list(range(len(counts))), 30)
    assert on_their_way(8, [4] * 7)[1] == 8


def test_a_request_that_gives_up_waiting_holds_nobody_up():
    async def main():
        budget = Budget(1)
        async with budget.share(1):
            waiting = asyncio.create_task(budget.share(1).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), budget.share(1):
            assert budget.used == 1
        assert budget.used == 0

    asyncio.run(main())


def test_a_call_that_fails_leaves_nothing_on_its_way(untied):
    """Otherwise a server would go on with samples of a lease that somebody else has by now."""
    with recorded(lies="2") as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match="must be sampled by version 3"):
            engine.generate(REQUESTS * 50, PARAMS)
        time.sleep(0.2)
        sent = server.state["generated"]
        time.sleep(0.3)
        assert server.state["generated"] == sent < 50 * 4
        assert engine.fleet.budget.used == 0


def test_an_abort_keeps_what_waits_from_being_sent(untied):
    with recorded(seconds=0.05) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        threading.Timer(0.3, engine.abort).start()
        groups = engine.generate(REQUESTS * 50, PARAMS)
        reasons = [group[0].finish_reason for group in groups]
        assert reasons[0] == "stop" and reasons[-1] == "abort"
        assert server.state["generated"] == reasons.count("stop")
