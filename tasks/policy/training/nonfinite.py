"""Steps whose loss or gradient was not finite: keep the rows that did it, and stop when it does not end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tasks.rl.packing import Row
from tasks.schema import TrainFrame, make_frame, to_bytes

if TYPE_CHECKING:
    from tasks.artifacts.store import PolicyStore


def steps_taken(metrics: Mapping[str, float]) -> str:
    """An update's steps, for its progress line."""
    skipped = metrics.get("skipped_steps", 0.0)
    of_them = f", {skipped:.0f} of them skipped: loss or gradient not finite" if skipped else ""
    return f"{metrics['steps']:.0f} steps{of_them}"


class NonFiniteSteps:
    """Counts skipped steps in a row, over iterations too; the same on every rank."""

    def __init__(self, store: PolicyStore, *, iteration: int, rank: int, limit: int, in_a_row: int):
        self.store, self.iteration, self.rank = store, iteration, rank
        self.limit, self.in_a_row = limit, in_a_row

    def keep(self, rows: Sequence[Row], *, minibatch: int) -> None:
        """Store the rows of this rank's offending micro-batches as an object of the campaign."""
        if rows:
            payload = to_bytes(make_frame(rows, TrainFrame))
            digest = hashlib.sha256(payload).hexdigest()[:8]  # a restarted group may offend with other rows
            name = f"{self.iteration:06d}-{minibatch:04d}-rank{self.rank:04d}-{digest}.arrow"
            self.store.put_object(f"nonfinite/{name}", payload)

    def count(self, *, is_skipped: bool, minibatch: int) -> None:
        """Call after every step; refuses to go on after ``limit`` skipped ones."""
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if self.in_a_row >= self.limit:
            raise RuntimeError(
                f"loss and gradient must be finite, got {self.in_a_row} steps in a row in which they were "
                f"not (train.max_nonfinite_steps is {self.limit}), the last in mini-batch {minibatch} of "
                f"iteration {self.iteration}. Nothing is published; the rows are objects nonfinite/ of "
                f"campaign {self.store.campaign}. Look at them, or lower train.learning_rate."
            )
