"""SwiGLU of an expert, times the routing weight of each row, in one pass forward and one backward.

Shape key: P rows, H width inside an expert, J = 2 H.

The weight is applied here, on H features, and not on the D of the expert's output: the projection between
them is linear. Rows from ``num_live`` on are dead: their inputs may be anything (a grouped matrix product
leaves rows past its last offset uninitialised), and on CUDA their outputs and gradients are left unwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import device, reference


def swiglu_weighted(gate_up_PJ: Tensor, weight_P: Tensor, num_live: Tensor) -> Tensor:
    """``weight * silu(gate) * up`` [P, H] of the first ``num_live`` rows; a 0-d tensor, so no host waits."""
    if not device.takes_triton(gate_up_PJ):
        is_live_P = torch.arange(gate_up_PJ.shape[0]) < num_live
        # what reaches the formula is clean, so that no gradient is 0 * nan
        live_PJ = torch.where(is_live_P[:, None], gate_up_PJ, 0.0)
        return reference.swiglu_weighted(live_PJ, torch.where(is_live_P, weight_P, 0.0))
    return _SwigluWeighted.apply(gate_up_PJ, weight_P, num_live)


class _SwigluWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_PJ: Tensor, weight_P: Tensor, num_live: Tensor) -> Tensor:
        from moe_kernels import swiglu_triton

        ctx.save_for_backward(gate_up_PJ, weight_P, num_live)
        return swiglu_triton.forward(gate_up_PJ, weight_P, num_live)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from moe_kernels import swiglu_triton

        gate_up_PJ, weight_P, num_live = ctx.saved_tensors
        return *swiglu_triton.backward(gate_up_PJ, weight_P, num_live, grads[0]), None
