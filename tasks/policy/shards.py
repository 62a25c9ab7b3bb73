"""What this rank holds of a tensor that ``fully_shard`` may have split along its first axis.

A split tensor is a ``DTensor`` whose last mesh axis is the one it is split over; an axis before it, if any,
replicates. Everything else is a whole tensor. All readers and writers of weights go through here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A contiguous block along the first axis of a tensor of ``total`` rows."""

    start: int
    count: int
    total: int


def is_split(tensor: Tensor) -> bool:
    """Whether other ranks hold other rows of it."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.size(-1) > 1


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> Rows:
    """Which rows ``local_tensor`` returns: blocks of equal size, the last ones shorter or empty."""
    total = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return Rows(start=0, count=total, total=total)
    block = -(-total // tensor.device_mesh.size(-1))
    start = min(total, tensor.device_mesh.get_local_rank(-1) * block)
    rows = Rows(start=start, count=min(total - start, block), total=total)
    assert tensor.to_local().shape[0] == rows.count, f"{tensor.placements} over {tensor.device_mesh}, {rows}"
    return rows


def whole_tensor(tensor: Tensor) -> Tensor:
    """Every row. Collective over the ranks that a split tensor is spread over."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
