"""What an iteration's rewards and their making say about the run: parts, alerts, throughput, idle time."""

from collections.abc import Mapping, Sequence

import polars as pl

from tasks.environments.intake import Intake
from tasks.records import RolloutReport
from tasks.reporting.rewards import ALERTS
from tasks.session import say


def reward_metrics(frame: pl.DataFrame) -> dict[str, float]:
    """Of a ``ScoredFrame``: alerts that are up, and the mean value, failures and abstentions of each part."""
    rewards = frame.filter(pl.col("outcome") == "score")["reward"]
    alerts = {
        "alert/none_scored": len(frame) > 0 and len(rewards) == 0,
        "alert/all_floor": len(rewards) > 1 and rewards.max() == 0.0,
        "alert/all_equal": len(rewards) > 1 and rewards.n_unique() == 1,
    }
    metrics = {name: 1.0 for name, is_up in alerts.items() if is_up}
    abstained = int((frame["outcome"] == "abstain").sum())
    if abstained:
        metrics["abstained"] = float(abstained)
    parts = frame.filter(pl.col("parts").list.len() > 0).select(pl.col("parts").explode()).unnest("parts")
    for (name,), part in parts.group_by("name", maintain_order=True):
        values = part.filter(pl.col("kind") == "score")["value"]
        if len(values):
            metrics[f"part/{name}"] = float(values.mean())  # pyright: ignore[reportArgumentType]
        metrics[f"part_seconds/{name}"] = float(part["seconds"].sum())
        for kind in ("failure", "abstain"):
            if count := int((part["kind"] == kind).sum()):
                metrics[f"part_{kind}/{name}"] = float(count)
    return metrics


def say_alerts(metrics: Mapping[str, float], *, iteration: int) -> None:
    for name, text in ALERTS.items():
        if metrics.get(name):
            say("ALERT", text, iteration=iteration)


def throughput_metrics(intake: Intake, reports: Sequence[RolloutReport]) -> dict[str, float]:
    """Seconds that each stage worked and waited, and the rate of scoring."""
    sampling = sum(share.seconds for share in intake.buffer.progress(intake.iteration).workers.values())
    working = sum(report.seconds - report.load_seconds for report in reports)
    pool = intake.scorer.pool
    metrics = {
        "busy/generate": sampling,
        "idle/generate": max(working - sampling, 0.0),
        "busy/score": intake.busy_seconds,
        "idle/score": intake.idle_seconds,
        "score/samples_per_second": intake.num_samples / max(intake.busy_seconds, 1e-9),
    }
    return metrics | ({"score/killed": float(pool.num_killed)} if pool else {})
