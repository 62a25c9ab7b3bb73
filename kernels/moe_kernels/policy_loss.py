"""The loss of a micro-batch's tokens in one pass: ratio, clip, weight, KL, entropy, mask, sums, gradients.

Shape key: N tokens of a micro-batch, trained or not; S sums.

The formula is ``tasks/rl/objective.py``, which is also what the kernel is tested against; there is no second
copy of it in torch. The forward pass stores the gradients, so that the backward pass only scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

SUMS = ("tokens", "policy_loss", "entropy", "clip_share", "kl_k1", "kl_k3", "weight", "reference_kl")
"""What is summed over trained tokens beside the loss, in the kernel's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """Which terms a token's loss has; the fields are those of ``tasks/algorithm_config.py``."""

    loss: Literal["clip", "sequence_clip", "clipped_weight", "soft_gate"]
    clip_low: float
    clip_high: float
    dual_clip: float
    tau_positive: float
    tau_negative: float
    entropy_coefficient: float
    kl_coefficient: float
    kl_estimator: Literal["none", "k1", "k2", "k3", "k3_with_k2_gradient"]
    kl_unbiased: bool
    is_per_length: bool
    """Divide a token's loss by the length of its sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenValues:
    """[N] each; what is None takes no part. Nothing is read where ``mask_N`` is False."""

    mask_N: Tensor
    behavior_N: Tensor
    advantage_N: Tensor
    length_N: Tensor
    proximal_N: Tensor | None
    """Log-probabilities of the policy that the ratio is to; None for the behaviour policy."""
    mean_log_ratio_N: Tensor | None
    """Of each token's sequence; for ``sequence_clip``."""
    weight_N: Tensor | None
    reference_N: Tensor | None


def policy_loss(
    logprob_N: Tensor, entropy_N: Tensor, values: TokenValues, terms: LossTerms
) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' losses with gradients for both inputs, and ``SUMS`` in float64 without."""
    return _PolicyLoss.apply(logprob_N, entropy_N, values, terms)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprob_N: Tensor, entropy_N: Tensor, values: TokenValues, terms: LossTerms
    ) -> tuple[Tensor, Tensor]:
        from moe_kernels import policy_loss_triton

        sums_S, by_logprob_N, by_entropy_N = policy_loss_triton.forward(logprob_N, entropy_N, values, terms)
        ctx.save_for_backward(by_logprob_N, by_entropy_N)
        loss, sums_S = sums_S[-1].to(logprob_N.dtype), sums_S[:-1]
        ctx.mark_non_differentiable(sums_S)
        return loss, sums_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_logprob_N, by_entropy_N = ctx.saved_tensors
        # selected, not scaled: the gradient of a masked token stays 0 whatever the factor
        return _scaled(by_logprob_N, grads[0]), _scaled(by_entropy_N, grads[0]), None, None


def _scaled(gradient_N: Tensor, factor: Tensor) -> Tensor:
    return torch.where(gradient_N == 0, 0.0, gradient_N * factor)
