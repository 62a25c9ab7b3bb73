"""Exchange of tokens by DeepEP: one kernel sends each token once to every rank that it selected.

Shape key: T tokens of this rank, K selections a token, D features, R rows received, e experts of this rank,
B = D / 128 groups of features.

The rows of a dispatch arrive in an order of the library's choosing; only a deterministic buffer repeats it.
The backward of each half is the other half: gradients of received rows are combined at their source, and
gradients of combined tokens are sent out again along the route of the forward pass.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from moe_kernels.fp8 import dequant_fp8_1x128, quant_fp8_1x128
from moe_kernels.reference import FP8_GROUP
from torch import Tensor

from tasks.deepep_config import DeepEPConfig
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

EXPERT_ALIGNMENT = 128
"""Rows of an expert's group in the expanded layout are padded to a multiple of it, the tile of a grouped
product."""


@dataclass(slots=True)
class _Route:
    """What one dispatch leaves for its combine and for both backwards."""

    handle: Any = None
    expert_RK: Tensor | None = None


class Transport(Protocol):
    """The three calls of an exchange, in the words of one version of the library.

    A payload is ``x_TD`` in bfloat16, or 8-bit rows with their scales.
    """

    def dispatch(
        self, payload: Any, expert_TK: Tensor, weight_TK: Tensor, num_experts: int
    ) -> tuple[Any, Tensor, Tensor, Any]:
        """Payload, local experts [R, K] with -1 where there is none, weights [R, K], and the handle."""
        ...

    def resend(self, x_TD: Tensor, handle: Any) -> Tensor:
        """Dispatch along a known route: the same rows in the same order."""
        ...

    def combine(
        self, y_RD: Tensor, weight_RK: Tensor | None, handle: Any
    ) -> tuple[Tensor, Tensor | None]: ...

    def groups(self, handle: Any) -> Groups | None:
        """Of rows that lie by expert."""
        ...

    def close(self) -> None: ...


class ElasticTransport:
    """``ElasticBuffer`` of version 2, compact or expanded."""

    def __init__(self, buffer: Any, settings: DeepEPConfig):
        self.buffer = buffer
        self.num_max_tokens = settings.max_tokens
        self.resources = {"num_sms": settings.num_sms, "num_qps": settings.num_qps}
        self.layout: dict[str, Any] = {"do_expand": settings.layout == "expanded"}
        if settings.layout == "expanded":
            self.layout["do_zero_padding"] = True

    def dispatch(
        self, payload: Any, expert_TK: Tensor, weight_TK: Tensor, num_experts: int
    ) -> tuple[Any, Tensor, Tensor, Any]:
        received, expert_RK, weight_RK, handle, _ = self.buffer.dispatch(
            payload,
            topk_idx=expert_TK,
            topk_weights=weight_TK,
            num_experts=num_experts,
            num_max_tokens_per_rank=self.num_max_tokens,
            expert_alignment=EXPERT_ALIGNMENT if self.layout["do_expand"] else 1,
            do_cpu_sync=True,  # without it every receive has the size of the worst case
            **self.resources,
            **self.layout,
        )
        if self.layout["do_expand"]:
            weight_RK = weight_RK[:, None]
            expert_RK = expanded_experts(handle.psum_num_recv_tokens_per_expert, weight_RK.shape[0])
        return received, expert_RK, weight_RK, handle

    def resend(self, x_TD: Tensor, handle: Any) -> Tensor:
        received, *_ = self.buffer.dispatch(x_TD, handle=handle, **self.resources, **self.layout)
        return received

    def combine(self, y_RD: Tensor, weight_RK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        if weight_RK is not None and self.layout["do_expand"]:
            weight_RK = weight_RK[:, 0].contiguous()
        y_TD, weight_TK, _ = self.buffer.combine(
            y_RD, handle=handle, topk_weights=weight_RK, **self.resources
        )
        return y_TD, weight_TK

    def groups(self, handle: Any) -> Groups | None:
        return expanded_groups(handle.psum_num_recv_tokens_per_expert) if self.layout["do_expand"] else None

    def close(self) -> None:
        self.buffer.destroy()


class LegacyTransport:
    """``Buffer`` of version 1."""

    def __init__(self, buffer: Any):
        self.buffer = buffer

    def dispatch(
        self, payload: Any, expert_TK: Tensor, weight_TK: Tensor, num_experts: int
    ) -> tuple[Any, Tensor, Tensor, Any]:
        per_rank, per_node, per_expert, is_sent, _ = self.buffer.get_dispatch_layout(expert_TK, num_experts)
        received, expert_RK, weight_RK, _, handle, _ = self.buffer.dispatch(
            payload,
            topk_idx=expert_TK,
            topk_weights=weight_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=per_expert,
        )
        return received, expert_RK, weight_RK, handle

    def resend(self, x_TD: Tensor, handle: Any) -> Tensor:
        return self.buffer.dispatch(x_TD, handle=handle)[0]

    def combine(self, y_RD: Tensor, weight_RK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        y_TD, weight_TK, _ = self.buffer.combine(y_RD, handle, topk_weights=weight_RK)
        return y_TD, weight_TK

    def groups(self, handle: Any) -> None:
        return None

    def close(self) -> None:
        self.buffer.destroy()


class DeepEPDispatcher:
    """The ``Dispatcher`` over either transport: types, limits, 8-bit rows, gradients."""

    def __init__(self, group: dist.ProcessGroup, transport: Transport, settings: DeepEPConfig, means: str):
        self.num_ranks, self.rank = group.size(), group.rank()
        self.transport, self.settings, self.means = transport, settings, means

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Dispatched:
        check_inputs(x_TD, expert_TK, weight_TK)
        experts_per_rank(num_experts, self.num_ranks)
        self._check(x_TD)
        # on the device, so that the host need not wait twice: the kernel would write past its tables
        torch.ops.aten._assert_async.msg(
            (expert_TK < num_experts).all(), "expert_TK must be below num_experts in a DeepEP dispatch"
        )
        route = _Route()
        # a missing selection's weight may be anything, and must come back as no gradient
        known_TK = torch.where(expert_TK >= 0, weight_TK, 0).float().contiguous()
        x_RD, weight_RK = _Dispatch.apply(
            self, route, x_TD.contiguous(), known_TK, expert_TK.contiguous(), num_experts
        )
        assert route.expert_RK is not None
        groups = self.transport.groups(route.handle)
        if groups is not None:  # rows that pad a group go through the experts with the others
            weight_RK = torch.where(route.expert_RK >= 0, weight_RK, 0)
        return Dispatched(
            x_RD=x_RD,
            expert_RK=route.expert_RK,
            weight_RK=weight_RK.to(weight_TK.dtype),
            handle=route,
            groups=groups,
        )

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        refuse_replay()
        if y_RD.dtype != torch.bfloat16:
            raise ValueError(f"rows of a DeepEP combine must be bfloat16, got {y_RD.dtype}. Convert them.")
        return _Combine.apply(self.transport, handle, y_RD)

    def describe(self) -> str:
        settings = self.settings
        rows = "8-bit rows with a scale for each 128 features" if settings.fp8 else "bfloat16 rows"
        return (
            f"deepep over {self.num_ranks} ranks: {settings.layout} layout, {rows}, at most "
            f"{settings.max_tokens} tokens, {settings.num_sms} SMs, {settings.num_qps} queue pairs; "
            f"{self.means}"
        )

    def close(self) -> None:
        """Collective; after it the process group may be destroyed."""
        self.transport.close()

    def _check(self, x_TD: Tensor) -> None:
        refuse_replay()
        if x_TD.dtype != torch.bfloat16:
            raise ValueError(
                f"tokens of a DeepEP dispatch must be bfloat16, got {x_TD.dtype}. "
                "Set train.compute_dtype to 'bfloat16', or the dispatcher to 'all_to_all'."
            )
        require_room(x_TD, self.settings.max_tokens, section="deepep")
        multiple = FP8_GROUP if self.settings.fp8 else 8
        if x_TD.shape[1] % multiple:
            raise ValueError(
                f"features of a DeepEP dispatch must be a multiple of {multiple}, got {x_TD.shape[1]}. "
                "Use the dispatcher 'all_to_all'."
            )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dispatcher: DeepEPDispatcher,
        route: _Route,
        x_TD: Tensor,
        weight_TK: Tensor,
        expert_TK: Tensor,
        num_experts: int,
    ) -> tuple[Tensor, Tensor]:
        payload = quant_fp8_1x128(x_TD) if dispatcher.settings.fp8 else x_TD
        with BLOCKED:
            received, expert_RK, weight_RK, route.handle = dispatcher.transport.dispatch(
                payload, expert_TK, weight_TK, num_experts
            )
        ctx.transport, ctx.route, route.expert_RK = dispatcher.transport, route, expert_RK
        return (dequant_fp8_1x128(*received) if dispatcher.settings.fp8 else received), weight_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_RD, grad_weight_RK = grads
        is_selected_RK = ctx.route.expert_RK >= 0
        with BLOCKED:
            grad_x_TD, grad_weight_TK = ctx.transport.combine(
                grad_x_RD.contiguous(), torch.where(is_selected_RK, grad_weight_RK, 0), ctx.route.handle
            )
        return None, None, grad_x_TD, grad_weight_TK, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Transport, route: _Route, y_RD: Tensor) -> Tensor:
        ctx.transport, ctx.handle = transport, route.handle
        with BLOCKED:
            return transport.combine(y_RD.contiguous(), None, route.handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        with BLOCKED:
            return None, None, ctx.transport.resend(grads[0].contiguous(), ctx.handle)


def expanded_experts(psum_e: Tensor, num_rows: int) -> Tensor:
    """[R, 1] local expert of each row of the expanded layout, -1 for rows that pad an expert's group.

    ``psum_e[i]`` is where the rows of expert i end; those of the next begin at the next multiple of the
    alignment.
    """
    row_R = torch.arange(num_rows, device=psum_e.device)
    next_e = _aligned(psum_e)
    expert_R = torch.searchsorted(next_e, row_R.to(next_e.dtype), right=True)
    return torch.where(row_R < psum_e[expert_R], expert_R, -1)[:, None]


def expanded_groups(psum_e: Tensor) -> Groups:
    """Groups of the expanded layout as a grouped product takes them: with the rows that pad each."""
    next_e = _aligned(psum_e)
    first_e = torch.cat([next_e.new_zeros(1), next_e[:-1]])
    return Groups(end_e=next_e.int(), count_e=psum_e - first_e)


def _aligned(psum_e: Tensor) -> Tensor:
    return (psum_e + EXPERT_ALIGNMENT - 1) // EXPERT_ALIGNMENT * EXPERT_ALIGNMENT


def make_deepep(group: dist.ProcessGroup, settings: DeepEPConfig, shape: ExchangeShape) -> DeepEPDispatcher:
    """Build the buffer, on every rank of the group at once; never another dispatcher, layout or version."""
    module = load_library(settings)
    if torch.are_deterministic_algorithms_enabled():
        # the library refuses it: the fill may run while a kernel of its own stream already writes
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # the group's communicator exists only after a collective, and the library takes it as it finds it
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    means = f"deep_ep {library_version(module)} {settings.api} at {module.__file__}"
    if settings.api == "legacy":
        return DeepEPDispatcher(
            group, LegacyTransport(_legacy_buffer(module, group, settings, shape)), settings, means
        )
    buffer = module.ElasticBuffer(
        group,
        num_max_tokens_per_rank=settings.max_tokens,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        use_fp8_dispatch=False,  # sized for the backward pass, whose dispatch is bfloat16 in any case
        deterministic=shape.deterministic,
        allow_hybrid_mode=settings.hybrid,
        num_allocated_qps=settings.num_qps,
        num_cpu_timeout_secs=shape.timeout_seconds,
        num_gpu_timeout_secs=shape.timeout_seconds,
        explicitly_destroy=True,  # a destructor would wait for the other ranks, after an error too
    )
    means += f", buffer {buffer.num_bytes / 2**20:.0f} MiB"
    return DeepEPDispatcher(group, ElasticTransport(buffer, settings), settings, means)


def load_library(settings: DeepEPConfig) -> Any:
    """The installed ``deep_ep``, if it has what the settings ask for."""
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        raise RuntimeError(
            f"dispatcher 'deepep' must find the package deep_ep, got: {error}. Use an image that has it, or "
            "set train.dispatcher to 'all_to_all'."
        ) from error
    wanted = {"elastic": "ElasticBuffer", "legacy": "Buffer"}[settings.api]
    found = f"deep_ep {library_version(module)} at {getattr(module, '__file__', None)}"
    if not hasattr(module, wanted):
        raise RuntimeError(
            f"deepep.api {settings.api!r} must find {wanted}, got {found} without it. Install DeepEP "
            f"{'2.0 or newer' if settings.api == 'elastic' else 'from its repository'}, or set deepep.api to "
            f"{'legacy' if settings.api == 'elastic' else 'elastic'!r}."
        )
    if settings.layout == "expanded":
        options = inspect.signature(module.ElasticBuffer.dispatch).parameters
        if "do_zero_padding" not in options:
            raise RuntimeError(
                "deepep.layout 'expanded' must find a version that combines weights of expanded rows (2.1 or "
                f"newer), got {found}. Set deepep.layout to 'compact'."
            )
    return module


def library_version(module: Any) -> str:
    if version := getattr(module, "__version__", None):
        return str(version)
    try:
        return importlib.metadata.version("deep_ep")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _legacy_buffer(
    module: Any, group: dist.ProcessGroup, settings: DeepEPConfig, shape: ExchangeShape
) -> Any:
    module.Buffer.set_num_sms(settings.num_sms)
    num_ranks, row_bytes = group.size(), shape.hidden * 2
    configs = module.Buffer.get_dispatch_config(num_ranks), module.Buffer.get_combine_config(num_ranks)
    return module.Buffer(
        group,
        num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        num_rdma_bytes=max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        num_qps_per_rank=settings.num_qps,
        explicitly_destroy=True,
    )
