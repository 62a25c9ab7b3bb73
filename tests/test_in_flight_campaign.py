"""A campaign whose versions land in responses: real standing worker, real standing trainer, and this process
as the graph: generation of iteration 1 runs while iteration 0 trains.

The worker stands still from its first lease of iteration 1 until version 1 is there, so that a small
iteration outlasts a training on any machine. What this test cannot see: how Flyte orders the same stages.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
from campaigns import ROOT, SMALL

from tasks.archive import archive
from tasks.buffer import assemble
from tasks.checkpoint import initialize, open_campaign, publish
from tasks.config import CampaignConfig
from tasks.evaluate import evaluate
from tasks.experience.archive import archive_key
from tasks.prompts import offer_prompts
from tasks.records import CampaignRun, CampaignState, CampaignSummary, TrainBatch
from tasks.report import report
from tasks.reward import score
from tasks.rollout import await_rollouts
from tasks.session import run_buffer, run_store
from tasks.train import update_policy

ITERATIONS = 2


def configured(store: Path) -> CampaignConfig:
    rollout = {
        "pool": "standing", "follow": "newest", "prompts_per_iteration": 12, "groups_per_portion": 3,
        "batch_size": 24, "max_new_tokens": 96, "standing_timeout_seconds": 200,
    }  # fmt: skip
    correction = {"proximal": "recomputed", "weight": "truncate"}
    return CampaignConfig.model_validate(
        SMALL
        | {
            "rollout": rollout,
            "algorithm": {"num_minibatches": 2, "correction": correction},
            "warm_start": {"steps": 0},
            "environment": {"held_out": 8},
            "train": {
                "pool": "standing", "topology": "single_1x1", "ep": 1, "dispatcher": "local",
                "deterministic": False, "standing_timeout_seconds": 200,
            },
            "schedule": {"iterations": ITERATIONS, "max_staleness": 1},
            "checkpoint": {"store": str(store)},
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Standing:
    run: CampaignRun
    worker: subprocess.Popen[bytes]


@pytest.fixture
def standing(tmp_path: Path, leave_servers: None) -> Iterator[Standing]:
    """A run, a worker and a trainer."""
    config = configured(tmp_path / "store")
    run = open_campaign(
        config=config, name=None, iterations=None, learning_rate=None, store=None, fresh=False
    )
    file = tmp_path / "campaign.json"  # JSON is YAML
    file.write_text(config.model_dump_json())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    commands = {
        "worker": ["-m", "tasks.engine.standing"],
        "trainer": [*torchrun, "-m", "tasks.policy.standing"],
    }
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, command in commands.items():
            with (tmp_path / f"{name}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *command, "--config", str(file)], env=environment, stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        yield Standing(run, started[0])
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
        for name in commands:
            print((tmp_path / f"{name}.log").read_text()[-4000:])


def stop_in_iteration_1(standing: Standing) -> None:
    buffer, deadline = run_buffer(standing.run), time.monotonic() + 100
    while not buffer.progress(1).leased:
        assert time.monotonic() < deadline and buffer.outstanding(1), "iteration 1 was to be sampled now"
        time.sleep(0.01)
    standing.worker.send_signal(signal.SIGSTOP)


def unroll(standing: Standing) -> tuple[list[TrainBatch], CampaignSummary]:
    """``workflows.campaign.unroll`` with ``max_staleness`` 1: both iterations are offered with version 0."""
    run = standing.run
    policies, batches = [initialize(run=run)], []
    evaluate(run=run, policy=policies[0])
    offered = [offer_prompts(run=run, iteration=k, behavior=policies[0]) for k in (0, 1)]
    for k in range(ITERATIONS):
        reports = await_rollouts(run=run, prompts=offered[k])
        if k == 0:
            stop_in_iteration_1(standing)
        scores = score(run=run, prompts=offered[k], behavior=policies[0], rollouts=reports)
        batches.append(assemble(run=run, scores=scores, policy=policies[k]))
        kept = archive(run=run, batch=batches[k], policy=policies[k])
        candidate = update_policy(run.config)(run=run, batch=batches[k], policy=policies[k])
        policies.append(publish(run=run, candidate=candidate, archive=kept))
        standing.worker.send_signal(signal.SIGCONT)
    evaluate(run=run, policy=policies[-1])
    return batches, report(run=run, state=CampaignState(versions=policies[-2:], iterations_done=ITERATIONS))


def test_a_version_lands_in_responses_and_every_sample_is_accounted_for(standing: Standing) -> None:
    run = standing.run
    batches, summary = unroll(standing)
    assert summary.produced == summary.trained + sum(summary.rejected.values()) and summary.pending == 0
    assert summary.produced == ITERATIONS * run.config.rollout.samples_per_iteration
    assert "stale" not in summary.rejected, "no token is older than the schedule allows"
    store, mixed = run_store(run), []
    for k, batch in enumerate(batches):
        frame = pl.read_parquet(store.get_object(archive_key(batch.key)))
        for row in frame.rows(named=True):
            parts = row["version_spans"] or []
            assert sum(part["num_tokens"] for part in parts) in (0, len(row["response_ids"]))
            assert len(row["behavior_logprob"]) == len(row["response_ids"])
            versions = [part["policy_version"] for part in parts] or [row["policy_version"]]
            assert 0 <= versions[0] <= versions[-1] <= k
            mixed += [versions] if len(versions) > 1 else []
        assert batch.behavior_version <= k and batch.oldest_version is not None
        manifest = store.manifest(k + 1)
        assert manifest.metrics["mismatch/effective_share"] > 0, "the correction saw these tokens"
    assert mixed and all(versions == [0, 1] for versions in mixed), "iteration 1 was sampled while 0 trained"
    print(json.dumps({"mixed": len(mixed), "produced": summary.produced}))
