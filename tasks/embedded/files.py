"""Files that several processes of a machine share: locks, and contents that are whole or absent."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.02


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock. Tried shared, so that two lookers do not see each other."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def exclusive(path: Path, *, deadline_s: float) -> Iterator[None]:
    """Hold the lock, which another process that starts the server may have for ``deadline_s`` at most."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{path} must be free within {deadline_s:.0f} s, got: held by another process that "
                        f"starts the server. `fuser {path}` names it."
                    ) from None
                time.sleep(POLL_S)
        try:
            yield
        finally:
            # not only close: a concurrent fork may hold a copy of the descriptor
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that is 0600 from its first byte on."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
