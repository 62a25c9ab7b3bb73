"""Each axis and the products that fit, over NCCL on real GPUs: the step of one rank on its own GPU.

    torchrun --nproc-per-node 2 tests/test_axes_gpu.py 0

runs all of it by hand from case 0 on, over gloo without GPUs. The cases are those of ``test_parallel.py``,
``test_fused_step.py`` and ``test_head_rows.py``. Four GPUs also run the products of four ranks.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import test_head_rows
import test_parallel
import torch
import torch.distributed as dist
from families import FAMILIES, VOCAB, tiny_policy
from steps import micro_batch, single_process

from tasks.policy.step import logprobs

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
"""Also with fused log-probabilities, and with a head that reads trained tokens only."""
MAX_FAILURES = 4


def cases(world_size: int) -> list[tuple[str, dict[str, int], str]]:
    found = []
    for sizes in AXES[world_size]:
        for family in FAMILIES:
            found.append((family, sizes, "plain"))
            found += [(family, sizes, "packed")] if family in PACKED else []
            found += [(family, sizes, kind) for kind in ("fused", "rows", "fused rows") if family in FUSED]
    return found


def check_case(rank: int, world_size: int, family: str, sizes: dict[str, int], kind: str) -> None:
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    model = tiny_policy(family, vocab_size=VOCAB + 1).to(device)
    logprobs._from_logits = PLAIN
    if kind.endswith("rows"):
        drawn = [test_head_rows.batch(seed, packed=True) for seed in range(3)]
        batches = [{name: part.to(device) for name, part in batch.items()} for batch in drawn]
        expected = single_process(model, batches, loss_fn=test_head_rows.masked_loss)
        arguments = rank, world_size, sizes, model, batches, expected, kind.startswith("fused")
        return test_head_rows.check_step(*arguments)
    make = test_parallel.packed_batch if kind == "packed" else micro_batch
    batches = [{name: part.to(device) for name, part in make(seed).items()} for seed in range(3)]
    expected = single_process(model, batches)
    if kind == "fused":
        logprobs._from_logits = logprobs.without_logits()
    return test_parallel.check_step(rank, world_size, sizes, model, expected, batches, kind == "packed")


CUDA = torch.cuda.is_available()
PLAIN: Any = logprobs._from_logits


def main(start: int) -> int:
    """Cases from ``start`` on, until one fails: its ranks are not in step any more."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if CUDA else "gloo",
        device_id=torch.device("cuda", rank) if CUDA else None,
        timeout=timedelta(seconds=60),
    )
    # a communicator takes a while
    test_parallel.make_mesh = test_head_rows.make_mesh = functools.cache(test_parallel.make_mesh)
    begin = time.monotonic()
    for number, (family, sizes, kind) in enumerate(cases(world_size)):
        if number < start:
            continue
        if rank == 0:
            print(f"{time.monotonic() - begin:5.1f} s case {number}: {family} {sizes} {kind}", flush=True)
        try:
            check_case(rank, world_size, family, sizes, kind)
        except Exception:
            print(f"rank {rank}, case {number}: {traceback.format_exc(limit=-3)}", flush=True)
            os._exit(1)
    dist.destroy_process_group()
    return 0


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
    start, failed = 0, []
    while start < len(cases(world_size)) and len(failed) < MAX_FAILURES:
        run = subprocess.run(
            [*command, __file__, str(start)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )
        print(run.stdout + run.stderr[-4000:] * bool(run.returncode), flush=True)
        if not run.returncode:
            break
        begun = [int(number) for number in re.findall(r"s case (\d+):", run.stdout)]
        assert begun, "the ranks did not start"
        failed.append(cases(world_size)[begun[-1]])
        start = begun[-1] + 1
    assert not failed, failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
