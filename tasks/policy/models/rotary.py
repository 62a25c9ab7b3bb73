"""Fused rotary embedding for a model's own attention, without touching a model's code.

A family's attention calls ``apply_rotary_pos_emb`` of its own file by name. Each module gets a forward of the
same code that finds ours under that name; nothing is changed for other models of the process.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from moe_kernels import reference
from moe_kernels.rotary import rotary
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"


def use_fused_rotary(model: nn.Module) -> int:
    """Let attention turn queries and keys in one pass each; returns how many modules do.

    Refused where a family turns other pairs of features than the two halves of a head.
    """
    found = 0
    for name, module in model.named_modules():
        forward: Any = inspect.unwrap(type(module).forward)
        if NAME not in forward.__code__.co_names:
            continue
        if not _turns_halves(module, forward):
            raise ValueError(
                f"rotary_kernel 'fused' turns the halves of a head, got {name} ({type(module).__name__}), "
                "which turns other pairs. Set rotary_kernel to 'torch'."
            )
        ours = FunctionType(
            forward.__code__,
            {**forward.__globals__, NAME: _turn_both},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        ours.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(ours, module)
        found += 1
    if not found:
        raise ValueError(
            f"rotary_kernel 'fused' needs attention that calls {NAME}, got {type(model).__name__} without. "
            "Set rotary_kernel to 'torch'."
        )
    return found


def _turn_both(
    q_BHLD: Tensor, k_BHLD: Tensor, cos_BLR: Tensor, sin_BLR: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    assert unsqueeze_dim == 1, "attention keeps heads before tokens"
    return rotary(q_BHLD, cos_BLR, sin_BLR), rotary(k_BHLD, cos_BLR, sin_BLR)


def _turns_halves(module: nn.Module, forward: Any) -> bool:
    """Whether the family's own function is our formula, which is asked of the function itself."""
    config: Any = getattr(module, "config", None)
    if f"{NAME}_interleave" in forward.__code__.co_names and getattr(config, "rope_interleave", False):
        return False
    own, is_asked = forward.__globals__[NAME], False
    generator = torch.Generator().manual_seed(0)
    for num_turned in (8, 4):  # of 8 features a head; families that turn all of them refuse fewer
        x_BHLD = torch.randn(1, 2, 3, 8, generator=generator)
        angle_BLR = torch.randn(1, 3, num_turned // 2, generator=generator).repeat(1, 1, 2)
        cos_BLR, sin_BLR = angle_BLR.cos(), angle_BLR.sin()
        try:
            got, _ = own(x_BHLD, x_BHLD, cos_BLR, sin_BLR)
        except RuntimeError:
            continue
        if not torch.equal(got, reference.rotary(x_BHLD, cos_BLR, sin_BLR)):
            return False
        is_asked = True
    return is_asked
