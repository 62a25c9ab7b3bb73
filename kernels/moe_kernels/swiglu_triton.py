"""``swiglu`` in Triton, float32 inside.

Shape key: P rows, H width inside an expert, J = 2 H.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 8, 256


def forward(gate_up_PJ: Tensor, weight_P: Tensor, num_live: Tensor) -> Tensor:
    num_rows, width = gate_up_PJ.shape[0], gate_up_PJ.shape[1] // 2
    h_PH = gate_up_PJ.new_empty(num_rows, width)
    if num_rows:
        _forward_kernel[(triton.cdiv(num_rows, ROWS),)](
            gate_up_PJ.contiguous(), weight_P, num_live, h_PH, width, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
        )
    return h_PH


def backward(gate_up_PJ: Tensor, weight_P: Tensor, num_live: Tensor, dh_PH: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = dh_PH.shape
    dgate_up_PJ, dweight_P = torch.empty_like(gate_up_PJ), torch.empty_like(weight_P)
    if num_rows:
        _backward_kernel[(triton.cdiv(num_rows, ROWS),)](
            gate_up_PJ, weight_P, num_live, dh_PH.contiguous(), dgate_up_PJ, dweight_P, width,
            ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return dgate_up_PJ, dweight_P


@triton.jit
def _forward_kernel(gate_up, weights, num_live, h, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_live = row < tl.load(num_live)
    weight = tl.load(weights + row, mask=is_live, other=0.0).to(tl.float32)[:, None]
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        is_in = is_live[:, None] & (column < width)
        place = gate_up + row[:, None] * (2 * width) + column
        gate = tl.load(place, mask=is_in, other=0.0).to(tl.float32)
        up = tl.load(place + width, mask=is_in, other=0.0).to(tl.float32)
        value = weight * gate * tl.sigmoid(gate) * up
        tl.store(h + row[:, None] * width + column, value.to(h.dtype.element_ty), mask=is_in)


@triton.jit
def _backward_kernel(
    gate_up, weights, num_live, dh, dgate_up, dweight, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_live = row < tl.load(num_live)
    weight = tl.load(weights + row, mask=is_live, other=0.0).to(tl.float32)[:, None]
    by_weight = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        is_in = is_live[:, None] & (column < width)
        offset = row[:, None] * (2 * width) + column
        gate = tl.load(gate_up + offset, mask=is_in, other=0.0).to(tl.float32)
        up = tl.load(gate_up + offset + width, mask=is_in, other=0.0).to(tl.float32)
        slope = tl.load(dh + row[:, None] * width + column, mask=is_in, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        by_weight += tl.sum(slope * silu * up, axis=1)
        by_gate = weight * slope * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(dgate_up + offset, by_gate.to(dgate_up.dtype.element_ty), mask=is_in)
        by_up = weight * slope * silu
        tl.store(dgate_up + offset + width, by_up.to(dgate_up.dtype.element_ty), mask=is_in)
    tl.store(dweight + row, by_weight.to(dweight.dtype.element_ty), mask=is_live)
