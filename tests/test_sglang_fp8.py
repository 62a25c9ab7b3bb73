"""8-bit weights for an engine: a folder that a public reader of the format loads as the policy it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import start_sglang
from moe_kernels.reference import dequant_fp8_128x128
from recorded_sglang import recorded
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.engine import sglang, sglang_adoption
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import Fleet
from tasks.engine.sglang_fp8 import quantised_folder
from tasks.engine.sglang_server import LaunchedServer, server_arguments
from tasks.sglang_config import SglangConfig


def save_policy(folder: Path, *, width: int = 128, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
        "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width,
        "vocab_size": 64, "tie_word_embeddings": False, "initializer_range": 0.1,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_policy(tmp_path / "v000007")


def test_projections_are_8_bit_blocks_and_everything_else_is_untouched(policy, tmp_path):
    served = quantised_folder(policy, tmp_path / "scratch", device="cpu")
    before, after = load_file(policy / "model.safetensors"), load_file(served / "model.safetensors")
    small = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    # 4 projections of attention and 3 of each of 4 experts, in 2 layers
    assert len(small) == 2 * (4 + 3 * 4) and all(name.endswith("_proj.weight") for name in small)
    for name, tensor in before.items():
        if name not in small:
            assert torch.equal(after[name], tensor), name
            continue
        scale_oi = after[f"{name}_scale_inv"]
        assert scale_oi.dtype == torch.float32 and scale_oi.shape == tuple(n // 128 for n in tensor.shape)
        back = dequant_fp8_128x128(after[name], scale_oi)
        # half a step of e4m3: 2^-4 of the value, or of the scale near zero
        bound = tensor.float().abs() * 2**-4 + scale_oi.max() * 2**-10
        assert ((back - tensor.float()).abs() <= bound).all(), name
    index = json.loads((served / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == after.keys()
    assert (served / "generation_config.json").exists()


@pytest.mark.parity  # it asks for accelerate
def test_transformers_loads_the_folder_as_the_policy_within_rounding(policy, tmp_path):
    served = quantised_folder(policy, tmp_path / "scratch", device="cpu")
    described = json.loads((served / "config.json").read_text())["quantization_config"]
    assert described["weight_block_size"] == [128, 128] and "lm_head" in described["modules_to_not_convert"]
    exact = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(
        served, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ids = torch.arange(24)[None] % 64
    with torch.no_grad():
        expected, got = exact(ids).logits.float(), loaded(ids).logits.float()
    for name, value in exact.state_dict().items():
        difference, size = (loaded.state_dict()[name].float() - value.float()).abs(), value.float().abs()
        # half a step of e4m3, one rounding to bfloat16; near zero 2^-10 of a scale of 1/448 of the largest
        assert (difference <= size * (2**-4 + 2**-8) + size.max() * 2**-18).all(), name
    error = (got - expected).norm() / expected.norm()
    assert 0 < error < 0.3, error  # measured 0.16: rounding sends some tokens to other experts


def test_one_version_is_kept_and_a_broken_off_one_is_made_again(policy, tmp_path):
    scratch = tmp_path / "scratch"
    first = quantised_folder(policy, scratch, device="cpu")
    made_at = (first / "config.json").stat().st_mtime_ns
    assert quantised_folder(policy, scratch, device="cpu") == first
    assert (first / "config.json").stat().st_mtime_ns == made_at
    (scratch / "part-fp8-v000008").mkdir()
    again = save_policy(tmp_path / "again" / "v000007", seed=2)
    assert quantised_folder(again, scratch, device="cpu") != first
    second = quantised_folder(save_policy(tmp_path / "v000008", seed=1), scratch, device="cpu")
    assert list(scratch.iterdir()) == [second] and second.name.startswith("fp8-v000008-")


def test_projections_without_whole_blocks_are_refused(tmp_path):
    folder = save_policy(tmp_path / "narrow", width=96)
    with pytest.raises(ValueError, match=r"multiples of 128, got model\.layers\.0\..*down_proj.*\[256, 96\]"):
        quantised_folder(folder, tmp_path / "scratch", device="cpu")


def test_the_server_reads_the_blocks_from_the_folder_and_not_from_a_flag():
    options: dict[str, Any] = {
        "model": Path("/m"),
        "version": 1,
        "dtype": "bfloat16",
        "port": 1,
        "routing": False,
    }
    blocks = server_arguments(SglangConfig(quantization="fp8_blocks"), **options)
    assert "--quantization" not in blocks
    assert "--quantization" in server_arguments(SglangConfig(quantization="fp8"), **options)
    with pytest.raises(ValueError, match="FP8 weights are not updated in place"):
        SglangConfig(quantization="fp8_blocks", urls=["http://engine:1"])


def test_a_fleet_serves_each_versions_rounded_folder_from_a_server_that_starts_anew(
    policy, tmp_path, monkeypatch
):
    """Stands in for the server alone, which needs a GPU for 8 bits, and rounds on the host."""
    served: list[Path] = []
    stops: list[int] = []
    with recorded() as server:

        def start(self: LaunchedServer, model: Path, version: int) -> str:
            dtypes = {tensor.dtype for tensor in load_file(model / "model.safetensors").values()}
            assert torch.float8_e4m3fn in dtypes
            served.append(model)
            server.state["version"] = str(version)
            return f"http://127.0.0.1:{server.server_address[1]}"

        async def fingerprint(*args: object, device: str) -> str:
            return served[-1].name

        monkeypatch.setattr(LaunchedServer, "start", start)
        monkeypatch.setattr(LaunchedServer, "stop", lambda self: stops.append(len(served)))
        monkeypatch.setattr(sglang_adoption, "_fingerprint", fingerprint)
        monkeypatch.setattr(
            sglang, "quantised_folder", lambda *args, device: quantised_folder(*args, device="cpu")
        )
        fleet = Fleet(SglangConfig(quantization="fp8_blocks"), dtype="bfloat16", folder=tmp_path / "scratch")
        fleet.load(policy, 7)
        fleet.load(save_policy(tmp_path / "v000008", seed=1), 8)
    assert [model.name[:11] for model in served] == ["fp8-v000007", "fp8-v000008"]
    assert stops == [1] and fleet.version == 8


@pytest.mark.gpu
@pytest.mark.sglang
@pytest.mark.usefixtures("leave_servers")
def test_a_server_on_a_gpu_serves_each_version_rounded(tmp_path):
    """Nearer to its own version than rounding may move it, and than the other version is. Both are rounded:
    weights before, activations in the server; 0.16 of the logits' size is what weights alone cost above."""
    if not torch.cuda.is_available():
        pytest.skip("8 bits need a CUDA device")
    folders = [save_policy(tmp_path / f"v{seed}", seed=seed) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    engine = start_sglang(tmp_path / "server", dtype="bfloat16", quantization="fp8_blocks")
    params = SamplingParams(max_new_tokens=48, temperature=1.0, top_p=1.0, stop_ids=frozenset())
    prompt = (2, 9, 10, 11, 3)
    for version, folder in enumerate(folders):
        engine.load(folder, version)
        (group,) = engine.generate([Request(prompt_ids=prompt, seeds=(1, 2, 3, 4))], params)
        distances = []
        for model in models:
            ids = torch.tensor([[*prompt, *done.response_ids] for done in group])
            with torch.no_grad():
                logprobs = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(2, ids[:, len(prompt) :, None])[..., 0]
            found = torch.tensor([done.logprobs for done in group])
            distances.append(float((found - expected).abs().mean()))
        assert distances[version] < 0.6 and distances[version] < 0.5 * distances[1 - version], distances
