"""One object into one file: parts arrive in parallel and are hashed in order while later ones arrive.

Not the client's transfer manager: it hands every piece through a queue to a thread that writes it, and there
the hash would come on top. Here a part's thread writes where the part belongs, and the caller's thread hashes
behind the first part that is missing. That costs no more processor time than the manager does without a hash.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, IncompleteReadError

from tasks.artifacts.content import PIECE_BYTES, Hash

BROKEN = (ConnectionError, HTTPClientError, IncompleteReadError)
"""A connection that failed. What was read may be asked for again."""
ATTEMPTS = 5


class WrongSize(Exception):
    """The object is of another size than was asked for."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


def download(
    get: Callable[..., dict[str, Any]],
    path: Path,
    *,
    size: int,
    found: Hash,
    part_bytes: int,
    num_threads: int,
    wait: Callable[[int], None],
) -> None:
    """Write an object to the file and its content to the hash.

    Args:
        get: ``get_object`` but for its ``Range``.
        wait: is called before a part is asked for again, with the number of times that it was.
    """
    ranges = [(start, min(start + part_bytes, size)) for start in range(0, max(size, 1), part_bytes)]
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def fetch(start: int, stop: int) -> None:
        for attempt in range(ATTEMPTS):
            try:
                return _fetch(get, fd, start, stop, size)
            except BROKEN:
                if attempt == ATTEMPTS - 1:
                    raise
                wait(attempt)

    try:
        make_parts(fd, ranges, fetch, num_threads=min(num_threads, len(ranges)), found=found)
    finally:
        os.close(fd)


def _fetch(get: Callable[..., dict[str, Any]], fd: int, start: int, stop: int, size: int) -> None:
    which = {"Range": f"bytes={start}-{stop - 1}"} if stop - start < size else {}
    try:
        answer = get(**which)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 416:  # there is nothing at the range
            raise WrongSize(0) from error
        raise
    total = int(answer["ContentRange"].rpartition("/")[2]) if which else answer["ContentLength"]
    body, at = answer["Body"], start
    if total != size:
        body.close()
        raise WrongSize(total)
    while piece := memoryview(body.read(PIECE_BYTES)):  # which refuses to end before it should
        while piece:  # a disk that gets full takes a part and refuses the rest
            written = os.pwrite(fd, piece, at)
            at, piece = at + written, piece[written:]


def make_parts(
    fd: int,
    ranges: Iterable[tuple[int, int]],
    make: Callable[[int, int], None],
    *,
    num_threads: int,
    found: Hash | None,
) -> None:
    """``make(start, stop)`` of each part in threads, hashed in order behind them; a failure ends the rest."""
    parts, buffer = list(ranges), memoryview(bytearray(PIECE_BYTES))
    with ThreadPoolExecutor(num_threads) as pool:
        # ``map`` drops what has not begun when a part fails
        for (at, stop), _ in zip(parts, pool.map(lambda part: make(*part), parts), strict=True):
            while found is not None and at < stop:
                number = os.preadv(fd, [buffer[: stop - at]], at)
                assert number, "a part that was written can be read"
                found.update(buffer[:number])
                at += number
