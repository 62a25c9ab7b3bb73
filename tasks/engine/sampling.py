"""Sampling whose randomness is a pure function of (seed, step), so that batching can never change a sample.

Shape key: B sequences, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor


def uniforms(seeds_B: np.ndarray, step: int | np.ndarray) -> Tensor:
    """[B] float64 in [0, 1): SplitMix64 (Steele et al., OOPSLA 2014) of the seed's stream at ``step``, one
    for all or one a row."""
    with np.errstate(over="ignore"):
        place = np.asarray(step, dtype=np.uint64) + np.uint64(1)
        x = seeds_B.astype(np.uint64) + place * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) / 2.0**53)


def sample(
    logits_BV: Tensor, uniform_B: Tensor, *, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    Returns:
        token [B] int64, and its log-probability [B] float32 under the tempered (and, for top_p < 1, truncated
        and renormalised) distribution. Temperature 0 takes the most likely token.
    """
    if temperature == 0:
        token_B = logits_BV.argmax(dim=-1)
        return token_B, _gather(logits_BV.float().log_softmax(dim=-1), token_B)
    logprob_BV = (logits_BV.float() / temperature).log_softmax(dim=-1)
    if top_p < 1:
        logprob_BV = _truncated(logprob_BV, top_p)
    cumulative_BV = logprob_BV.double().exp().cumsum(dim=-1)
    target_B1 = uniform_B[:, None].to(cumulative_BV.device) * cumulative_BV[:, -1:]
    token_B = (
        torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1).clamp_(max=logits_BV.shape[1] - 1)
    )
    return token_B, _gather(logprob_BV, token_B)


def _gather(logprob_BV: Tensor, token_B: Tensor) -> Tensor:
    return logprob_BV.gather(1, token_B[:, None]).squeeze(1)


def _truncated(logprob_BV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach ``top_p``; renormalise; the rest get
    -inf."""
    sorted_BV, order_BV = logprob_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.exp().cumsum(dim=-1) - sorted_BV.exp()
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, float("-inf")).log_softmax(dim=-1)
    return torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV)
