"""What this rank holds of a tensor that tensor parallelism and ``fully_shard`` may have split.

``fully_shard`` makes it a ``DTensor``, split along its first axis over the last axis of its mesh; an axis
before it, if any, replicates. What it has split may itself be a block of a tensor
that tensor parallelism has split along its first or second axis. Everything else is a whole tensor. All
readers and writers of weights go through here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from tasks.policy.parallel.collectives import all_gather
from tasks.policy.parallel.place import TensorSplit


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A contiguous block along one axis of a tensor, of ``total`` rows (or columns)."""

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


def disk_block(tensor: Tensor, split: TensorSplit | None) -> tuple[Rows | None, Rows | None]:
    """The rows and the columns of the whole tensor that this rank holds; None where it holds all."""
    rows = local_rows(tensor) if is_split(tensor) else None
    if split is None:
        return rows, None
    size = tensor.shape[split.dim]
    block = Rows(start=split.index * size, count=size, total=split.size * size)
    if split.dim == 1:
        return rows, block
    inner = rows or Rows(start=0, count=size, total=size)  # of this rank's block, not of the whole tensor
    return Rows(start=block.start + inner.start, count=inner.count, total=block.total), None


def whole_tensor(tensor: Tensor, split: TensorSplit | None = None) -> Tensor:
    """Everything. Collective over the ranks that a split tensor is spread over."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor if split is None else all_gather(tensor.detach(), split.group, split.dim)
