"""SIGKILL at every kind of moment of a campaign: run again, it ends with the bits of an undisturbed one.

What this cannot see: a machine that loses its disk, and engines whose batches are not repeatable.
"""

from __future__ import annotations

import hashlib
import re
import signal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from campaigns import SMALL
from crash import Moments, disturbed_campaign, in_child

from tasks.artifacts.store import EMBEDDED_BUCKET
from tasks.config import CampaignConfig
from tasks.records import CampaignRun
from tasks.reporting.collect import collect
from tasks.session import run_store

TINY = {
    **SMALL,
    "warm_start": {"steps": 0},
    "model": SMALL["model"] | {"dtype": "bfloat16"},
    "rollout": {
        "workers": 1, "prompts_per_iteration": 12, "groups_per_portion": 6, "group_size": 8, "batch_size": 24,
        "lease_seconds": 1.0,
    },
    "algorithm": {"num_minibatches": 2},
    "environment": {"held_out": 16},
    "schedule": {"iterations": 2, "segment_iterations": 2, "evaluate_every": 2},
}  # fmt: skip
NUM_POINTS = 26
TIMED = re.compile(r"^slow_rank/")
"""Metrics that measure time; all others must be equal."""
STAGES = (
    "put_work",
    "generate",
    "settle",
    "exchange_rollouts",
    "batches",
    "train_minibatch",
    "put_patched",
    "commit",
)


@pytest.fixture
def make_config(s3_endpoint, policy_store, valkey_url, campaign, monkeypatch):
    """A configuration with a store of its own on the session's servers."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_endpoint.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_endpoint.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def make(name: str, folder: Path) -> CampaignConfig:
        return CampaignConfig.model_validate(
            TINY
            | {
                "buffer": {"url": valkey_url, "capacity_mb": 64},
                "checkpoint": {
                    "store": f"s3://{EMBEDDED_BUCKET}/{campaign}-{name}",
                    "endpoint_url": s3_endpoint.url,
                    "cache_folder": str(folder / f"cache-{name}"),
                },
            }
        )

    return make


def outcome(config: CampaignConfig) -> dict[str, Any]:
    """Everything that must not depend on when a process died."""
    run = CampaignRun(config=config, lineage=1, code_revision="")
    store = run_store(run)
    record = collect(store, run)
    versions = []
    for manifest in record.manifests:
        versions.append({
            "tensors": manifest.tensor_digest,
            "files": {name: file.sha256 for name, file in manifest.files.items()},
            "metrics": {k: v for k, v in manifest.metrics.items() if not TIMED.search(k)},
            "data": manifest.data,
            "ledger": manifest.ledger,
        })  # fmt: skip
    samples = []
    for key in store.list_objects("archive/"):
        frame = pl.read_parquet(store.get_object(key)).sort("prompt_id", "sample_index")
        kept = [
            name for name in frame.columns if name not in ("worker", "seconds", "attempt", "published_at")
        ]
        samples.append(hashlib.sha256(frame.select(kept).write_json().encode()).hexdigest())
    evaluations = [e.model_dump(exclude={"seconds"}) for e in record.evaluations]
    return {
        "versions": versions,
        "samples": samples,
        "evaluations": evaluations,
        "ledger": record.ledger.model_dump(),
    }


def chosen(moments: list[str], number: int) -> list[str]:
    """Moments spread over the whole run, its first and last among them, and one of each stage."""
    spread = [moments[round(i * (len(moments) - 1) / (number - 1))] for i in range(number)]
    missed = [word for word in STAGES if not any(word in moment for moment in spread)]
    return spread + [next(moment for moment in moments if word in moment) for word in missed]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_campaign_killed_at_any_moment_ends_with_the_same_bits(make_config, tmp_path):
    """Rows 1, 2, 4, 6, 8, 9: weights, optimizer, samples, metrics, ledger and evaluation, all compared."""
    trace, log = tmp_path / "trace", tmp_path / "log"
    calm = make_config("calm", tmp_path)
    assert in_child(disturbed_campaign, calm, Moments(trace=trace), log=log) == (0, None)
    _, expected = in_child(outcome, calm, log=log)
    moments = list(dict.fromkeys(trace.read_text().splitlines()))
    assert len(expected["versions"]) == 3 and expected["versions"][1] != expected["versions"][2]
    points = chosen(moments, NUM_POINTS)
    for number, point in enumerate(points):
        config = make_config(f"p{number}", tmp_path)
        killed, _ = in_child(disturbed_campaign, config, Moments(target=point), log=log)
        assert killed == signal.SIGKILL, point
        assert in_child(disturbed_campaign, config, Moments(), log=log) == (0, None), point
        _, got = in_child(outcome, config, log=log)
        assert got == expected, point
        print(f"killed {point}: same bits", flush=True)
    print(f"{len(set(points))} distinct points of {len(moments)}", flush=True)
    assert len(set(points)) >= 25
