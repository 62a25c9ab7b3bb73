"""Advantages from the rewards of one prompt's group.

Shape key: N groups, G samples of one prompt.
Pure: tensors in, tensors out, no process group, no config object.
"""

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Added to the standard deviation (ddof 1), as verl does."""


def group_advantages(reward_NG: Tensor, *, normalize_by_std: bool) -> Tensor:
    """Centre rewards within each group; divide by the group's standard deviation (ddof 1) if asked.

    GRPO, arXiv 2402.03300 eq. for outcome supervision; without the division Dr. GRPO, arXiv 2503.20783
    section 3.1.

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
    if not normalize_by_std:
        return centred_NG
    return centred_NG / (reward_NG.std(dim=1, keepdim=True, correction=1) + STD_EPS)


def has_signal(reward_NG: Tensor) -> Tensor:
    """[N] True where a group's rewards are not all exactly equal; other groups have a gradient of zero."""
    return (reward_NG != reward_NG[:, :1]).any(dim=1)


def control_rewards(reward_NG: Tensor, *, control: str, seed: int) -> Tensor:
    """Rewards of a control experiment: ``flipped`` is 1 - r, ``shuffled`` permutes the whole batch."""
    if control == "none":
        return reward_NG
    if control == "flipped":
        return 1 - reward_NG
    if control == "shuffled":
        order = torch.randperm(reward_NG.numel(), generator=torch.Generator().manual_seed(seed))
        return reward_NG.flatten()[order].view_as(reward_NG)
    raise ValueError(f"control must be none, flipped or shuffled, got {control!r}.")
