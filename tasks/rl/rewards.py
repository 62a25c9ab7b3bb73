"""What happens to rewards before they become advantages. Pure.

Shape key: N groups, G samples of one prompt; B samples.
"""

import torch
from torch import Tensor


def overlong_penalty(length_B: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Soft punishment of length (DAPO, arXiv 2503.14476 eq. 13): 0 up to ``max_tokens - buffer_tokens``, then
    linear to -1 at ``max_tokens``."""
    return -((length_B - (max_tokens - buffer_tokens)) / buffer_tokens).clamp(min=0, max=1)


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
