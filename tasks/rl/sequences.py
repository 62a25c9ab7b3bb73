"""Sums over sequences, and the three ways a sum over tokens becomes a loss.

Shape key: B rows, L positions; S sequences. ``segment_BL`` numbers the sequence of each token within a
micro-batch, so that padded rows (one sequence a row) and packed ones (several) are the same to every formula.
Pure: tensors in, tensors out, no process group, no config object.

The law: a loss is a sum over tokens divided by counts of the *whole* mini-batch, which the caller gives. So
its gradient is the same for every split over micro-batches and ranks, packed or padded, in any order.
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "fixed"]


def masked(value_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """``value_BL`` with 0 outside the mask, whatever is there: selected, not multiplied, so no NaN leaks."""
    return torch.where(mask_BL, value_BL, 0.0)


def sequence_sum(value_BL: Tensor, mask_BL: Tensor, segment_BL: Tensor) -> Tensor:
    """[B, L] At each token the sum of ``value_BL`` over the masked tokens of its sequence."""
    # as many sums as there are tokens: reading the number of sequences would stop the device
    sum_S = value_BL.new_zeros(value_BL.numel())
    sum_S = sum_S.index_add(0, segment_BL.flatten(), masked(value_BL, mask_BL).flatten())
    return sum_S[segment_BL]


def sequence_mean(value_BL: Tensor, mask_BL: Tensor, segment_BL: Tensor) -> Tensor:
    """[B, L] At each token the mean of ``value_BL`` over the masked tokens of its sequence; 0 if none are."""
    length_BL = sequence_sum(torch.ones_like(value_BL), mask_BL, segment_BL)
    return sequence_sum(value_BL, mask_BL, segment_BL) / length_BL.clamp(min=1)


def aggregate(
    value_BL: Tensor,
    mask_BL: Tensor,
    length_BL: Tensor,
    *,
    aggregation: Aggregation,
    num_global_tokens: int,
    num_global_sequences: int,
    fixed_length: int,
) -> Tensor:
    """A micro-batch's share of the loss of its mini-batch.

    - ``token_mean``: sum of all tokens over their number (DAPO, arXiv 2503.14476 eq. 8).
    - ``sequence_mean``: mean over sequences of their token means (GRPO, arXiv 2402.03300 eq. 3).
    - ``fixed``: mean over sequences of their sums over a constant length (Dr. GRPO, arXiv 2503.20783
      section 3.2), never the padded width, which changes with the batch.

    Args:
        length_BL: number of trained tokens of the sequence that a token belongs to.
        num_global_sequences: sequences of the whole mini-batch with at least one trained token.
    """
    value_BL = masked(value_BL, mask_BL)
    if aggregation == "sequence_mean":
        value_BL = value_BL / length_BL.clamp(min=1)
    return value_BL.sum() / loss_divisor(
        aggregation,
        num_global_tokens=num_global_tokens,
        num_global_sequences=num_global_sequences,
        fixed_length=fixed_length,
    )


def loss_divisor(
    aggregation: Aggregation, *, num_global_tokens: int, num_global_sequences: int, fixed_length: int
) -> int:
    """What ``aggregate`` divides the whole mini-batch's sum by."""
    return {
        "token_mean": num_global_tokens,
        "sequence_mean": num_global_sequences,
        "fixed": num_global_sequences * fixed_length,
    }[aggregation]
