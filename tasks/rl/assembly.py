"""Scored samples to train rows: admission, advantages, mini-batches. Pure."""

import math

import polars as pl
import torch

from tasks.config import CampaignConfig
from tasks.rl.advantages import combine_rewards, has_signal, whiten
from tasks.rl.mismatch import age_histogram
from tasks.rl.preparation import sequence_advantages
from tasks.rl.rewards import control_rewards, overlong_penalty
from tasks.schema import TrainFrame, polars_schema, validated

GROUP = ("iteration", "prompt_id")
SAMPLE = (*GROUP, "sample_index")
KEPT = "kept"
"""Fate of a sample that is neither trained nor rejected, but left over for the next iteration."""


def assemble_frame(
    frame: pl.DataFrame, config: CampaignConfig, *, iteration: int, policy_version: int
) -> tuple[pl.DataFrame, dict[str, int], dict[str, float]]:
    """Train rows of one iteration, rejected samples by reason, and metrics of the batch.

    Every row of ``frame`` (a ``ScoredFrame``) is either in the result or counted under one reason, of which
    ``KEPT`` is none. The result does not depend on the order of ``frame``.
    """
    frame = _with_reasons(frame, config, policy_version)
    rejected = _counts(frame.filter(pl.col("reason") != ""))
    admitted = frame.filter(pl.col("reason") == "")
    admitted, without_signal = _with_advantages(_with_rewards(admitted, config, iteration), config)
    rejected |= without_signal
    train = _into_minibatches(
        admitted, num_minibatches=config.algorithm.num_minibatches, seed=config.seed + iteration
    )
    ages = policy_version - train["policy_version"]
    metrics = {
        "zero_variance": without_signal.get("zero_variance", 0) / max(len(frame), 1),
        "staleness": float(ages.mean() or 0.0),  # pyright: ignore[reportArgumentType]
        **age_histogram(ages.to_list()),
    }
    if config.rollout.follow == "newest":
        metrics["mixed_versions"] = 1 - train["version_spans"].null_count() / max(len(train), 1)
    return train, rejected, metrics


def newest_version(frame: pl.DataFrame) -> int:
    """The newest version that sampled any token; -1 of no rows."""
    last = pl.col("version_spans").list.last().struct.field("policy_version")
    return frame.select(pl.coalesce(last, "policy_version").max().fill_null(-1)).item()


def _with_reasons(frame: pl.DataFrame, config: CampaignConfig, policy_version: int) -> pl.DataFrame:
    """Sorted, with ``reason``: why a sample is not trained, whatever its group's rewards are; else empty."""
    frame = frame.sort(SAMPLE).with_columns(reason=_rejection(config, policy_version))
    quota = config.rollout.quota_groups
    return frame.with_columns(reason=_beyond(quota, config)) if quota else frame


def _rejection(config: CampaignConfig, policy_version: int) -> pl.Expr:
    """Why a sample may not be trained; empty if it may. A teacher speaks where a verifier is silent."""
    age = policy_version - pl.col("policy_version")
    needs_reward = pl.lit(config.algorithm.advantage != "teacher")
    return (
        pl.when(needs_reward & (pl.col("outcome") == "failure")).then(pl.lit("verifier_failure"))
        .when(needs_reward & (pl.col("outcome") == "abstain")).then(pl.lit("abstained"))
        .when(age > config.max_age).then(pl.lit("stale"))
        .when(pl.col("finish_reason") == "abort").then(pl.lit("aborted"))
        .otherwise(pl.lit(""))
    )  # fmt: skip


def _beyond(quota: int, config: CampaignConfig) -> pl.Expr:
    """The reason, where there is none so far and the prompt is not among the first ``quota`` of those
    published; inherited ones come first. The frame must be sorted."""
    is_beyond = (pl.col("reason") == "") & (pl.struct(GROUP).rle_id() >= quota)
    is_own = pl.col("iteration") == pl.col("iteration").max()
    goes_on = pl.col("iteration") + 1 < config.schedule.iterations
    is_kept = is_own & goes_on & pl.lit(config.rollout.leftovers == "keep")
    return (
        pl.when(is_beyond & is_kept).then(pl.lit(KEPT))
        .when(is_beyond).then(pl.lit("over_quota"))
        .otherwise(pl.col("reason"))
    )  # fmt: skip


def sample_fates(
    frame: pl.DataFrame, train: pl.DataFrame, config: CampaignConfig, *, policy_version: int
) -> pl.DataFrame:
    """``frame`` with a column ``fate``: ``trained`` for the rows of the sealed ``train``, else why not."""
    frame = _with_reasons(frame.with_columns(failure="reason"), config, policy_version)
    trained = train.select(*SAMPLE, "advantage", "minibatch", is_trained=pl.lit(True))
    admitted = (pl.col("reason") == "").sum().over(GROUP)
    filters = config.algorithm.overlong == "filter"
    has_signal = pl.col("is_trained").any().over(GROUP)
    cut_off = pl.lit(filters) & has_signal & (pl.col("finish_reason") == "length")
    fate = (
        pl.when(pl.col("is_trained")).then(pl.lit("trained"))
        .when(pl.col("reason") != "").then(pl.col("reason"))
        .when(cut_off).then(pl.lit("overlong"))
        .when(admitted == 1).then(pl.lit("group_of_one"))
        .otherwise(pl.lit("zero_variance"))
    )  # fmt: skip
    frame = frame.join(trained, on=SAMPLE, how="left", maintain_order="left")
    return frame.with_columns(fate=fate).drop("reason", "is_trained")


def _with_rewards(frame: pl.DataFrame, config: CampaignConfig, iteration: int) -> pl.DataFrame:
    """Rewards as the algorithm sees them: a control experiment's, less the price of length."""
    if config.algorithm.advantage == "teacher":
        return frame
    rewards = control_rewards(
        torch.tensor(frame["reward"].to_list(), dtype=torch.float64),
        control=config.reward.control,
        seed=config.seed + iteration,
    )
    if config.algorithm.overlong == "shape":
        rewards = rewards + overlong_penalty(
            _num_tokens(frame),
            max_tokens=config.rollout.max_new_tokens,
            buffer_tokens=config.algorithm.overlong_buffer,
        )
    return frame.with_columns(reward=pl.Series(rewards.tolist(), dtype=pl.Float64))


def _with_advantages(frame: pl.DataFrame, config: CampaignConfig) -> tuple[pl.DataFrame, dict[str, int]]:
    """Rows that teach something, with their advantages; groups of one or of equal rewards are counted, and
    samples that were cut off where they are filtered: after they have been part of their group's mean.

    Where the trainer estimates advantages itself they are 0 here, and there every sample teaches something
    unless it is compared with its group.
    """
    algorithm = config.algorithm
    if algorithm.advantage in ("returns", "gae", "teacher"):
        return _without_overlong(frame.with_columns(advantage=pl.lit(0.0)), {}, config)
    frame = frame.with_columns(size=pl.len().over(GROUP))
    parts, rejected = [], {}
    for (size,), part in frame.group_by("size", maintain_order=True):
        if size == 1:
            rejected["group_of_one"] = len(part)
            continue
        reward_NG = _combined(part, config).view(-1, int(size))  # pyright: ignore[reportArgumentType]
        keep_N = has_signal(reward_NG)
        advantage_NG = sequence_advantages(reward_NG, algorithm)
        keep = keep_N.repeat_interleave(int(size))  # pyright: ignore[reportArgumentType]
        part = part.with_columns(advantage=pl.Series(advantage_NG.flatten().tolist(), dtype=pl.Float64))
        parts.append(part.filter(pl.Series(keep.tolist())))
        rejected["zero_variance"] = rejected.get("zero_variance", 0) + int((~keep).sum())
    if not parts:
        return frame.with_columns(advantage=pl.lit(0.0)).clear(), rejected
    frame, rejected = _without_overlong(pl.concat(parts).sort(SAMPLE), rejected, config)
    return (_whitened(frame) if algorithm.whiten and len(frame) else frame), rejected


def _combined(frame: pl.DataFrame, config: CampaignConfig) -> torch.Tensor:
    """Rewards as they were given, or the weighed sum of parts that were each normalised by their group."""
    if config.reward.normalise == "none":
        return torch.tensor(frame["reward"].to_list(), dtype=torch.float64)
    weights = {name: weight for name, weight in config.reward.parts.items() if weight > 0}
    values = [
        {part["name"]: part["value"] for part in parts if part["value"] is not None}
        for parts in frame["parts"].to_list()
    ]
    part_BK = torch.tensor([[row.get(n, math.nan) for n in weights] for row in values], dtype=torch.float64)
    group = int(frame["prompt_id"].len() / frame["prompt_id"].n_unique())
    part_NGK = part_BK.view(-1, group, len(weights))
    weight_K = torch.tensor(list(weights.values()), dtype=torch.float64)
    return combine_rewards(part_NGK, weight_K, how="normalize_then_sum")


def _without_overlong(
    frame: pl.DataFrame, rejected: dict[str, int], config: CampaignConfig
) -> tuple[pl.DataFrame, dict[str, int]]:
    if config.algorithm.overlong != "filter":
        return frame, rejected
    kept = frame.filter(pl.col("finish_reason") != "length")
    return kept, rejected | {"overlong": len(frame) - len(kept)}


def _whitened(frame: pl.DataFrame) -> pl.DataFrame:
    """Statistics over all trained tokens, of which a long sample has more."""
    trained = pl.coalesce(pl.col("chosen").list.sum(), pl.col("response_ids").list.len())
    length_N = torch.tensor(frame.select(trained).to_series().to_list(), dtype=torch.int64)
    advantage_T = torch.tensor(frame["advantage"].to_list(), dtype=torch.float64).repeat_interleave(length_N)
    whitened_T = whiten(advantage_T, torch.ones_like(advantage_T, dtype=torch.bool))
    last_N = length_N.cumsum(0) - 1
    return frame.with_columns(advantage=pl.Series(whitened_T[last_N].tolist(), dtype=pl.Float64))


def _num_tokens(frame: pl.DataFrame) -> torch.Tensor:
    return torch.tensor(frame["response_ids"].list.len().to_list(), dtype=torch.int64)


def _into_minibatches(frame: pl.DataFrame, *, num_minibatches: int, seed: int) -> pl.DataFrame:
    """Shuffle by the seed and deal into mini-batches of nearly equal size."""
    order = torch.randperm(len(frame), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(num_minibatches, max(len(frame), 1))
    minibatch = [i * count // max(len(frame), 1) for i in range(len(frame))]
    train = frame[order].with_columns(
        loss_mask=pl.coalesce("chosen", pl.col("response_ids").list.eval(pl.element().is_not_null())),
        minibatch=pl.Series(minibatch, dtype=pl.Int64),
    )
    return validated(train.select(list(polars_schema(TrainFrame))), TrainFrame)


def _counts(rejected: pl.DataFrame) -> dict[str, int]:
    return dict(rejected.group_by("reason").len().sort("reason").iter_rows())
