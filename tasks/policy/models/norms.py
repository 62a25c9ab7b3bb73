"""Fused normalisation for a model's own modules, without touching a model's code."""

from __future__ import annotations

from types import MethodType
from typing import Any

from moe_kernels.norm import rms_norm
from torch import Tensor, nn


def use_fused_norms(model: nn.Module) -> int:
    """Let root-mean-square norms of the common form run as one kernel; returns how many do.

    The common form is transformers' ``weight * normalised.to(dtype)``. Its modules name their epsilon
    ``variance_epsilon``; families that scale by ``1 + weight`` call it ``eps`` and keep their own forward.
    """
    norms = [module for module in model.modules() if _is_common(module)]
    if not norms:
        raise ValueError(
            f"norm_kernel 'fused' needs norms of the form weight * normalised, got {type(model).__name__} "
            "without any. Set norm_kernel to 'torch'."
        )
    for module in norms:
        module.forward = MethodType(_forward, module)
    return len(norms)


def _is_common(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)
