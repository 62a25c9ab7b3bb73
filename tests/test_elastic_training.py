"""A training's ranks may be fewer or more in the next iteration, slow, or killed one by one.

The slow test starts a real torchrun; the others fork their ranks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_policy
from jobs import Job, train_job, write_job
from ranks import run_ranks
from safetensors.torch import load_file
from test_faults import CONFIG, train_rows
from test_preemption import attempt, content, disturbed, made
from test_update import ROOT, TINY, train_batch

from tasks.artifacts.manifest import Manifest
from tasks.config import CampaignConfig, with_overrides
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import make_mesh
from tasks.policy.ranks.progress import Progress
from tasks.policy.step.trainer import make_optimizer
from tasks.policy.training.epoch import train
from tasks.policy.training.nonfinite import NonFiniteSteps
from tasks.policy.training.trainee import Trainee
from tasks.records import CampaignRun, PolicyVersion
from tasks.session import run_store


@pytest.fixture
def first(store_folder: Path, campaign: str) -> tuple[CampaignRun, PolicyVersion]:
    from tasks.policy.checkpoint.initial import initial_manifest

    config = CampaignConfig.model_validate(
        {"name": campaign, "model": {"random": TINY}, "checkpoint": {"store": str(store_folder)}}
    )
    run = CampaignRun(config=config, lineage=1, code_revision="r" * 40)
    store = run_store(run)
    return run, store.commit(initial_manifest(store, run))


def weights_of(run: CampaignRun, manifest: Manifest, folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, file in manifest.files.items():
        if name.startswith("model-"):
            run_store(run).cache.link(name, file, folder)
            found |= load_file(folder / name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_may_be_fewer_and_more_again_from_one_iteration_to_the_next(first, tmp_path):
    """Two ranks with half the experts each, then one with all, which makes the step of two, then two."""
    run, policy = first
    store = run_store(run)
    few = {"train__topology": "single_1x1", "train__ep": 1, "train__dispatcher": "local"}
    alone = run.model_copy(update={"config": with_overrides(run.config, **few)})
    found: dict[int, Manifest] = {}

    def updated(by: CampaignRun, iteration: int, head: PolicyVersion) -> Manifest:
        codes, said = attempt((by, batches[iteration], head), tmp_path)
        assert codes == [0] * by.config.train.world_size, said
        return made(tmp_path)

    batches = [train_batch(run, iteration, iteration) for iteration in range(3)]
    first_version = store.commit(updated(run, 0, policy))
    for by in (run, alone):
        manifest = updated(by, 1, first_version)
        found[by.config.train.world_size] = manifest
        shards = [name for name in manifest.files if re.match(r"model-\d", name)]
        assert len(shards) == by.config.train.world_size
    one, two = (weights_of(run, found[size], tmp_path / str(size)) for size in (1, 2))
    assert one.keys() == two.keys() and len(one) > 20
    # Adam moves an element whose gradient is almost 0 by up to a rate either way: few do
    apart = [((one[name] - two[name]).abs() > 1e-5).double().mean().item() for name in two]
    assert sum(apart) / len(apart) < 0.02, max(apart)
    again = updated(run, 2, store.commit(found[1]))
    assert again.metrics["steps"] == 2 and again.tensor_digest != found[1].tensor_digest


def test_an_update_names_the_rank_that_stands_still_with_its_phase_and_step(first, tmp_path):
    run, policy = first
    quick = run.model_copy(update={"config": with_overrides(run.config, train__stuck_after_seconds=1.5)})
    log = tmp_path / "log"

    def hurt() -> None:
        def stand_still(rank: int, _stop: Any) -> None:
            end = time.monotonic() + 30
            while rank == 1 and "stands still" not in log.read_text() and time.monotonic() < end:
                time.sleep(0.1)

        disturbed(2, stand_still)

    codes, said = attempt((quick, train_batch(run, 0, policy.version, minibatches=4), policy), tmp_path, hurt)
    assert codes == [0, 0], said
    assert re.search(
        r"watchdog +rank 1 stands still for \d+ s in phase mini-batch, step 2; 1 others", said
    ), said


def check_slow(rank: int, world_size: int) -> None:
    model = tiny_policy("qwen3_moe")
    attach_dispatcher(model, LocalDispatcher())
    if rank == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.4))
    store: Any = None  # for rows of steps that are not finite, of which there are none
    trainee = Trainee(
        model,
        make_optimizer(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0),
        make_mesh(world_size, 1),
        progress=Progress(),
        nonfinite=NonFiniteSteps(store, iteration=3, rank=rank, limit=2, in_a_row=0),
    )
    metrics = train(trainee, train_rows(bad=set()), CONFIG, objective="clipped_policy")
    slow = {name: times for name, times in metrics.items() if name.startswith("slow_rank/")}
    assert list(slow) == ["slow_rank/1"] and slow["slow_rank/1"] > CONFIG.train.slow_rank_factor, slow


def test_a_rank_slower_than_the_median_is_named_in_the_metrics_of_every_rank():
    run_ranks(check_slow, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_restarts_the_group_from_the_last_version(first, tmp_path):
    """Once; a group that dies again is given up, and nothing is made of it."""
    run, policy = first
    job: Job = (run, train_batch(run, 0, 0), policy)
    codes, said = attempt(job, tmp_path)
    assert codes == [0, 0], said
    expected = content(made(tmp_path))
    path, answer = tmp_path / "job.json", tmp_path / "candidate.json"
    write_job(job, path)
    paths = f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for deaths in (1, 2):
        answer.unlink(missing_ok=True)
        result = subprocess.run(
            [*launch, "--max-restarts", "1", __file__, str(path), str(answer), str(deaths)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert (result.returncode == 0) == (deaths == 1) == answer.exists(), result.stderr[-3000:]
        if deaths == 1:
            assert content(made(tmp_path)) == expected


if __name__ == "__main__":

    def die(rank: int, _stop: Any) -> None:
        if rank == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

    disturbed(1, die)
    train_job(*sys.argv[1:3])
