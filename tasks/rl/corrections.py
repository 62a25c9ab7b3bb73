"""Samples of another policy: how much they count, and which are left out.

Shape key: B rows, L positions. Pure. Weights compare the *proximal* policy (the trainer's, when an update
begins) with the *behaviour* policy (the engine's, when it sampled): older weights, another precision, other
kernels. They are constants of the update. The *current* policy is held near the proximal one by the loss, so
that the two corrections do not meet: decoupled PPO, arXiv 2110.00641 section 3; AReaL, arXiv 2505.24298
section 5.2.
"""

from typing import Literal

import torch
from torch import Tensor

from tasks.rl.kl import kl_estimate
from tasks.rl.sequences import masked, sequence_mean, sequence_sum

Level = Literal["token", "sequence"]


def importance_weight(
    proximal_logprob_BL: Tensor,
    behavior_logprob_BL: Tensor,
    mask_BL: Tensor,
    segment_BL: Tensor,
    *,
    level: Level,
) -> Tensor:
    """Proximal over behaviour probability of each token, or of its whole sequence; 1 outside the mask."""
    log_weight_BL = masked(proximal_logprob_BL - behavior_logprob_BL, mask_BL)
    if level == "sequence":
        log_weight_BL = masked(sequence_sum(log_weight_BL, mask_BL, segment_BL), mask_BL)
    return log_weight_BL.exp()


def truncated_weight(weight_BL: Tensor, *, high: float) -> Tensor:
    """Truncated importance sampling (arXiv 2505.24298 section 5.2): no token counts more than ``high``."""
    return weight_BL.clamp(max=high)


def masked_weight(weight_BL: Tensor, *, low: float, high: float) -> Tensor:
    """Masked importance sampling (IcePop, arXiv 2510.18855 section 3): outside the bounds none at all."""
    return torch.where((weight_BL >= low) & (weight_BL <= high), weight_BL, 0.0)


def keeps_near_sequences(
    proximal_logprob_BL: Tensor,
    behavior_logprob_BL: Tensor,
    mask_BL: Tensor,
    segment_BL: Tensor,
    *,
    max_k3: float,
) -> Tensor:
    """[B, L] False at sequences whose mean KL(behaviour || proximal), by k3, exceeds ``max_k3``."""
    log_ratio_BL = masked(behavior_logprob_BL - proximal_logprob_BL, mask_BL)
    k3_BL = kl_estimate(log_ratio_BL, estimator="k3")
    return sequence_mean(k3_BL, mask_BL, segment_BL) <= max_k3


def keeps_useful_sequences(
    proximal_logprob_BL: Tensor,
    behavior_logprob_BL: Tensor,
    advantage_BL: Tensor,
    mask_BL: Tensor,
    segment_BL: Tensor,
    *,
    max_k1: float,
) -> Tensor:
    """[B, L] False at sequences with a negative advantage and a mean KL, by k1, above ``max_k1``.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556 section 3.1): mistakes that the policy would
    hardly make any more teach it nothing, what went well does.
    """
    log_ratio_BL = masked(behavior_logprob_BL - proximal_logprob_BL, mask_BL)
    k1_BL = sequence_mean(log_ratio_BL, mask_BL, segment_BL)
    return (sequence_mean(advantage_BL, mask_BL, segment_BL) >= 0) | (k1_BL <= max_k1)
