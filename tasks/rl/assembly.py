"""Scored samples to train rows: admission, advantages, mini-batches. Pure."""

import polars as pl
import torch

from tasks.config import CampaignConfig
from tasks.rl.advantages import control_rewards, group_advantages, has_signal
from tasks.schema import TrainFrame, polars_schema, validated

SAMPLE = ("iteration", "prompt_id", "sample_index")


def assemble_frame(
    frame: pl.DataFrame, config: CampaignConfig, *, iteration: int, policy_version: int
) -> tuple[pl.DataFrame, dict[str, int], dict[str, float]]:
    """Train rows of one iteration, rejected samples by reason, and metrics of the batch.

    Every row of ``frame`` (a ``ScoredFrame``) is either in the result or counted under one reason. The result
    does not depend on the order of ``frame``.
    """
    frame = frame.sort(SAMPLE).with_columns(reason=_rejection(config, policy_version))
    if quota := config.rollout.quota_groups:
        frame = frame.with_columns(reason=_beyond(quota))
    rejected = _counts(frame.filter(pl.col("reason") != ""))
    admitted = frame.filter(pl.col("reason") == "")
    rewards = control_rewards(
        torch.tensor(admitted["reward"].to_list(), dtype=torch.float64),
        control=config.reward.control,
        seed=config.seed + iteration,
    )
    admitted = admitted.with_columns(reward=pl.Series(rewards.tolist(), dtype=pl.Float64))
    admitted, without_signal = _with_advantages(admitted, normalize_by_std=config.algorithm.normalize_by_std)
    rejected |= without_signal
    train = _into_minibatches(
        admitted, num_minibatches=config.algorithm.num_minibatches, seed=config.seed + iteration
    )
    metrics = {
        "zero_variance": without_signal.get("zero_variance", 0) / max(len(frame), 1),
        "staleness": float((policy_version - train["policy_version"]).mean() or 0.0),  # pyright: ignore
    }
    return train, rejected, metrics


def _rejection(config: CampaignConfig, policy_version: int) -> pl.Expr:
    """Why a sample may not be trained; empty if it may."""
    age = policy_version - pl.col("policy_version")
    return (
        pl.when(pl.col("outcome") == "failure").then(pl.lit("verifier_failure"))
        .when(pl.col("outcome") == "abstain").then(pl.lit("abstained"))
        .when(age > config.schedule.max_staleness).then(pl.lit("stale"))
        .when(pl.col("finish_reason") == "abort").then(pl.lit("aborted"))
        .otherwise(pl.lit(""))
    )  # fmt: skip


def _beyond(quota: int) -> pl.Expr:
    """The reason, where there is none so far and the prompt is not among the first ``quota`` of those
    published."""
    place = pl.col("prompt_id").rank("dense")
    return (
        pl.when((pl.col("reason") == "") & (place > quota))
        .then(pl.lit("over_quota"))
        .otherwise(pl.col("reason"))
    )


def sample_fates(
    frame: pl.DataFrame, train: pl.DataFrame, config: CampaignConfig, *, policy_version: int
) -> pl.DataFrame:
    """``frame`` with a column ``fate``: ``trained`` for the rows of the sealed ``train``, else why not."""
    frame = frame.sort(SAMPLE).with_columns(
        reason=_rejection(config, policy_version), failure=pl.col("reason")
    )
    if quota := config.rollout.quota_groups:
        frame = frame.with_columns(reason=_beyond(quota))
    trained = train.select(*SAMPLE, "advantage", "minibatch", is_trained=pl.lit(True))
    admitted = (pl.col("reason") == "").sum().over("prompt_id")
    fate = (
        pl.when(pl.col("is_trained")).then(pl.lit("trained"))
        .when(pl.col("reason") != "").then(pl.col("reason"))
        .when(admitted == 1).then(pl.lit("group_of_one"))
        .otherwise(pl.lit("zero_variance"))
    )  # fmt: skip
    frame = frame.join(trained, on=SAMPLE, how="left", maintain_order="left")
    return frame.with_columns(fate=fate).drop("reason", "is_trained")


def _with_advantages(frame: pl.DataFrame, *, normalize_by_std: bool) -> tuple[pl.DataFrame, dict[str, int]]:
    """Rows of groups that teach something, with their advantages; groups of one or of equal rewards are
    counted."""
    frame = frame.with_columns(size=pl.len().over("prompt_id"))
    parts, rejected = [], {}
    for (size,), part in frame.group_by("size", maintain_order=True):
        if size == 1:
            rejected["group_of_one"] = len(part)
            continue
        reward_NG = torch.tensor(part["reward"].to_list(), dtype=torch.float64).view(-1, int(size))  # pyright: ignore
        keep_N = has_signal(reward_NG)
        advantage_NG = group_advantages(reward_NG, normalize_by_std=normalize_by_std)
        keep = keep_N.repeat_interleave(int(size))  # pyright: ignore[reportArgumentType]
        part = part.with_columns(advantage=pl.Series(advantage_NG.flatten().tolist(), dtype=pl.Float64))
        parts.append(part.filter(pl.Series(keep.tolist())))
        rejected["zero_variance"] = rejected.get("zero_variance", 0) + int((~keep).sum())
    if not parts:
        return frame.with_columns(advantage=pl.lit(0.0)).clear(), rejected
    return pl.concat(parts).sort(SAMPLE), rejected


def _into_minibatches(frame: pl.DataFrame, *, num_minibatches: int, seed: int) -> pl.DataFrame:
    """Shuffle by the seed and deal into mini-batches of nearly equal size."""
    order = torch.randperm(len(frame), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(num_minibatches, max(len(frame), 1))
    minibatch = [i * count // max(len(frame), 1) for i in range(len(frame))]
    train = frame[order].with_columns(
        loss_mask=pl.col("response_ids").list.eval(pl.element().is_not_null()),
        minibatch=pl.Series(minibatch, dtype=pl.Int64),
    )
    return validated(train.select(list(polars_schema(TrainFrame))), TrainFrame)


def _counts(rejected: pl.DataFrame) -> dict[str, int]:
    return dict(rejected.group_by("reason").len().sort("reason").iter_rows())
