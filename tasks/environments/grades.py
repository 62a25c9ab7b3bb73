"""The word of one scorer on one sample: what it said on its own scale, and what that is worth as a reward."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.environments.protocol import Part

Messages = Sequence[list[dict[str, str]]]
"""Conversations as chat messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    part: Part
    reward: float | None = None
    """From 0 to 1; none where the scorer abstained or failed."""


Grade = Callable[[Messages], list[Graded]]
"""A grade each."""


def worth(value: float, *, scale: float) -> float:
    """The reward for a reward model's output: its sigmoid, which has the order of the outputs."""
    return 1 / (1 + math.exp(-max(min(value / scale, 50.0), -50.0)))


def scored(name: str, values: Sequence[float], *, scale: float, seconds: float) -> list[Graded]:
    """Grades by a reward model's outputs for a batch, whose time is shared out evenly."""
    each = seconds / max(len(values), 1)
    return [
        Graded(
            part=Part(name=name, kind="score", value=value, seconds=each), reward=worth(value, scale=scale)
        )
        for value in values
    ]
