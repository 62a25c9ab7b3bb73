"""Which ranks share what: disjoint experts inside consecutive ranks, replicas of each expert shard across.

With 4 ranks and ep 2, rank r is row r // 2 and column r % 2 of a 2 x 2 grid: a row is an ``ep_group``
(disjoint experts), a column a ``replicate_group`` (the same experts). Dense parameters are on every rank.
Every rank reads its own part of the batch, so dense gradients are summed over the world; an expert already
receives the gradients of all tokens of its row through the dispatcher, so its own are summed over the column.
Losses are divided by the global token count beforehand, hence sums and never means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.policy.experts import expert_shards

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMesh:
    """This rank's place in the grid; a group is None where it would hold one rank only."""

    world_size: int
    ep: int
    rank: int
    world: dist.ProcessGroup | None
    ep_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep

    @property
    def replicate_rank(self) -> int:
        return self.rank // self.ep


def make_mesh(world_size: int, ep: int) -> ParallelMesh:
    """Create the groups; with more than one rank, call on every rank after ``init_process_group``."""
    if ep < 1 or world_size % ep:
        choices = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"ep must divide world_size, got ep={ep}, world_size={world_size}. Set ep to one of {choices}."
        )
    if world_size == 1:
        return ParallelMesh(world_size=1, ep=1, rank=0, world=None, ep_group=None, replicate_group=None)
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        got = dist.get_world_size() if dist.is_initialized() else "no process group"
        raise ValueError(
            f"world_size must equal the number of ranks started, got world_size={world_size} and {got}. "
            "Start the ranks with torchrun and call init_process_group first."
        )
    rows = [list(range(start, start + ep)) for start in range(0, world_size, ep)]
    columns = [list(range(start, world_size, ep)) for start in range(ep)]
    return ParallelMesh(
        world_size=world_size,
        ep=ep,
        rank=dist.get_rank(),
        world=dist.group.WORLD,
        ep_group=_my_group(rows) if ep > 1 else None,
        replicate_group=_my_group(columns) if ep < world_size else None,
    )


def reduce_gradients(model: nn.Module, mesh: ParallelMesh, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum gradients over the ranks that hold the same parameter.

    A parameter without a gradient (its layer was not used on some ranks) gets a zero one, so that all ranks
    reduce the same buckets and the optimizer steps the same parameters.
    """
    dense, experts = split_parameters(model)
    for params, group in ((dense, mesh.world), (experts, mesh.replicate_group)):
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        if group is None:
            continue
        for bucket in _buckets([param.grad for param in params if param.grad is not None], bucket_bytes):
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat, group=group)
            for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(summed.view_as(grad))


def clip_gradients(model: nn.Module, mesh: ParallelMesh, max_norm: float) -> float:
    """Scale reduced gradients to a global norm of at most ``max_norm``; returns the norm before.

    Every expert shard of a row and the dense parameters count once each. A norm that is not finite scales
    nothing: it is the caller's to refuse the step.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}. Use inf to measure without clipping.")
    dense, experts = split_parameters(model)
    dense_sum, expert_sum = _square_sum(dense), _square_sum(experts)
    if mesh.ep_group is not None:
        dist.all_reduce(expert_sum, group=mesh.ep_group)
    norm = math.sqrt((dense_sum + expert_sum).item())
    if math.isfinite(norm) and norm > max_norm:
        for param in [*dense, *experts]:
            if param.grad is not None:
                param.grad.mul_(max_norm / norm)
    return norm


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters: those replicated everywhere, and those that are stacks of this rank's experts."""
    shards = expert_shards(model)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [p for name, p in named if name not in shards], [p for name, p in named if name in shards]


def _my_group(rank_lists: list[list[int]]) -> dist.ProcessGroup:
    # every rank creates every group, in one order: torch demands it
    groups = [(ranks, dist.new_group(ranks)) for ranks in rank_lists]
    mine = next(group for ranks, group in groups if dist.get_rank() in ranks)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _buckets(grads: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one type, together at most ``bucket_bytes`` unless a single one is larger."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (grad.dtype != bucket[0].dtype or size + grad.nbytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket


def _square_sum(params: list[nn.Parameter]) -> Tensor:
    device = params[0].device if params else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for param in params:
        if param.grad is not None:
            total += torch.linalg.vector_norm(param.grad, dtype=torch.float64).square()
    return total
