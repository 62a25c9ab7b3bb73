"""DeepEP's documented calls, over gloo and in the least convenient way: for the adapter's tests without GPUs.

It checks what the adapter's tensor logic makes of those tuples, and what it passes; whether the library keeps
its documentation is for the GPU tests. What is documented as unspecified holds poison here: rows arrive in a
shuffled order, weights of selections elsewhere are NaN, and so are rows of the expanded layout that only pad
unless zeros were asked for.

Shape key: T tokens of this rank, K selections, D features, W ranks, R rows received, A rows after expansion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass
class Handle:
    """Where each received row came from, and where its copies are."""

    num_sms: int
    num_experts: int
    topk_idx: Tensor
    source_R: list[tuple[int, int]]  # (rank, token)
    slot_RK: Tensor  # place of each selection's copy in the expanded layout, -1 where there is none
    psum_num_recv_tokens_per_expert: Tensor
    num_rows: int
    is_expanded: bool


class ElasticBuffer:
    """Of version 2.1."""

    num_bytes = 2**21

    def __init__(self, group: dist.ProcessGroup, **options: Any):
        self.group, self.options, self.is_destroyed = group, options, False
        self.generator = torch.Generator().manual_seed(group.rank())
        self.calls: list[tuple[str, int, int]] = []

    def dispatch(
        self, x: Any, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        num_experts: int | None = None, num_max_tokens_per_rank: int | None = None,
        expert_alignment: int = 1, num_sms: int = 0, num_qps: int = 0, handle: Handle | None = None,
        do_cpu_sync: bool | None = None, do_expand: bool = False, do_zero_padding: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, Handle, None]:  # fmt: skip
        parts = x if isinstance(x, tuple) else (x,)
        self.calls.append(("resend" if handle is not None else "dispatch", num_sms, num_qps))
        assert parts[0].dtype == (torch.float8_e4m3fn if isinstance(x, tuple) else torch.bfloat16)
        assert all(part.is_contiguous() for part in parts)
        if handle is None:
            assert topk_idx is not None and num_experts is not None and do_cpu_sync
            assert num_max_tokens_per_rank == self.options["num_max_tokens_per_rank"] >= len(topk_idx)
            assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
            assert topk_weights is not None and topk_weights.dtype == torch.float32
            handle = self._route(topk_idx, num_experts, num_sms, expert_alignment if do_expand else 0)
        else:
            assert topk_idx is None and do_cpu_sync is None and num_sms == handle.num_sms
        # 8-bit floats neither travel nor stack: as bytes they do, and 127 is the NaN among them
        parts = tuple(part.view(torch.uint8) if part.itemsize == 1 else part for part in parts)
        sent = gather_all((parts, handle.topk_idx, topk_weights), self.group)
        rows = tuple(
            torch.stack([sent[r][0][i][t] for r, t in handle.source_R]) if handle.source_R
            else part.new_empty((0, *part.shape[1:]))
            for i, part in enumerate(parts)
        )  # fmt: skip
        start, count = self._experts(handle.num_experts)
        expert_RK = _stack([sent[r][1][t] for r, t in handle.source_R], handle.topk_idx) - start
        expert_RK = torch.where((expert_RK >= 0) & (expert_RK < count), expert_RK, -1)
        weight_RK = None
        if topk_weights is not None:
            weight_RK = _stack([sent[r][2][t] for r, t in handle.source_R], topk_weights)
            weight_RK = torch.where(expert_RK >= 0, weight_RK, torch.nan)
        if do_expand:
            is_copied = handle.slot_RK >= 0
            row_P = is_copied.nonzero()[:, 0]
            expanded = []
            for part in rows:
                poison = 127 if part.dtype == torch.uint8 else torch.nan
                out = part.new_full((handle.num_rows, *part.shape[1:]), 0 if do_zero_padding else poison)
                out[handle.slot_RK[is_copied]] = part[row_P]
                expanded.append(out)
            rows = tuple(expanded)
            if weight_RK is not None:
                weight_A = torch.full((handle.num_rows,), torch.nan)
                weight_A[handle.slot_RK[is_copied]] = weight_RK[is_copied]
                weight_RK = weight_A
        rows = tuple(row.view(torch.float8_e4m3fn) if row.itemsize == 1 else row for row in rows)
        received = rows if isinstance(x, tuple) else rows[0]
        return received, None if do_expand else expert_RK, weight_RK, handle, None

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
    ) -> tuple[Tensor, Tensor | None, None]:
        self.calls.append(("combine", num_sms, num_qps))
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert len(x) == handle.num_rows
        x_RD, weight_RK = x.float(), topk_weights
        if handle.is_expanded:
            is_copied = handle.slot_RK >= 0
            padded = torch.cat([x.float(), x.new_zeros((1, x.shape[1]))])  # row -1
            x_RD = torch.where(is_copied[:, :, None], padded[handle.slot_RK], 0).sum(dim=1)
            if topk_weights is not None:
                assert topk_weights.dim() == 1
                weight_RK = torch.cat([topk_weights, topk_weights.new_zeros(1)])[handle.slot_RK]
        sent = gather_all((handle.source_R, x_RD, weight_RK), self.group)
        y_TD = torch.zeros(len(handle.topk_idx), x.shape[1])
        weight_TK = torch.full(handle.topk_idx.shape, torch.nan)
        count = handle.num_experts // self.group.size()
        for rank, (sources, theirs_RD, weights) in enumerate(sent):
            for row, (source, token) in enumerate(sources):
                if source != self.group.rank():
                    continue
                y_TD[token] += theirs_RD[row]
                is_theirs_K = handle.topk_idx[token].div(count, rounding_mode="floor") == rank
                if weights is not None:
                    weight_TK[token] = torch.where(is_theirs_K, weights[row], weight_TK[token])
        return y_TD.bfloat16(), None if topk_weights is None else weight_TK, None

    def destroy(self) -> None:
        self.is_destroyed = True

    def _experts(self, num_experts: int) -> tuple[int, int]:
        count = num_experts // self.group.size()
        return self.group.rank() * count, count

    def _route(self, topk_idx: Tensor, num_experts: int, num_sms: int, alignment: int) -> Handle:
        start, count = self._experts(num_experts)
        chosen = gather_all(topk_idx, self.group)
        source_R = [
            (rank, token)
            for rank, expert_TK in enumerate(chosen)
            for token in range(len(expert_TK))
            if ((expert_TK[token] >= start) & (expert_TK[token] < start + count)).any()
        ]
        source_R = [source_R[i] for i in torch.randperm(len(source_R), generator=self.generator)]
        expert_RK = _stack([chosen[r][t] for r, t in source_R], topk_idx) - start
        slot_RK, ends, begin = torch.full_like(expert_RK, -1), [], 0
        if alignment:
            for expert in range(count):
                is_mine = expert_RK == expert
                slot_RK[is_mine] = begin + torch.randperm(int(is_mine.sum()), generator=self.generator)
                ends.append(begin + int(is_mine.sum()))
                begin = -(-ends[-1] // alignment) * alignment
        return Handle(
            num_sms=num_sms, num_experts=num_experts, topk_idx=topk_idx.clone(), source_R=source_R,
            slot_RK=slot_RK,
            psum_num_recv_tokens_per_expert=torch.tensor(ends, dtype=torch.int32),
            num_rows=begin if alignment else len(source_R), is_expanded=bool(alignment),
        )  # fmt: skip


class Buffer:
    """Of version 1, in the terms of the other."""

    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, **options: Any):
        self.inner = ElasticBuffer(group, num_max_tokens_per_rank=2**30, **options)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, None, Any, Any, None]:
        count = num_experts // self.inner.group.size()
        owner_TK = topk_idx.div(count, rounding_mode="floor")
        is_sent_TW = (owner_TK[:, :, None] == torch.arange(self.inner.group.size())).any(dim=1)
        per_expert = (topk_idx[:, :, None] == torch.arange(num_experts)).sum(dim=(0, 1)).int()
        return is_sent_TW.sum(dim=0).int(), None, per_expert, is_sent_TW, None

    def dispatch(
        self, x: Any, handle: Handle | None = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None, num_tokens_per_expert: Any = None,
        topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
    ) -> tuple[Any, Any, Any, Any, Any, None]:  # fmt: skip
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self.inner.dispatch(x, handle=handle)[0], None, None, None, None, None
        assert num_tokens_per_rank is not None and is_token_in_rank is not None
        received, expert_RK, weight_RK, handle, _ = self.inner.dispatch(
            x, topk_idx, topk_weights, len(num_tokens_per_expert), 2**30, do_cpu_sync=True
        )
        return received, expert_RK, weight_RK, [], handle, None

    def combine(self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None) -> tuple[Any, Any, None]:
        return self.inner.combine(x, handle, topk_weights)

    def destroy(self) -> None:
        self.inner.destroy()


def _stack(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_empty((0, like.shape[1]))
