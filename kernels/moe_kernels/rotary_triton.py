"""``rotary`` in Triton: a program takes all heads of one token, whose angles it reads once.

Shape key: B sequences, H heads, L tokens, D features of a head, R of them turned.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def turn(x_BHLD: Tensor, cos_BLR: Tensor, sin_BLR: Tensor, *, is_backward: bool) -> Tensor:
    """Forward by the angles, backward by their negatives; in the memory layout of a projection's output,
    [B, L, H, D], which attention takes as it is."""
    batch, heads, length, width = x_BHLD.shape
    x_BLHD = x_BHLD.transpose(1, 2).contiguous()  # a view, mostly
    y_BLHD = torch.empty_like(x_BLHD)
    half = cos_BLR.shape[-1] // 2
    if x_BLHD.numel():
        _kernel[(batch * length,)](
            x_BLHD,
            cos_BLR.contiguous(),
            sin_BLR.contiguous(),
            y_BLHD,
            length if cos_BLR.shape[0] == 1 else batch * length,
            heads,
            width,
            half,
            HEADS=triton.next_power_of_2(heads),
            HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(max(width - 2 * half, 1)),
            IS_BACKWARD=is_backward,
            HAS_REST=width > 2 * half,
            num_warps=8 if heads * half >= 2048 else 4,
            enable_fp_fusion=False,  # else a product is not rounded before its sum, as torch rounds it
        )
    return y_BLHD.transpose(1, 2)


@triton.jit
def _kernel(
    x, cosines, sines, y, num_angles, heads, width, half, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, IS_BACKWARD: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    is_in = (head < heads)[:, None] & (column < half)[None, :]
    place = (token * heads + head[:, None]) * width + column[None, :]
    angle = (token % num_angles) * 2 * half + column
    first = tl.load(x + place, mask=is_in, other=0.0)
    second = tl.load(x + place + half, mask=is_in, other=0.0)
    # both halves of an angle are read, as transformers does, though its own models make them equal
    cos1 = tl.load(cosines + angle, mask=column < half, other=0.0)[None, :]
    cos2 = tl.load(cosines + angle + half, mask=column < half, other=0.0)[None, :]
    sin1 = tl.load(sines + angle, mask=column < half, other=0.0)[None, :]
    sin2 = tl.load(sines + angle + half, mask=column < half, other=0.0)[None, :]
    if IS_BACKWARD:
        turned1 = _sum(_product(first, cos1), _product(second, sin2))
        turned2 = _difference(_product(second, cos2), _product(first, sin1))
    else:
        turned1 = _difference(_product(first, cos1), _product(second, sin1))
        turned2 = _sum(_product(second, cos2), _product(first, sin2))
    tl.store(y + place, turned1, mask=is_in)
    tl.store(y + place + half, turned2, mask=is_in)
    if HAS_REST:
        more = tl.arange(0, REST)
        has_more = (head < heads)[:, None] & (more < width - 2 * half)[None, :]
        rest = (token * heads + head[:, None]) * width + 2 * half + more[None, :]
        tl.store(y + rest, tl.load(x + rest, mask=has_more, other=0.0), mask=has_more)


@triton.jit
def _product(a, b):
    """Rounded to the inputs' dtype, as a product of torch is."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def _sum(a, b):
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def _difference(a, b):
    return (a.to(tl.float32) - b.to(tl.float32)).to(a.dtype)
