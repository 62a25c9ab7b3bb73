"""Each axis and the products that fit, over NCCL on real GPUs: the step of one rank on its own GPU.

    torchrun --nproc-per-node 2 tests/test_axes_gpu.py

runs all of it by hand, as ``test_parallel.py`` and ``test_fused_step.py`` do over gloo. Four GPUs also run
the products of four ranks.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import test_parallel
import torch
import torch.distributed as dist
from families import FAMILIES, VOCAB, tiny_policy
from steps import micro_batch, single_process

from tasks.policy import logprobs

ROOT = Path(__file__).resolve().parent.parent
AXES: dict[int, list[dict[str, int]]] = {
    2: [
        {"ep": 2}, {"ep": 1, "fsdp": 2}, {"ep": 2, "fsdp": 2}, {"ep": 1, "tp": 2}, {"ep": 2, "tp": 2},
        {"ep": 1, "cp": 2}, {"ep": 2, "cp": 2}, {"ep": 1, "pp": 2},
    ],
    4: [
        {"ep": 4}, {"ep": 2, "fsdp": 2}, {"ep": 2, "tp": 2, "fsdp": 2}, {"ep": 2, "pp": 2},
        {"ep": 2, "tp": 2, "cp": 2}, {"ep": 4, "cp": 2, "fsdp": 2}, {"ep": 1, "pp": 2, "tp": 2},
        {"ep": 2, "pp": 2, "fsdp": 2},
    ],
}  # fmt: skip
PACKED = ["deepseek_v3"]
"""Also with packed rows and recomputation."""
FUSED = ["qwen3_moe"]
"""Also with fused log-probabilities."""


def cases(world_size: int) -> list[tuple[str, dict[str, int], str]]:
    found = []
    for sizes in AXES[world_size]:
        for family in FAMILIES:
            found.append((family, sizes, "plain"))
            found += [(family, sizes, "packed")] if family in PACKED else []
            found += [(family, sizes, "fused")] if family in FUSED else []
    return found


def check_case(rank: int, world_size: int, family: str, sizes: dict[str, int], kind: str) -> None:
    device = torch.device("cuda", rank)
    model = tiny_policy(family, vocab_size=VOCAB + 1).to(device)
    make = test_parallel.packed_batch if kind == "packed" else micro_batch
    batches = [{name: part.to(device) for name, part in make(seed).items()} for seed in range(3)]
    logprobs._from_logits = PLAIN
    expected = single_process(model, batches)
    if kind == "fused":
        logprobs._from_logits = logprobs.without_logits()
    test_parallel.check_step(rank, world_size, sizes, model, expected, batches, kind == "packed")


PLAIN: Any = logprobs._from_logits


def main() -> int:
    """All cases on this rank; the number that failed, the same on every rank that is not stuck."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    test_parallel.make_mesh = functools.cache(test_parallel.make_mesh)  # a communicator takes a while
    failed, start = 0, time.monotonic()
    for family, sizes, kind in cases(world_size):
        said = "ok"
        try:
            check_case(rank, world_size, family, sizes, kind)
        except AssertionError:
            said, failed = f"rank {rank}: {traceback.format_exc(limit=1)}", failed + 1
        if rank == 0 or said != "ok":
            print(f"{time.monotonic() - start:5.1f} s {family} {sizes} {kind}: {said}", flush=True)
    dist.destroy_process_group()
    return failed


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", AXES)
def test_every_axis_makes_the_step_of_one_rank_over_nccl(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, found {torch.cuda.device_count()}")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world_size}",
    ]
    paths = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run(
        [*command, __file__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=540,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]


if __name__ == "__main__":
    sys.exit(main())
