"""8-bit floats (e4m3) with a scale for each group of values: rows for an exchange, weights for an engine.

Shape key: T rows, D features, B = D / 128 groups of a row; O and I outputs and inputs of a weight, o and i
blocks of 128 of them.

Scales multiply back: value = 8-bit value * scale. The layouts are those of two libraries. DeepEP sends rows
with float32 scales [T, B]. DeepGEMM reads scales column by column, each column begun at a multiple of 16
bytes, in float32 (``column_scales``) or four powers of two to an int32 (``packed_scales``). A checkpoint in
DeepSeek-V3's format has a scale for each block of 128 x 128 weights, named ``weight_scale_inv``.

A group that holds a value which is not finite comes back as NaN throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels import device, reference
from moe_kernels.reference import FP8_GROUP

COLUMN_BYTES = 16
"""What the bulk copies of a product want a column of scales to begin at a multiple of."""


def quant_fp8_1x128(x_TD: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """8-bit rows [T, D] and float32 scales [T, B] that put the largest value of each group on 448.

    With ``power_of_two`` a scale is the next power of two (UE8M0), which Blackwell's products take.
    """
    if x_TD.ndim != 2 or x_TD.shape[1] % FP8_GROUP:
        raise ValueError(
            f"rows to quantise must be [T, D] with D a multiple of {FP8_GROUP}, got {list(x_TD.shape)}."
        )
    if not device.takes_triton(x_TD):
        return reference.quant_fp8_1x128(x_TD, power_of_two=power_of_two)
    from moe_kernels import fp8_triton

    return fp8_triton.quant_rows(x_TD, power_of_two=power_of_two)


def dequant_fp8_1x128(rows_TD: Tensor, scale_TB: Tensor) -> Tensor:
    """The rows in bfloat16."""
    if not device.takes_triton(rows_TD):
        return reference.dequant_fp8_1x128(rows_TD, scale_TB)
    from moe_kernels import fp8_triton

    return fp8_triton.dequant_rows(rows_TD, scale_TB)


def quant_fp8_128x128(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights [O, I] and float32 scales [o, i], blocks at the edges being smaller."""
    if weight_OI.ndim != 2:
        raise ValueError(f"weights to quantise must be [O, I], got {list(weight_OI.shape)}.")
    if not device.takes_triton(weight_OI):
        return reference.quant_fp8_128x128(weight_OI)
    from moe_kernels import fp8_triton

    return fp8_triton.quant_blocks(weight_OI)


def column_scales(scale_TB: Tensor) -> Tensor:
    """The same scales with columns in one piece each, as DeepGEMM's products on Hopper read them."""
    num_rows, num_groups = scale_TB.shape
    multiple = COLUMN_BYTES // scale_TB.element_size()
    length = -(-num_rows // multiple) * multiple
    out_BT = scale_TB.new_empty(num_groups, length)
    out_BT[:, :num_rows] = scale_TB.T
    return out_BT.T[:num_rows]


def packed_scales(scale_TB: Tensor) -> Tensor:
    """Powers of two as the exponents' bytes, four groups to an int32, laid out like ``column_scales``."""
    exponent_TB = (scale_TB.view(torch.int32) >> 23).to(torch.uint8)
    missing = -exponent_TB.shape[1] % 4
    return column_scales(torch.nn.functional.pad(exponent_TB, (0, missing)).view(torch.int32))
