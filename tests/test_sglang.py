"""SGLang beyond the engine contract: configuration, arguments, what a server reads, what is said to it and
understood. Whether SGLang keeps the contract is tested in ``test_engine.py`` and ``test_sglang_real.py``.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from policies import save_tiny_policy
from pydantic import ValidationError
from recorded_sglang import answer

from tasks.config import CampaignConfig
from tasks.engine.make import portions_at_once
from tasks.engine.partial import group_rows
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang_format import completion, request_body, single_bodies
from tasks.engine.sglang_model import served_folder
from tasks.engine.sglang_server import LaunchedServer, server_arguments
from tasks.rollout_config import RolloutConfig
from tasks.schema import RolloutFrame, make_frame
from tasks.sglang_config import DEEPEP_ROOM, SglangConfig

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


# --- configuration

DEEPEP = {"tp": 8, "ep": 8, "moe_a2a": "deepep", "moe_runner": "deep_gemm"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 8, "ep": 4}, r"ep must be 1 or tp: .*#32963.* Set ep to 1 or to 8"),
        ({"tp": 8, "ep": 1, "moe_a2a": "deepep"}, "ep must equal tp"),
        ({"tp": 8, "ep": 8, "dp_attention": True}, "wrong.* Set ep to 1; or .*moe_runner to 'deep_gemm'"),
        (
            {**DEEPEP, "max_running_requests": 1025},
            "at most 1024, what DeepEP's .* in the section's environment, which alone is read",
        ),
        ({**DEEPEP, "environment": {DEEPEP_ROOM: "abc"}}, "whole number from 1 to 1024, got 'abc'"),
        ({**DEEPEP, "environment": {DEEPEP_ROOM: "0"}}, "whole number from 1 to 1024, got '0'"),
        ({**DEEPEP, "environment": {DEEPEP_ROOM: "1025"}}, "whole number from 1 to 1024, got '1025'"),
        ({"deepep_mode": "low_latency"}, "deepep_mode goes with moe_a2a"),
        ({**DEEPEP, "deepep_mode": "normal"}, "cuda_graphs must be off"),
        ({**DEEPEP, "moe_runner": "auto"}, "'auto' is 'triton' for 16-bit .* quantization 'none'. Set moe_r"),
        (
            {**DEEPEP, "moe_runner": "auto", "deepep_mode": "normal", "cuda_graphs": False},
            "moe_runner must be 'deep_gemm' with moe_a2a 'deepep', .* in any of its modes, .*got 'auto'",
        ),
        ({**DEEPEP, "moe_runner": "triton", "quantization": "fp8"}, "got 'triton' with quantization 'fp8'"),
        ({"dp_attention": True}, "tp of at least 2"),
        ({"device": "cpu"}, "torch_native"),
        ({"deterministic": True, "sampling": "flashinfer"}, "alone takes seeds"),
        ({"deterministic": True, "attention": "torch_native"}, "sums depend on the batch"),
        ({"router_url": "http://router:1"}, "router_url needs urls"),
        ({"in_flight": "pause", "quantization": "fp8"}, "must not be 'pause' with quantized weights"),
        ({"quantization": "fp8", "urls": ["http://engine:1"]}, "FP8 weights are not updated in place"),
        ({"max_runing_requests": 8}, "Did you mean max_running_requests"),
    ],
)
def test_combinations_that_sglang_gets_wrong_are_refused_at_launch(values, message):
    with pytest.raises(ValidationError, match=message):
        SglangConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 8, "ep": 4, "urls": ["http://engine:1"]},
        {**DEEPEP, "max_running_requests": 4096, "urls": ["http://engine:1"]},
        {"environment": {DEEPEP_ROOM: "abc"}},
        {**DEEPEP, "deepep_mode": "normal", "cuda_graphs": False, "max_running_requests": 4096},
        {**DEEPEP, "max_running_requests": 8192, "environment": {DEEPEP_ROOM: "1024"}},
        {**DEEPEP, "max_running_requests": 1024},
        {**DEEPEP, "moe_runner": "auto", "quantization": "fp8"},
        {**DEEPEP, "moe_runner": "auto", "quantization": "fp8_blocks"},
    ],
    ids=[
        "others' ep",
        "others' DeepEP",
        "no DeepEP",
        "normal mode",
        "largest room",
        "default room",
        "FP8",
        "FP8 in blocks",
    ],
)
def test_what_the_section_does_not_start_or_use_is_not_refused(values):
    SglangConfig(**values)


def test_the_engine_decides_what_a_worker_may_ask_of_it():
    with pytest.raises(ValidationError, match="portions_at_once must be 0 or 1"):
        RolloutConfig(portions_at_once=2)
    offered = {"engine": "sglang", "prompts_per_iteration": 512, "groups_per_portion": 32}
    assert portions_at_once(RolloutConfig()) == 1
    assert [portions_at_once(RolloutConfig(**offered, workers=n)) for n in (1, 8, 32)] == [4, 2, 1]
    assert portions_at_once(RolloutConfig(**offered, workers=32, portions_at_once=3)) == 3
    assert portions_at_once(RolloutConfig(**offered, workers=32, pool="standing")) == 4  # workers say nothing
    with pytest.raises(ValidationError, match=r"speaks to engine 'sglang' only, got .*\['tp'\] of it"):
        RolloutConfig.model_validate({"sglang": {"tp": 8}})
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


@pytest.mark.parametrize(
    ("rollout", "rendered"),
    [
        ({"sglang": {"tp": 8, "ep": 8, "attention": "fa3"}, "workers": 1}, "--tp-size 8 --ep-size 8"),
        ({"sglang": {"tp": 2, "ep": 2, "moe_runner": "triton"}, "workers": 1}, "--tp-size 2 --ep-size 2"),
        (
            {
                "sglang": {
                    "tp": 8, "ep": 8, "dp_attention": True, "moe_a2a": "deepep", "moe_runner": "deep_gemm",
                    "quantization": "fp8", "attention": "fa3",
                },
                "workers": 32, "portions_at_once": 24,
            },
            "--moe-a2a-backend deepep --deepep-mode auto --dp-size 8",
        ),
    ],
    ids=["one node", "two GPUs", "a pool of 32 nodes with DeepEP"],
)  # fmt: skip
def test_a_section_travels_through_flyte_and_starts_the_same_server(rollout, rendered):
    """As an input of a workflow: through Flyte's literal and back."""
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    laptop = Path(__file__).parent.parent / "configs/campaigns/laptop.yaml"
    values = yaml.safe_load(laptop.read_text())
    values |= {"rollout": values["rollout"] | {"engine": "sglang", "max_portions_per_worker": 0} | rollout}
    values["model"] |= {"dtype": "bfloat16"}
    values["train"] = values.get("train", {}) | {"deterministic": False}
    config = CampaignConfig.model_validate_json(json.dumps(values))
    context, kind = FlyteContextManager.current_context(), TypeEngine.to_literal_type(CampaignConfig)
    literal = TypeEngine.to_literal(context, config, CampaignConfig, kind)
    back = TypeEngine.to_python_value(context, literal, CampaignConfig)
    assert back == config and back.digest() == config.digest()
    arguments = [
        server_arguments(
            one.rollout.sglang, model=Path("/model"), version=7, dtype="bfloat16", port=1, routing=False
        )
        for one in (config, back)
    ]
    assert arguments[0] == arguments[1] and rendered in " ".join(arguments[0])


def test_a_server_gets_the_environment_without_our_path_and_with_what_is_configured(monkeypatch, tmp_path):
    """On its path this project's folder ``kernels`` would be found in the place of a package of that name."""
    monkeypatch.setenv("PYTHONPATH", "/here:/here/kernels")
    monkeypatch.setenv("KEPT", "1")
    cpu = {"device": "cpu", "attention": "torch_native", "cuda_graphs": False}
    for values, expected in (({}, {}), (cpu, {"SGLANG_USE_CPU_ENGINE": "1"})):
        for extra in ({}, {"PYTHONPATH": "/theirs"}):
            config = SglangConfig(**values, environment=extra)
            found = LaunchedServer(config, tmp_path, dtype="bfloat16", routing=False).environment()
            assert found.get("PYTHONPATH") == extra.get("PYTHONPATH")
            assert found.items() >= {"KEPT": "1", "HF_HUB_OFFLINE": "1", **expected}.items()


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


def test_a_response_under_which_the_weights_changed_says_which_version_sampled_what():
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    done = completion(answer(weight_version="8", weight_versions=spans), routing_shape=(2, 2))
    assert done.version_spans == ((7, 1), (8, 1))
    assert completion(answer(weight_versions=spans[:1]), routing_shape=(2, 2)).version_spans == ((7, 1),)
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
