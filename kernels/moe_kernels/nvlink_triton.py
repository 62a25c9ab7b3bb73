"""``nvlink`` in Triton: each byte crosses once, and each row is written or read once.

Shape key: T tokens of this rank, N tokens of a rank at most, K selections, D features, W ranks, E experts,
e experts of this rank, P rows in expert order.

Other ranks' arrays come as addresses, one a rank, in a tensor on the device. How many tokens another rank has
is known on the device only, so ``expand`` and ``contract`` run a fixed number of programs that share out what
there is. They take ranks in turn, so that the link and this card's own memory are busy all the time.
"""

# Triton is not installed where types are checked, and its kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.nvlink import Buffers, Rows

CELLS, CHUNK, COPY = 1024, 4096, 4096
NUM_SMS = 132


@dataclass(frozen=True, slots=True)
class Tile:
    """Features a program holds at a time, its warps, and programs a multiprocessor."""

    block: int
    num_warps: int
    programs: int

    @property
    def grid(self) -> tuple[int]:
        return (NUM_SMS * self.programs,)


EXPAND = Tile(1024, 4, 16)
CONTRACT = Tile(2048, 4, 8)


def stage(
    x_TD: Tensor | None,
    expert_TK: Tensor | None,
    weight_TK: Tensor | None,
    num_experts: int,
    buffers: Buffers,
) -> None:
    rank = buffers.rank
    own_ND, num_cells, num_tokens, num_tables = buffers.tokens_ND.views[rank], 0, 0, 0
    num_elements = x_TD.numel() if x_TD is not None else 0
    if expert_TK is not None:
        num_tokens, num_cells = expert_TK.shape[0], expert_TK.numel()
        num_tables = num_experts + 1 + triton.cdiv(num_cells, CELLS)
    grid = num_tables + triton.cdiv(num_elements, COPY)
    if grid:
        _stage_kernel[(grid,)](
            own_ND if x_TD is None else x_TD,
            buffers.expert_NK.views[rank] if expert_TK is None else expert_TK,
            buffers.weight_NK.views[rank] if weight_TK is None else weight_TK,
            own_ND, buffers.expert_NK.views[rank], buffers.ordinal_NK.views[rank],
            buffers.weight_NK.views[rank], buffers.count_C.views[rank],
            num_tables, num_experts, num_tokens, num_cells, num_elements,
            CELLS=CELLS, CHUNK=CHUNK, COPY=COPY, num_warps=4,
        )  # fmt: skip


def place(num_experts: int, num_rows: int, buffers: Buffers) -> tuple[Rows, Tensor, Tensor]:
    num_ranks, (max_tokens, num_topk) = buffers.num_ranks, buffers.expert_NK.views[0].shape
    num_local, device = num_experts // num_ranks, buffers.count_C.address_W.device
    numbers = {"dtype": torch.int32, "device": device}
    slot_WNK, status = torch.empty(num_ranks, max_tokens, num_topk, **numbers), torch.empty(4, **numbers)
    bound_2e = torch.empty(2, num_local, **numbers)
    expert_P = torch.empty(num_rows, dtype=torch.int64, device=device)
    weight_P = torch.empty(num_rows, dtype=torch.float32, device=device)
    _place_kernel[(num_ranks, triton.cdiv(max_tokens * num_topk, CELLS))](
        buffers.expert_NK.address_W, buffers.ordinal_NK.address_W, buffers.weight_NK.address_W,
        buffers.count_C.address_W, slot_WNK, expert_P, weight_P, bound_2e, status,
        buffers.rank, num_experts, num_local, max_tokens * num_topk, num_rows,
        W=num_ranks, K=num_topk, LOCAL=triton.next_power_of_2(num_local), CELLS=CELLS, num_warps=4,
    )  # fmt: skip
    end_e, count_e = bound_2e.unbind()
    return Rows(slot_WNK=slot_WNK, end_e=end_e, count_e=count_e, status=status), expert_P, weight_P


def expand(rows: Rows, num_rows: int, buffers: Buffers) -> Tensor:
    num_ranks, max_tokens, num_topk = rows.slot_WNK.shape
    own_ND = buffers.tokens_ND.views[buffers.rank]
    width = own_ND.shape[1]
    out_PD = own_ND.new_empty(num_rows, width)
    if num_rows:
        _expand_kernel[EXPAND.grid](
            buffers.tokens_ND.address_W, rows.slot_WNK, rows.status, out_PD, width, max_tokens,
            W=num_ranks, K=num_topk, BLOCK=EXPAND.block, num_warps=EXPAND.num_warps,
        )  # fmt: skip
    return out_PD


def contract(y_PD: Tensor, gradient_P: Tensor | None, rows: Rows, buffers: Buffers) -> None:
    num_ranks, max_tokens, num_topk = rows.slot_WNK.shape
    if y_PD.shape[0]:
        _contract_kernel[CONTRACT.grid](
            y_PD, rows.slot_WNK if gradient_P is None else gradient_P, rows.slot_WNK, rows.status,
            buffers.sums_WND.address_W, buffers.gradient_NK.address_W,
            buffers.rank, y_PD.shape[1], max_tokens,
            W=num_ranks, K=num_topk, PLACES=triton.next_power_of_2(num_topk),
            HAS_GRADIENT=gradient_P is not None, BLOCK=CONTRACT.block, num_warps=CONTRACT.num_warps,
        )  # fmt: skip


def collect(
    expert_TK: Tensor, num_experts: int, buffers: Buffers, *, has_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    sums_WND, own_NK = buffers.sums_WND.views[buffers.rank], buffers.gradient_NK.views[buffers.rank]
    (num_ranks, max_tokens, width), (num_tokens, num_topk) = sums_WND.shape, expert_TK.shape
    out_TD = sums_WND.new_empty(num_tokens, width)
    gradient_TK = own_NK.new_empty(num_tokens, num_topk) if has_gradient else None
    if num_tokens:
        block = 1024
        _collect_kernel[(num_tokens, triton.cdiv(width, block))](
            sums_WND, expert_TK, own_NK, out_TD, own_NK if gradient_TK is None else gradient_TK,
            num_experts // num_ranks, width, max_tokens, W=num_ranks, K=num_topk,
            PLACES=triton.next_power_of_2(num_topk), HAS_GRADIENT=has_gradient, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out_TD, gradient_TK


@triton.jit
def _stage_kernel(
    x, experts, weights, out_tokens, out_experts, out_ordinals, out_weights, out_counts,
    num_tables, num_experts, num_tokens, num_cells, num_elements,
    CELLS: tl.constexpr, CHUNK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < num_tables:
        if program <= num_experts:  # one expert's cells in order; the last program finds those above all
            seen = 0
            for first in range(0, num_cells, CHUNK):
                cell = first + tl.arange(0, CHUNK)
                number = tl.load(experts + cell, mask=cell < num_cells, other=-1)
                is_mine = tl.where(program < num_experts, number == program, number >= num_experts)
                ordinal = seen + tl.cumsum(is_mine.to(tl.int32), 0) - 1
                tl.store(out_ordinals + cell, ordinal, mask=is_mine)
                seen += tl.sum(is_mine.to(tl.int32), 0)
            tl.store(out_counts + program, seen)
            if program == num_experts:
                tl.store(out_counts + num_experts + 1, num_tokens)
        else:
            cell = (program - num_experts - 1) * CELLS + tl.arange(0, CELLS)
            is_in = cell < num_cells
            number = tl.load(experts + cell, mask=is_in, other=-1)
            tl.store(out_experts + cell, number.to(tl.int32), mask=is_in)
            tl.store(out_weights + cell, tl.load(weights + cell, mask=is_in), mask=is_in)
    else:
        element = (program - num_tables).to(tl.int64) * COPY + tl.arange(0, COPY)
        is_in = element < num_elements
        tl.store(out_tokens + element, tl.load(x + element, mask=is_in), mask=is_in)


@triton.jit
def _place_kernel(
    experts, ordinals, weights, counts, slots, row_experts, row_weights, bounds, status,
    rank, num_experts, num_local, max_cells, num_rows,
    W: tl.constexpr, K: tl.constexpr, LOCAL: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    source, block = tl.program_id(0), tl.program_id(1)
    local = tl.arange(0, LOCAL)
    total, before = tl.zeros([LOCAL], tl.int32), tl.zeros([LOCAL], tl.int32)
    num_unknown, longest, num_tokens = 0, 0, 0
    for other in tl.static_range(W):
        count = tl.load(counts + other).to(tl.pointer_type(tl.int32))
        here = tl.load(count + rank * num_local + local, mask=local < num_local, other=0)
        total += here
        before += tl.where(other < source, here, 0)
        num_unknown += tl.load(count + num_experts)
        tokens = tl.load(count + num_experts + 1)
        longest = tl.maximum(longest, tokens)
        num_tokens = tl.where(other == source, tokens, num_tokens)
    end, last = tl.cumsum(total, 0), tl.sum(total, 0)
    start = end - total + before
    if (source == 0) & (block == 0):
        tl.store(bounds + local, tl.minimum(end, num_rows), mask=local < num_local)
        tl.store(bounds + num_local + local, total, mask=local < num_local)
        tl.store(status, last)
        tl.store(status + 1, num_unknown)
        tl.store(status + 2, longest)
        tl.store(status + 3, ((last <= num_rows) & (num_unknown == 0)).to(tl.int32))

    cell = block * CELLS + tl.arange(0, CELLS)
    is_cell = cell < num_tokens * K
    number = tl.load(tl.load(experts + source).to(tl.pointer_type(tl.int32)) + cell, mask=is_cell, other=-1)
    number -= rank * num_local
    is_here = is_cell & (number >= 0) & (number < num_local)
    ordinal = tl.load(tl.load(ordinals + source).to(tl.pointer_type(tl.int32)) + cell, mask=is_here, other=0)
    weight = tl.load(
        tl.load(weights + source).to(tl.pointer_type(tl.float32)) + cell, mask=is_here, other=0.0
    )
    slot = tl.gather(start, tl.where(is_here, number, 0), 0) + ordinal
    is_here &= slot < num_rows
    tl.store(slots + source * max_cells + cell, tl.where(is_here, slot, -1), mask=cell < max_cells)
    tl.store(row_experts + slot, number.to(tl.int64), mask=is_here)
    tl.store(row_weights + slot, weight, mask=is_here)

    row = (source * tl.num_programs(1) + block) * CELLS + tl.arange(0, CELLS)
    is_past = (row >= last) & (row < num_rows)
    tl.store(row_experts + row, tl.full([CELLS], -1, tl.int64), mask=is_past)
    tl.store(row_weights + row, tl.zeros([CELLS], tl.float32), mask=is_past)


@triton.jit
def _expand_kernel(
    tokens, slots, status, out, width, max_tokens, W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    num_blocks = tl.cdiv(width, BLOCK)
    num_parts = tl.load(status + 2) * W * num_blocks
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        row, column = part // num_blocks, (part % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        token, source = row // W, row % W
        place = slots + (source * max_tokens + token) * K
        highest = tl.load(place)
        for k in tl.static_range(1, K):
            highest = tl.maximum(highest, tl.load(place + k))
        base = tl.load(tokens + source).to(tl.pointer_type(out.dtype.element_ty))
        base = tl.multiple_of(base, 16)
        is_in = column < width
        value = tl.load(base + token.to(tl.int64) * width + column, mask=is_in & (highest >= 0))
        for k in tl.static_range(K):
            slot = tl.load(place + k).to(tl.int64)
            tl.store(out + slot * width + column, value, mask=is_in & (slot >= 0))


@triton.jit
def _contract_kernel(
    y, gradients, slots, status, sums, out_gradients, rank, width, max_tokens,
    W: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(width, BLOCK)
    num_parts = tl.load(status + 2) * W * num_blocks
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        row, column = part // num_blocks, (part % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        token, source = row // W, row % W
        place = slots + (source * max_tokens + token) * K
        is_in, highest = column < width, -1
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            slot = tl.load(place + k)
            highest = tl.maximum(highest, slot)
            value = tl.load(y + slot.to(tl.int64) * width + column, mask=is_in & (slot >= 0), other=0.0)
            total += value.to(tl.float32)
        base = tl.load(sums + source).to(tl.pointer_type(y.dtype.element_ty))
        base = tl.multiple_of(base, 16) + (rank * max_tokens + token).to(tl.int64) * width
        tl.store(base + column, total.to(y.dtype.element_ty), mask=is_in & (highest >= 0))
        if HAS_GRADIENT and part % num_blocks == 0:
            cell = tl.arange(0, PLACES)
            row_of = tl.load(place + cell, mask=cell < K, other=-1)
            out = tl.load(out_gradients + source).to(tl.pointer_type(tl.float32)) + token * K
            tl.store(out + cell, tl.load(gradients + row_of, mask=row_of >= 0), mask=row_of >= 0)


@triton.jit
def _collect_kernel(
    sums, experts, gradients, out, out_gradients, num_local, width, max_tokens,
    W: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for owner in tl.static_range(W):
        is_sent = False
        for k in tl.static_range(K):
            number = tl.load(experts + token * K + k)
            is_sent |= (number >= owner * num_local) & (number < (owner + 1) * num_local)
        place = sums + (owner * max_tokens + token) * width + column
        total += tl.load(place, mask=is_in & is_sent, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=is_in)
    if HAS_GRADIENT and tl.program_id(1) == 0:
        cell = tl.arange(0, PLACES)
        selected = tl.load(experts + token * K + cell, mask=cell < K, other=-1)
        gradient = tl.load(gradients + token * K + cell, mask=selected >= 0, other=0.0)
        tl.store(out_gradients + token * K + cell, gradient, mask=cell < K)
