"""Log-probability and entropy of tokens where the vocabulary is split over a tp group by blocks.

Shape key: B sequences, M predictions, v words of this rank's block. No rank ever holds all logits of a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from moe_kernels.logprob import VocabularyBlock
from torch import Tensor

from tasks.policy.parallel.collectives import all_reduce, sum_to_equal, to_own


def split_logprob_entropy(
    logits_BMv: Tensor, target_BM: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Of the whole distribution, equal on every rank: log Z from each rank's own sum of exponentials."""
    largest_BM = all_reduce(logits_BMv.detach().amax(dim=-1), group, "max")
    sum_BM = sum_to_equal((logits_BMv - largest_BM[..., None]).exp().sum(dim=-1), group)
    log_z_BM = sum_BM.log() + largest_BM
    size = logits_BMv.shape[-1]
    local_BM = target_BM - group.rank() * size
    is_here_BM = (local_BM >= 0) & (local_BM < size)
    chosen_BM = logits_BMv.gather(-1, torch.where(is_here_BM, local_BM, 0)[..., None]).squeeze(-1)
    chosen_BM = sum_to_equal(torch.where(is_here_BM, chosen_BM, 0), group)
    # to_own: each rank's block of the expectation depends on log Z in its own way
    probability_BMv = (logits_BMv - to_own(log_z_BM, group)[..., None]).exp()
    mean_logit_BM = sum_to_equal((probability_BMv * logits_BMv).sum(dim=-1), group)
    return chosen_BM - log_z_BM, log_z_BM - mean_logit_BM


def vocabulary_block(head: Any) -> VocabularyBlock | None:
    """What the kernel without logits must know of a head that holds a block of rows; None if it has all."""
    group = getattr(head, "vocabulary_group", None)
    if group is None:
        return None
    size = head.weight.shape[0]
    return VocabularyBlock(
        start=group.rank() * size,
        vocab_size=size * group.size(),
        all_reduce=lambda x, op: all_reduce(x, group, op),
    )
