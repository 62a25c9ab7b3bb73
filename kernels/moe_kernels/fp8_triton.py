"""``fp8`` in Triton: each value read once and written once, as many groups a program as fill its loads.

Shape key: as in ``fp8``; N = T B groups, which lie one after another in memory.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.reference import FP8_GROUP, FP8_MAX, FP8_SMALLEST

GROUPS = 16
"""Groups of one program."""


def quant_rows(x_TD: Tensor, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows_TD = torch.empty(x_TD.shape, dtype=torch.float8_e4m3fn, device=x_TD.device)
    num_groups = x_TD.shape[1] // FP8_GROUP
    scale_TB = torch.empty(x_TD.shape[0], num_groups, dtype=torch.float32, device=x_TD.device)
    if scale_TB.numel():
        _quant_rows_kernel[(triton.cdiv(scale_TB.numel(), GROUPS),)](
            x_TD.contiguous(), rows_TD, scale_TB, scale_TB.numel(), MOST=FP8_MAX, LEAST=FP8_SMALLEST,
            POWER_OF_TWO=power_of_two, GROUPS=GROUPS, WIDTH=FP8_GROUP, num_warps=4,
        )  # fmt: skip
    return rows_TD, scale_TB


def dequant_rows(rows_TD: Tensor, scale_TB: Tensor) -> Tensor:
    x_TD = torch.empty(rows_TD.shape, dtype=torch.bfloat16, device=rows_TD.device)
    if scale_TB.numel():
        _dequant_rows_kernel[(triton.cdiv(scale_TB.numel(), GROUPS),)](
            rows_TD.contiguous(), scale_TB.contiguous(), x_TD, scale_TB.numel(),
            GROUPS=GROUPS, WIDTH=FP8_GROUP, num_warps=4,
        )  # fmt: skip
    return x_TD


def quant_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = weight_OI.shape
    out_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    grid = triton.cdiv(num_rows, FP8_GROUP), triton.cdiv(num_columns, FP8_GROUP)
    scale_oi = torch.empty(grid, dtype=torch.float32, device=weight_OI.device)
    if out_OI.numel():
        _quant_blocks_kernel[grid](
            weight_OI.contiguous(), out_OI, scale_oi, num_rows, num_columns, MOST=FP8_MAX, LEAST=FP8_SMALLEST,
            WIDTH=FP8_GROUP, num_warps=8,
        )  # fmt: skip
    return out_OI, scale_oi


@triton.jit
def _magnitude(value):
    """Absolute value, infinite for NaN: a maximum need not hand NaN on."""
    return tl.where(value == value, tl.abs(value), float("inf"))


@triton.jit
def _quant_rows_kernel(
    x, rows, scales, num_groups, MOST: tl.constexpr, LEAST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    is_in = (group < num_groups)[:, None]
    place = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(x + place, mask=is_in, other=0.0).to(tl.float32)
    most = tl.full([GROUPS], MOST, tl.float32)
    largest = tl.maximum(tl.max(_magnitude(value), axis=1), tl.full([GROUPS], LEAST, tl.float32))
    scale = tl.div_rn(largest, most)
    factor = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), largest) * most
    if POWER_OF_TWO:  # one up in the exponent unless the mantissa is 0
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(exponent, 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    out = (value * factor[:, None]).to(tl.float8e4nv)
    tl.store(rows + place, out, mask=is_in)
    tl.store(scales + group, scale, mask=group < num_groups)


@triton.jit
def _dequant_rows_kernel(rows, scales, x, num_groups, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    is_in = (group < num_groups)[:, None]
    place = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(rows + place, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.load(scales + group, mask=group < num_groups, other=0.0)
    tl.store(x + place, (value * scale[:, None]).to(x.dtype.element_ty), mask=is_in)


@triton.jit
def _quant_blocks_kernel(
    weights, out, scales, num_rows, num_columns,
    MOST: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_in = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    place = row[:, None] * num_columns + column[None, :]
    value = tl.load(weights + place, mask=is_in, other=0.0).to(tl.float32)
    most = tl.full([1], MOST, tl.float32)
    largest = tl.max(tl.max(_magnitude(value), axis=1), axis=0, keep_dims=True)
    largest = tl.maximum(largest, tl.full([1], LEAST, tl.float32))
    scale = tl.div_rn(largest, most)
    factor = tl.div_rn(tl.full([1], 1.0, tl.float32), largest) * most
    tl.store(out + place, (value * factor[:, None]).to(out.dtype.element_ty), mask=is_in)
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales + block + tl.arange(0, 1), scale)
