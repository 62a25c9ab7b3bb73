"""The scoring side of an iteration's stream: take groups as they are published, score them, store them.

A take is as large as what is scored in ``TAKE_SECONDS`` at the measured rate, so that scoring keeps up
without holding groups that another scorer could have. While they are scored, their leases are renewed.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from tasks.environments.scorer import Scorer
from tasks.environments.scoring import readable, score_groups
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.meanwhile import meanwhile
from tasks.say import say

NAME = "score"
MOST_GROUPS, FIRST_GROUPS = 128, 16
TAKE_SECONDS = 5.0
POLL_SECONDS = 0.05


class Intake:
    """One scorer's work on one iteration, and how long it waited for it."""

    def __init__(self, buffer: ExperienceBuffer, scorer: Scorer, iteration: int) -> None:
        self.buffer, self.scorer, self.iteration = buffer, scorer, iteration
        self.busy_seconds = self.idle_seconds = 0.0
        self.num_groups = self.num_samples = 0

    @property
    def max_groups(self) -> int:
        """Groups of the next take."""
        if self.scorer.is_cheap:
            return MOST_GROUPS
        if not self.num_groups:
            return FIRST_GROUPS
        seconds = min(TAKE_SECONDS, self.buffer.lease_seconds)
        return max(1, min(MOST_GROUPS, int(self.num_groups / max(self.busy_seconds, 1e-6) * seconds)))

    def score_waiting(self) -> int:
        """Score what is there now; returns the groups scored."""
        before = self.num_groups
        taken = self.buffer.take_rollouts(NAME, iteration=self.iteration, max_groups=self.max_groups)
        while taken:
            start = time.monotonic()
            groups, unreadable = readable(taken)
            for handle, reason in unreadable:
                worker = self.buffer.refuse_rollout(NAME, self.iteration, handle, reason)
                text = f"refused a group of worker {worker}, now barred: {reason[:160]}"
                say("score", text, iteration=self.iteration)
            with self._held([handle for handle, _ in groups]):
                scored = score_groups(groups, self.scorer)
            self.busy_seconds += time.monotonic() - start
            self.num_groups += len(groups)
            self.num_samples += sum(group.num_samples for _, group in groups)
            _, taken = self.buffer.exchange_rollouts(NAME, self.iteration, scored, max_groups=self.max_groups)
        return self.num_groups - before

    def finish(self) -> None:
        """Until every published group is scored, those too that another attempt at this stage holds: it may
        have ended with them, and then their leases expire. A dropped iteration has nothing left to score."""
        while not self.buffer.produced(self.iteration).is_dropped:
            self.score_waiting()
            now = self.buffer.progress(self.iteration)
            if now.groups_published <= now.groups_scored + now.groups_unscored:
                return
            time.sleep(POLL_SECONDS)

    def follow(self, *, timeout_seconds: float) -> None:
        """Score while others generate, until no portion is left on the queue."""
        moved = time.monotonic()
        while True:
            is_over = self.buffer.outstanding(self.iteration) == 0  # asked first: what came before is scored
            if self.score_waiting():
                moved = time.monotonic()
            elif is_over:
                return
            else:
                time.sleep(POLL_SECONDS)
                self.idle_seconds += POLL_SECONDS
            if not is_over and time.monotonic() - moved > timeout_seconds:
                held = self.buffer.progress(self.iteration).leases_by_worker
                raise RuntimeError(
                    f"iteration {self.iteration} must publish groups within rollout.standing_timeout_seconds="
                    f"{timeout_seconds:g}, got none; leases: {dict(held) or 'none'}. Start workers, then run "
                    "the campaign again."
                )

    def _held(self, handles: Sequence[str]) -> AbstractContextManager[None]:
        """Renews leases while the block runs."""
        if self.scorer.is_cheap:  # over long before the lease
            return nullcontext()
        renew = partial(self.buffer.renew_rollouts, NAME, iteration=self.iteration, handles=handles)
        return meanwhile(renew, every=self.buffer.lease_seconds / 3, name="renew scoring leases")
