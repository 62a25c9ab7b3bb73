"""Losses of single tokens, before they are aggregated.

Shape key: B rows, L positions (any shape works as long as all tensors share it). Pure: tensors in, tensors
out, no process group, no config object. Three policies are told apart by name: ``logprob`` is the *current*
one, which is trained; ``proximal_logprob`` the one whose neighbourhood it must not leave;
``behavior_logprob`` the one that sampled. ``log_ratio`` is current minus proximal. Tokens outside the mask
hold 0 in every argument. ``objective.py`` puts the terms together.
"""

import torch
from torch import Tensor

from tasks.rl.sequences import masked, sequence_mean


def clipped_surrogate(
    log_ratio_BL: Tensor, advantage_BL: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347 eq. 7) with asymmetric bounds (DAPO, arXiv 2503.14476 eq. 8).

    ``dual_clip`` above 0 also bounds the loss of a token with a negative advantage by that many times the
    advantage (arXiv 1912.09729 eq. 5): a ratio may grow without limit there.

    Returns:
        The loss, and True where clipping removed the gradient.
    """
    ratio_BL = log_ratio_BL.exp()
    clipped_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high)
    surrogate_BL = torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
    is_clipped_BL = clipped_BL * advantage_BL < ratio_BL * advantage_BL
    if dual_clip:
        floor_BL = torch.where(advantage_BL < 0, dual_clip * advantage_BL, -torch.inf)
        is_clipped_BL = is_clipped_BL | (surrogate_BL < floor_BL)
        surrogate_BL = torch.maximum(surrogate_BL, floor_BL)
    return -surrogate_BL, is_clipped_BL


def sequence_log_ratio(log_ratio_BL: Tensor, mask_BL: Tensor, segment_BL: Tensor) -> Tensor:
    """GSPO's ratio of a sequence, at each of its tokens (arXiv 2507.18071 eq. 7, token form of eq. 15).

    The value is the mean log-ratio of the sequence; the gradient reaches each token's own log-probability, so
    that a weight on a token acts on that token. Into ``clipped_surrogate`` it goes in place of a token's.
    """
    mean_BL = sequence_mean(log_ratio_BL, mask_BL, segment_BL)
    return log_ratio_BL - log_ratio_BL.detach() + mean_BL.detach()


def clipped_weight_loss(
    logprob_BL: Tensor, log_ratio_BL: Tensor, advantage_BL: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv 2506.13585 eq. 4): the ratio is a clipped constant weight, so no token loses its gradient.

    The bounds are relative to 1 as elsewhere: an absolute cap of 5 is ``clip_high`` 4, and ``clip_low`` 1 is
    no lower bound.

    Returns:
        The loss, and True where the weight was clipped.
    """
    ratio_BL = log_ratio_BL.detach().exp()
    weight_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BL * advantage_BL * logprob_BL, weight_BL != ratio_BL


def soft_gate_loss(
    log_ratio_BL: Tensor, advantage_BL: Tensor, *, tau_positive: float, tau_negative: float
) -> Tensor:
    """SAPO (arXiv 2511.20347 eq. 5): a sigmoid in place of the clip; at ratio 1 its slope is 1."""
    # not torch.where of two numbers, which would round them to float32
    tau_BL = torch.full_like(advantage_BL, tau_negative).masked_fill(advantage_BL > 0, tau_positive)
    gate_BL = torch.sigmoid(tau_BL * (log_ratio_BL.exp() - 1)) * 4 / tau_BL
    return -gate_BL * advantage_BL


def clipped_value_loss(value_BL: Tensor, old_value_BL: Tensor, return_BL: Tensor, *, clip: float) -> Tensor:
    """Half the squared error, or that of a value held within ``clip`` of the old one if it is larger.

    The clipping of OpenAI's PPO (arXiv 2005.12729 section 3, "value function clipping"); ``clip`` 0 = off.
    """
    error_BL = (value_BL - return_BL).square()
    if clip:
        near_BL = torch.clamp(value_BL, old_value_BL - clip, old_value_BL + clip)
        error_BL = torch.maximum(error_BL, (near_BL - return_BL).square())
    return 0.5 * error_BL


def supervised_loss(
    logprob_BL: Tensor, mask_BL: Tensor, *, num_global_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the masked tokens."""
    logprob_BL = masked(logprob_BL, mask_BL)
    loss = -logprob_BL.sum() / num_global_tokens
    return loss, {"tokens": mask_BL.sum(), "policy_loss": -logprob_BL.detach().sum()}
