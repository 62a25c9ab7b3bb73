"""One pass over a sealed batch: an optimizer step a mini-batch, with what watches over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tasks.config import CampaignConfig
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.ranks.progress import Progress, slow_ranks
from tasks.policy.step.fused_loss import fused_policy_objective
from tasks.policy.step.head_rows import with_head_rows
from tasks.policy.step.reading import reader_of
from tasks.policy.step.trainer import train_minibatch
from tasks.policy.training.trainee import Trainee
from tasks.rl.losses import supervised_loss
from tasks.rl.objective import PER_TOKEN, policy_objective
from tasks.rl.packing import (
    Row,
    by_minibatch,
    collate,
    num_trained_sequences,
    num_trained_tokens,
    plan_micro_batches,
    rank_share,
)
from tasks.rl.preparation import prepare_rows


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a pass is, and what it has summed up: with the trainee, all it needs to go on."""

    done: int = 0
    """Mini-batches, counted over epochs."""
    totals: dict[str, float] = field(default_factory=lambda: {"steps": 0.0, "skipped": 0.0})

    def add(self, sums: Mapping[str, float]) -> None:
        """A step. A skipped one counts as one and adds nothing else: what it would add is not finite."""
        finite = {"skipped": 1.0} if sums["skipped"] else sums
        for name, value in {**finite, "steps": 1.0}.items():
            self.totals[name] = self.totals.get(name, 0.0) + value


def train(
    trainee: Trainee,
    rows: list[Row],
    config: CampaignConfig,
    *,
    objective: str,
    position: Position | None = None,
) -> dict[str, float]:
    """One optimizer step a mini-batch, ``num_epochs`` times over the batch; metrics are means over tokens or
    steps.

    A mini-batch of which a correction dropped every token takes no step. Goes on behind ``position`` and
    moves it, so that it is right when ``StopAgreed`` ends the pass between two mini-batches.
    """
    position = position or Position()
    mesh, totals = trainee.mesh, position.totals
    report, num_epochs = {}, 1
    if objective == "clipped_policy":
        rows, report = prepare_rows(rows, config.algorithm)
        num_epochs = config.algorithm.num_epochs
    order = by_minibatch(rows) * num_epochs
    for place in range(position.done, len(order)):
        number, members = order[place]
        if num_trained_tokens(members):
            trainee.reseed(place)
            sums = _step(trainee, number, members, config, objective=objective)
            position.add(sums)
            trainee.nonfinite.count(is_skipped=bool(sums["skipped"]), minibatch=number)
        position.done = place + 1
    tokens = max(totals.get("tokens", 0.0), 1.0)
    taken = max(totals["steps"] - totals["skipped"], 1.0)
    per_token = {name: totals[name] / tokens for name in PER_TOKEN if name in totals}
    return {
        **report,
        **per_token,
        **_balance_metrics(totals, taken, config),
        **(trainee.routing.metrics(mesh) if trainee.routing else {}),
        **_slow_rank_metrics(mesh, trainee.progress, config.train.slow_rank_factor),
        "trained_tokens": totals.get("tokens", 0.0),
        "samples": float(len(rows)),
        "grad_norm": totals.get("grad_norm", 0.0) / taken,
        "skipped_steps": totals["skipped"],
        "nonfinite_in_a_row": float(trainee.nonfinite.in_a_row),
        "steps": totals["steps"],
        "learning_rate": trainee.optimizer.param_groups[0]["lr"],
    }


def _step(
    trainee: Trainee, number: int, members: list[Row], config: CampaignConfig, *, objective: str
) -> dict[str, float]:
    mesh, settings = trainee.mesh, config.train
    share = rank_share(members, rank=mesh.share, world_size=mesh.num_shares)
    plan = plan_micro_batches(share, max_tokens=settings.micro_batch_tokens, packing=settings.packing)
    num_global_tokens = num_trained_tokens(members)
    trainee.progress.at("mini-batch", number)
    batches = [with_head_rows(collate(batch, packing=settings.packing), mesh.cp_group) for batch in plan]

    def keep(at_fault: list[int]) -> None:
        trainee.nonfinite.keep([row for index in at_fault for row in plan[index]], minibatch=number)

    return train_minibatch(
        trainee,
        [{k: v.to(trainee.model.device) for k, v in batch.items()} for batch in batches],
        make_loss(
            config,
            objective,
            num_global_tokens=num_global_tokens,
            num_global_sequences=num_trained_sequences(members),
        ),
        num_global_tokens=num_global_tokens,
        max_grad_norm=settings.max_grad_norm,
        read=reader_of(config, objective),
        routers=trainee.routers,
        on_nonfinite=keep,
    )


def _balance_metrics(totals: dict[str, float], taken: float, config: CampaignConfig) -> dict[str, float]:
    """Only of what is on: a manifest that holds these was trained with it."""
    coefficient, rate = config.train.router_aux_loss_coefficient, config.train.router_bias_rate
    metrics = {"router_bias_rate": rate} if rate else {}
    if coefficient:
        balance = totals.get("router_balance", 0.0) / taken
        metrics |= {"router_aux_loss_coefficient": coefficient, "router_balance": balance}
    return metrics


def _slow_rank_metrics(mesh: ParallelMesh, progress: Progress, factor: float) -> dict[str, float]:
    """``slow_rank/<rank>``: how many times the median rank it worked, for those above ``factor``."""
    if mesh.world is None:
        return {}
    seconds: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(seconds, progress.work_seconds, group=mesh.world)
    return {f"slow_rank/{rank}": times for rank, times in slow_ranks(seconds, factor=factor).items()}


def make_loss(
    config: CampaignConfig, objective: str, *, num_global_tokens: int, num_global_sequences: int
) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, dict[str, Tensor]]]:
    """The loss of an objective for a mini-batch. A policy's is put together in ``tasks/rl/objective.py``."""

    def supervised(logprob_BL: Tensor, entropy_BL: Tensor, micro: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return supervised_loss(logprob_BL, micro["mask"], num_global_tokens=num_global_tokens)

    make = fused_policy_objective if config.train.loss_kernel == "fused" else policy_objective
    policy = make(
        config.algorithm,
        num_global_tokens=num_global_tokens,
        num_global_sequences=num_global_sequences,
        fixed_length=config.rollout.max_new_tokens,
    )
    return {"clipped_policy": policy, "supervised": supervised}[objective]
