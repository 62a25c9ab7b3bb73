"""Between frames and what the buffer holds: prompts as portions of work, scored groups as samples."""

import polars as pl

from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.records import WorkItem
from tasks.rollout_config import RolloutConfig
from tasks.schema import ScoredFrame, from_bytes, to_bytes


def portions(
    prompts: pl.DataFrame, rollout: RolloutConfig, *, iteration: int, policy_version: int, first: int
) -> list[WorkItem]:
    """Work of an iteration from a ``PromptFrame``; ``first`` is the number of its first portion."""
    return [
        WorkItem(
            iteration=iteration,
            portion=first + number,
            policy_version=policy_version,
            num_groups=len(part),
            num_samples=len(part) * rollout.group_size,
            payload=to_bytes(part),
        )
        for number, part in enumerate(prompts.iter_slices(rollout.groups_per_portion))
    ]


def scored_samples(buffer: ExperienceBuffer, iteration: int) -> pl.DataFrame:
    """The ``ScoredFrame`` of all that an iteration's scorers have stored so far."""
    return from_bytes(*(group.payload for group in buffer.scan_scored(iteration)), schema=ScoredFrame)
