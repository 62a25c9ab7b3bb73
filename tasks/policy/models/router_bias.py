"""Experts evened out without a loss: biases that take part in selecting experts, moved after every step.

Shape key: T tokens of a micro-batch on this rank, E experts, K selections a token.

Only for routers that have such a bias. It is a buffer, equal on all ranks that hold the layer, and is saved
with the weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.policy.models.router import BIAS, router_modules
from tasks.policy.parallel.collectives import all_reduce
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.rl.balance import bias_step


class RouterBias:
    """Counts the experts that real tokens select in a mini-batch, and moves the biases by the counts."""

    def __init__(self, model: PreTrainedModel, *, rate: float):
        self.rate = rate
        self._routers: list[Any] = [router for _, router in router_modules(model)]
        if without := [type(router).__name__ for router in self._routers if not hasattr(router, BIAS)]:
            raise ValueError(
                f"train.router_bias_rate needs routers with a {BIAS}, got {without[0]}. Set it to 0; "
                "train.router_aux_loss_coefficient evens out any router."
            )
        self._seen: list[tuple[int, Tensor]] = []
        self._load_E = [torch.zeros_like(getattr(router, BIAS)) for router in self._routers]
        for number, router in enumerate(self._routers):
            router.register_forward_hook(self._hook(number))

    def count(self, is_token_T: Tensor | None) -> None:
        """Add what the last forward pass selected; nothing of a pass that is not a micro-batch's."""
        seen, self._seen = self._seen, []
        for number, expert_TK in seen:
            if is_token_T is not None:
                load_E = self._load_E[number]
                # padding counts for 0: to leave it out, the host would wait for the number of tokens
                counts_TK = is_token_T.to(load_E.dtype)[:, None].expand_as(expert_TK)
                load_E.index_add_(0, expert_TK.flatten(), counts_TK.flatten())

    def step(self, mesh: ParallelMesh, *, is_finite: bool) -> None:
        """Move the biases by the counts of all ranks with other tokens, unless the step was skipped."""
        for router, load_E in zip(self._routers, self._load_E, strict=True):
            if is_finite:
                total_E = load_E if mesh.dense_group is None else all_reduce(load_E, mesh.dense_group)
                getattr(router, BIAS).add_(bias_step(total_E, rate=self.rate))
            load_E.zero_()

    def _hook(self, number: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if torch.is_grad_enabled():
                self._seen.append((number, output[2].detach()))

        return keep
