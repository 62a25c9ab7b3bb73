"""Rollout groups in, scored groups out."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import polars as pl

from tasks.environments.protocol import Outcome
from tasks.environments.scorer import Sample, Scorer
from tasks.experience.records import Group
from tasks.schema import RolloutFrame, ScoredFrame, from_bytes, polars_schema, to_bytes, validated

SAMPLE = ("prompt_id", "prompt_ids", "response_ids", "finish_reason", "chosen")


def score_groups(taken: Sequence[tuple[str, Group]], scorer: Scorer) -> list[tuple[str, Group]]:
    """Score the samples of some groups; handles and group ids stay as they are."""
    frame = from_bytes(*(group.payload for _, group in taken), schema=RolloutFrame)
    samples = [Sample(**row) for row in frame.select(SAMPLE).rows(named=True)]
    outcomes = [_columns(outcome) for outcome in scorer.outcomes(samples)]
    types = {name: dtype for name, dtype in polars_schema(ScoredFrame).items() if name not in frame.columns}
    # validated once, stored a group at a time; columns beside, since routing records may be megabytes a row
    scored = validated(
        pl.concat([frame, pl.DataFrame(outcomes, schema=types)], how="horizontal"), ScoredFrame
    )
    result, first = [], 0
    for handle, group in taken:
        payload = to_bytes(scored.slice(first, group.num_samples))
        result.append(
            (handle, Group(group_id=group.group_id, num_samples=group.num_samples, payload=payload))
        )
        first += group.num_samples
    return result


def readable(
    taken: Sequence[tuple[str, Group]],
) -> tuple[list[tuple[str, Group]], list[tuple[str, str]]]:
    """The groups that obey the schema, and (handle, reason) of those that do not."""
    if _fault([group for _, group in taken]) is None:  # one check for all: it costs as much as for one
        return list(taken), []
    good, bad = [], []
    for handle, group in taken:
        fault = _fault([group])
        if fault is None:
            good.append((handle, group))
        else:
            bad.append((handle, f"group {group.group_id}: {fault}"))
    return good, bad


def _fault(groups: Sequence[Group]) -> str | None:
    try:
        frame = from_bytes(*(group.payload for group in groups), schema=RolloutFrame)
    except Exception as error:  # bytes of a stranger: whatever a reader makes of them is the answer
        return f"{type(error).__name__}: {str(error)[:300]}"
    names = [group.group_id for group in groups for _ in range(group.num_samples)]
    if frame["prompt_id"].to_list() != names:
        return f"rows must be the {len(names)} samples of their group, got {len(frame)} or other prompts"
    return None


def _columns(outcome: Outcome) -> dict[str, Any]:
    return {
        "outcome": outcome.kind,
        "reward": outcome.reward,
        "is_exact": outcome.is_exact,
        "reason": outcome.reason,
        "parts": [asdict(part) for part in outcome.parts],
    }
