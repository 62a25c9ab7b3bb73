"""A whole policy update on two ranks, from a stored version to the next one's candidate.

    torchrun --nproc-per-node 2 tests/test_update.py JOB.json

is what each test starts: the real store, process group, dispatcher and optimizer; no Flyte.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import train_job, write_job

from tasks.artifacts.cursor import fix_dataset
from tasks.artifacts.manifest import Manifest
from tasks.config import CampaignConfig
from tasks.records import CampaignRun, Candidate, PolicyVersion, TrainBatch

ROOT = Path(__file__).resolve().parent.parent
TINY = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "expert_width": 32}
WIDE = {  # of a size that DeepEP's kernels are compiled for in test_exchange_gpu
    "hidden_size": 2048, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_experts": 128,
    "experts_per_token": 8, "expert_width": 16,
}  # fmt: skip
BFLOAT16 = {"backend": "nccl", "compute_dtype": "bfloat16", "packing": "packed", "micro_batch_tokens": 2048}
BFLOAT16 |= {"activation_checkpointing": True}
DEEPEP = {"dispatcher": "deepep", "deepep": {"max_tokens": 4096}}


def train_batch(
    run: CampaignRun, iteration: int, behavior_version: int, *, minibatches: int = 2
) -> TrainBatch:
    """32 samples in so many mini-batches, sealed in the store."""
    import polars as pl

    from tasks.schema import TrainFrame, polars_schema, to_bytes
    from tasks.session import run_environment, run_store

    generator = torch.Generator().manual_seed(iteration)
    columns = polars_schema(TrainFrame)
    rows = []
    for index in range(32):
        length = 5 + index % 7
        known: dict[str, Any] = {
            "iteration": iteration, "prompt_id": f"p{index}", "sample_index": 0,
            "policy_version": behavior_version, "prompt_ids": [3, 4, 5], "reward": float(index % 2),
            "response_ids": torch.randint(3, 30, (length,), generator=generator).tolist(),
            "behavior_logprob": [-3.5] * length, "loss_mask": [True] * length,
            "advantage": -1.0 + index % 3, "minibatch": index * minibatches // 32,
        }  # fmt: skip
        rows.append(known)
    payload = to_bytes(pl.DataFrame(rows, schema={name: columns[name] for name in rows[0]}))
    key = f"batches/{iteration:06d}.arrow"
    run_store(run).put_object(key, payload)
    fix_dataset(run_store(run), run_environment(run).fingerprint())
    return TrainBatch(
        iteration=iteration, objective="clipped_policy", key=key, sha256=hashlib.sha256(payload).hexdigest(),
        num_samples=32, behavior_version=behavior_version, produced=32, rejected={}, metrics={}, seconds={},
        sealed_at=time.time(),
    )  # fmt: skip


def on_two_ranks(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion, folder: Path) -> Manifest:
    job, answer = folder / "job.json", folder / "candidate.json"
    write_job((run, batch, policy), job)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [*command, __file__, str(job), str(answer)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return Manifest.model_validate_json(Candidate.model_validate_json(answer.read_text()).manifest_json)


def updates(folder: Path, shape: dict[str, Any], train: dict[str, Any], number: int = 2) -> list[Manifest]:
    """The manifests of version 0 and of those that so many updates made."""
    from tasks.policy.checkpoint.initial import initial_manifest
    from tasks.session import run_store

    config = CampaignConfig.model_validate(
        {"name": "update", "model": {"random": shape}, "train": train, "checkpoint": {"store": str(folder)}}
    )
    run = CampaignRun(config=config, lineage=1, code_revision="r" * 40)
    store = run_store(run)
    manifests = [initial_manifest(store, run)]
    policy = store.commit(manifests[0])
    for iteration in range(number):
        manifests.append(on_two_ranks(run, train_batch(run, iteration, policy.version), policy, folder))
        policy = store.commit(manifests[-1])
    return manifests


def check(manifests: list[Manifest], dispatcher: str) -> None:
    assert len({manifest.tensor_digest for manifest in manifests}) == len(manifests)
    for manifest in manifests[1:]:
        assert manifest.num_samples == 32 and manifest.metrics["steps"] == 2
        assert manifest.metrics["skipped_steps"] == 0 and 0 < manifest.metrics["grad_norm"] < 1e3
        assert manifest.means["dispatcher"].startswith(f"{dispatcher} over ")
        parts = "logprob", "experts", "norms", "loss", "rotary", "optimizer"
        assert manifest.means["kernels"] == ", ".join(f"{part} torch" for part in parts)
        assert f"torch {torch.__version__.split('+')[0]}" in manifest.means["libraries"]
        assert any(name.startswith("optimizer") for name in manifest.files)


@pytest.mark.slow
@pytest.mark.usefixtures("leave_servers")
def test_an_update_makes_a_version_and_reports_what_it_used(tmp_path):
    manifests = updates(tmp_path, TINY, {}, number=1)
    check(manifests, "all_to_all")
    assert manifests[1].means["dispatcher"] == "all_to_all over gloo, 2 ranks"


@pytest.mark.timeout(600)
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("leave_servers")
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "deepep"])
def test_two_updates_on_two_gpus(dispatcher, deterministic, tmp_path):
    train = BFLOAT16 | {"deterministic": deterministic}
    if dispatcher == "deepep":
        pytest.importorskip("deep_ep", reason="needs DeepEP", exc_type=ImportError)
        train |= DEEPEP
    manifests = updates(tmp_path, WIDE, train)
    check(manifests, dispatcher)
    print(json.dumps([m.metrics | m.seconds for m in manifests[1:]]))
    print(manifests[2].means)
    if deterministic:
        again = updates(tmp_path / "again", WIDE, train)
        assert [m.tensor_digest for m in again] == [m.tensor_digest for m in manifests]


if __name__ == "__main__":
    train_job(*sys.argv[1:])
