"""Collectives that autograd can go through, by what the ranks of the group do with the result.

Two kinds of values: *equal* ones, which every rank of the group holds and computes on alike, so that their
gradients are equal as well; and *own* ones, of which the ranks hold different parts or addends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the ops below
from torch import Tensor

from tasks.policy.ranks.progress import BLOCKED

_OPS = torch.ops._c10d_functional
"""Collectives that return their result: what recomputation can be told to keep."""
KEPT_WHEN_RECOMPUTING = [_OPS.all_gather_into_tensor.default]
"""What a part of a layer that is computed again must take from its first run: collectives inside it."""


def to_own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """An equal value that each rank goes on with in its own way: gradients are summed."""
    return _ToOwn.apply(x, group)


def sum_to_equal(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of own addends, which every rank then uses alike."""
    return _SumToEqual.apply(x, group)


def own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's block of an equal value's rows, as many on every rank."""
    return _OwnRows.apply(x, group)


def join_to_equal(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """All ranks' blocks along ``dim``, which every rank then uses alike."""
    return _JoinToEqual.apply(x, group, dim)


def join_for_own(group: dist.ProcessGroup, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All ranks' blocks along ``dim`` of each tensor, which each rank uses in its own way."""
    return _JoinForOwn.apply(group, dim, *tensors)


def take_tokens(
    group: dist.ProcessGroup | None, *tensors: Tensor, fill: tuple[float, ...]
) -> tuple[Tensor, ...]:
    """This rank's part of tokens that its group holds all of, padded to equal parts with ``fill``."""
    if group is None:
        return tensors
    if missing := -len(tensors[0]) % group.size():
        tensors = tuple(
            torch.cat([x, x.new_full((missing, *x.shape[1:]), value)])
            for x, value in zip(tensors, fill, strict=True)
        )
    return tuple(own_rows(x, group) for x in tensors)


def give_tokens(group: dist.ProcessGroup | None, y_TD: Tensor, num_tokens: int) -> Tensor:
    """What ``take_tokens`` took apart, joined."""
    return y_TD if group is None else join_to_equal(y_TD, group)[:num_tokens]


def all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    with BLOCKED:
        rows = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return rows if dim == 0 else torch.cat(rows.chunk(group.size()), dim)


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    with BLOCKED:
        return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), op, group.group_name))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    blocks = x if dim == 0 else torch.cat(x.chunk(group.size(), dim))
    with BLOCKED:
        return _OPS.wait_tensor(
            _OPS.reduce_scatter_tensor(blocks.contiguous(), "sum", group.size(), group.group_name)
        )


def _block(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


class _ToOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _SumToEqual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _block(x, group, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.group, 0), None


class _JoinToEqual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _block(grads[0], ctx.group, ctx.dim), None, None


class _JoinForOwn(torch.autograd.Function):
    """One node for all tensors: every rank's backward makes the same calls in one order."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.dim = group, dim
        return tuple(all_gather(tensor, group, dim) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_reduce_scatter(grad, ctx.group, ctx.dim) for grad in grads)
