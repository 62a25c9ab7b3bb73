"""Exchange of tokens between the GPUs of one node through each other's memory.

Shape key: T tokens of this rank, K selections a token, D features, P rows in expert order.

``moe_kernels.nvlink`` has the two halves of each direction; here are the memory, the barriers between the
halves, and the gradients: the backward of each direction is the other one.

Memory is taken once and used again by every exchange. What a rank stages may be overwritten when all have
fetched it, and what was delivered when it was added up: both hold at the barrier of the next exchange in the
other direction. Exchanges alternate in a training step; where two of one direction follow each other, a
barrier is put before the second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from moe_kernels import nvlink
from torch import Tensor

from tasks.nvlink_config import NVLinkConfig
from tasks.policy.dispatch.dispatcher import (
    Dispatched,
    ExchangeShape,
    Groups,
    check_inputs,
    experts_per_rank,
    refuse_replay,
    require_room,
)
from tasks.policy.ranks.progress import BLOCKED


class Memory(Protocol):
    """As many bytes of every rank, all of which this rank can address."""

    @property
    def parts(self) -> list[Tensor]:
        """Of each rank, as bytes."""
        ...

    def barrier(self) -> None:
        """On the device: what ranks wrote before it, all ranks read after it."""
        ...

    def close(self) -> None: ...


class SymmetricMemory:
    """Torch's, over NVLink or PCIe; never with multicast objects, which nothing here needs."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, timeout_seconds: int):
        # a multicast object that outlives its process can hang all GPUs of a host
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(
            num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )
        self.handle = symmetric.rendezvous(own, group)
        self.parts = [self.handle.get_buffer(r, (num_bytes,), torch.uint8) for r in range(group.size())]
        self.timeout_ms = timeout_seconds * 1000

    def barrier(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)

    def close(self) -> None:
        self.barrier()  # others may still read
        torch.cuda.synchronize()
        self.parts = []


@dataclass(slots=True)
class _Route:
    """What one dispatch leaves for its combine and for both backwards."""

    expert_TK: Tensor
    num_experts: int
    rows: Any = None
    num_rows: int = 0


class NVLinkDispatcher:
    """The ``Dispatcher`` over memory that all ranks address; its rows arrive grouped by expert."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        memory: Memory,
        settings: NVLinkConfig,
        shape: ExchangeShape,
        means: str,
    ):
        self.num_ranks, self.rank = group.size(), group.rank()
        self.memory, self.settings, self.shape, self.means = memory, settings, shape, means
        shapes = shapes_of(self.num_ranks, settings, shape)
        self.buffers = nvlink.carve(memory.parts, self.rank, shapes)
        self.last: Literal["none", "out", "back"] = "none"

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Dispatched:
        check_inputs(x_TD, expert_TK, weight_TK)
        self._check(x_TD, expert_TK, num_experts)
        route = _Route(expert_TK=expert_TK.contiguous(), num_experts=num_experts)
        x_PD, weight_P, expert_P = _Dispatch.apply(
            self, route, x_TD.contiguous(), weight_TK.float().contiguous()
        )
        return Dispatched(
            x_RD=x_PD,
            expert_RK=expert_P[:, None],
            weight_RK=weight_P[:, None].to(weight_TK.dtype),
            groups=Groups(route.rows.end_e, route.rows.count_e),
            handle=route,
        )

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        refuse_replay()
        if y_RD.dtype != self.shape.dtype:
            raise ValueError(
                f"rows of an NVLink combine must be {self.shape.dtype}, got {y_RD.dtype}. Convert them."
            )
        return _Combine.apply(self, handle, y_RD)

    def describe(self) -> str:
        settings, size = self.settings, self.memory.parts[self.rank].numel() / 2**20
        room = f"room for {settings.capacity:g} even shares" if settings.capacity else "as many as arrive"
        return (
            f"nvlink over {self.num_ranks} ranks: {self.shape.dtype} rows, {room}, at most "
            f"{settings.max_tokens} tokens; {self.means}, {size:.0f} MiB"
        )

    def close(self) -> None:
        """Collective; after it the process group may be destroyed."""
        self.memory.close()

    def fetch(self, x_TD: Tensor, weight_TK: Tensor, route: _Route) -> tuple[Tensor, Tensor, Tensor]:
        """Send tokens out; the rows, their weights and their experts."""
        self._turn("out")
        num_experts, num_rows = route.num_experts, self.max_rows(route.num_experts)
        if self.settings.capacity:
            nvlink.stage_all(x_TD, route.expert_TK, weight_TK, num_experts, self.buffers)
            self.memory.barrier()
            route.rows, expert_P, weight_P = nvlink.place(num_experts, num_rows, self.buffers)
            # on the device: nothing after it runs, so that no step can be made of what is missing
            torch.ops.aten._assert_async.msg(
                route.rows.status[3],
                "rows of an NVLink dispatch must fit nvlink.capacity, and expert_TK be below num_experts",
            )
        else:
            nvlink.stage_tables(route.expert_TK, weight_TK, num_experts, self.buffers)
            self.memory.barrier()
            route.rows, expert_P, weight_P = nvlink.place(num_experts, num_rows, self.buffers)
            read = _read_later(route.rows.status)
            nvlink.stage_rows(x_TD, self.buffers)  # meanwhile
            self.memory.barrier()
            num_rows, num_unknown, *_ = read()
            if num_unknown:
                raise ValueError(
                    f"expert_TK must be below num_experts, got {num_unknown} selections at or above it. "
                    "Check that the router and the experts come from the same configuration."
                )
            expert_P, weight_P = expert_P[:num_rows], weight_P[:num_rows]
        route.num_rows = num_rows
        return nvlink.expand(route.rows, num_rows, self.buffers), weight_P, expert_P

    def fetch_again(self, x_TD: Tensor, route: _Route) -> Tensor:
        """Send other rows out along a known route."""
        self._turn("out")
        nvlink.stage_rows(x_TD, self.buffers)
        self.memory.barrier()
        return nvlink.expand(route.rows, route.num_rows, self.buffers)

    def deliver(self, y_PD: Tensor, gradient_P: Tensor | None, route: _Route) -> tuple[Tensor, Tensor | None]:
        """Bring rows back, and the gradients of weights where given."""
        self._turn("back")
        nvlink.contract(y_PD, gradient_P, route.rows, self.buffers)
        self.memory.barrier()
        has_gradient = gradient_P is not None
        return nvlink.collect(route.expert_TK, route.num_experts, self.buffers, has_gradient=has_gradient)

    def max_rows(self, num_experts: int) -> int:
        """What a rank can receive: of ``capacity``, or in the worst case if that is less or none is set."""
        share = self.settings.max_tokens * self.shape.num_topk
        worst = self.settings.max_tokens * self.num_ranks
        worst *= min(self.shape.num_topk, num_experts // self.num_ranks)
        return min(int(self.settings.capacity * share), worst) if self.settings.capacity else worst

    def _turn(self, direction: Literal["out", "back"]) -> None:
        if self.last == direction:
            self.memory.barrier()
        self.last = direction

    def _check(self, x_TD: Tensor, expert_TK: Tensor, num_experts: int) -> None:
        refuse_replay()
        experts_per_rank(num_experts, self.num_ranks)
        if num_experts > nvlink.MAX_EXPERTS:
            raise ValueError(
                f"num_experts must be at most {nvlink.MAX_EXPERTS} in an NVLink dispatch, got {num_experts}. "
                "Use the dispatcher 'all_to_all'."
            )
        wanted, got = (self.shape.dtype, self.shape.hidden), (x_TD.dtype, x_TD.shape[1])
        if got != wanted or expert_TK.shape[1] != self.shape.num_topk:
            raise ValueError(
                f"tokens of an NVLink dispatch must be {wanted[0]} of {wanted[1]} features with "
                f"{self.shape.num_topk} selections, got {got[0]}, {got[1]} and {expert_TK.shape[1]}. "
                "The memory is taken for the model's: build the dispatcher for this one."
            )
        require_room(x_TD, self.settings.max_tokens, section="nvlink")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dispatcher: NVLinkDispatcher, route: _Route, x_TD: Tensor, weight_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dispatcher, ctx.route = dispatcher, route
        x_PD, weight_P, expert_P = dispatcher.fetch(x_TD, weight_TK, route)
        ctx.mark_non_differentiable(expert_P)
        return x_PD, weight_P, expert_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_PD, grad_weight_P, _ = grads
        delivered = ctx.dispatcher.deliver(grad_x_PD.contiguous(), grad_weight_P.contiguous(), ctx.route)
        return None, None, *delivered


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dispatcher: NVLinkDispatcher, route: _Route, y_PD: Tensor) -> Tensor:
        ctx.dispatcher, ctx.route = dispatcher, route
        return dispatcher.deliver(y_PD.contiguous(), None, route)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.dispatcher.fetch_again(grads[0].contiguous(), ctx.route)


def _read_later(status: Tensor) -> Callable[[], list[int]]:
    """Begin to copy to the host; the call of what is returned waits for it, and for nothing queued since."""
    if not status.is_cuda:
        return status.tolist
    values, done = torch.empty(status.shape, dtype=status.dtype, pin_memory=True), torch.cuda.Event()
    values.copy_(status, non_blocking=True)
    done.record()

    def read() -> list[int]:
        with BLOCKED:
            done.synchronize()
        return values.tolist()

    return read


def shapes_of(num_ranks: int, settings: NVLinkConfig, shape: ExchangeShape) -> dict[str, Any]:
    return nvlink.arrays(
        num_ranks=num_ranks,
        max_tokens=settings.max_tokens,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        dtype=shape.dtype,
    )


def make_nvlink(group: dist.ProcessGroup, settings: NVLinkConfig, shape: ExchangeShape) -> NVLinkDispatcher:
    """Take the memory, on every rank of the group at once; never another dispatcher."""
    if not torch.cuda.is_available() or dist.get_backend(group) != "nccl":
        raise RuntimeError(
            "dispatcher 'nvlink' must have CUDA devices and backend 'nccl', got "
            f"{torch.cuda.device_count()} devices and {dist.get_backend(group)!r}. Use 'all_to_all'."
        )
    device = torch.cuda.current_device()
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (this_node(), device), group=group)
    check_peers(found, device, torch.cuda.can_device_access_peer)
    # the fill of a deterministic run would write every row twice; no row is read that was not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    size = nvlink.num_bytes(shapes_of(group.size(), settings, shape))
    memory = SymmetricMemory(group, size, shape.timeout_seconds)
    means = f"symmetric memory of torch {torch.__version__}, no multicast"
    return NVLinkDispatcher(group, memory, settings, shape, means)


def this_node() -> str:
    """The same for all processes of one running kernel, whatever their containers call themselves."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_peers(found: list[tuple[str, int]], device: int, can_access: Callable[[int, int], bool]) -> None:
    """Refuse a group that spans nodes, or whose devices cannot address each other; (node, device) by rank."""
    nodes = sorted({node for node, _ in found})
    if len(nodes) > 1:
        raise RuntimeError(
            f"dispatcher 'nvlink' must have all {len(found)} ranks of an expert-parallel group on one node, "
            f"got {len(nodes)} nodes. Set ep to at most the GPUs of a node, or dispatcher to 'deepep'."
        )
    closed = sorted({other for _, other in found if other != device and not can_access(device, other)})
    if closed:
        raise RuntimeError(
            f"dispatcher 'nvlink' must reach the memory of every device of its group, got device {device} "
            f"without access to {closed}. Use 'all_to_all'."
        )
