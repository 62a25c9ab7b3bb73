"""``chunks`` in Triton: one read of the logits forward, one read and write backward.

Shape key: T tokens, C vocabulary entries of one chunk.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.chunks import Statistics

FOLD = {"BLOCK": 1024, "num_warps": 1}
"""One warp a token: its reductions need no barrier."""
REWRITE = {"BLOCK": 1024, "num_warps": 2}


def fold_(statistics: Statistics, logits_TC: Tensor, ids_T: Tensor, start: int, scale: float) -> None:
    num_tokens, width = logits_TC.shape
    s = statistics
    if num_tokens:
        _fold_kernel[(num_tokens,)](
            logits_TC, ids_T, s.max_T, s.sum_T, s.moment_T, s.chosen_T, start, scale, width,
            LN2=math.log(2), **FOLD,
        )  # fmt: skip


def rewrite_(
    logits_TC: Tensor,
    ids_T: Tensor,
    start: int,
    scale: float,
    logsumexp_T: Tensor,
    entropy_T: Tensor,
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
) -> None:
    num_tokens, width = logits_TC.shape
    if num_tokens:
        _rewrite_kernel[(num_tokens, triton.cdiv(width, REWRITE["BLOCK"]))](
            logits_TC, ids_T, logsumexp_T, entropy_T, grad_logprob_T, grad_entropy_T, start, scale, width,
            **REWRITE,
        )  # fmt: skip


@triton.jit
def _fold_block(largest, total, moment, raw, by_log2):
    """Statistics with one block more, in powers of two: an element costs a fused product and an exp2."""
    new = tl.maximum(largest, tl.max(raw, axis=0) * by_log2)
    below = raw * by_log2 - new
    exp = tl.exp2(below)
    shift = largest - new
    factor = tl.exp2(shift)
    moment = (moment + total * shift) * factor + tl.sum(exp * below, axis=0)
    return new, total * factor + tl.sum(exp, axis=0), moment


@triton.jit
def _fold_kernel(
    logits, ids, maxima, sums, moments, chosen, start, scale, width,
    BLOCK: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * width
    known = tl.load(maxima + token)
    by_log2 = scale / LN2
    largest, total, moment = known / LN2, tl.load(sums + token), tl.load(moments + token) / LN2
    column = tl.arange(0, BLOCK)
    whole = width // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):  # without a mask, which would cost as much as the rest
        raw = tl.load(row + first + column).to(known.dtype)
        largest, total, moment = _fold_block(largest, total, moment, raw, by_log2)
    if whole < width:
        raw = tl.load(row + whole + column, mask=whole + column < width, other=-float("inf"))
        # finite, so that the moment has no 0 * inf
        raw = tl.maximum(raw.to(known.dtype), -1e30)
        largest, total, moment = _fold_block(largest, total, moment, raw, by_log2)
    tl.store(maxima + token, largest * LN2)
    tl.store(sums + token, total)
    tl.store(moments + token, moment * LN2)
    place = tl.load(ids + token) - start
    if (place >= 0) & (place < width):
        tl.store(chosen + token, tl.load(row + place).to(known.dtype) * scale)


@triton.jit
def _rewrite_kernel(
    logits, ids, logsumexps, entropies, grad_logprob, grad_entropy,
    start, scale, width, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    place = logits + token * width + column
    logsumexp, entropy = tl.load(logsumexps + token), tl.load(entropies + token)
    by_logprob, by_entropy = tl.load(grad_logprob + token), tl.load(grad_entropy + token)
    number = tl.load(ids + token)
    log_p = tl.load(place, mask=is_in, other=0.0).to(logsumexp.dtype) * scale - logsumexp
    gradient = -tl.exp(log_p) * (by_logprob + by_entropy * (log_p + entropy))
    gradient += tl.where(column == number - start, by_logprob, 0.0)
    # select, not multiply: a masked token's statistics may be anything
    gradient = tl.where(number >= 0, gradient * scale, 0.0)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=is_in)
