"""Root-mean-square normalisation, one pass forward and one backward.

Shape key: N rows, D features.

As transformers computes it: in float32, rounded to the input's dtype, then times the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_kernels import device, reference


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x`` is [..., D], normalised over its last dimension."""
    if not device.takes_triton(x):
        return reference.rms_norm(x, weight_D, eps)
    return _RmsNorm.apply(x, weight_D, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        from moe_kernels import norm_triton

        x_ND = x.reshape(-1, x.shape[-1])
        y_ND, scale_N = norm_triton.forward(x_ND, weight_D, eps)
        ctx.save_for_backward(x_ND, weight_D, scale_N)
        return y_ND.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from moe_kernels import norm_triton

        x_ND, weight_D, scale_N = ctx.saved_tensors
        dx_ND, dweight_D = norm_triton.backward(x_ND, weight_D, scale_N, grads[0].reshape(x_ND.shape))
        return dx_ND.view(grads[0].shape), dweight_D, None
