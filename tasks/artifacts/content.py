"""What a stored file is known by and verified with, and how a content is read on its way to the store.

Its name in the store is the SHA-256 of its content. What is read is verified with BLAKE3, which takes a
quarter of the time on one core, where the publisher recorded it; manifests of earlier releases did not, and
what they name is verified with SHA-256.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PIECE_BYTES = 1 << 20


class Content(Protocol):
    """Bytes on their way to the store: in a file or in memory, read by several threads, more than once."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """What begins at ``start``: at least a byte, and none behind ``stop``."""
        ...

    def require_unchanged(self) -> None:
        """An error if what was read may not be the content that it was at first."""
        ...


class Hash(Protocol):
    """``hashlib``'s interface."""

    @property
    def name(self) -> str: ...
    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class Known(Protocol):
    """A file of a manifest."""

    @property
    def sha256(self) -> str: ...
    @property
    def blake3(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Digests:
    sha256: str
    blake3: str


class BytesContent:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]

    def require_unchanged(self) -> None:
        pass


class FileContent:
    """An open file; it must keep its size and time of writing until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._before = os.fstat(self._file.fileno())

    def __enter__(self) -> "FileContent":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        return self._before.st_size

    def read(self, start: int, stop: int) -> bytes:
        data = os.pread(self._file.fileno(), min(stop - start, PIECE_BYTES), start)
        if not data:
            self.require_unchanged()
        return data

    def require_unchanged(self) -> None:
        after, before = os.fstat(self._file.fileno()), self._before
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ValueError(
                f"{self._path} must not change while it is stored, got a write to it. Store it when done."
            )


class Part(io.RawIOBase):
    """A range of a content, as a client reads the body of a request."""

    def __init__(self, content: Content, start: int, stop: int) -> None:
        super().__init__()
        self._content, self._start, self._stop, self._at = content, start, stop, start

    def __len__(self) -> int:
        return self._stop - self._start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: self._start, os.SEEK_CUR: self._at, os.SEEK_END: self._stop}[whence]
        self._at = origin + offset
        return self.tell()

    def read(self, size: int | None = -1) -> bytes | memoryview:  # type: ignore[override]
        """Memory is handed out as it lies: a client that sends or hashes it needs no copy."""
        stop = self._stop if size is None or size < 0 else min(self._at + size, self._stop)
        if self._at >= stop:
            return b""
        data = self._content.read(self._at, stop)
        self._at += len(data)
        return data


def digests_of(content: Content | Path) -> Digests:
    """Both hashes at a time, each in a thread of its own where that is worth one."""
    if isinstance(content, Path):
        with FileContent(content) as file:
            return digests_of(file)
    sha256, fast = hashlib.sha256(), _blake3()
    if content.size <= PIECE_BYTES:
        _hash(content, sha256)
        _hash(content, fast)
    else:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(_hash, content, fast)
            _hash(content, sha256)
            other.result()
    return Digests(sha256.hexdigest(), fast.hexdigest())


def sha256_of(content: Content, start: int, stop: int) -> bytes:
    """Of a range."""
    found = hashlib.sha256()
    _hash(content, found, start, stop)
    return found.digest()


def new_hash(file: Known) -> Hash:
    """What the file is verified with, of nothing yet."""
    return _blake3() if file.blake3 else hashlib.sha256()


def hashed(path: Path, file: Known) -> Hash:
    """That of what lies at the path."""
    found = new_hash(file)
    for piece in _pieces(path):
        found.update(piece)
    return found


def difference(found: Hash, file: Known) -> str:
    """What is wrong with a content; empty if nothing is."""
    got, published = found.hexdigest(), file.blake3 or file.sha256
    return "" if got == published else f"{found.name} {got} instead of {published}"


def _hash(content: Content, found: Hash, start: int = 0, stop: int | None = None) -> None:
    end = content.size if stop is None else stop
    while start < end:
        piece = content.read(start, min(start + PIECE_BYTES, end))
        found.update(piece)
        start += len(piece)


def _pieces(path: Path) -> Iterator[memoryview]:
    """The file's content in one buffer after another's use: what is hashed lies in the processor's cache."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(buffer):
            yield buffer[:number]


def _blake3() -> Hash:
    from blake3 import blake3  # not needed by those that only import a store

    return blake3()
