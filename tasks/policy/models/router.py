"""Routers in reinforcement learning: leave them as they are, or keep their experts evenly used.

Shape key: T tokens of a micro-batch (B x L, flattened), E experts, K selections a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.policy.parallel.experts import experts_modules
from tasks.rl.balance import sequence_balance_loss
from tasks.rl.packing import MicroBatch

BIAS = "e_score_correction_bias"
"""Of DeepSeek-V3's and GLM-4-MoE's routers: takes part in selecting experts and not in weighing them."""


def router_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The router of every experts module: its sibling that transformers calls one."""
    for name, _ in experts_modules(model):
        parent = name.rsplit(".", 1)[0]
        routers = [
            (f"{parent}.{leaf}", child)
            for leaf, child in model.get_submodule(parent).named_children()
            if "router" in type(child).__name__.lower()
        ]
        if len(routers) != 1:
            raise ValueError(
                f"{parent} must have one router beside its experts, got {[leaf for leaf, _ in routers]}. "
                "Set train.freeze_router to false and train.router_aux_loss_coefficient to 0."
            )
        yield routers[0]


def router_scores(router: nn.Module, logits_TE: Tensor) -> Tensor:
    """How well the router finds that each expert suits a token: a sigmoid where it has a ``BIAS``, which is
    no part of the score, else a softmax."""
    logits_TE = logits_TE.float()
    return logits_TE.sigmoid() if hasattr(router, BIAS) else logits_TE.softmax(dim=-1)


def freeze_routers(model: PreTrainedModel) -> None:
    """Train everything but the routers; call before making the optimizer."""
    for _, router in router_modules(model):
        router.requires_grad_(False)


class RouterBalance:
    """The auxiliary loss of the micro-batch that the model has seen last."""

    def __init__(self, model: PreTrainedModel, *, coefficient: float):
        self.coefficient = coefficient
        self._seen: list[tuple[Tensor, Tensor]] = []
        for _, router in router_modules(model):
            router.register_forward_hook(self._keep)

    def clear(self) -> None:
        self._seen.clear()

    def loss(self, micro_batch: MicroBatch, *, num_global_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over layers, weighted by a sequence's share of trained tokens; call once a forward pass."""
        seen, self._seen = self._seen, []
        sequence_T, num_sequences = sequence_numbers(micro_batch)
        total = torch.stack(
            [
                sequence_balance_loss(
                    score_TE,
                    expert_TK,
                    sequence_T,
                    is_token_T=micro_batch["attention_mask"].flatten().bool(),
                    is_trained_T=micro_batch["mask"].flatten(),
                    num_sequences=num_sequences,
                    num_global_tokens=num_global_tokens,
                )
                for score_TE, expert_TK in seen
            ]
        ).mean()
        return self.coefficient * total, {"router_balance": total.detach()}

    def _keep(self, router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits_TE, _, expert_TK = output
        if torch.is_grad_enabled():
            self._seen.append((router_scores(router, logits_TE), expert_TK))


def sequence_numbers(micro_batch: MicroBatch) -> tuple[Tensor, int]:
    """Which sequence each token of a micro-batch belongs to, and how many there are."""
    if "position_ids" in micro_batch:
        sequence_T = (micro_batch["position_ids"].flatten() == 0).cumsum(0) - 1
        return sequence_T, int(sequence_T[-1]) + 1
    rows, length = micro_batch["input_ids"].shape
    device = micro_batch["input_ids"].device
    return torch.arange(rows, device=device).repeat_interleave(length), rows
