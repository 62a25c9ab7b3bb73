"""A file whose age says for how long the ranks of a node have not moved: what a liveness probe reads.

A collective that waits too long ends a run by itself; this is for what no other rank waits for: a single
rank, or one that hangs in a store or a driver.
"""

from pathlib import Path


class Pulse:
    """Beats nowhere until it is given a file."""

    def __init__(self) -> None:
        self.path: Path | None = None

    def beat(self) -> None:
        if self.path is not None:
            self.path.touch()


PULSE = Pulse()
"""One a process, like its progress."""
