"""Samples to micro-batches: which rank computes what, in padded rows or packed one after another.

Shape key: B rows, L positions: of the longest sample where rows are padded, of all samples in one packed row.
Pure. Nothing here changes a gradient: losses divide by the global token count.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.rl.routing_records import unpack

Packing = Literal["padded", "packed"]
Row = dict[str, Any]
"""A sample as ``TrainFrame`` has it, and what was computed for it since: ``collate`` says which columns."""
MicroBatch = Mapping[str, Tensor]
"""[B, L] each, as ``collate`` makes it; with ``head_rows`` the positions that a policy's head reads for the
tokens in ``mask``. One that only keeps ranks in step has ``input_ids`` and ``attention_mask`` alone."""
TOKEN_COLUMNS = ("proximal_logprob", "reference_logprob", "weight", "value", "return")
"""What a row may hold beside its tokens, one number each, once ``preparation.py`` has seen the batch."""
PADDING = {"routed_experts": -1}
"""What stands where a row ends before the longest, where that is not 0."""


def by_minibatch(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Mini-batches in their order: number and rows."""
    minibatches: dict[int, list[Row]] = {}
    for row in rows:
        minibatches.setdefault(row["minibatch"], []).append(row)
    return sorted(minibatches.items())


def rank_share(rows: Sequence[Row], *, rank: int, world_size: int) -> list[Row]:
    """This rank's rows of a mini-batch: longest first, dealt out in turn, so that ranks finish together."""
    by_length = sorted(rows, key=_length, reverse=True)
    return by_length[rank::world_size]


def plan_micro_batches(rows: Sequence[Row], *, max_tokens: int, packing: Packing) -> list[list[Row]]:
    """Rows by micro-batch, each of at most ``max_tokens`` tokens with padding (one row may exceed it alone).

    Packed rows go by decreasing length into the first micro-batch with room, which needs at most 11/9 of the
    fewest possible (plus one). Padded rows fill up in turn: neighbours in length waste the least padding.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=_length, reverse=True):
        open_batches = batches if packing == "packed" else batches[-1:]
        for batch in open_batches:
            if _num_tokens([*batch, row], packing) <= max_tokens:
                batch.append(row)
                break
        else:
            batches.append([row])
    return batches


def collate(rows: Sequence[Row], *, packing: Packing) -> dict[str, Tensor]:
    """One micro-batch. Each row holds ``prompt_ids``, ``response_ids``, ``behavior_logprob``, ``loss_mask``
    and ``advantage``, or ``token_advantage`` in its place, and perhaps more of ``TOKEN_COLUMNS``.

    Returns:
        [B, L] tensors: ``input_ids``, ``attention_mask`` (1 on tokens), ``mask`` (True on trained tokens),
        ``behavior_logprob``, ``advantage`` and the row's ``TOKEN_COLUMNS`` (0 outside the response),
        ``segment`` (the sample's number in the micro-batch) and ``length`` (its trained tokens). Position t
        of every tensor speaks of token t. A packed micro-batch is one row that also has ``position_ids``, 0
        where a sample begins.
    """
    samples = [_sample_tensors(row, number) for number, row in enumerate(rows)]
    if packing == "padded":
        return {
            name: pad_sequence(
                [sample[name] for sample in samples], batch_first=True, padding_value=PADDING.get(name, 0)
            )
            for name in samples[0]
            if name != "position_ids"
        }
    return {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}


def micro_batches(rows: Sequence[Row], *, max_tokens: int, packing: Packing) -> list[dict[str, Tensor]]:
    """All of a rank's micro-batches of a mini-batch."""
    plan = plan_micro_batches(rows, max_tokens=max_tokens, packing=packing)
    return [collate(batch, packing=packing) for batch in plan]


def num_trained_tokens(rows: Sequence[Row]) -> int:
    return sum(sum(row["loss_mask"]) for row in rows)


def num_trained_sequences(rows: Sequence[Row]) -> int:
    """Samples with at least one trained token; others are no part of any mean."""
    return sum(any(row["loss_mask"]) for row in rows)


def _length(row: Row) -> int:
    return len(row["prompt_ids"]) + len(row["response_ids"])


def _num_tokens(rows: list[Row], packing: Packing) -> int:
    lengths = [_length(row) for row in rows]
    return sum(lengths) if packing == "packed" else max(lengths) * len(lengths)


def _sample_tensors(row: Row, number: int) -> dict[str, Tensor]:
    start, end = len(row["prompt_ids"]), _length(row)
    sample = {
        "input_ids": torch.tensor([*row["prompt_ids"], *row["response_ids"]]),
        "attention_mask": torch.ones(end, dtype=torch.long),
        "position_ids": torch.arange(end),
        "mask": torch.zeros(end, dtype=torch.bool),
        "behavior_logprob": torch.zeros(end),
        "advantage": torch.zeros(end),
        "segment": torch.full((end,), number),
        "length": torch.full((end,), sum(row["loss_mask"])),
    }
    sample["mask"][start:] = torch.tensor(row["loss_mask"])
    sample["behavior_logprob"][start:] = torch.tensor(row["behavior_logprob"])
    sample["advantage"][start:] = torch.tensor(row.get("token_advantage", row["advantage"]))
    for name in TOKEN_COLUMNS:
        if name in row:
            sample[name] = torch.zeros(end)
            sample[name][start:] = torch.tensor(row[name])
    return sample | _routing_tensors(row, end)


def _routing_tensors(row: Row, length: int) -> dict[str, Tensor]:
    """[L, layers, k] of the record, where there is one: the last token was never read, so it has none."""
    found = {}
    for name in ("routed_experts", "routed_weights"):
        if (payload := row.get(name)) is not None:
            record = torch.from_numpy(unpack(payload).copy())
            record = record.to(torch.int16) if name == "routed_experts" else record
            missing = record.new_full((length - len(record), *record.shape[1:]), PADDING.get(name, 0))
            found[name] = torch.cat([record, missing])
    return found
