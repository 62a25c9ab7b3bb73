"""The difference between two safetensors files of one layout: what changed, and how to rebuild the new one.

    magic | length of the header | header (JSON, zstd) | streams (zstd), in the header's order

The header lists every block with a change: its tensor, its bytes in the file, their SHA-256 after the change,
and how its changes are coded (``changes.py``): a step of reinforcement learning moves few of the bfloat16
weights, and those by one unit in the last place. What is rebuilt is equal bit for bit.
"""

import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from tasks.artifacts.changes import decode, encode
from tasks.artifacts.content import Content, Hash
from tasks.artifacts.download import make_parts
from tasks.artifacts.errors import CorruptArtifact

MAGIC = b"MOEPATCH"
BLOCK_BYTES = 16 << 20
"""Of a tensor, compared and compressed together; a thread holds a few times as much. Part of the format: in
the patches of one chain blocks are the same or apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of one tensor in a file."""

    tensor: str
    start: int
    stop: int
    width: int
    """Bytes of an element."""


@dataclass(frozen=True, slots=True)
class _Change:
    """What one patch has for one block."""

    entry: dict[str, Any]
    data: NDArray[np.uint8]
    """The whole patch."""
    offset: int
    """Of the block's streams in it."""
    name: str


def make_patch(base: Path, new: Content, patch: Path, *, num_threads: int, max_share: float = 0.5) -> bool:
    """Write what turns ``base`` into ``new``; False, and nothing is written, if that is not worth while.

    It is not where the layouts differ, or where the patch would exceed ``max_share`` of the file.
    """
    prefix = _prefix(base)
    if new.size != base.stat().st_size or prefix != bytes(_range(new, 0, len(prefix))):
        return False
    old_bytes = np.memmap(base, np.uint8, "r")
    entries: list[dict[str, Any]] = []
    left = int(max_share * new.size)
    body = patch.with_name(f"{patch.name}.body")
    try:
        with body.open("wb") as file, ThreadPoolExecutor(num_threads) as pool:

            def work(block: Block) -> tuple[dict[str, Any], list[bytes]] | None:
                return _encode(block, old_bytes, _range(new, block.start, block.stop))

            for window in _windows(blocks_of(prefix), 4 * num_threads):  # bounds what is held at a time
                for done in filter(None, pool.map(work, window)):
                    entry, streams = done
                    entries.append(entry)
                    file.writelines(streams)
                    left -= sum(map(len, streams))
                if left < 0:
                    return False
        _assemble(entries, new.size, body, patch)
    finally:
        body.unlink(missing_ok=True)
    return True


def apply_patches(
    patches: Sequence[Path],
    base: BinaryIO,
    target: Path,
    *,
    num_threads: int,
    found: Hash | None = None,
    is_checked: bool = False,
) -> None:
    """Write what patches, oldest first, make of ``base``: each block is read, changed and written once.

    Args:
        base: an open file.
        found: is fed what is written, in order and beside the writing.
        is_checked: whether each block that a patch changed is compared with its SHA-256 there. It names the
            tensor that is wrong; that nothing is, a hash of the whole says in a third of the time.
    """
    source = base.fileno()
    size = os.fstat(source).st_size
    changes = _changes(patches, size)
    largest = max((stop - start for start, stop in changes), default=0)
    local, room = threading.local(), max(largest, BLOCK_BYTES)
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def make(start: int, stop: int) -> None:
        if not hasattr(local, "block"):  # one a thread: memory that was touched before is much faster
            local.block = np.empty(room, np.uint8)
        block = local.block[: stop - start]
        _read(source, block, start)
        for change in changes.get((start, stop), ()):
            _apply(change, block, is_checked=is_checked)
        _write(fd, block, start)

    try:
        make_parts(fd, _pieces(sorted(changes), size), make, num_threads=num_threads, found=found)
    finally:
        os.close(fd)


def changed_tensors(patch: Path) -> list[str]:
    """Names of the tensors that a patch changes, in the file's order."""
    header, _ = _header(patch, np.memmap(patch, np.uint8, "r"))
    return list(dict.fromkeys(entry["tensor"] for entry in header["blocks"]))


def blocks_of(prefix: bytes) -> list[Block]:
    """The blocks of every tensor of a safetensors file, from its header, in the file's order."""
    tensors = {k: v for k, v in json.loads(prefix[8:]).items() if k != "__metadata__"}
    blocks = []
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = (len(prefix) + offset for offset in tensor["data_offsets"])
        width = _width(tensor["dtype"])
        for start in range(first, last, BLOCK_BYTES):
            blocks.append(Block(tensor=name, start=start, stop=min(start + BLOCK_BYTES, last), width=width))
    return blocks


def _width(dtype: str) -> int:
    """Bytes of an element, from the number in its type's name; BOOL has none, and four bits fill none."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _prefix(path: Path) -> bytes:
    """Length and header of a safetensors file."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(struct.unpack("<Q", length)[0])


def _windows(blocks: list[Block], size: int) -> Iterator[list[Block]]:
    yield from (blocks[i : i + size] for i in range(0, len(blocks), size))


def _changes(patches: Sequence[Path], size: int) -> dict[tuple[int, int], list[_Change]]:
    """What the patches have for each block, oldest first."""
    changes: dict[tuple[int, int], list[_Change]] = {}
    for patch in patches:
        data = np.memmap(patch, np.uint8, "r")
        header, offset = _header(patch, data)
        if header["size"] != size:
            raise CorruptArtifact(f"a file must have {header['size']} bytes for {patch.name}, got {size}.")
        for entry in header["blocks"]:
            block = entry["start"], entry["stop"]
            changes.setdefault(block, []).append(_Change(entry, data, offset, patch.name))
            offset += sum(length for length, _ in entry["streams"])
    return changes


def _pieces(blocks: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The whole file in order: blocks, and pieces of what lies between."""
    at = 0
    for start, stop in (*blocks, (size, size)):
        if start < at:
            raise ValueError(f"the blocks of patches must be the same or apart, got {at} behind {start}")
        yield from ((a, min(a + BLOCK_BYTES, start)) for a in range(at, start, BLOCK_BYTES))
        if start < stop:
            yield start, stop
        at = stop


def _read(fd: int, block: NDArray[np.uint8], at: int) -> None:
    while len(block):
        number = os.preadv(fd, [block.data], at)
        if not number:
            raise CorruptArtifact(f"the base of a patch must not get shorter, got an end at {at}.")
        at, block = at + number, block[number:]


def _write(fd: int, block: NDArray[np.uint8], at: int) -> None:
    while len(block):
        number = os.pwrite(fd, block.data, at)
        at, block = at + number, block[number:]


def _range(content: Content, start: int, stop: int) -> NDArray[np.uint8]:
    """A part of a content; as it lies, where it lies in one piece."""
    piece = content.read(start, stop)
    if len(piece) == stop - start:
        return np.frombuffer(piece, np.uint8)
    whole, at = np.empty(stop - start, np.uint8), 0
    while at < len(whole):
        whole[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
        piece = content.read(start + at, stop) if at < len(whole) else b""
    return whole


def _encode(
    block: Block, old_bytes: NDArray[np.uint8], new: NDArray[np.uint8]
) -> tuple[dict[str, Any], list[bytes]] | None:
    """The header's entry and the compressed streams of a block; None if nothing changed in it."""
    kind = f"<u{block.width}"
    how, raw = encode(old_bytes[block.start : block.stop].view(kind), new.view(kind))
    if not raw:
        return None
    streams = [_compress(part.data) for part in raw]
    entry = {
        "tensor": block.tensor,
        "start": block.start,
        "stop": block.stop,
        "width": block.width,
        **how,
        "sha256": sha256(new.data).hexdigest(),
        "streams": [(len(stream), len(part)) for stream, part in zip(streams, raw, strict=True)],
    }
    return entry, streams


def _apply(change: _Change, block: NDArray[np.uint8], *, is_checked: bool) -> None:
    entry = change.entry
    try:
        raw = _decompressed(entry["streams"], change.data, change.offset)
        decode(entry, raw, block.view(f"<u{entry['width']}"))
        got = sha256(block.data).hexdigest() if is_checked else entry["sha256"]
    except (OSError, ValueError, IndexError) as error:
        got = f"{type(error).__name__}: {error}"
    if got != entry["sha256"]:
        raise CorruptArtifact(
            f"tensor {entry['tensor']} must have its published content after {change.name}, sha256 "
            f"{entry['sha256'][:16]}, got {got} in bytes {entry['start']} to {entry['stop']}."
        )


def _decompressed(
    sizes: list[tuple[int, int]], data: NDArray[np.uint8], offset: int
) -> list[NDArray[np.uint8]]:
    raw = []
    for length, size in sizes:
        raw.append(np.frombuffer(_decompress(data[offset : offset + length], size), np.uint8))
        offset += length
    return raw


def _assemble(entries: list[dict[str, Any]], size: int, body: Path, patch: Path) -> None:
    text = json.dumps({"size": size, "blocks": entries}).encode()
    header = _compress(text)
    with patch.open("wb") as file, body.open("rb") as streams:
        file.write(MAGIC + struct.pack("<QQ", len(header), len(text)) + header)
        _copy(streams, file)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while chunk := source.read(BLOCK_BYTES):
        target.write(chunk)


def _header(patch: Path, data: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """The header, and where the streams begin."""
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise CorruptArtifact(f"{patch} must be a patch, got a file that does not begin like one.")
    first = len(MAGIC) + 16
    length, size = struct.unpack("<QQ", bytes(data[len(MAGIC) : first]))
    text = _decompress(data[first : first + length], size)
    return json.loads(bytes(text)), first + length


def _compress(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)  # an object a call: they are not for sharing


def _decompress(data: NDArray[np.uint8], size: int) -> bytes:
    """The ``size`` bytes of a stream; ``ValueError`` if they are not what was compressed."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data.data, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"a stream of {size} bytes cannot be read: {error}") from None
    if len(raw) != size:
        raise ValueError(f"a stream must hold {size} bytes, got {len(raw)}")
    return raw
