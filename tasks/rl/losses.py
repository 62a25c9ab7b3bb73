"""Token losses, summed here and divided by a *global* count.

Shape key: B rows, L positions (any shape works as long as all tensors share it). Pure: tensors in, tensors
out, no process group, no config object. Dividing by ``num_global_tokens`` (not by this rank's count) makes
the gradient the same for every split of a batch over ranks and micro-batches. Metrics are sums over masked
positions; the caller adds them over micro-batches and ranks and divides once.
"""

import torch
from torch import Tensor


def clipped_policy_loss(
    logprob_BL: Tensor,
    behavior_logprob_BL: Tensor,
    advantage_BL: Tensor,
    entropy_BL: Tensor,
    mask_BL: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coefficient: float,
    num_global_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (PPO, arXiv 1707.06347 eq. 7) with asymmetric bounds and token-level mean
    (DAPO, arXiv 2503.14476 eq. 8), plus an entropy bonus.

    ``mask_BL`` is True where the policy chose the token; the other positions may hold anything, NaN included.
    """
    log_ratio_BL = torch.where(mask_BL, logprob_BL - behavior_logprob_BL, 0.0)
    advantage_BL = torch.where(mask_BL, advantage_BL, 0.0)
    entropy_BL = torch.where(mask_BL, entropy_BL, 0.0)
    ratio_BL = log_ratio_BL.exp()
    clipped_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high)
    surrogate_BL = torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
    loss = -(surrogate_BL + entropy_coefficient * entropy_BL).sum() / num_global_tokens
    with torch.no_grad():
        metrics = {
            "tokens": mask_BL.sum(),
            "policy_loss": -surrogate_BL.sum(),
            "entropy": entropy_BL.sum(),
            "clip_share": (clipped_BL * advantage_BL < ratio_BL * advantage_BL).sum(),
            "kl_k1": -log_ratio_BL.sum(),
            "kl_k3": (log_ratio_BL.exp() - 1 - log_ratio_BL).sum(),
        }
    return loss, metrics


def supervised_loss(
    logprob_BL: Tensor, mask_BL: Tensor, *, num_global_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the masked tokens."""
    logprob_BL = torch.where(mask_BL, logprob_BL, 0.0)
    loss = -logprob_BL.sum() / num_global_tokens
    return loss, {"tokens": mask_BL.sum(), "policy_loss": -logprob_BL.detach().sum()}
