"""Copy rows to their experts' order and sum them back, reading and writing every byte once.

Shape key: T rows, K places a row may be copied to, P copies, D features.

``slot_TK`` holds the copy number of each (row, place), -1 for none; no two cells share one. Both functions
are each other's backward and only gather by it: no atomic add, hence the same bits on every run. Copies that
no slot names are neither written nor read: they may hold anything, and on CUDA they do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import device, reference


def moe_permute(x_TD: Tensor, slot_TK: Tensor, num_copies: int) -> Tensor:
    """Copies [P, D] of rows [T, D]."""
    if not device.takes_triton(x_TD):
        return reference.gather_rows(x_TD, slot_TK, num_copies)
    return _Permute.apply(x_TD, slot_TK, num_copies)


def moe_unpermute(y_PD: Tensor, slot_TK: Tensor) -> Tensor:
    """Sum of each row's copies in the order of its places, added in float32; zero for a row without any."""
    if not device.takes_triton(y_PD):
        return reference.sum_rows(y_PD, slot_TK)
    return _Unpermute.apply(y_PD, slot_TK)


def permute_weights(weight_TK: Tensor, cell_P: Tensor, slot_TK: Tensor) -> Tensor:
    """Weight of each copy, whose flat cell number is ``cell_P``; a cell without a copy gets gradient 0."""
    return _PermuteWeights.apply(weight_TK, cell_P, slot_TK)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_TK: Tensor, num_copies: int) -> Tensor:
        from moe_kernels import rows_triton

        ctx.save_for_backward(slot_TK)
        return rows_triton.gather_rows(x_TD, slot_TK, num_copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from moe_kernels import rows_triton

        (slot_TK,) = ctx.saved_tensors
        return rows_triton.sum_rows(grads[0], slot_TK), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, slot_TK: Tensor) -> Tensor:
        from moe_kernels import rows_triton

        ctx.save_for_backward(slot_TK)
        ctx.num_copies = y_PD.shape[0]
        return rows_triton.sum_rows(y_PD, slot_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from moe_kernels import rows_triton

        (slot_TK,) = ctx.saved_tensors
        return rows_triton.gather_rows(grads[0], slot_TK, ctx.num_copies), None


class _PermuteWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_TK: Tensor, cell_P: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return weight_TK.reshape(-1)[cell_P]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        if grads[0].shape[0] == 0:
            return grads[0].new_zeros(slot_TK.shape), None, None
        return torch.where(slot_TK >= 0, grads[0][slot_TK.clamp(min=0)], 0.0), None, None
