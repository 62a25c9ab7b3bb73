"""What a stored file is known by and verified with.

Its name in the store is the SHA-256 of its content. What is read is verified with BLAKE3, which takes a
quarter of the time on one core, where the publisher recorded it; manifests of earlier releases did not, and
what they name is verified with SHA-256.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PIECE_BYTES = 1 << 20


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


def digests_of(path: Path) -> Digests:
    return _both(_pieces(path))


def digests_of_bytes(data: bytes) -> Digests:
    return _both(iter([data]))


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


def _both(pieces: Iterator[bytes | memoryview]) -> Digests:
    sha256, fast = hashlib.sha256(), _blake3()
    for piece in pieces:
        sha256.update(piece)
        fast.update(piece)
    return Digests(sha256.hexdigest(), fast.hexdigest())


def _pieces(path: Path) -> Iterator[memoryview]:
    """The file's content in one buffer after another's use: what is hashed lies in the processor's cache."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while number := file.readinto(buffer):
            yield buffer[:number]


def _blake3() -> Hash:
    from blake3 import blake3  # not needed by those that only import a store

    return blake3()
