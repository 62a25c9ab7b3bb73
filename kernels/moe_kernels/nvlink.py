"""Exchange of tokens between ranks that can address each other's memory: copy out to experts, sum back.

Shape key: T tokens of this rank, N tokens of a rank at most, K selections, D features, W ranks, E experts,
e experts of this rank, P rows in expert order.

A token crosses to a rank once, however many of that rank's experts it selected. Out: every rank leaves its
tokens in its own memory (``stage``), and the owners of experts fetch them and write a row for each of their
experts (``expand``). Back: owners add up a token's rows and write one sum into the memory of its source
(``contract``), which adds those of all ranks (``collect``). Rows lie by expert, then by source rank, then by
token (``place``): an order that every rank works out for itself from all ranks' counts, so it never varies.

Between the two halves of each direction all ranks must have passed a barrier; the caller has it. On CPU the
formulas below run, on CUDA those of ``nvlink_triton`` with the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from moe_kernels import device, reference

MAX_EXPERTS = 1024
ALIGNMENT = 256
"""Of each array in a rank's memory, in bytes."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The same array of every rank, this rank's own among them."""

    views: tuple[Tensor, ...]
    address_W: Tensor
    """Where they begin, on the device: kernels address other ranks' memory by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """What every rank holds for the others to read (staged) or to write into (delivered)."""

    rank: int
    tokens_ND: Shared
    expert_NK: Shared
    ordinal_NK: Shared
    """How many earlier cells of the same rank have the same expert."""
    weight_NK: Shared
    count_C: Shared
    """Cells of each expert; then, at E and E + 1, cells above the last expert, and tokens."""
    sums_WND: Shared
    """Delivered by each rank: what its experts make of this rank's tokens."""
    gradient_NK: Shared
    """Delivered: gradients of routing weights."""

    @property
    def num_ranks(self) -> int:
        return len(self.tokens_ND.views)

    @property
    def max_tokens(self) -> int:
        return self.tokens_ND.views[0].shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Which row each cell of every rank has here, and what is known of the rows."""

    slot_WNK: Tensor
    """int32; -1 where this rank does not own the expert, or where there is no cell."""
    end_e: Tensor
    """int32; where each expert's rows end, at most P."""
    count_e: Tensor
    """int32; how many there are, with those past P."""
    status: Tensor
    """int32: rows that there are; selections above the last expert, on all ranks; tokens of the rank with
    most; 1 if all rows have a place and all selections are known."""


def arrays(
    *, num_ranks: int, max_tokens: int, hidden: int, num_topk: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each array of a rank, in the order in which they lie."""
    cells = (max_tokens, num_topk)
    return {
        "tokens_ND": ((max_tokens, hidden), dtype),
        "sums_WND": ((num_ranks, max_tokens, hidden), dtype),
        "expert_NK": (cells, torch.int32),
        "ordinal_NK": (cells, torch.int32),
        "weight_NK": (cells, torch.float32),
        "gradient_NK": (cells, torch.float32),
        "count_C": ((MAX_EXPERTS + 2,), torch.int32),
    }


def num_bytes(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(_aligned(shape, dtype) for shape, dtype in shapes.values())


def carve(memory: list[Tensor], rank: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Buffers:
    """Views of all ranks' memory, each a tensor of ``num_bytes`` bytes."""
    shared, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        end = start + torch.Size(shape).numel() * dtype.itemsize
        views = tuple(part[start:end].view(dtype).view(shape) for part in memory)
        addresses = torch.tensor([view.data_ptr() for view in views], device=memory[rank].device)
        shared[name] = Shared(views, addresses)
        start += _aligned(shape, dtype)
    return Buffers(rank=rank, **shared)


def stage_tables(expert_TK: Tensor, weight_TK: Tensor, num_experts: int, buffers: Buffers) -> None:
    """Leave the selections where other ranks read them."""
    if triton := _triton(expert_TK):
        return triton.stage(None, expert_TK, weight_TK, num_experts, buffers)
    rank, num_tokens = buffers.rank, expert_TK.shape[0]
    is_of_CE = expert_TK.flatten()[:, None] == torch.arange(num_experts)
    before_CE = is_of_CE.cumsum(dim=0) - 1
    ordinal_C = torch.where(is_of_CE, before_CE, 0).sum(dim=1)
    buffers.expert_NK.views[rank][:num_tokens] = expert_TK
    buffers.ordinal_NK.views[rank][:num_tokens] = ordinal_C.view_as(expert_TK)
    buffers.weight_NK.views[rank][:num_tokens] = weight_TK
    num_unknown = (expert_TK >= num_experts).sum()
    counts = torch.cat([is_of_CE.sum(dim=0), torch.tensor([num_unknown, num_tokens])])
    buffers.count_C.views[rank][: num_experts + 2] = counts


def stage_rows(x_TD: Tensor, buffers: Buffers) -> None:
    """Leave the tokens where other ranks read them."""
    if triton := _triton(x_TD):
        return triton.stage(x_TD, None, None, 0, buffers)
    buffers.tokens_ND.views[buffers.rank][: x_TD.shape[0]] = x_TD


def stage_all(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, num_experts: int, buffers: Buffers) -> None:
    """Both, in one pass where that is faster."""
    if triton := _triton(x_TD):
        return triton.stage(x_TD, expert_TK, weight_TK, num_experts, buffers)
    stage_tables(expert_TK, weight_TK, num_experts, buffers)
    stage_rows(x_TD, buffers)


def place(num_experts: int, num_rows: int, buffers: Buffers) -> tuple[Rows, Tensor, Tensor]:
    """Work out the rows of this rank from the tables of all; those past ``num_rows`` have no place.

    Then, for each place, the number of its expert on this rank and the routing weight; -1 and 0 where no row
    came.
    """
    if triton := _triton(buffers.count_C.address_W):
        return triton.place(num_experts, num_rows, buffers)
    num_ranks, (max_tokens, num_topk) = buffers.num_ranks, buffers.expert_NK.views[0].shape
    num_local = num_experts // num_ranks
    start = buffers.rank * num_local
    counts_WC = torch.stack([view[: num_experts + 2].long() for view in buffers.count_C.views])
    counts_We = counts_WC[:, start : start + num_local]
    end_e = counts_We.sum(dim=0).cumsum(dim=0)
    first_We = end_e - counts_We.sum(dim=0) + counts_We.cumsum(dim=0) - counts_We
    slot_WNK = torch.full((num_ranks, max_tokens, num_topk), -1, dtype=torch.int32)
    expert_P = torch.full((num_rows,), -1)
    weight_P = torch.zeros(num_rows)
    for source, num_tokens in enumerate(counts_WC[:, num_experts + 1].tolist()):
        local_TK = buffers.expert_NK.views[source][:num_tokens].long() - start
        is_here_TK = (local_TK >= 0) & (local_TK < num_local)
        slot_TK = first_We[source][local_TK.clamp(0, num_local - 1)]
        slot_TK = slot_TK + buffers.ordinal_NK.views[source][:num_tokens]
        is_here_TK &= slot_TK < num_rows
        slot_WNK[source, :num_tokens] = torch.where(is_here_TK, slot_TK, -1)
        expert_P[slot_TK[is_here_TK]] = local_TK[is_here_TK]
        weight_P[slot_TK[is_here_TK]] = buffers.weight_NK.views[source][:num_tokens][is_here_TK]
    num_unknown = counts_WC[:, num_experts].sum()
    is_whole = (end_e[-1] <= num_rows) & (num_unknown == 0)
    longest = counts_WC[:, num_experts + 1].max()
    rows = Rows(
        slot_WNK=slot_WNK,
        end_e=end_e.clamp(max=num_rows).int(),
        count_e=counts_We.sum(dim=0).int(),
        status=torch.stack([end_e[-1], num_unknown, longest, is_whole]).int(),
    )
    return rows, expert_P, weight_P


def expand(rows: Rows, num_rows: int, buffers: Buffers) -> Tensor:
    """Fetch every rank's staged tokens into [P, D]; rows past the last hold anything."""
    if triton := _triton(rows.slot_WNK):
        return triton.expand(rows, num_rows, buffers)
    example_ND = buffers.tokens_ND.views[buffers.rank]
    out_PD = example_ND.new_empty(num_rows, example_ND.shape[1])
    for tokens_ND, slot_NK in zip(buffers.tokens_ND.views, rows.slot_WNK, strict=True):
        token, place = (slot_NK >= 0).nonzero(as_tuple=True)
        out_PD[slot_NK[token, place].long()] = tokens_ND[token]
    return out_PD


def contract(y_PD: Tensor, gradient_P: Tensor | None, rows: Rows, buffers: Buffers) -> None:
    """Deliver to each token's source the sum of its rows and, if given, a gradient for each of its cells."""
    if triton := _triton(y_PD):
        return triton.contract(y_PD, gradient_P, rows, buffers)
    for source, slot_NK in enumerate(rows.slot_WNK):
        is_sent_N = (slot_NK >= 0).any(dim=1)
        slot_SK = slot_NK[is_sent_N].long()
        if slot_SK.numel():
            buffers.sums_WND.views[source][buffers.rank, is_sent_N] = reference.sum_rows(y_PD, slot_SK)
        if gradient_P is not None:
            buffers.gradient_NK.views[source][slot_NK >= 0] = gradient_P[slot_NK[slot_NK >= 0].long()]


def collect(
    expert_TK: Tensor, num_experts: int, buffers: Buffers, *, has_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Add up what the owners of a token's experts delivered: in float32, by rank, rounded once.

    Then, if asked for, the delivered gradient of each routing weight; 0 where nothing was selected.
    """
    if triton := _triton(expert_TK):
        return triton.collect(expert_TK, num_experts, buffers, has_gradient=has_gradient)
    num_local, num_tokens = num_experts // buffers.num_ranks, expert_TK.shape[0]
    sums_WND = buffers.sums_WND.views[buffers.rank]
    wide = torch.promote_types(sums_WND.dtype, torch.float32)
    total_TD = torch.zeros(num_tokens, sums_WND.shape[2], dtype=wide)
    for owner, sums_ND in enumerate(sums_WND):
        first = owner * num_local
        is_sent_T = ((expert_TK >= first) & (expert_TK < first + num_local)).any(dim=1)
        total_TD += torch.where(is_sent_T[:, None], sums_ND[:num_tokens].to(wide), 0)
    gradient_TK = None
    if has_gradient:
        gradient_TK = torch.where(expert_TK >= 0, buffers.gradient_NK.views[buffers.rank][:num_tokens], 0)
    return total_TD.to(sums_WND.dtype), gradient_TK


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _triton(tensor: Tensor) -> ModuleType | None:
    if not device.takes_triton(tensor):
        return None
    from moe_kernels import nvlink_triton

    return nvlink_triton
