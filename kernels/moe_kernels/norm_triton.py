"""``norm`` in Triton: a program takes many rows, and sums their share of the weight's gradient.

Shape key: N rows, D features, G programs.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements a program holds at a time, unless a row is longer."""
PROGRAMS = 1056
"""Eight for each of an H200's 132 multiprocessors; each leaves one row of partial sums."""


def forward(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, width = x_ND.shape
    x_ND, y_ND = x_ND.contiguous(), torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    scale_N = torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
    block, rows = _tile(width)
    if num_rows:
        _forward_kernel[(triton.cdiv(num_rows, rows),)](
            x_ND,
            weight_D,
            y_ND,
            scale_N,
            num_rows,
            width,
            eps,
            ROWS=rows,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return y_ND, scale_N


def backward(x_ND: Tensor, weight_D: Tensor, scale_N: Tensor, dy_ND: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = x_ND.shape
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    block, rows = _tile(width)
    num_programs = min(PROGRAMS, triton.cdiv(num_rows, rows))
    partial_GD = torch.empty(num_programs, width, dtype=torch.float32, device=x_ND.device)
    if num_rows:
        _backward_kernel[(num_programs,)](
            x_ND.contiguous(), weight_D, scale_N, dy_ND.contiguous(), dx_ND, partial_GD, num_rows, width,
            ROWS=rows, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return dx_ND, partial_GD.sum(dim=0).to(weight_D.dtype)


def _tile(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, max(TILE // block, 1)


def _warps(block: int) -> int:
    return min(max(block // 512, 4), 16)


@triton.jit
def _forward_kernel(x, weights, y, scales, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_in = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32)
    weight = tl.load(weights + column, mask=column < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    unit = (value * scale[:, None]).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (unit * weight[None, :]).to(y.dtype.element_ty), mask=is_in)
    tl.store(scales + row, scale, mask=row < num_rows)


@triton.jit
def _backward_kernel(
    x, weights, scales, dy, dx, partials, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    weight = tl.load(weights + column, mask=column < width, other=0.0).to(tl.float32)
    by_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_in = (row < num_rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        scale = tl.load(scales + row, mask=row < num_rows, other=0.0)[:, None]
        unit = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32) * scale
        slope = tl.load(dy + place, mask=is_in, other=0.0).to(tl.float32)
        by_weight += tl.sum(slope * unit, axis=0)
        slope *= weight[None, :]
        along = tl.sum(slope * unit, axis=1) / width
        gradient = scale * (slope - unit * along[:, None])
        tl.store(dx + place, gradient.to(dx.dtype.element_ty), mask=is_in)
    tl.store(partials + tl.program_id(0) * width + column, by_weight, mask=column < width)
