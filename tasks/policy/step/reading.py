"""What one model says of every token of a batch, without training it: log-probabilities or values.

Each row is read by one rank; all ranks get all results, in the order of the rows. Collective, like training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tasks.config import CampaignConfig
from tasks.policy.models.routers import RouterWatch
from tasks.policy.parallel.mesh import ParallelMesh
from tasks.policy.ranks.progress import BLOCKED
from tasks.policy.step.head_rows import with_head_rows
from tasks.policy.step.trainer import Read, agree_on_passes, empty_micro_batch, policy_reader
from tasks.rl.packing import Packing, Row, collate, plan_micro_batches, rank_share


def reader_of(config: CampaignConfig, objective: str) -> Read:
    """How a policy reads a batch: samples at the temperature they were sampled with, demonstrations at 1."""
    return policy_reader(
        temperature=1.0 if objective == "supervised" else config.rollout.temperature,
        kernel=config.train.logprob_kernel,
        keep_gb=config.train.logprob_keep_gb,
    )


@torch.no_grad()
def read_rows(
    model: PreTrainedModel,
    rows: Sequence[Row],
    mesh: ParallelMesh,
    read: Read,
    *,
    max_tokens: int,
    packing: Packing,
    routing: RouterWatch | None = None,
) -> list[list[float]]:
    """``read``'s first result at the response tokens of every row, one list a row; without pipeline stages.

    A log-probability of a token that is not trained is 0.0. ``routing`` is told of each micro-batch first.
    """
    numbered = [{**row, "row": number} for number, row in enumerate(rows)]
    share = rank_share(numbered, rank=mesh.share, world_size=mesh.num_shares)
    plan = plan_micro_batches(share, max_tokens=max_tokens, packing=packing)
    mine: dict[int, list[float]] = {}
    for index in range(agree_on_passes(model, mesh, len(plan), max(len(rows), 1), 1)):
        micro_batch = empty_micro_batch(model)
        if index < len(plan):
            micro_batch = with_head_rows(collate(plan[index], packing=packing), mesh.cp_group)
            micro_batch = {name: tensor.to(model.device) for name, tensor in micro_batch.items()}
        if routing is not None:
            routing.use(micro_batch)
        value_BL = read(model, micro_batch, cp_group=mesh.cp_group)[0]
        if index < len(plan):
            mine |= _by_row(value_BL.float().cpu(), plan[index], packing)
    for theirs in _all_gathered(mine, mesh):
        mine |= theirs
    return [mine[number] for number in range(len(rows))]


def _by_row(value_BL: Tensor, rows: Sequence[Row], packing: Packing) -> dict[int, list[float]]:
    """The response's part of each row, cut out of padded or packed rows."""
    found, start = {}, 0
    for index, row in enumerate(rows):
        prompt, response = len(row["prompt_ids"]), len(row["response_ids"])
        line_L, first = (value_BL[index], 0) if packing == "padded" else (value_BL[0], start)
        found[row["row"]] = line_L[first + prompt : first + prompt + response].tolist()
        start += prompt + response
    return found


def _all_gathered(mine: dict[int, list[float]], mesh: ParallelMesh) -> list[dict[int, list[float]]]:
    if mesh.world is None:
        return [mine]
    by_rank: list[Any] = [None] * mesh.world_size
    with BLOCKED:
        dist.all_gather_object(by_rank, mine, group=mesh.world)
    return by_rank
