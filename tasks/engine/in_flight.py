"""Versions that are taken while responses run: in-flight weight updates (PipelineRL, arXiv 2509.19128).

Beside a worker's loop a thread looks for the version after the one that the engine holds, fetches it and has
the engine load it, whatever it samples. What becomes of the responses is the engine's (``Engine.load``): they
are aborted and resumed by the loop, or go on under the new weights. Either way each token keeps the version
that chose it and the log-probability that it had there, and a sample is as old as its oldest token.

What surprises: a load that fails leaves the engine without a version, in the middle of a portion. The loop
hands the portion back, and the error of the load is what is raised.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tasks.artifacts.errors import NotFound
from tasks.artifacts.store import PolicyStore
from tasks.artifacts.version import PolicyVersion
from tasks.engine.notices import Departure
from tasks.experience.meanwhile import meanwhile

LOOK_SECONDS = 0.5
"""Between two looks; each is one request to the store."""


def newest_after(store: PolicyStore, version: int) -> PolicyVersion | None:
    """The newest published version above ``version``; versions have no gaps."""
    newest = None
    while True:
        try:
            newest = store.reference(version + 1 if newest is None else newest.version + 1)
        except NotFound:
            return newest


def taking_newer(look: Callable[[], None], *, departure: Departure) -> AbstractContextManager[None]:
    """While the block runs, ``look`` for a newer version and load it, again and again, in another thread; not
    once this worker has to leave. At the end a load is waited for, for as long as the departure leaves time.
    """
    return meanwhile(
        lambda: None if departure.is_due else look(),
        every=LOOK_SECONDS,
        name="newer versions",
        patience=departure.seconds_left,
        is_retried=False,
    )
