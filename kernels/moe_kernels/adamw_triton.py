"""``adamw`` in Triton: a program takes a block of the flattened tensors."""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def step(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **factors: float) -> None:
    count = param.numel()
    if count:
        _kernel[(triton.cdiv(count, BLOCK),)](
            param, grad, exp_avg, exp_avg_sq, count, factors["keep"], factors["beta1"], 1 - factors["beta1"],
            factors["beta2"], 1 - factors["beta2"], factors["step_size"], 1 / factors["root"],
            factors["eps"], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _kernel(
    weights, grads, exp_avgs, exp_avg_sqs, count, keep, beta1, rest1, beta2, rest2, step_size, by_root, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = place < count
    param = tl.load(weights + place, mask=is_in, other=0.0).to(tl.float32)
    grad = tl.load(grads + place, mask=is_in, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avgs + place, mask=is_in, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sqs + place, mask=is_in, other=0.0).to(tl.float32)
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    param = keep * param - step_size * exp_avg / (tl.sqrt(exp_avg_sq) * by_root + eps)
    tl.store(weights + place, param.to(weights.dtype.element_ty), mask=is_in)
    tl.store(exp_avgs + place, exp_avg.to(exp_avgs.dtype.element_ty), mask=is_in)
    tl.store(exp_avg_sqs + place, exp_avg_sq.to(exp_avg_sqs.dtype.element_ty), mask=is_in)
