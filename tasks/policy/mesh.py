"""Which ranks share what: disjoint experts inside consecutive ranks, replicas of each expert shard across.

With 4 ranks and ep 2, rank r is row r // 2 and column r % 2 of a 2 x 2 grid: a row is an ``ep_group``
(disjoint experts), a column a ``replicate_group`` (the same experts). Dense parameters are on every rank.
Every rank reads its own part of the batch, so dense gradients are summed over the world; an expert already
receives the gradients of all tokens of its row through the dispatcher, so its own are summed over the column.
Losses are divided by the global token count beforehand, hence sums and never means.

With fsdp above 1 the grid is ``dp_replicate x fsdp`` for dense parameters and ``dp_replicate x efsdp x ep``
for experts, where fsdp = efsdp * ep and ep is the innermost: fsdp consecutive ranks together hold one copy of
the model. ``tasks/policy/fsdp.py`` splits the parameters so and torch sums their gradients; the norm is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tasks.policy.experts import expert_shards
from tasks.policy.progress import BLOCKED
from tasks.policy.shards import local_tensor

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMesh:
    """This rank's place in the grid; a group is None where it would hold one rank only."""

    world_size: int
    ep: int
    fsdp: int
    """Ranks over which dense parameters are split; 1 keeps them whole on every rank."""
    rank: int
    world: dist.ProcessGroup | None
    ep_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    """Ranks that hold the same experts."""
    copy_group: dist.ProcessGroup | None
    """Ranks that together hold one copy of the model: those of ``ep``, or of the larger ``fsdp``."""

    @property
    def efsdp(self) -> int:
        """Ranks over which the experts of one expert-parallel rank are split."""
        return max(1, self.fsdp // self.ep)

    @property
    def copy_size(self) -> int:
        return max(self.fsdp, self.ep)

    @property
    def copy_rank(self) -> int:
        return self.rank % self.copy_size

    @property
    def ep_rank(self) -> int:
        return self.rank % self.ep

    @property
    def replicate_rank(self) -> int:
        """Which copy of the model this rank is a part of."""
        return self.rank // self.copy_size


def check_mesh(world_size: int, ep: int, fsdp: int) -> None:
    """Refuse sizes that do not make a grid, with those that would."""
    if ep < 1 or world_size % ep:
        choices = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"ep must divide world_size, got ep={ep}, world_size={world_size}. Set ep to one of {choices}."
        )
    if fsdp < 1 or world_size % fsdp or (fsdp > 1 and fsdp % ep):
        choices = [
            1,
            *(size for size in range(2, world_size + 1) if world_size % size == 0 and size % ep == 0),
        ]
        raise ValueError(
            f"fsdp must divide world_size and be 1 or a multiple of ep, got fsdp={fsdp}, ep={ep}, "
            f"world_size={world_size}. Set fsdp to one of {choices}."
        )


def make_mesh(world_size: int, ep: int, fsdp: int = 1) -> ParallelMesh:
    """Create the groups; with more than one rank, call on every rank after ``init_process_group``."""
    check_mesh(world_size, ep, fsdp)
    if world_size == 1:
        return ParallelMesh(
            world_size=1,
            ep=1,
            fsdp=1,
            rank=0,
            world=None,
            ep_group=None,
            replicate_group=None,
            copy_group=None,
        )
    if not dist.is_initialized() or dist.get_world_size() != world_size:
        got = dist.get_world_size() if dist.is_initialized() else "no process group"
        raise ValueError(
            f"world_size must equal the number of ranks started, got world_size={world_size} and {got}. "
            "Start the ranks with torchrun and call init_process_group first."
        )
    rows = [list(range(start, start + ep)) for start in range(0, world_size, ep)]
    columns = [list(range(start, world_size, ep)) for start in range(ep)]
    copies = [list(range(start, start + fsdp)) for start in range(0, world_size, fsdp)]
    ep_group = _my_group(rows) if ep > 1 else None
    return ParallelMesh(
        world_size=world_size,
        ep=ep,
        fsdp=fsdp,
        rank=dist.get_rank(),
        world=dist.group.WORLD,
        ep_group=ep_group,
        replicate_group=_my_group(columns) if ep < world_size else None,
        copy_group=_my_group(copies) if fsdp > ep else ep_group,
    )


def reduce_gradients(model: nn.Module, mesh: ParallelMesh, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum gradients over the ranks that hold the same parameter, unless ``fully_shard`` has done so.

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
        grads = [param.grad for param in params if not isinstance(param, DTensor)]
        for bucket in _buckets([grad for grad in grads if grad is not None], bucket_bytes):
            flat = torch.cat([grad.flatten() for grad in bucket])
            with BLOCKED:
                dist.all_reduce(flat, group=group)
            for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(summed.view_as(grad))


def clip_gradients(model: nn.Module, mesh: ParallelMesh, max_norm: float) -> float:
    """Scale reduced gradients to a global norm of at most ``max_norm``; returns the norm before.

    Every row of every parameter counts once, wherever it is. A norm that is not finite scales nothing: it is
    the caller's to refuse the step.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}. Use inf to measure without clipping.")
    dense, experts = split_parameters(model)
    dense_sum, expert_sum = _square_sum(dense), _square_sum(experts)
    if mesh.copy_group is not None:
        with BLOCKED:
            dist.all_reduce(expert_sum, group=mesh.copy_group)
            if mesh.fsdp > 1:
                dist.all_reduce(dense_sum, group=mesh.copy_group)
    norm = math.sqrt((dense_sum + expert_sum).item())
    if math.isfinite(norm) and norm > max_norm:
        for param in [*dense, *experts]:
            if param.grad is not None:
                local_tensor(param.grad).mul_(max_norm / norm)
    return norm


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters: those that all ranks share, and those that are stacks of this rank's experts."""
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
            total += torch.linalg.vector_norm(local_tensor(param.grad), dtype=torch.float64).square()
    return total
