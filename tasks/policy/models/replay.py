"""Routing replay: the trainer sends each token to the experts that the rollout engine chose for it.

A router is a discontinuous function, so a rounding difference between engine and trainer moves tokens to
other experts and their log-probabilities with them. The engine therefore records which experts each token
went to and with which weights; the trainer uses both (R3, arXiv 2510.11370, with the weights added: expert
numbers alone leave the part of the error that is continuous). The value of a routing weight is the recorded
one, its gradient that of the trainer's own router at the recorded experts.

Shape key: B sequences, L positions, T = B L tokens, N layers with experts, K selections a token, E experts.
Row t of a sequence speaks of the pass that read token t; its last token was sampled and never read, so a
sequence of L tokens has L - 1 rows. ``-1`` is no record: there the trainer routes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tasks.policy.models.router import router_modules
from tasks.rl.packing import MicroBatch

Replay = Literal["none", "experts", "experts_and_weights"]


class RoutingRecorder:
    """Keeps what every router chose in the last forward pass, while it is on; for an engine."""

    def __init__(self, model: nn.Module):
        self.is_on = False
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._num_experts = 0
        for _, router in router_modules(model):
            router.register_forward_hook(self._keep)
            self._num_experts = max(self._num_experts, int(router.num_experts))  # pyright: ignore

    def take(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """[B, L, N, K] expert numbers and weights of the pass since the last call: numbers in the smallest
        type that holds them, weights in half precision where the model computes in it."""
        seen, self._seen = self._seen, []
        expert_TNK = torch.stack([expert_TK for expert_TK, _ in seen], dim=1)
        weight_TNK = torch.stack([weight_TK for _, weight_TK in seen], dim=1)
        expert_TNK = expert_TNK.to(torch.uint8 if self._num_experts <= 256 else torch.int16)
        if weight_TNK.dtype != torch.float32:
            weight_TNK = weight_TNK.to(torch.float16)  # holds a bfloat16 below 1 but for the smallest ones
        experts, weights = expert_TNK.cpu().numpy(), weight_TNK.cpu().numpy()
        shape = num_rows, -1, *experts.shape[1:]
        return experts.reshape(shape), weights.reshape(shape)

    def _keep(self, _module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.is_on:
            _, weight_TK, expert_TK = output
            self._seen.append((expert_TK, weight_TK))


class RoutingReplay:
    """Makes a model's routers choose what the current micro-batch recorded; call before
    ``checkpoint_activations``, so that a part computed again is routed again alike."""

    def __init__(self, model: PreTrainedModel, *, has_weights: bool):
        self.has_weights = has_weights
        self._expert_TNK: Tensor | None = None
        self._weight_TNK: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        for layer, (_, router) in enumerate(router_modules(model)):
            forward: Any = router.forward
            router.forward = partial(self._route, router, layer, forward)

    def use(self, micro_batch: MicroBatch) -> None:
        """Route by this micro-batch until the next call, its backward pass included."""
        expert_BLNK = micro_batch.get("routed_experts")
        self._expert_TNK = None if expert_BLNK is None else expert_BLNK.flatten(0, 1).long()
        self._weight_TNK = None
        if self.has_weights and expert_BLNK is not None:
            self._weight_TNK = micro_batch["routed_weights"].flatten(0, 1)

    def take_sums(self) -> dict[str, Tensor]:
        """Selections replayed since the last call, and how many of them the own router would have made."""
        sums, self._sums = self._sums, {}
        return sums

    def go_on_from(self, sums: dict[str, Tensor]) -> None:
        """Begin with what was summed up before."""
        self._sums = sums

    def _route(
        self, router: Any, layer: int, forward: Callable[[Tensor], tuple[Tensor, ...]], hidden: Tensor
    ) -> tuple[Tensor, ...]:
        if self._expert_TNK is None:
            return forward(hidden)
        recorded_TK = self._expert_TNK[:, layer]
        with _Selection(recorded_TK, num_experts=router.num_experts) as selection:
            logits_TE, weight_TK, expert_TK = forward(hidden)
        if selection.count != 1:
            raise ValueError(
                f"{type(router).__name__} must select its experts with one topk over all of them, got "
                f"{selection.count}. Set train.replay_routing to 'none'."
            )
        self._add("replayed", selection.is_recorded_TK.sum())
        self._add("alike", selection.is_alike_TK.sum())
        if self._weight_TNK is not None:
            recorded = self._weight_TNK[:, layer].to(weight_TK.dtype)
            value_TK = torch.where(selection.is_recorded_TK, recorded, weight_TK.detach())
            weight_TK = value_TK + (weight_TK - weight_TK.detach())  # the bracket is 0 and has the gradient
        return logits_TE, weight_TK, expert_TK

    def _add(self, name: str, count: Tensor) -> None:
        self._sums[name] = self._sums[name] + count if name in self._sums else count


class _Selection(TorchFunctionMode):
    """While on, the topk over all experts returns the recorded ones, so that each family's own code weights
    them."""

    def __init__(self, recorded_TK: Tensor, *, num_experts: int):
        super().__init__()
        self.recorded_TK, self.num_experts, self.count = recorded_TK, num_experts, 0
        self.is_recorded_TK = recorded_TK >= 0
        self.is_alike_TK = torch.zeros_like(self.is_recorded_TK)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        score_TE, own_TK = args[0], result[1]
        # DeepSeek's groups are chosen by a topk of another shape
        if own_TK.shape != self.recorded_TK.shape or score_TE.shape[-1] != self.num_experts:
            return result
        self.count += 1
        with torch.no_grad():
            self.is_alike_TK = (self.recorded_TK[:, :, None] == own_TK[:, None, :]).any(dim=-1)
        expert_TK = torch.where(self.is_recorded_TK, self.recorded_TK, own_TK)
        return score_TE.gather(-1, expert_TK), expert_TK
