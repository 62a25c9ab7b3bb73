"""Which positions of a micro-batch the head reads: those before a trained token, and no others.

Shape key: B sequences, L tokens of the longest, l positions of this rank's block, N positions that are read,
D features.

Nothing asks for log-probabilities of prompts, padding or what a tool said, and the head's product is the
largest of a step. The positions are found where a micro-batch is put together, on the host: a GPU that
counted them would make it wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tasks.policy.parallel.context import my_block

HEAD_ROWS = "head_rows"


def with_head_rows(
    micro_batch: Mapping[str, Tensor], cp_group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Also with ``head_rows``, [N]: places in this rank's flattened block whose next token is in ``mask``.

    At least one, whatever it says: every rank's head takes part in a pass, with zero weight if need be.
    """
    is_read_BL = F.pad(micro_batch["mask"][:, 1:].int(), (0, 1))
    row_N = my_block(is_read_BL, cp_group).flatten().nonzero().flatten()
    return {**micro_batch, HEAD_ROWS: row_N if len(row_N) else row_N.new_zeros(1)}


@contextlib.contextmanager
def head_reads(head: Any, row_N: Tensor) -> Iterator[None]:
    """Inside, the head gets those rows of the hidden states as one sequence, [1, N, D]."""

    def take(_head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (take_rows(inputs[0].flatten(0, 1), row_N)[None],)

    hook = head.register_forward_pre_hook(take)
    try:
        yield
    finally:
        hook.remove()


def take_rows(x_TD: Tensor, row_N: Tensor) -> Tensor:
    """Rows of x, each at most once."""
    return _TakeRows.apply(x_TD, row_N)


def spread(value_1N: Tensor, row_N: Tensor, like_Bl: Tensor) -> Tensor:
    """[B, l], 0 where nothing was read."""
    zero_T = value_1N.new_zeros(like_Bl.numel())
    return zero_T.index_copy(0, row_N, value_1N[0]).view(like_Bl.shape)


class _TakeRows(torch.autograd.Function):
    """Distinct rows, so that backward copies them and adds nothing: the same bits on every run."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_N: Tensor) -> Tensor:
        ctx.save_for_backward(row_N)
        ctx.num_rows = x_TD.shape[0]
        return x_TD.index_select(0, row_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (row_N,) = ctx.saved_tensors
        zero_TD = grads[0].new_zeros(ctx.num_rows, grads[0].shape[1])
        return zero_TD.index_copy_(0, row_N, grads[0]), None
