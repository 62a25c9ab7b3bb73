"""The elementwise half of ``logprob``: fold a chunk of logits into a token's statistics; logits to gradient.

Shape key: T tokens, C vocabulary entries of one chunk, whose first is number ``start``.

Torch here, Triton in ``chunks_triton``; the two are chosen by device and take the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moe_kernels import device

AllReduce = Callable[[Tensor, str], Tensor]
"""The sum or the maximum ("sum", "max") of a tensor over the ranks that hold the other blocks."""
LOWEST = -1e30
"""Below every logit, but finite: minus infinity would make 0 * inf of an empty sum."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of each token's softmax after some chunks; z are logits over the temperature."""

    max_T: Tensor
    sum_T: Tensor
    """Sum of exp(z - max)."""
    moment_T: Tensor
    """Sum of exp(z - max) * (z - max)."""
    chosen_T: Tensor
    """z of the token's id; 0 as long as no chunk had it."""

    @classmethod
    def empty(cls, hidden_TD: Tensor) -> Self:
        zero_T = hidden_TD.new_zeros(
            hidden_TD.shape[0], dtype=torch.promote_types(hidden_TD.dtype, torch.float32)
        )
        return cls(torch.full_like(zero_T, LOWEST), zero_T, zero_T.clone(), zero_T.clone())

    def joined(self, all_reduce: AllReduce) -> Self:
        """Of the whole vocabulary, where each rank has folded its own block of it."""
        max_T = all_reduce(self.max_T, "max")
        shift_T = self.max_T - max_T
        moment_T = self.moment_T + self.sum_T * shift_T
        parts_3T = torch.stack([self.sum_T * shift_T.exp(), moment_T * shift_T.exp(), self.chosen_T])
        return type(self)(max_T, *all_reduce(parts_3T, "sum").unbind())

    def finish(self) -> tuple[Tensor, Tensor]:
        """Log of the sum of exp(z), and entropy."""
        log_sum_T = self.sum_T.log()
        return self.max_T + log_sum_T, log_sum_T - self.moment_T / self.sum_T


Fold = Callable[[Statistics, Tensor, Tensor, int, float], None]
Rewrite = Callable[[Tensor, Tensor, int, float, Tensor, Tensor, Tensor, Tensor], None]


def fold_function(hidden_TD: Tensor) -> Fold:
    if device.takes_triton(hidden_TD):
        from moe_kernels import chunks_triton

        return chunks_triton.fold_
    return fold_


def rewrite_function(hidden_TD: Tensor) -> Rewrite:
    if device.takes_triton(hidden_TD):
        from moe_kernels import chunks_triton

        return chunks_triton.rewrite_
    return rewrite_


def fold_(statistics: Statistics, logits_TC: Tensor, ids_T: Tensor, start: int, scale: float) -> None:
    s = statistics
    z_TC = logits_TC.to(s.max_T.dtype) * scale
    max_T = torch.maximum(s.max_T, z_TC.amax(dim=1))
    shift_T = s.max_T - max_T
    below_TC = z_TC - max_T[:, None]
    exp_TC = below_TC.exp()
    s.moment_T.add_(s.sum_T * shift_T).mul_(shift_T.exp()).add_((exp_TC * below_TC).sum(dim=1))
    s.sum_T.mul_(shift_T.exp()).add_(exp_TC.sum(dim=1))
    s.max_T.copy_(max_T)
    place_T1 = (ids_T - start).clamp(0, z_TC.shape[1] - 1)[:, None]
    s.chosen_T.copy_(torch.where(_is_here(ids_T, start, z_TC), z_TC.gather(1, place_T1)[:, 0], s.chosen_T))


def rewrite_(
    logits_TC: Tensor,
    ids_T: Tensor,
    start: int,
    scale: float,
    logsumexp_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
) -> None:
    """Logits become the loss's gradient by them: d logprob = [chosen] - p, d entropy = -p (log p + H)."""
    log_p_TC = logits_TC.to(logsumexp_T.dtype) * scale - logsumexp_T[:, None]
    slope_TC = grad_logprob_T[:, None] + grad_entropy_T[:, None] * (log_p_TC + entropy_T[:, None])
    gradient_TC = -log_p_TC.exp() * slope_TC
    is_here_T = _is_here(ids_T, start, logits_TC)
    place_T1 = (ids_T - start).clamp(0, logits_TC.shape[1] - 1)[:, None]
    gradient_TC.scatter_add_(1, place_T1, torch.where(is_here_T, grad_logprob_T, 0.0)[:, None])
    logits_TC.copy_(torch.where((ids_T >= 0)[:, None], gradient_TC * scale, 0.0))


def _is_here(ids_T: Tensor, start: int, logits_TC: Tensor) -> Tensor:
    return (ids_T >= start) & (ids_T < start + logits_TC.shape[1])
