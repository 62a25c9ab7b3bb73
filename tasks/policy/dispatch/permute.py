"""Copy rows out to several places and sum them back: the two halves of every expert exchange.

Shape key: T source rows, K places a source row may be copied to, P copies, D features.

``gather_rows`` and ``sum_rows`` are each other's transpose, so each is the other's backward. Both only
gather: no atomic add, hence the same bits on every run, which ``index_add`` does not promise on CUDA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Placement(NamedTuple):
    """Which copy belongs to which source row, told from both sides."""

    row_P: Tensor
    """Source row of each copy."""
    slot_TK: Tensor
    """Copy number of each (source row, place), or -1 where there is none."""


def invert(cell_P: Tensor, num_rows: int, num_places: int, *, num_live: Tensor | None = None) -> Placement:
    """Placement of copies listed by flat cell number ``row * num_places + place``, each cell at most once.

    ``num_live``, on the device, says how many of the copies there are; those after them are nobody's.
    """
    number_P = torch.arange(cell_P.numel(), device=cell_P.device)
    slot = cell_P.new_full((num_rows * num_places,), -1)
    slot[cell_P] = number_P if num_live is None else torch.where(number_P < num_live, number_P, -1)
    return Placement(row_P=cell_P // max(num_places, 1), slot_TK=slot.view(num_rows, num_places))


def gather_rows(x_TD: Tensor, placement: Placement) -> Tensor:
    """``x_TD[row_P]`` with a deterministic backward."""
    return _Gather.apply(x_TD, *placement)


def sum_rows(y_PD: Tensor, placement: Placement) -> Tensor:
    """Sum of each source row's copies, in the order of its places; zero for a row without copies."""
    return _Sum.apply(y_PD, *placement)


def _sum_copies(y_PD: Tensor, slot_TK: Tensor) -> Tensor:
    # Half-precision copies are added in float32 and rounded once.
    total_TD = torch.zeros(
        slot_TK.shape[0],
        y_PD.shape[1],
        dtype=torch.promote_types(y_PD.dtype, torch.float32),
        device=y_PD.device,
    )
    if y_PD.shape[0] == 0:
        return total_TD.to(y_PD.dtype)
    for slot_T in slot_TK.unbind(1):  # one place at a time: T x D of extra memory, not T x K x D
        copy_TD = y_PD[slot_T.clamp(min=0)]
        total_TD += torch.where((slot_T >= 0)[:, None], copy_TD, 0)
    return total_TD.to(y_PD.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_P: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return x_TD[row_P]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return _sum_copies(grads[0], slot_TK), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, row_P: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_P)
        return _sum_copies(y_PD, slot_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_P,) = ctx.saved_tensors
        return grads[0][row_P], None, None
