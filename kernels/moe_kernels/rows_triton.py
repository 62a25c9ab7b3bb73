"""``rows`` in Triton: a program reads a row's slots once, and each of its bytes once.

Shape key: T rows, K places a row may be copied to, P copies, D features.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def gather_rows(x_TD: Tensor, slot_TK: Tensor, num_copies: int) -> Tensor:
    (num_rows, width), num_places = x_TD.shape, slot_TK.shape[1]
    out_PD = x_TD.new_empty(num_copies, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        _gather_kernel[grid](x_TD.contiguous(), slot_TK, out_PD, width, num_places, BLOCK=BLOCK, num_warps=4)
    return out_PD


def sum_rows(y_PD: Tensor, slot_TK: Tensor) -> Tensor:
    (num_rows, num_places), width = slot_TK.shape, y_PD.shape[1]
    out_TD = y_PD.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        _sum_kernel[grid](y_PD.contiguous(), slot_TK, out_TD, width, num_places, BLOCK=BLOCK, num_warps=4)
    return out_TD


@triton.jit
def _gather_kernel(x, slots, out, width, num_places: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    value = tl.load(x + row * width + column, mask=is_in)
    for place in tl.static_range(num_places):
        slot = tl.load(slots + row * num_places + place)
        tl.store(out + slot * width + column, value, mask=is_in & (slot >= 0))


@triton.jit
def _sum_kernel(y, slots, out, width, num_places: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(num_places):
        slot = tl.load(slots + row * num_places + place)
        total += tl.load(y + slot * width + column, mask=is_in & (slot >= 0), other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=is_in)
