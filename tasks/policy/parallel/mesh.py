"""Which ranks share what: the process groups of a grid, and the gradients summed over them.

``tasks/grid.py`` says how ranks are laid out. Losses are divided by the global token count beforehand, so
gradients are summed and never averaged:

    dense      over the ranks of a stage that hold the same tp part and have other tokens: a tp group computes
               on equal tokens, and what it holds whole gets an equal gradient on each of its ranks
    partial    whole parameters inside a split part (``tensor_parallel.py``), over the tp group as well
    experts    over the ranks of a stage that hold the same experts; an expert has already received the
               gradients of all tokens of its ep group through the dispatcher
    tied       an embedding that is the head's as well, over the first and the last stage

``tasks/policy/parallel/fsdp.py`` splits parameters further and torch sums their gradients; the norm is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tasks.grid import Grid
from tasks.policy.parallel.experts import expert_shards
from tasks.policy.parallel.place import layout_of
from tasks.policy.parallel.shards import local_tensor
from tasks.policy.ranks.progress import BLOCKED

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMesh(Grid):
    """This rank's place in the grid; a group is None where it would hold one rank only."""

    rank: int
    world: dist.ProcessGroup | None
    ep_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    """Ranks of this stage that hold the same experts."""
    dense_group: dist.ProcessGroup | None
    """Ranks of this stage that hold the same part of dense parameters and have other tokens."""
    tp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None
    copy_group: dist.ProcessGroup | None
    """Ranks of all stages that together hold one copy of the model."""
    stage_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    """This rank's likes in all stages, in order: once for activations and once for their gradients, because
    one NCCL communicator would run the two directions in the order of their calls and lock."""
    tied_group: dist.ProcessGroup | None
    """This rank and its like in the first and last stage, where it is in one of them."""
    timeout: timedelta | None
    """Of a collective of any of these groups, and of those that FSDP makes; None = torch's default."""

    @property
    def stage(self) -> int:
        return self.stage_of(self.rank)

    @property
    def stage_rank(self) -> int:
        return self.rank % self.stage_size

    @property
    def holder(self) -> int:
        return self.holder_of(self.rank)

    @property
    def copy_rank(self) -> int:
        return self.stage * self.holders + self.holder

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def replicate_rank(self) -> int:
        """Which copy of the model this rank is a part of."""
        return self.stage_rank // self.holders

    @property
    def share(self) -> int:
        """Which part of a batch this rank's stage, tp and cp ranks have."""
        return self.stage_rank // (self.cp * self.tp)

    @property
    def is_reporter(self) -> bool:
        """Whether this rank speaks for those that compute the same losses."""
        return self.stage == self.pp - 1 and self.stage_rank % (self.cp * self.tp) == 0


def make_mesh(
    world_size: int,
    ep: int,
    fsdp: int = 1,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    timeout: timedelta | None = None,
) -> ParallelMesh:
    """Create the groups; with more than one rank, call on every rank after ``init_process_group``, whose
    timeout no other group takes over."""
    grid = Grid(world_size=world_size, ep=ep, fsdp=fsdp, tp=tp, cp=cp, pp=pp).checked()
    rank = 0
    if world_size > 1:
        if not dist.is_initialized() or dist.get_world_size() != world_size:
            got = dist.get_world_size() if dist.is_initialized() else "no process group"
            raise ValueError(
                f"world_size must equal the number of ranks started, got world_size={world_size} and {got}. "
                "Start the ranks with torchrun and call init_process_group first."
            )
        rank = dist.get_rank()
    ranks, my_group = torch.arange(world_size), partial(_my_group, timeout=timeout)
    by_stage = ranks.view(pp, -1)  # [stage, rank of it]
    ends = by_stage[[0, -1]].T.tolist() if pp > 1 else []
    stages = by_stage.T.tolist() if pp > 1 else []
    ep_group, copies = my_group(ranks.view(-1, ep).tolist()), by_stage.view(pp, -1, grid.holders)
    return ParallelMesh(
        **asdict(grid),
        rank=rank,
        world=dist.group.WORLD if world_size > 1 else None,
        ep_group=ep_group,
        replicate_group=my_group(by_stage.view(pp, -1, ep).transpose(1, 2).flatten(0, 1).tolist()),
        dense_group=my_group(by_stage.view(pp, -1, tp).transpose(1, 2).flatten(0, 1).tolist()),
        tp_group=my_group(ranks.view(-1, tp).tolist()),
        cp_group=my_group(ranks.view(-1, cp, tp).transpose(1, 2).flatten(0, 1).tolist()),
        copy_group=ep_group
        if grid.copy_size == ep
        else my_group(copies.transpose(0, 1).flatten(1, 2).tolist()),
        stage_groups=_pair(my_group(stages), my_group(stages)),
        tied_group=my_group(ends),
        timeout=timeout,
    )


def reduce_gradients(model: nn.Module, mesh: ParallelMesh, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum gradients over the ranks that hold the same parameter, where ``fully_shard`` has not done so.

    A parameter without a gradient (its layer was not used on some ranks) gets a zero one, so that all ranks
    reduce the same buckets and the optimizer steps the same parameters.
    """
    layout = layout_of(model)
    dense, experts = named_parameters(model)
    for param in [*dense.values(), *experts.values()]:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    whole = [[p for p in params.values() if not isinstance(p, DTensor)] for params in (dense, experts)]
    partial = [param for name, param in dense.items() if name in layout.partial]
    tied = [param for name, param in dense.items() if name in layout.tied]
    for params, group in (
        (whole[0], mesh.dense_group), (whole[1], mesh.replicate_group),
        (partial, mesh.tp_group), (tied, mesh.tied_group),
    ):  # fmt: skip
        if group is not None:
            _sum_gradients(params, group, bucket_bytes)


def _sum_gradients(params: list[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    grads = [local_tensor(param.grad) for param in params if param.grad is not None]
    for bucket in _buckets(grads, bucket_bytes):
        flat = torch.cat([grad.flatten() for grad in bucket])
        with BLOCKED:
            dist.all_reduce(flat, group=group)
        for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(summed.view_as(grad))


def clip_gradients(
    model: nn.Module, mesh: ParallelMesh, max_norm: float, sums: Mapping[str, Tensor]
) -> tuple[float, dict[str, float]]:
    """Scale reduced gradients to a global norm of at most ``max_norm``; returns the norm before, and this
    rank's float64 ``sums``, which are read together with it: every read stops the device.

    Every number of every parameter counts once, wherever it is: over all stages, splits and experts. A norm
    that is not finite scales nothing: it is the caller's to refuse the step.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}. Use inf to measure without clipping.")
    dense, experts = named_parameters(model)
    counted = (
        [param for name, param in dense.items() if _is_counted(model, mesh, name)],
        # without fsdp, a tp group larger than an ep group holds the experts several times
        list(experts.values()) if mesh.fsdp > 1 or mesh.holder < mesh.ep else [],
    )
    device = next(model.parameters()).device  # a rank may have nothing to count, and counts it there
    squares = torch.stack([_square_sum(params, device) for params in counted])
    if mesh.copy_group is not None:
        with BLOCKED:
            dist.all_reduce(squares, group=mesh.copy_group)
    square, *values = torch.stack([squares.sum(), *sums.values()]).tolist()
    norm = math.sqrt(square)
    if math.isfinite(norm) and norm > max_norm:
        for param in [*dense.values(), *experts.values()]:
            if param.grad is not None:
                local_tensor(param.grad).mul_(max_norm / norm)
    return norm, dict(zip(sums, values, strict=True))


def named_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Trained parameters: those that are not experts, and those that are stacks of this rank's experts."""
    shards = expert_shards(model)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return {n: p for n, p in named if n not in shards}, {n: p for n, p in named if n in shards}


def _is_counted(model: nn.Module, mesh: ParallelMesh, name: str) -> bool:
    """Whether this rank's part of a dense parameter is its own, or the first of several equal ones."""
    layout = layout_of(model)
    is_first_shard = mesh.fsdp > 1 or mesh.holder < mesh.tp
    is_own_part = name in layout.splits or mesh.tp_rank == 0
    return is_first_shard and is_own_part and name not in layout.copies


def _pair(
    one: dist.ProcessGroup | None, other: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    return None if one is None or other is None else (one, other)


def _my_group(rank_lists: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup | None:
    """The group that this rank is in, if one is and has others: every rank creates all, in one order."""
    if all(len(ranks) == 1 for ranks in rank_lists):
        return None
    if len(rank_lists[0]) == dist.get_world_size():
        return dist.group.WORLD
    groups = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in rank_lists]
    mine = next((group for ranks, group in groups if dist.get_rank() in ranks), None)
    assert mine is None or isinstance(mine, dist.ProcessGroup)
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


def norm_dtype(grad: torch.dtype, device: str) -> torch.dtype:
    """What squares of one gradient are added up in. A GPU adds in float32, by a tree of blocks: in float64 it
    would write a copy of the gradient, four times its bytes, and read it again. So one above 1.8e19 is not
    finite there, and its step is skipped where a CPU would clip it."""
    return torch.float64 if device == "cpu" else torch.promote_types(grad, torch.float32)


def _square_sum(params: list[nn.Parameter], device: torch.device) -> Tensor:
    """In float64 over parameters."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for param in params:
        if param.grad is not None:
            grad = local_tensor(param.grad)
            norm = torch.linalg.vector_norm(grad, dtype=norm_dtype(grad.dtype, device.type))
            total += norm.double().square()
    return total
