"""PPO's critic: a policy-like artefact with versions of its own, trained on the policy's ranks before it.

Advantages and returns are fixed before the first step, so the critic is trained first and let go of before
the policy is loaded: memory never holds both with their optimizers. Told to stop, its pass ends between two
mini-batches like the policy's, and goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.algorithm_config import AlgorithmConfig, CorrectionConfig
from tasks.policy.step.logprobs import stage_inputs
from tasks.policy.step.reading import read_rows
from tasks.policy.step.trainer import Learner, Read, train_minibatch
from tasks.policy.training.epoch import Position
from tasks.rl.objective import value_objective
from tasks.rl.packing import (
    MicroBatch,
    Row,
    by_minibatch,
    micro_batches,
    num_trained_tokens,
    rank_share,
)
from tasks.rl.preparation import prepare_rows
from tasks.train_config import TrainConfig


def value_reader() -> Read:
    """Reads the value of the state in which each token was chosen: that before the token."""

    def read(model: PreTrainedModel, micro_batch: MicroBatch, **_: Any) -> tuple[Tensor]:
        mask_BL, position_BL = micro_batch["attention_mask"], micro_batch.get("position_ids")
        inputs = stage_inputs(model, micro_batch["input_ids"], mask_BL, position_BL, None, None)
        before_BM = model(**inputs).logits.squeeze(-1).float()[:, :-1]
        none_B1 = before_BM.new_zeros(before_BM.shape[0], 1)
        # what stands at padding or at a sequence's first token is of no sequence, and never in the mask
        return (torch.cat([none_B1, before_BM], dim=1),)

    return read


def read_values(critic: Learner, rows: Sequence[Row], settings: TrainConfig) -> list[Row]:
    """Rows with the ``value`` of each token, as the critic says it now. Collective."""
    values = read_rows(
        critic.model,
        rows,
        critic.mesh,
        value_reader(),
        max_tokens=settings.micro_batch_tokens,
        packing=settings.packing,
    )
    return [{**row, "value": value} for row, value in zip(rows, values, strict=True)]


def train_critic(
    critic: Learner,
    rows: Sequence[Row],
    algorithm: AlgorithmConfig,
    settings: TrainConfig,
    *,
    position: Position | None = None,
) -> dict[str, float]:
    """Train it towards the returns of rows that have their values; metrics under ``critic/``. Goes on behind
    ``position`` and moves it, as a policy's pass does. Collective."""
    position = position or Position()
    # returns only: what is corrected or left out is the policy's business
    with_returns, _ = prepare_rows(rows, algorithm.model_copy(update={"correction": CorrectionConfig()}))
    order = by_minibatch(with_returns) * algorithm.num_epochs
    for place in range(position.done, len(order)):
        number, members = order[place]
        if num_trained_tokens(members):
            critic.progress.at("critic's mini-batch", number)
            critic.reseed(place)
            position.add(_step(critic, members, algorithm, settings))
        position.done = place + 1
    return _metrics(position.totals)


def _step(
    critic: Learner, members: Sequence[Row], algorithm: AlgorithmConfig, settings: TrainConfig
) -> dict[str, float]:
    share = rank_share(members, rank=critic.mesh.share, world_size=critic.mesh.num_shares)
    batches = micro_batches(share, max_tokens=settings.micro_batch_tokens, packing=settings.packing)
    num_global_tokens = num_trained_tokens(members)
    return train_minibatch(
        critic,
        [{name: tensor.to(critic.model.device) for name, tensor in batch.items()} for batch in batches],
        value_objective(clip=algorithm.critic.value_clip, num_global_tokens=num_global_tokens),
        num_global_tokens=num_global_tokens,
        max_grad_norm=settings.max_grad_norm,
        read=value_reader(),
    )


def _metrics(totals: dict[str, float]) -> dict[str, float]:
    """Means, if there was a step; ``explained`` is the share of the returns' variance that the values
    explain."""
    skipped = {"critic/skipped_steps": totals["skipped"]}
    if "tokens" not in totals:
        return skipped
    tokens = totals["tokens"]
    mean = totals["return"] / tokens
    variance = totals["return_square"] / tokens - mean**2
    return {
        "critic/value_loss": totals["value_loss"] / tokens,
        "critic/value": totals["value"] / tokens,
        "critic/explained": 1 - totals["value_error"] / tokens / variance if variance > 0 else 0.0,
        "critic/grad_norm": totals["grad_norm"] / (totals["steps"] - totals["skipped"]),
        **skipped,
    }
