"""Learning a reward from preferences.

Shape key: N pairs of a better and a worse response.
Pure: tensors in, tensors out, no process group, no config object.
"""

import torch
from torch import Tensor


def bradley_terry_loss(better_N: Tensor, worse_N: Tensor) -> Tensor:
    """Mean of -log sigmoid(better - worse): Bradley and Terry 1952, as in arXiv 2203.02155 eq. 1."""
    return -torch.nn.functional.logsigmoid(better_N - worse_N).mean()


def pair_accuracy(better_N: Tensor, worse_N: Tensor) -> Tensor:
    """Share of pairs ranked right; a tie counts half."""
    return ((better_N > worse_N).double() + 0.5 * (better_N == worse_N).double()).mean()
