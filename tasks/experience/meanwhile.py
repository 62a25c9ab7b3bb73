"""Something done again and again beside the work that needs it: renewing a lease, looking for a version."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(
    act: Callable[[], object],
    *,
    every: float,
    name: str,
    patience: Callable[[], float] = lambda: math.inf,
    is_retried: bool = True,
) -> Iterator[None]:
    """While the block runs, ``act`` in another thread, for the first time after ``every`` seconds. At the end
    one that has begun is waited for, as long as there is ``patience``: the seconds that are left for it.

    One that fails is tried again like one that does not; if the last one failed, its error is raised at the
    end, unless the block raised one of its own. Without ``is_retried`` the first that fails is the last, and
    its error is raised whatever the block raised: that comes of it.
    """
    is_over, failed = threading.Event(), list[BaseException]()

    def repeat() -> None:
        while not is_over.wait(every):
            try:
                act()
            except BaseException as error:
                failed[:] = [error]
                if not is_retried:
                    return
            else:
                failed.clear()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        while thread.is_alive() and patience() > 0:
            thread.join(every)
        if failed and not is_retried:
            raise failed[0]
    for error in tuple(failed):
        raise error
