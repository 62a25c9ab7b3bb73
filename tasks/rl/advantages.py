"""Advantages: from the rewards of one prompt's group, from rewards to come, from a critic's values.

Shape key: N groups, G samples of one prompt, K reward parts; B sequences, T their response tokens.
Pure: tensors in, tensors out, no process group, no config object. Statistics "over the batch" are over all
of it: whoever holds a part gathers the rest first.
"""

from typing import Literal

import torch
from torch import Tensor

from tasks.rl.sequences import masked

STD_EPS = 1e-6
"""Added to a standard deviation (ddof 1), as verl does; TRL adds 1e-4."""
VARIANCE_EPS = 1e-8
"""Added to the variance (ddof 1) of a whole batch, as verl does."""


def group_advantages(
    reward_NG: Tensor, *, normalize_by_std: bool, std_eps: float = STD_EPS, leave_one_out: bool = False
) -> Tensor:
    """Centre rewards within each group; divide by the group's standard deviation (ddof 1) if asked.

    GRPO, arXiv 2402.03300 section 4.1.2; without the division Dr. GRPO, arXiv 2503.20783 section 3.2.
    ``leave_one_out``: from a reward the mean of the *others* is taken (RLOO, arXiv 2402.14740 section 3.3),
    which is G / (G - 1) times the centred reward.

    Args:
        reward_NG: float rewards, one row a prompt; every group is complete and has at least two samples.

    Returns:
        [N, G] advantages; each row sums to 0.
    """
    if reward_NG.ndim != 2 or reward_NG.shape[1] < 2:
        raise ValueError(
            f"reward_NG must be [groups, samples >= 2], got shape {tuple(reward_NG.shape)}. The mean of a "
            "group of one is its own reward, so its advantage carries no information."
        )
    centred_NG = reward_NG - reward_NG.mean(dim=1, keepdim=True)
    if leave_one_out:
        centred_NG = centred_NG * (reward_NG.shape[1] / (reward_NG.shape[1] - 1))
    if not normalize_by_std:
        return centred_NG
    return centred_NG / (reward_NG.std(dim=1, keepdim=True, correction=1) + std_eps)


def has_signal(reward_NG: Tensor) -> Tensor:
    """[N] True where a group's rewards are not all exactly equal; other groups have a gradient of zero."""
    return (reward_NG != reward_NG[:, :1]).any(dim=1)


def combine_rewards(
    part_NGK: Tensor, weight_K: Tensor, *, how: Literal["sum", "normalize_then_sum"], std_eps: float = STD_EPS
) -> Tensor:
    """[N, G] One reward from K parts: their weighted sum, to be normalised by the group afterwards, or the
    weighted sum of parts that were each normalised by the group, so that none drowns another
    (GDPO, arXiv 2601.05242 section 3; whiten it over the batch afterwards).

    NaN marks a part that abstained: statistics leave it out and it adds 0. A sample of which all parts
    abstained has no reward and is refused.
    """
    is_given_NGK = ~part_NGK.isnan()
    if not is_given_NGK.any(dim=-1).all():
        raise ValueError(
            "every sample must have a reward part that is not NaN, got "
            f"{int((~is_given_NGK.any(dim=-1)).sum())} samples without. Reject them as abstained."
        )
    if how == "normalize_then_sum":
        num_N1K = is_given_NGK.sum(dim=1, keepdim=True)
        mean_N1K = masked(part_NGK, is_given_NGK).sum(dim=1, keepdim=True) / num_N1K.clamp(min=1)
        part_NGK = part_NGK - mean_N1K
        variance_N1K = masked(part_NGK, is_given_NGK).square().sum(dim=1, keepdim=True)
        part_NGK = part_NGK / ((variance_N1K / (num_N1K - 1).clamp(min=1)).sqrt() + std_eps)
    return (masked(part_NGK, is_given_NGK) * weight_K).sum(dim=-1)


def whiten(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean 0 and variance 1 (ddof 1) over all masked tokens of the batch; 0 elsewhere.

    REINFORCE++, arXiv 2501.03262 section 3.2. A value of a sequence counts once for each of its tokens.
    """
    num_tokens = mask_BT.sum()
    if num_tokens < 2:
        raise ValueError(
            f"whitening needs at least two trained tokens, got {int(num_tokens)}. Skip the batch."
        )
    centred_BT = value_BT - masked(value_BT, mask_BT).sum() / num_tokens
    variance = masked(centred_BT, mask_BT).square().sum() / (num_tokens - 1)
    return masked(centred_BT * (variance + VARIANCE_EPS).rsqrt(), mask_BT)


def token_rewards(reward_B: Tensor, mask_BT: Tensor, kl_BT: Tensor, *, kl_coefficient: float) -> Tensor:
    """[B, T] A sequence's reward at its last trained token, less a penalty at every one of them.

    InstructGPT, arXiv 2203.02155 appendix C.4: ``kl_BT`` is k1, sampling minus reference log-probability.
    """
    num_after_BT = mask_BT.flip(1).cumsum(dim=1).flip(1)
    is_last_BT = mask_BT & (num_after_BT == 1)
    return masked(reward_B[:, None], is_last_BT) - kl_coefficient * masked(kl_BT, mask_BT)


def gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, *, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv 1506.02438 eq. 16) and the returns a critic learns.

    Tokens outside the mask (a tool's answer) are stepped over: the next trained token follows the last one
    directly. Both results are 0 there, whatever rewards and values hold.
    """
    reward_BT, value_BT = masked(reward_BT, mask_BT), masked(value_BT, mask_BT)
    next_value_B = next_advantage_B = torch.zeros_like(reward_BT[:, 0])
    advantage_BT = torch.zeros_like(reward_BT)
    for t in reversed(range(reward_BT.shape[1])):
        delta_B = reward_BT[:, t] + discount * next_value_B - value_BT[:, t]
        advantage_B = delta_B + discount * gae_lambda * next_advantage_B
        next_value_B = torch.where(mask_BT[:, t], value_BT[:, t], next_value_B)
        next_advantage_B = torch.where(mask_BT[:, t], advantage_B, next_advantage_B)
        advantage_BT[:, t] = masked(advantage_B, mask_BT[:, t])
    return advantage_BT, advantage_BT + value_BT


def discounted_returns(reward_BT: Tensor, mask_BT: Tensor, *, discount: float) -> Tensor:
    """Discounted rewards to come (REINFORCE++): what GAE gives with no critic and lambda 1."""
    nothing_BT = torch.zeros_like(reward_BT)
    return gae(reward_BT, nothing_BT, mask_BT, discount=discount, gae_lambda=1.0)[0]


def teacher_advantages(behavior_logprob_BT: Tensor, teacher_logprob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """On-policy distillation (arXiv 2306.13649): each token's reward is minus the reverse KL to a teacher.

    k1 at the sampled token; its policy gradient is that of KL(policy || teacher) without looking ahead.
    """
    return masked(teacher_logprob_BT - behavior_logprob_BT, mask_BT)
