"""Balance of experts: by a loss over sequences, or by biases after a step; no split of a batch changes them.

Shape key: T tokens, S sequences, E experts, K selections a token.
"""

import torch
from torch import Tensor


def sequence_balance_loss(
    score_TE: Tensor,
    expert_TK: Tensor,
    sequence_T: Tensor,
    *,
    is_token_T: Tensor,
    is_trained_T: Tensor,
    num_sequences: int,
    num_global_tokens: int,
) -> Tensor:
    """Sequence-wise balance loss (DeepSeek-V3, arXiv 2412.19437 eq. 17 to 20); 1 if experts are used evenly.

    ``score_TE`` are the router's positive affinities. A balance over a whole batch is a product of two sums
    over it, so its gradient would depend on how the batch is split; over a sequence it does not. Sequences
    are weighted by their share of the ``num_global_tokens`` trained tokens; padding (not ``is_token_T``) is
    left out.
    """
    num_experts, num_selected = score_TE.shape[1], expert_TK.shape[1]
    number_S = torch.arange(num_sequences, device=sequence_T.device)
    member_ST = ((sequence_T == number_S[:, None]) & is_token_T).to(score_TE.dtype)
    length_S = member_ST.sum(dim=1)
    chosen_TE = torch.zeros_like(score_TE).scatter(1, expert_TK, 1.0)
    share_SE = (member_ST @ chosen_TE) * (num_experts / num_selected) / length_S[:, None]
    mean_SE = (member_ST @ (score_TE / score_TE.sum(dim=1, keepdim=True))) / length_S[:, None]
    weight_S = member_ST @ is_trained_T.to(score_TE.dtype) / num_global_tokens
    return (weight_S * (share_SE * mean_SE).sum(dim=1)).sum()


def bias_step(load_E: Tensor, *, rate: float) -> Tensor:
    """What to add to the biases that select experts (arXiv 2408.15664): up where an expert is used less than
    the mean, down where more, by ``rate``; none where it is the mean."""
    return rate * (load_E.mean() - load_E).sign()
