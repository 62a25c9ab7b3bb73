"""What an iteration's rewards and their making say about the run: parts, alerts, throughput, idle time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from tasks.environments.alerts import ALERTS, alerts_up
from tasks.environments.intake import Intake
from tasks.records import RolloutReport
from tasks.say import say

SHOWN = 160
"""Characters of a prompt's end and of a response's beginning beside an alert."""


def reward_metrics(frame: pl.DataFrame) -> dict[str, float]:
    """Of a ``ScoredFrame``: alerts that are up, and the mean value, failures and abstentions of each part."""
    rewards = frame.filter(pl.col("outcome") == "score")["reward"]
    metrics = dict.fromkeys(alerts_up(rewards, num_samples=len(frame)), 1.0)
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
    return metrics | _truth_metrics(frame)


def _truth_metrics(frame: pl.DataFrame) -> dict[str, float]:
    """How far the reward is from the verifier's word where other parts make it: a policy that learns to
    please a model drives them apart."""
    if not len(frame.filter(pl.col("parts").list.len() > 1)):
        return {}
    part = pl.element().struct
    verified = pl.element().filter((part.field("name") == "verifier") & (part.field("kind") == "score"))
    truth = pl.col("parts").list.eval(verified.struct.field("value")).list.first()
    both = frame.select("reward", truth=truth).drop_nulls()
    if not len(both):
        return {}
    gap = both.select((pl.col("reward") - pl.col("truth")).mean()).item()
    metrics = {"truth/value": float(both["truth"].mean()), "truth/gap": float(gap)}  # pyright: ignore[reportArgumentType]
    correlation = both.select(pl.corr("reward", "truth")).item()
    if correlation is not None and math.isfinite(correlation):  # none where either is the same throughout
        metrics["truth/correlation"] = float(correlation)
    return metrics


def say_alerts(metrics: Mapping[str, float], frame: pl.DataFrame, tokenizer: Any, *, iteration: int) -> None:
    """What is wrong with an iteration's rewards, and one of its samples: there mostly is what to mend."""
    texts = [text for name, text in ALERTS.items() if metrics.get(name)]
    for text in texts:
        say("ALERT", text, iteration=iteration)
    if texts and len(frame):
        row = frame.row(0, named=True)
        prompt, response = (
            tokenizer.decode(row[ids], skip_special_tokens=False) for ids in ("prompt_ids", "response_ids")
        )
        scored = row["outcome"] == "score"
        came = f"reward {row['reward']:g}" if scored else f"{row['outcome']}: {row['reason']}"
        say("ALERT", f"such as {prompt[-SHOWN:]!r} -> {response[:SHOWN]!r}: {came}", iteration=iteration)


def waiting_seconds(intake: Intake, reports: Sequence[RolloutReport]) -> dict[str, float]:
    """Seconds that each stage worked and waited."""
    sampling = sum(share.seconds for share in intake.buffer.progress(intake.iteration).workers.values())
    working = sum(report.seconds - report.load_seconds for report in reports)
    return {
        "busy/generate": sampling,
        "idle/generate": max(working - sampling, 0.0),
        "busy/score": intake.busy_seconds,
        "idle/score": intake.idle_seconds,
    }


def killed_verifiers(intake: Intake) -> dict[str, float]:
    """How many verifier processes had to be killed, where a pool of them scored."""
    pool = intake.scorer.pool
    return {"score/killed": float(pool.num_killed)} if pool else {}
