"""Run a function on several ranks of this machine: forked processes that talk over gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # importing it lazily, once in every forked rank, costs seconds
import torch.distributed as dist
import torch.multiprocessing as mp

torch.set_num_threads(1)  # a forked child must not inherit a running thread pool


def run_ranks(fn: Callable[..., None], world_size: int, *args: Any) -> None:
    """Call ``fn(rank, world_size, *args)`` on every rank; an assertion on any rank fails the test.

    Ranks that did not find each other start again: a program beside them that looks for a server of its own
    may knock at gloo's port, which ends the meeting. In a campaign the elastic agent does this.
    """
    assert not torch.cuda.is_initialized(), "cannot fork after CUDA initialisation; run this test alone"
    for tries_left in (2, 1, 0):
        with tempfile.TemporaryDirectory() as folder:
            arguments = fn, world_size, f"{folder}/init", args
            try:
                return mp.start_processes(_enter, args=arguments, nprocs=world_size, start_method="fork")
            except mp.ProcessRaisedException as error:
                if "connectFullMesh failed" not in str(error) or not tries_left:
                    raise


def _enter(rank: int, fn: Callable[..., None], world_size: int, init: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        fn(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
