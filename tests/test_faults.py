"""Ranks that stand still or are slow are named, SIGTERM ends with 143, non-finite steps leave their rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import tiny_policy
from ranks import run_ranks
from test_packing import rows
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.api import SignalException

from tasks.config import CampaignConfig
from tasks.elastic import TrainingPreempted
from tasks.policy.dispatch.dispatcher import LocalDispatcher, make_dispatcher
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.fsdp import shard_parameters
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.ranks import process_group
from tasks.policy.ranks.progress import BLOCKED, Progress, Sign, Watchdog, slow_ranks, standing_still
from tasks.policy.step.trainer import make_optimizer
from tasks.policy.training.epoch import train
from tasks.policy.training.nonfinite import NonFiniteSteps, steps_taken
from tasks.policy.training.resident import Resident
from tasks.policy.training.trainee import Trainee
from tasks.schema import TrainFrame, from_bytes
from tasks.train import UPDATE_POLICY

ROOT = Path(__file__).resolve().parent.parent


def test_an_updates_line_says_how_many_steps_were_skipped():
    """Of a warm start whose every step was skipped it said "4 steps, loss nan"."""
    assert steps_taken({"steps": 4.0, "skipped_steps": 0.0}) == "4 steps"
    assert (
        steps_taken({"steps": 4.0, "skipped_steps": 3.0})
        == "4 steps, 3 of them skipped: loss or gradient not finite"
    )


def sign(age: float, heard_at: float, is_waiting: bool = False) -> Sign:
    return Sign(phase="p", step=0, age=age, is_waiting=is_waiting, beat=1, heard_at=heard_at)


def test_to_blame_is_who_does_not_wait_then_who_stopped_first_and_a_silent_rank_counts():
    # at 100: rank 0 stopped 12 s ago, rank 1 moved a second ago, rank 2 was last heard moving 15 s ago
    signs = {0: sign(11, 99), 1: sign(0.5, 99.5), 2: sign(0, 85)}
    assert standing_still(signs, now=100, deadline=10) == [2, 0]
    assert standing_still(signs, now=100, deadline=20) == []
    signs = {0: sign(30, 100, is_waiting=True), 1: sign(20, 100), 2: sign(25, 100, is_waiting=True)}
    assert standing_still(signs, now=100, deadline=10) == [1, 0, 2]
    assert standing_still(signs, now=100, deadline=22) == []  # rank 1 may still move: it is slow, not stuck


def test_a_rank_slower_than_the_median_by_the_factor_is_named():
    assert slow_ranks([1.0, 1.1, 3.5, 0.9], factor=3) == {2: pytest.approx(3.5 / 1.05)}
    assert slow_ranks([1.0, 1.9], factor=2) == {}  # of two ranks neither is the usual one
    assert slow_ranks([0.0, 0.0], factor=2) == {}


def test_work_is_time_without_waiting_for_others():
    progress = Progress()
    with progress.working():
        time.sleep(0.05)
        with BLOCKED:
            time.sleep(0.2)
    assert 0.05 <= progress.work_seconds < 0.2


def check_stuck(rank: int, world_size: int, kind: str) -> None:
    """Rank 2 stops; the others wait for it in a collective, as they do in training."""
    reports: list[str] = []
    progress, store = Progress(), dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(
        store, progress, rank=rank, world_size=world_size, deadline=0.6, report=reports.append, interval=0.05
    )
    store.set(f"pid{rank}", str(os.getpid()))
    with watchdog:
        for step in range(5):
            progress.at("upload" if rank == 2 else "reduce gradients", step)
            time.sleep(0.05)
        if rank == 2:
            if kind == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(1.5)
        elif rank == 0 and kind == "frozen":
            with BLOCKED:
                time.sleep(1.5)
            os.kill(int(store.get("pid2")), signal.SIGCONT)
        with BLOCKED:
            dist.barrier()
        progress.at("done")
    if rank == 0:
        assert reports[0].startswith("rank 2 stands still for "), reports
        assert f"in phase upload, step {'' if kind == 'frozen' else '4'}" in reports[0]  # its last sign
        assert ("does not answer" in reports[0]) == (kind == "frozen")
    else:
        assert not reports


@pytest.mark.parametrize("kind", ["busy", "frozen"])
def test_the_watchdog_names_rank_phase_and_step_of_who_stands_still(kind):
    run_ranks(check_stuck, 3, kind)


def check_moving(rank: int, world_size: int) -> None:
    reports: list[str] = []
    progress, store = Progress(), dist.distributed_c10d._get_default_store()
    with Watchdog(
        store, progress, rank=rank, world_size=world_size, deadline=0.5, report=reports.append, interval=0.05
    ):
        for step in range(12):
            progress.at("forward and backward", step)
            time.sleep(0.1)
    assert not reports


def test_the_watchdog_says_nothing_while_all_ranks_move():
    run_ranks(check_moving, 2)


RANK = """
import pathlib, sys, time
from tasks.policy.ranks.stopping import exit_on_sigterm
folder = pathlib.Path(sys.argv[1])
with exit_on_sigterm(grace_seconds=1.0):
    try:
        (folder / "ready").touch()
        if sys.argv[2] == "python":
            while True:
                time.sleep(0.01)
        import torch.distributed as dist
        dist.FileStore(str(folder / "store"), 2).get("never set")  # native code, where no handler runs
    finally:
        (folder / "unwound").touch()
"""


@pytest.mark.parametrize("where", ["python", "native"])
def test_sigterm_unwinds_a_rank_and_exits_with_143(where, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path), where], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / ("store" if where == "native" else "ready")).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.terminate()
    try:
        assert process.wait(timeout=10) == 143
    finally:
        process.kill()
    assert (tmp_path / "unwound").exists() == (where == "python")


@pytest.mark.parametrize(
    ("topology", "raised"), [("cluster_16x8", SystemExit), ("laptop_1x2", TrainingPreempted)]
)
def test_a_stopped_training_never_ends_as_a_success(topology, raised, monkeypatch):
    def stopped(*_: Any, **__: Any) -> None:
        raise SignalException("got SIGTERM", signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.launcher.api.launch_agent", stopped)
    task = UPDATE_POLICY[topology]
    with pytest.raises(raised) as caught:
        task.post_execute(None, task.execute())
    if raised is SystemExit:
        assert caught.value.code == 143


def trainee(policy_store: Any, *, limit: int, in_a_row: int = 0) -> Trainee:
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, LocalDispatcher())
    return Trainee(
        model,
        make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0),
        make_mesh(1, 1),
        progress=Progress(),
        nonfinite=NonFiniteSteps(policy_store, iteration=3, rank=0, limit=limit, in_a_row=in_a_row),
    )


def train_rows(*, bad: set[int]) -> list[dict[str, Any]]:
    """Five samples, one a mini-batch but for the last two; a bad one was impossible for who sampled it."""
    samples = rows()
    for index, row in enumerate(samples):
        row |= {"iteration": 3, "prompt_id": f"p{index}", "sample_index": 0, "policy_version": 2}
        row |= {"minibatch": min(index, 3), "advantage": -1.0}
        if index in bad:
            row["behavior_logprob"] = [-float("inf")] * len(row["response_ids"])
    return samples


CONFIG = CampaignConfig.model_validate({"train": {"micro_batch_tokens": 6}})


def test_a_nonfinite_step_is_skipped_and_its_rows_alone_are_kept(policy_store):
    subject = trainee(policy_store, limit=2)
    metrics = train(subject, train_rows(bad={1, 3}), CONFIG, objective="clipped_policy")
    assert metrics["skipped_steps"] == 2 and metrics["steps"] == 4 and metrics["samples"] == 5
    assert (
        all(map(torch.isfinite, map(torch.tensor, metrics.values()))) and metrics["nonfinite_in_a_row"] == 1
    )
    kept = policy_store.list_objects("nonfinite/")
    assert [key.rsplit("-", 1)[0] for key in kept] == [
        "nonfinite/000003-0001-rank0000", "nonfinite/000003-0003-rank0000",
    ]  # fmt: skip
    found = [
        from_bytes(policy_store.get_object(key), schema=TrainFrame)["prompt_id"].to_list() for key in kept
    ]
    assert found == [["p1"], ["p3"]]  # and not p4, in the same mini-batch


def test_nonfinite_steps_in_a_row_stop_the_run_and_a_good_one_starts_anew(policy_store):
    with pytest.raises(RuntimeError, match=r"got 2 steps in a row .* mini-batch 2 of iteration 3"):
        train(trainee(policy_store, limit=2), train_rows(bad={1, 2}), CONFIG, objective="clipped_policy")
    with pytest.raises(RuntimeError, match=r"got 2 steps in a row .* mini-batch 0 of iteration 3"):
        subject = trainee(policy_store, limit=2, in_a_row=1)  # the last step of the iteration before
        train(subject, train_rows(bad={0}), CONFIG, objective="clipped_policy")
    train(trainee(policy_store, limit=2), train_rows(bad={0, 2}), CONFIG, objective="clipped_policy")


def check_deadline(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - start < 5
    else:
        time.sleep(3)


def test_a_collective_that_a_rank_never_joins_fails_at_its_deadline():
    run_ranks(check_deadline, 2)


def check_deadlines_of_groups(rank: int, world_size: int) -> None:
    mesh = make_mesh(world_size, ep=2, fsdp=2, timeout=timedelta(seconds=77))
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, make_dispatcher("all_to_all", mesh.ep_group))
    shard_parameters(model, mesh, compute_dtype=torch.float32)
    made = [group for group in distributed_c10d._world.pg_map if group is not mesh.world]
    assert mesh.ep_group in made and len(made) > 4
    for group in made:
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=77), dist.get_process_group_ranks(group)


def test_every_group_of_a_mesh_has_the_configured_deadline():
    """Only that of all ranks had: torch gives others 30 minutes, and NCCL's 10."""
    run_ranks(check_deadlines_of_groups, 4)
    train = {"topology": "single_1x1", "ep": 1, "dispatcher": "local", "collective_timeout_seconds": 77}
    config = CampaignConfig.model_validate({"train": train})
    assert Resident().make_mesh(config).timeout == timedelta(seconds=77)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_group_of_all_ranks_has_the_configured_deadline_and_knows_its_device(backend, monkeypatch):
    """With a device, NCCL makes communicators at once, and DeepEP takes a group's as it finds it."""
    given: dict[str, Any] = {}
    train = {"backend": backend, "collective_timeout_seconds": 77, "deterministic": False}
    config = CampaignConfig.model_validate({"train": train})
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1", "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: given.update(current=device))
    monkeypatch.setattr(
        process_group,
        "rendezvous",
        lambda *_, **named: given.update(met=named) or iter([(dist.HashStore(), 0, 2)]),
    )
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: given.update(named))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group.process_group(config):
        pass
    assert given["timeout"] == given["met"]["timeout"] == timedelta(seconds=77)
    device = torch.device("cuda", 1) if backend == "nccl" else None
    assert given["device_id"] == device and given.get("current") == device
