"""``policy_loss`` in Triton: a program sums its tokens, and torch the programs, so the bits never vary.

Shape key: N tokens, S sums, the loss last; G programs.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.policy_loss import SUMS

if TYPE_CHECKING:
    from moe_kernels.policy_loss import LossTerms, TokenValues

BLOCK = 512


def forward(
    logprob_N: Tensor, entropy_N: Tensor, values: TokenValues, terms: LossTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [S] in float64, and the gradients of the loss by both inputs."""
    by_logprob_N, by_entropy_N = torch.empty_like(logprob_N), torch.empty_like(entropy_N)
    num_tokens = logprob_N.numel()
    num_programs = triton.cdiv(num_tokens, BLOCK)
    partial_GS = logprob_N.new_empty(num_programs, len(SUMS) + 1)
    if num_tokens:
        # what is absent is never read: any pointer does
        proximal_N, mean_N, weight_N, reference_N = (
            logprob_N if value is None else value
            for value in (values.proximal_N, values.mean_log_ratio_N, values.weight_N, values.reference_N)
        )
        _kernel[(num_programs,)](
            logprob_N, entropy_N, values.mask_N.view(torch.uint8), values.behavior_N, values.advantage_N,
            values.length_N, proximal_N, mean_N, weight_N, reference_N,
            by_logprob_N, by_entropy_N, partial_GS, num_tokens,
            LOSS=terms.loss, LOW=1 - terms.clip_low, HIGH=1 + terms.clip_high, DUAL=terms.dual_clip,
            TAU_POSITIVE=terms.tau_positive, TAU_NEGATIVE=terms.tau_negative,
            ENTROPY=terms.entropy_coefficient, KL=terms.kl_coefficient, ESTIMATOR=terms.kl_estimator,
            UNBIASED=terms.kl_unbiased, PER_LENGTH=terms.is_per_length,
            HAS_PROXIMAL=values.proximal_N is not None, HAS_WEIGHT=values.weight_N is not None,
            NUM_SUMS=len(SUMS) + 1, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return partial_GS.double().sum(dim=0), by_logprob_N, by_entropy_N


@triton.jit
def _clipped(
    log_ratio, advantage, LOW: tl.constexpr, HIGH: tl.constexpr, DUAL: tl.constexpr
):  # fmt: skip
    """Loss, its gradient by the log-ratio, and whether clipping took it, in autograd's conventions."""
    ratio = tl.exp(log_ratio)
    # not tl.clamp and tl.minimum, which lose NaN
    clipped = tl.where(ratio < LOW, LOW, tl.where(ratio > HIGH, HIGH, ratio))
    plain, bound = ratio * advantage, clipped * advantage
    is_clipped = bound < plain
    surrogate = tl.where(is_clipped, bound, plain)
    through_bound = tl.where((ratio >= LOW) & (ratio <= HIGH), plain, 0.0)
    slope = tl.where(is_clipped, through_bound, plain)
    slope = tl.where(plain == bound, 0.5 * plain + 0.5 * through_bound, slope)  # a tie goes half each way
    if DUAL > 0:
        floor = tl.where(advantage < 0, DUAL * advantage, -float("inf"))
        slope = tl.where(surrogate < floor, 0.0, tl.where(surrogate == floor, 0.5 * slope, slope))
        is_clipped = is_clipped | (surrogate < floor)
        surrogate = tl.where(surrogate < floor, floor, surrogate)
    return -surrogate, -slope, is_clipped


@triton.jit
def _policy_term(
    logprob, log_ratio, advantage, LOSS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    DUAL: tl.constexpr, TAU_POSITIVE: tl.constexpr, TAU_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """Loss, its gradient by the log-probability, and whether clipping changed it."""
    if LOSS == "clipped_weight":
        ratio = tl.exp(log_ratio)
        weight = tl.where(ratio < LOW, LOW, tl.where(ratio > HIGH, HIGH, ratio))
        return -weight * advantage * logprob, -weight * advantage, weight != ratio
    elif LOSS == "soft_gate":
        ratio = tl.exp(log_ratio)
        tau = tl.where(advantage > 0, log_ratio * 0.0 + TAU_POSITIVE, log_ratio * 0.0 + TAU_NEGATIVE)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        slope = -4.0 * gate * (1.0 - gate) * ratio * advantage
        return -gate * 4.0 / tau * advantage, slope, tau < 0
    else:
        return _clipped(log_ratio, advantage, LOW, HIGH, DUAL)


@triton.jit
def _divergence(log_ratio, ESTIMATOR: tl.constexpr):
    """Estimate, and its gradient by the log-ratio."""
    k2 = 0.5 * log_ratio * log_ratio
    inverse = tl.exp(-log_ratio)
    k3 = inverse - 1.0 + log_ratio
    if ESTIMATOR == "k1":
        return log_ratio, log_ratio * 0.0 + 1.0
    elif ESTIMATOR == "k2":
        return k2, log_ratio
    elif ESTIMATOR == "k3":
        return k3, 1.0 - inverse
    else:
        return k3, log_ratio


@triton.jit
def _kernel(
    logprobs, entropies, masks, behaviors, advantages, lengths, proximals, means, weights, references,
    by_logprob, by_entropy, partials, num_tokens,
    LOSS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DUAL: tl.constexpr,
    TAU_POSITIVE: tl.constexpr, TAU_NEGATIVE: tl.constexpr, ENTROPY: tl.constexpr, KL: tl.constexpr,
    ESTIMATOR: tl.constexpr, UNBIASED: tl.constexpr, PER_LENGTH: tl.constexpr,
    HAS_PROXIMAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, NUM_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = token < num_tokens
    is_trained = is_in & (tl.load(masks + token, mask=is_in, other=0) != 0)
    logprob = tl.load(logprobs + token, mask=is_trained, other=0.0)
    entropy = tl.load(entropies + token, mask=is_trained, other=0.0).to(logprob.dtype)
    advantage = tl.load(advantages + token, mask=is_trained, other=0.0).to(logprob.dtype)
    from_behavior = logprob - tl.load(behaviors + token, mask=is_trained, other=0.0).to(logprob.dtype)
    log_ratio = from_behavior
    if HAS_PROXIMAL:
        log_ratio = logprob - tl.load(proximals + token, mask=is_trained, other=0.0).to(logprob.dtype)
    value = log_ratio
    if LOSS == "sequence_clip":  # the mean in value, each token's own in gradient
        value = tl.load(means + token, mask=is_trained, other=0.0).to(logprob.dtype)
    loss, slope, is_clipped = _policy_term(
        logprob, value, advantage, LOSS, LOW, HIGH, DUAL, TAU_POSITIVE, TAU_NEGATIVE
    )
    weight_sum = tl.sum(logprob * 0.0, axis=0)
    if HAS_WEIGHT:
        weight = tl.load(weights + token, mask=is_trained, other=0.0).to(logprob.dtype)
        loss, slope = loss * weight, slope * weight
        weight_sum = tl.sum(weight, axis=0)
    total = loss - ENTROPY * entropy
    kl_sum = tl.sum(logprob * 0.0, axis=0)
    if ESTIMATOR != "none":
        reference = tl.load(references + token, mask=is_trained, other=0.0).to(logprob.dtype)
        kl, kl_slope = _divergence(logprob - reference, ESTIMATOR)
        if UNBIASED:
            ratio = tl.exp(log_ratio)
            kl, kl_slope = kl * ratio, (kl + kl_slope) * ratio
        total, slope = total + KL * kl, slope + KL * kl_slope
        kl_sum = tl.sum(kl, axis=0)
    entropy_slope = logprob * 0.0 - ENTROPY
    if PER_LENGTH:
        length = tl.load(lengths + token, mask=is_trained, other=1)
        length = tl.maximum(length, 1).to(logprob.dtype)
        total, slope, entropy_slope = total / length, slope / length, entropy_slope / length
    tl.store(by_logprob + token, tl.where(is_trained, slope, 0.0), mask=is_in)
    tl.store(by_entropy + token, tl.where(is_trained, entropy_slope, 0.0), mask=is_in)
    row = partials + tl.program_id(0) * NUM_SUMS
    _store_token_sums(row, is_trained, loss, entropy, is_clipped, from_behavior, total)
    tl.store(row + 6, weight_sum)
    tl.store(row + 7, kl_sum)


@triton.jit
def _store_token_sums(row, is_trained, loss, entropy, is_clipped, from_behavior, total):
    tl.store(row + 0, tl.sum(is_trained.to(loss.dtype), axis=0))
    tl.store(row + 1, tl.sum(tl.where(is_trained, loss, 0.0), axis=0))
    tl.store(row + 2, tl.sum(entropy, axis=0))
    tl.store(row + 3, tl.sum(is_clipped.to(loss.dtype), axis=0))
    tl.store(row + 4, tl.sum(-from_behavior, axis=0))
    tl.store(row + 5, tl.sum(tl.exp(from_behavior) - 1.0 - from_behavior, axis=0))
    tl.store(row + 8, tl.sum(tl.where(is_trained, total, 0.0), axis=0))
