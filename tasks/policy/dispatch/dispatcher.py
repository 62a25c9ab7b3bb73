"""Send each token to the ranks that own its experts, and bring the results back.

Shape key: T tokens of this rank, K selections a token, D features, W ranks, S (token, rank) pairs sent,
R rows received. A token travels once to a rank however many of that rank's experts it selected.

All calls are collective: every rank must make equally many, also with zero tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.policy.dispatch.permute import Placement, gather_rows, invert, sum_rows
from tasks.policy.ranks.progress import BLOCKED
from tasks.section import divisors


class Groups(NamedTuple):
    """The rows of each local expert. Others among them hold zeros, those past the last anything; both have
    expert -1 and weight 0."""

    end_e: Tensor
    """int32"""
    count_e: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows that reached this rank, one a (token, destination rank).

    A token that selected local experts 2 and 0 here, and one expert elsewhere:
        expert_RK = [2, -1, 0]    weight_RK = [0.5, (unspecified), 0.3]
    """

    x_RD: Tensor
    expert_RK: Tensor
    """Local expert numbers; -1 where the selection belongs to another rank or is none."""
    weight_RK: Tensor
    """Routing weights; unspecified where ``expert_RK`` is -1, so select with ``where``, never multiply."""
    handle: Any
    """What ``combine`` needs to find the way back."""
    groups: Groups | None = None
    """If rows are one a (token, expert) and lie by expert: they go into a grouped product as they are."""
    num_pairs: int | None = None
    """How many selections in ``expert_RK`` are experts', or a number above it; None if only the device knows,
    so that whoever takes memory for them has to ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeShape:
    """What the memory of an exchange is sized by beside its settings, and how long it may wait."""

    hidden: int
    num_topk: int
    deterministic: bool
    timeout_seconds: int
    """Longer than the slowest rank may come late to an exchange."""
    dtype: torch.dtype = torch.bfloat16


class Dispatcher(Protocol):
    """Exchange of tokens between the ranks that hold disjoint experts, in contiguous blocks by rank."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Dispatched:
        """Send tokens out by global expert number; -1 is no selection."""
        ...

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        """Sum the rows of each token at its source; the caller has applied the weights, so that a row without
        an expert is zero."""
        ...

    def describe(self) -> str:
        """What is in use, for the report of a run."""
        ...

    def close(self) -> None:
        """Let go of buffers, on every rank at once and before the process group ends."""
        ...


class LocalDispatcher:
    """One rank owns every expert, so nothing travels and a token without selections keeps its row."""

    num_ranks = 1
    rank = 0

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Dispatched:
        check_inputs(x_TD, expert_TK, weight_TK)
        # missing selections are few, so that memory for all of them costs less than to count those there are
        return Dispatched(
            x_RD=x_TD, expert_RK=expert_TK, weight_RK=weight_TK, handle=None, num_pairs=expert_TK.numel()
        )

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        return y_RD

    def describe(self) -> str:
        return "local, 1 rank"

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Route:
    placement: Placement  # of the sent copies among this rank's tokens; a place is a destination rank
    destination_S: Tensor
    sent_W: list[int]
    received_W: list[int]
    num_pairs: int


class AllToAllDispatcher:
    """Reference exchange over ``torch.distributed`` (gloo or NCCL): rows, expert numbers, weights, counts."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Dispatched:
        check_inputs(x_TD, expert_TK, weight_TK)
        num_local = experts_per_rank(num_experts, self.num_ranks)
        # floor division keeps -1 (no selection) out of every rank's block
        owner_TK = torch.div(expert_TK, num_local, rounding_mode="floor")
        route = self._route(owner_TK)
        token_S = route.placement.row_P
        is_owned_SK = owner_TK[token_S] == route.destination_S[:, None]
        local_SK = torch.where(is_owned_SK, expert_TK[token_S] % num_local, -1)
        (expert_RK,) = _exchange(self.group, route.sent_W, route.received_W, local_SK)
        x_RD, weight_RK = _Exchange.apply(
            self.group,
            route.sent_W,
            route.received_W,
            gather_rows(x_TD, route.placement),
            gather_rows(weight_TK, route.placement),
        )
        return Dispatched(
            x_RD=x_RD, expert_RK=expert_RK, weight_RK=weight_RK, handle=route, num_pairs=route.num_pairs
        )

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        (y_SD,) = _Exchange.apply(self.group, handle.received_W, handle.sent_W, y_RD)
        return sum_rows(y_SD, handle.placement)

    def describe(self) -> str:
        return f"all_to_all over {dist.get_backend(self.group)}, {self.num_ranks} ranks"

    def close(self) -> None:
        pass

    def _route(self, owner_TK: Tensor) -> _Route:
        """Who sends how many rows to whom; the only part of a dispatch in which the host waits."""
        num_tokens, ranks_W = owner_TK.shape[0], torch.arange(self.num_ranks, device=owner_TK.device)
        is_owned_WTK = owner_TK[None] == ranks_W[:, None, None]
        is_sent_WT = is_owned_WTK.any(dim=2)
        sent_W2 = torch.stack([is_sent_WT.sum(dim=1), is_owned_WTK.sum(dim=(1, 2))], dim=1)
        received_W2 = torch.empty_like(sent_W2)
        with BLOCKED:
            dist.all_to_all_single(received_W2, sent_W2, group=self.group)
        num_unknown = (owner_TK >= self.num_ranks).sum()
        sums = torch.stack([received_W2[:, 1].sum(), num_unknown])
        *rows, num_pairs, unknown = torch.cat([sent_W2[:, 0], received_W2[:, 0], sums]).tolist()
        if unknown:
            raise ValueError(
                f"expert_TK must be below num_experts, got {unknown} selections at or above it. "
                "Check that the router and the experts come from the same configuration."
            )
        sent_W, received_W = rows[: self.num_ranks], rows[self.num_ranks :]
        # by destination, then by token; what ``nonzero`` would find, for which the host would wait again
        order = is_sent_WT.flatten().to(torch.uint8).sort(descending=True, stable=True).indices
        place_S = order[: sum(sent_W)]
        to_rank_S, token_S = place_S // max(num_tokens, 1), place_S % max(num_tokens, 1)
        return _Route(
            placement=invert(token_S * self.num_ranks + to_rank_S, num_tokens, self.num_ranks),
            destination_S=to_rank_S,
            sent_W=sent_W,
            received_W=received_W,
            num_pairs=num_pairs,
        )


def make_dispatcher(
    name: Literal["local", "all_to_all", "deepep", "nvlink"],
    group: dist.ProcessGroup | None = None,
    build: Callable[[dist.ProcessGroup], Dispatcher] | None = None,
) -> Dispatcher:
    """The dispatcher of that name over the expert-parallel group (None is one rank); never another one.

    ``build`` makes 'deepep' or 'nvlink' over the group, by settings and sizes that the others do not have
    (``tasks/policy/dispatch/deepep.py``, ``nvlink.py``).
    """
    num_ranks = group.size() if group is not None else 1
    if name == "local":
        if num_ranks > 1:
            raise ValueError(
                f"dispatcher 'local' must run on 1 expert-parallel rank, got {num_ranks}. "
                "Use 'all_to_all', or set ep to 1."
            )
        return LocalDispatcher()
    names = ["local", "all_to_all", "deepep", "nvlink"]
    if name not in names:
        raise ValueError(f"dispatcher must be one of {names}, got {name!r}.")
    if group is None:
        raise ValueError(
            f"dispatcher {name!r} must be given an expert-parallel group, got None. "
            "Set ep above 1, or use 'local'."
        )
    if name == "all_to_all":
        return AllToAllDispatcher(group)
    if build is None:
        raise ValueError(f"dispatcher {name!r} must be given its settings and sizes, got None.")
    return build(group)


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """Size of a rank's contiguous block of experts."""
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts ({num_experts}) must be a multiple of the expert-parallel size ({num_ranks}); "
            f"choose one of {divisors(num_experts)}."
        )
    return num_experts // num_ranks


def check_inputs(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> None:
    """What every dispatcher demands of a call; reads shapes only, so it costs no synchronisation."""
    if expert_TK.shape != weight_TK.shape or expert_TK.shape[:1] != x_TD.shape[:1] or x_TD.dim() != 2:
        raise ValueError(
            "x_TD, expert_TK and weight_TK must agree on tokens T and selections K, got "
            f"{tuple(x_TD.shape)}, {tuple(expert_TK.shape)} and {tuple(weight_TK.shape)}. "
            "Flatten batch and sequence to one token axis first."
        )
    if expert_TK.dtype != torch.int64:
        raise ValueError(f"expert_TK must be int64, got {expert_TK.dtype}. Convert the router's indices.")


def require_room(x_TD: Tensor, max_tokens: int, *, section: str) -> None:
    """For dispatchers whose buffers are as large as their section of the configuration says."""
    if x_TD.shape[0] > max_tokens:
        raise ValueError(
            f"a dispatch must have at most {section}.max_tokens ({max_tokens}) tokens, got {x_TD.shape[0]}. "
            "Raise it to the longest micro-batch, or lower train.micro_batch_tokens."
        )


def refuse_replay() -> None:
    """For dispatchers whose order or buffers another pass would disturb."""
    # inside a backward pass only activation checkpointing calls a forward
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "an exchange must run once a pass, got one inside a backward pass: activation checkpointing "
            "repeats it, in an order that ranks need not share. Checkpoint what lies between exchanges only."
        )


def _exchange(
    group: dist.ProcessGroup, sent_W: list[int], received_W: list[int], *tensors: Tensor
) -> tuple[Tensor, ...]:
    received = tuple(t.new_empty((sum(received_W), *t.shape[1:])) for t in tensors)
    with BLOCKED:
        for out, tensor in zip(received, tensors, strict=True):
            dist.all_to_all_single(out, tensor.contiguous(), received_W, sent_W, group=group)
    return received


class _Exchange(torch.autograd.Function):
    """One node for all tensors of an exchange: every rank's backward makes the same calls in one order."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sent_W: list[int], received_W: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route = group, received_W, sent_W
        return _exchange(group, sent_W, received_W, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchange(*ctx.route, *grads)
