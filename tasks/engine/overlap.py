"""Several portions sampled at once by one process, so that a server has work at the end of each."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tasks.engine.collector import old_objects_apart
from tasks.engine.worker import RolloutWorker, WorkDone


def drain_together(
    members: Sequence[RolloutWorker], iteration: int, *, max_portions: int = 0, waits: bool = True
) -> WorkDone:
    """``RolloutWorker.drain`` by all members at the same time; the sum of what they did.

    An error of one member ends the others behind the portion they are at, and is raised.

    Args:
        max_portions: of all members together; 0 = no bound.
        waits: stay while the rest is leased to others.
    """
    if len(members) == 1:
        with old_objects_apart():
            return members[0].drain(iteration, max_portions=max_portions, waits=waits)
    turns, lock, failed = itertools.count(), threading.Lock(), threading.Event()

    def work(member: RolloutWorker) -> list[WorkDone]:
        parts: list[WorkDone] = []
        while not failed.is_set():
            with lock:
                if max_portions and next(turns) >= max_portions:
                    break
            try:
                parts.append(member.drain(iteration, max_portions=1, waits=waits))
            except BaseException:
                failed.set()
                raise
            if parts[-1].num_portions == 0:  # nothing is left, or the process has to leave
                break
        return parts

    with old_objects_apart(), ThreadPoolExecutor(len(members), thread_name_prefix="portion") as pool:
        parts = [part for member in pool.map(work, members) for part in member]
    return WorkDone(
        num_portions=sum(part.num_portions for part in parts),
        num_returned=sum(part.num_returned for part in parts),
        num_samples=sum(part.num_samples for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        seconds=sum(part.seconds for part in parts) / len(members),
    )
