"""Who works, who waits, who is stuck: every rank says how far it is, and rank 0 names those that stand still.

A stuck rank stops all others at their next exchange, so all stand still; to blame is the one that does not
wait for others, and among several of those the one that stopped first. A rank whose process is frozen or gone
says nothing any more, which counts as standing still.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore

from tasks.policy.ranks.pulse import PULSE


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """Seconds spent inside ``with``, summed up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_running = False
        self._start = 0.0

    def __enter__(self) -> Self:
        self._start, self.is_running = time.monotonic(), True
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._start
        self.is_running = False


BLOCKED = Stopwatch()
"""Host seconds in which this process waited for other ranks. One a process, because autograd calls into the
exchanges from threads of its own. On GPUs it holds device time as well, so it shows slow hosts only."""


class Progress:
    """How far this rank is; any thread may read it."""

    def __init__(self) -> None:
        self.phase, self.step, self.since = "start", 0, time.monotonic()
        self.work_seconds = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Add the seconds inside to ``work_seconds``, without those spent waiting for other ranks."""
        start = time.monotonic() - BLOCKED.seconds
        yield
        self.work_seconds += time.monotonic() - BLOCKED.seconds - start

    def at(self, phase: str, step: int = 0) -> None:
        self.phase, self.step, self.since = phase, step, time.monotonic()
        PULSE.beat()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """What a rank said last, and when it was heard on the clock of who heard it."""

    phase: str
    step: int
    age: float
    """Seconds it had not moved when it said so."""
    is_waiting: bool
    """Whether it then waited for other ranks."""
    beat: int
    heard_at: float

    def still_for(self, now: float) -> float:
        return self.age + now - self.heard_at


def standing_still(signs: Mapping[int, Sign], *, now: float, deadline: float) -> list[int]:
    """Ranks that have not moved for ``deadline`` seconds, the one to blame first.

    None while all of these wait for a rank that does move: it is slow, not stuck.
    """
    still = {rank: sign.still_for(now) for rank, sign in signs.items()}
    found = [rank for rank, seconds in still.items() if seconds >= deadline]
    if len(found) < len(signs) and all(signs[rank].is_waiting for rank in found):
        return []
    return sorted(found, key=lambda rank: (signs[rank].is_waiting, -still[rank]))


def slow_ranks(seconds_by_rank: Sequence[float], *, factor: float) -> dict[int, float]:
    """Rank -> how many times the median it worked, where that is more than ``factor``."""
    median = statistics.median(seconds_by_rank)
    if median <= 0:
        return {}
    return {r: s / median for r, s in enumerate(seconds_by_rank) if s > factor * median}


class Watchdog:
    """A thread a rank: it posts this rank's progress to the ranks' common store; rank 0's reads all of them.

    Only reports. What ends a stuck run is the deadline of the collective in which the others wait.
    """

    def __init__(
        self,
        store: Any,
        progress: Progress,
        *,
        rank: int,
        world_size: int,
        deadline: float,
        report: Callable[[str], None],
        interval: float = 2.0,
    ):
        # a clone: the main thread may wait inside the original for minutes, and would lock this one out
        self.store = PrefixStore("progress", store.clone())
        self.progress, self.rank, self.world_size = progress, rank, world_size
        self.deadline, self.report, self.interval = deadline, report, interval
        self.signs: dict[int, Sign] = {}
        self.reported_at = -float("inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        beat = 0
        try:
            while not self._stop.wait(self.interval if beat else 0):
                beat += 1
                self._post(beat)
                if self.rank == 0:
                    self._listen()
                    self._judge(time.monotonic())
        except RuntimeError as error:  # the store is gone: its host has ended, and with it the run
            if not self._stop.is_set():
                self.report(f"rank {self.rank} can no longer post its progress: {str(error).splitlines()[0]}")

    def _post(self, beat: int) -> None:
        now, progress = time.monotonic(), self.progress
        said = {"phase": progress.phase, "step": progress.step, "age": now - progress.since}
        said |= {"is_waiting": BLOCKED.is_running, "beat": beat}
        self.store.set(str(self.rank), json.dumps(said))

    def _listen(self) -> None:
        for rank in range(self.world_size):
            said = {"phase": "not started", "step": 0, "age": 0.0, "is_waiting": False, "beat": 0}
            if self.store.check([str(rank)]):
                said = json.loads(self.store.get(str(rank)))
            if rank not in self.signs or self.signs[rank].beat != said["beat"]:
                self.signs[rank] = Sign(**said, heard_at=time.monotonic())

    def _judge(self, now: float) -> None:
        still = standing_still(self.signs, now=now, deadline=self.deadline)
        if not still or now - self.reported_at < self.deadline:
            return
        self.reported_at = now
        first = self.signs[still[0]]
        is_silent = now - first.heard_at > max(5 * self.interval, self.deadline / 2)
        silent = ", its process does not answer" if is_silent else ""
        others = f"; {len(still) - 1} others stand still with it" if len(still) > 1 else ""
        self.report(
            f"rank {still[0]} stands still for {first.still_for(now):.0f} s in phase {first.phase}, "
            f"step {first.step}{silent}{others}"
        )
