"""A checkpoint becomes version 0 without ever being a model in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import saved, tiny_policy
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.policy.checkpoint.weights import disk_tensors, tensor_digest
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import build_random, checkpoint_tensors, load_policy

MEASURE = """
import sys
from pathlib import Path
from tasks.policy.models.model import checkpoint_tensors
from tasks.policy.checkpoint.weights import tensor_digest

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

list(zip(checkpoint_tensors(Path(sys.argv[1])), range(1)))  # imports, and what a first call sets up
Path("/proc/self/clear_refs").write_text("5")  # the highest value begins anew
before = kilobytes("VmRSS")
digest = tensor_digest(checkpoint_tensors(Path(sys.argv[1])))
print(digest, kilobytes("VmHWM") - before)
"""


def test_a_checkpoint_of_many_files_needs_the_memory_of_a_few(tmp_path):
    """Resident memory, which counts the pages of files that are mapped."""
    model = build_random(
        "qwen3_moe", vocab_size=512, num_layers=6, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64,
        num_experts=32, experts_per_token=2, expert_width=128, seed=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model.save_pretrained(tmp_path, max_shard_size="8MB")
    files = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert sum(files) > 80e6 and len(files) >= 10 and max(files) < 9e6
    expected = tensor_digest(disk_tensors(load_policy(tmp_path, dispatcher=LocalDispatcher())))
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    digest, grown = done.stdout.split()
    assert digest == expected
    assert int(grown) * 1024 < 2.5 * max(files), f"{int(grown) / 1024:.0f} MiB"


def write(folder: Path, source: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_tensors_come_as_stored_and_those_of_another_model_are_refused(tmp_path):
    source, name = tmp_path / "half", "model.layers.1.mlp.experts.3.up_proj.weight"
    saved(tiny_policy("deepseek_v3").bfloat16(), source)
    stored = load_file(source / "model.safetensors")
    found = dict(checkpoint_tensors(source))
    assert found.keys() == stored.keys() and found[name].dtype == torch.bfloat16
    assert all(torch.equal(tensor, stored[key]) for key, tensor in found.items())
    fewer = write(tmp_path / "fewer", source, {key: t for key, t in stored.items() if key != name})
    with pytest.raises(ValueError, match=rf"1 missing \['{name}'\]"):
        list(checkpoint_tensors(fewer))
    smaller = write(tmp_path / "smaller", source, stored | {name: stored[name][:4].clone()})
    with pytest.raises(ValueError, match=rf"{name} must have the model's shape \(16, 32\), got \(4, 32\)"):
        list(checkpoint_tensors(smaller))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_wherever_they_are_read(tmp_path, dtype):
    """They were converted without their scales, adopted and trained."""
    source, name = tmp_path / "whole", "model.layers.1.mlp.experts.3.up_proj.weight"
    saved(tiny_policy("deepseek_v3"), source)
    stored = load_file(source / "model.safetensors")
    folder = write(tmp_path / "quantised", source, stored | {name: stored[name].to(dtype)})
    for read in (
        lambda: list(checkpoint_tensors(folder)),
        lambda: load_policy(folder, dispatcher=LocalDispatcher()),
    ):
        words = rf"{name} must be float32, bfloat16, float16 or float64, got {dtype}"
        with pytest.raises(ValueError, match=words):
            read()


def test_a_file_that_was_cut_off_is_named(tmp_path):
    source = tmp_path / "whole"
    saved(tiny_policy("deepseek_v3"), source)
    path = source / "model.safetensors"
    for length in (path.stat().st_size // 2, 0):
        os.truncate(path, length)
        with pytest.raises(ValueError, match=rf"{path} must be a whole safetensors file, got: "):
            list(checkpoint_tensors(source))
