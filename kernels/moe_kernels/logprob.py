"""Log-probability and entropy of given tokens, without ever holding [tokens, vocabulary].

Shape key: T tokens, D features, V vocabulary (or this rank's block of it), C vocabulary entries of one chunk.

The vocabulary is cut into chunks, not the tokens. The gradient of a chunk's weights is then one matrix
product over all tokens, summed in float32 inside it and written once; cutting tokens would read and write a
float32 [V, D] for every chunk. What is carried from chunk to chunk is a few numbers a token, and backward
the [T, D] gradient. Backward turns a chunk's logits into their gradient in place; it computes them again,
except those that ``keep_bytes`` left room for: one of four matrix products against memory.

Logits have the dtype of the inputs, as a model's own head would give them; all statistics are float32.

Where ranks hold blocks of the vocabulary, each folds its own logits; four numbers a token are joined forward,
and the gradient of the hidden states backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels import chunks

CHUNK_BYTES = 256 * 2**20
"""Logits held at a time. On a second stream, beside the next product, the elementwise passes gained 1 % where
twice as many were held: a product takes every multiprocessor whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyBlock:
    """Which rows of the head's weights this rank has, and how it speaks with the ranks that have the rest."""

    start: int
    vocab_size: int
    """Of all blocks."""
    all_reduce: chunks.AllReduce


def selective_logprob_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    ids_T: Tensor,
    *,
    temperature: float,
    chunk_bytes: int = CHUNK_BYTES,
    keep_bytes: int = 0,
    block: VocabularyBlock | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``ids_T`` under softmax(hidden @ weight.T / temperature), and its entropy.

    Both are float32 (float64 for float64 inputs), and 0 without a gradient where the id is negative. Triton
    does the elementwise work on CUDA, torch everywhere else; the matrix products are the library's.

    With ``block`` the weights are that block of the vocabulary's rows; hidden states, ids (of the whole
    vocabulary), results and their gradients are equal on all ranks, and so is the hidden states' gradient.
    """
    _check(hidden_TD, weight_VD, ids_T, temperature, block)
    has_backward = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    keep_bytes = keep_bytes if has_backward else 0
    return _SelectiveLogprobEntropy.apply(
        hidden_TD, weight_VD, ids_T, temperature, chunk_bytes, keep_bytes, block
    )


def _check(
    hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, temperature: float, block: VocabularyBlock | None
) -> None:
    same_features = hidden_TD.ndim == weight_VD.ndim == 2 and hidden_TD.shape[1] == weight_VD.shape[1]
    if not same_features or ids_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            "hidden, weight and ids must be [T, D], [V, D] and [T], got "
            f"{list(hidden_TD.shape)}, {list(weight_VD.shape)} and {list(ids_T.shape)}."
        )
    if hidden_TD.dtype != weight_VD.dtype or not hidden_TD.dtype.is_floating_point:
        raise ValueError(
            "hidden and weight must have one floating-point dtype, got "
            f"{hidden_TD.dtype} and {weight_VD.dtype}. Convert one of them."
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    # On the device: reading the answer here would stop it.
    is_known = (ids_T < (weight_VD.shape[0] if block is None else block.vocab_size)).all()
    torch._assert_async(is_known, "ids must be below the vocabulary size")  # pyright: ignore


class _SelectiveLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        ids_T: Tensor,
        temperature: float,
        chunk_bytes: int,
        keep_bytes: int,
        block: VocabularyBlock | None,
    ) -> tuple[Tensor, Tensor]:
        statistics = chunks.Statistics.empty(hidden_TD)
        first = 0 if block is None else block.start
        fold = chunks.fold_function(hidden_TD)
        kept: dict[int, Tensor] = {}
        for start, logits_TC in _logits(hidden_TD, weight_VD, chunk_bytes, kept, keep_bytes):
            fold(statistics, logits_TC, ids_T, first + start, 1 / temperature)
        if block is not None:
            statistics = statistics.joined(block.all_reduce)
        logsumexp_T, entropy_T = statistics.finish()
        ctx.save_for_backward(hidden_TD, weight_VD, ids_T, logsumexp_T, entropy_T)
        ctx.temperature, ctx.chunk_bytes, ctx.kept, ctx.block = temperature, chunk_bytes, kept, block
        is_asked_T = ids_T >= 0
        logprob_T = statistics.chosen_T - logsumexp_T
        return torch.where(is_asked_T, logprob_T, 0.0), torch.where(is_asked_T, entropy_T, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, ids_T, logsumexp_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rewrite = chunks.rewrite_function(hidden_TD)
        total_TD = torch.zeros_like(hidden_TD, dtype=logsumexp_T.dtype)
        grad_VD = torch.empty_like(weight_VD) if needs_weight else None
        scale, first = 1 / ctx.temperature, 0 if ctx.block is None else ctx.block.start
        slopes = [grad.contiguous() for grad in grads]
        for start, logits_TC in _logits(hidden_TD, weight_VD, ctx.chunk_bytes, ctx.kept, 0):
            rewrite(logits_TC, ids_T, first + start, scale, logsumexp_T, entropy_T, *slopes)
            end = start + logits_TC.shape[1]
            if grad_VD is not None:
                torch.mm(logits_TC.T, hidden_TD, out=grad_VD[start:end])
            if needs_hidden:
                _add_product(total_TD, logits_TC, weight_VD[start:end])
        if needs_hidden and ctx.block is not None:  # before it is rounded
            total_TD = ctx.block.all_reduce(total_TD, "sum")
        return total_TD.to(hidden_TD.dtype) if needs_hidden else None, grad_VD, *[None] * 5


def _logits(
    hidden_TD: Tensor, weight_VD: Tensor, chunk_bytes: int, kept: dict[int, Tensor], keep_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """(first entry, logits) of each chunk: kept ones handed out once, others in a buffer they all share.

    The first chunks, as far as ``keep_bytes`` goes, are added to ``kept``.
    """
    num_tokens, vocab_size = hidden_TD.shape[0], weight_VD.shape[0]
    row_bytes = max(num_tokens, 1) * hidden_TD.element_size()
    # whole tiles of the matrix product, and never so few columns that the weights are read at a loss
    width = min(max(chunk_bytes // row_bytes // 256, 1) * 256, vocab_size)
    buffer: Tensor | None = None
    for start in range(0, vocab_size, width):
        part_CD = weight_VD[start : start + width]
        end = start + part_CD.shape[0]
        if start in kept:
            yield start, kept.pop(start)  # the caller rewrites them, so another pass must not find them
            continue
        if end * row_bytes <= keep_bytes:
            logits_TC = kept[start] = hidden_TD.new_empty(num_tokens, part_CD.shape[0])
        else:
            buffer = hidden_TD.new_empty(num_tokens * width) if buffer is None else buffer
            logits_TC = buffer[: num_tokens * part_CD.shape[0]].view(num_tokens, part_CD.shape[0])
        torch.mm(hidden_TD, part_CD.T, out=logits_TC)
        yield start, logits_TC


def _add_product(total_TD: Tensor, dlogits_TC: Tensor, weight_CD: Tensor) -> None:
    if total_TD.dtype == dlogits_TC.dtype:
        total_TD.addmm_(dlogits_TC, weight_CD)
    elif total_TD.is_cuda:  # the product leaves its accumulators in float32
        torch.addmm(total_TD, dlogits_TC, weight_CD, out_dtype=total_TD.dtype, out=total_TD)
    else:
        total_TD.addmm_(dlogits_TC.to(total_TD.dtype), weight_CD.to(total_TD.dtype))
