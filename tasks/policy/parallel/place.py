"""What this rank holds of a model, beside its experts: the notes that splitting a model leaves on it.

Readers and writers of weights and whoever sums gradients ask here; a model that nothing has been split of
has the empty ``Layout``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSplit:
    """This rank's block of a parameter that a tp group has split along ``dim`` into blocks of equal size."""

    dim: int
    index: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This rank among those that hold one copy of its stage's parameters."""

    index: int
    size: int
    stage: int = 0
    is_expert_writer: bool = True
    """Whether this rank's experts are its own, or the first of several equal blocks."""
    ep_group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    place: Place | None = None
    compute_dtype: torch.dtype | None = None
    """Of activations, where it is not that of the weights."""
    splits: dict[str, TensorSplit] = field(default_factory=dict)
    """Parameters that tensor parallelism has split."""
    partial: frozenset[str] = frozenset()
    """Whole parameters inside split parts: each rank of a tp group has an addend of their gradient."""
    tied: frozenset[str] = frozenset()
    """Parameters that the first and the last pipeline stage both hold."""
    copies: frozenset[str] = frozenset()
    """Those of them that another stage writes and counts."""
    elsewhere: frozenset[str] = frozenset()
    """Names on disk of what only other stages hold."""


def layout_of(model: nn.Module) -> Layout:
    return getattr(model, "parallel_layout", Layout())


def set_layout(model: nn.Module, layout: Layout) -> None:
    model.parallel_layout = layout  # type: ignore[assignment]
