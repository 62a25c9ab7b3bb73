"""Samples to micro-batches: which rank computes what, in how many padded rows.

Shape key: B rows, L positions of the longest row of a micro-batch.
Pure. Nothing here changes a gradient: losses divide by the global token count.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rank_share(rows: Sequence[dict[str, Any]], *, rank: int, world_size: int) -> list[dict[str, Any]]:
    """This rank's rows of a mini-batch: longest first, dealt out in turn, so that ranks finish together."""
    by_length = sorted(rows, key=_length, reverse=True)
    return by_length[rank::world_size]


def micro_batches(rows: Sequence[dict[str, Any]], *, max_tokens: int) -> list[dict[str, Tensor]]:
    """Right-padded micro-batches of at most ``max_tokens`` padded tokens (one row may exceed it alone).

    Each row holds ``prompt_ids``, ``response_ids``, ``behavior_logprob``, ``loss_mask`` and ``advantage``.

    Returns:
        dicts of [B, L] tensors: ``input_ids``, ``attention_mask`` (1 on tokens), ``mask`` (True on trained
        tokens), ``behavior_logprob`` and ``advantage`` (0 outside the response). Position t of every tensor
        speaks of token t.
    """
    batches: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=_length, reverse=True):
        if batches and (len(batches[-1]) + 1) * _length(batches[-1][0]) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_padded(batch) for batch in batches]


def num_trained_tokens(rows: Sequence[dict[str, Any]]) -> int:
    return sum(sum(row["loss_mask"]) for row in rows)


def _length(row: dict[str, Any]) -> int:
    return len(row["prompt_ids"]) + len(row["response_ids"])


def _padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    shape = (len(rows), max(_length(row) for row in rows))
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "mask": torch.zeros(shape, dtype=torch.bool),
        "behavior_logprob": torch.zeros(shape),
        "advantage": torch.zeros(shape),
    }
    for i, row in enumerate(rows):
        start, end = len(row["prompt_ids"]), _length(row)
        batch["input_ids"][i, :end] = torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        batch["attention_mask"][i, :end] = 1
        batch["mask"][i, start:end] = torch.tensor(row["loss_mask"])
        batch["behavior_logprob"][i, start:end] = torch.tensor(row["behavior_logprob"])
        batch["advantage"][i, start:end] = row["advantage"]
    return batch
