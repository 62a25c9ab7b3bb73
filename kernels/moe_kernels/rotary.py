"""Rotary position embedding: pairs of features turned by the angle of a token's position, in one pass.

Shape key: B sequences, H heads, L tokens, D features of a head, R of them turned (an even number, often D).

As transformers computes it where the two halves of a head are the pairs: on CPU equal to the bit, on CUDA as
near to the exact result, where the compiler may round a product once less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import device, reference


def rotary(x_BHLD: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> Tensor:
    """The first R features of each head turned, the rest as they are. ``cos`` and ``sin`` have B rows, or one
    for all."""
    _check(x_BHLD, cos_BLR, sin_BLR)
    if not device.takes_triton(x_BHLD):
        return reference.rotary(x_BHLD, cos_BLR, sin_BLR)
    return _Rotary.apply(x_BHLD, cos_BLR, sin_BLR)


def _check(x_BHLD: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> None:
    batch, _, length, width = x_BHLD.shape
    turned = cos_BLR.shape[-1]
    is_alike = cos_BLR.shape == sin_BLR.shape and cos_BLR.shape[:2] in ((batch, length), (1, length))
    if not is_alike or turned > width or turned % 2:
        raise ValueError(
            "x, cos and sin must be [B, H, L, D] and twice [B or 1, L, R], R even and at most D, got "
            f"{list(x_BHLD.shape)}, {list(cos_BLR.shape)} and {list(sin_BLR.shape)}."
        )
    if not x_BHLD.dtype == cos_BLR.dtype == sin_BLR.dtype:
        raise ValueError(
            f"x, cos and sin must have one dtype, got {x_BHLD.dtype}, {cos_BLR.dtype} and {sin_BLR.dtype}. "
            "Convert the angles."
        )


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHLD: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> Tensor:
        from moe_kernels import rotary_triton

        ctx.save_for_backward(cos_BLR, sin_BLR)
        return rotary_triton.turn(x_BHLD, cos_BLR, sin_BLR, is_backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from moe_kernels import rotary_triton

        return rotary_triton.turn(grads[0], *ctx.saved_tensors, is_backward=True), None, None
