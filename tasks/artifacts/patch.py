"""The difference between two safetensors files of one layout: what changed, and how to rebuild the new one.

    magic | length of the header | header (JSON, zstd) | streams (zstd), in the header's order

The header lists every block with a change: its tensor, its bytes in the file, their SHA-256 after the change,
and how its changes are coded (``changes.py``): a step of reinforcement learning moves few of the bfloat16
weights, and those by one unit in the last place. What is rebuilt is equal bit for bit.
"""

import json
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from tasks.artifacts.changes import decode, encode
from tasks.artifacts.errors import CorruptArtifact

MAGIC = b"MOEPATCH"
BLOCK_BYTES = 16 << 20
"""Of a tensor, compared and compressed together; a thread holds a few times as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of one tensor in a file."""

    tensor: str
    start: int
    stop: int
    width: int
    """Bytes of an element."""


def make_patch(base: Path, new: Path, patch: Path, *, num_threads: int, max_share: float = 0.5) -> bool:
    """Write what turns ``base`` into ``new``; False, and nothing is written, if that is not worth while.

    It is not where the layouts differ, or where the patch would exceed ``max_share`` of the file.
    """
    prefix = _prefix(new)
    if new.stat().st_size != base.stat().st_size or prefix != _prefix(base):
        return False
    old_bytes, new_bytes = np.memmap(base, np.uint8, "r"), np.memmap(new, np.uint8, "r")
    entries: list[dict[str, Any]] = []
    left = int(max_share * len(new_bytes))
    body = patch.with_name(f"{patch.name}.body")
    try:
        with body.open("wb") as file, ThreadPoolExecutor(num_threads) as pool:

            def work(block: Block) -> tuple[dict[str, Any], list[bytes]] | None:
                return _encode(block, old_bytes, new_bytes)

            for window in _windows(blocks_of(prefix), 4 * num_threads):  # bounds what is held at a time
                for done in filter(None, pool.map(work, window)):
                    entry, streams = done
                    entries.append(entry)
                    file.writelines(streams)
                    left -= sum(map(len, streams))
                if left < 0:
                    return False
        _assemble(entries, len(new_bytes), body, patch)
    finally:
        body.unlink(missing_ok=True)
    return True


def apply_patch(patch: Path, target: Path, *, num_threads: int) -> None:
    """Turn ``target``, a copy of the file that the patch was made against, into the new file, in place."""
    data = np.memmap(patch, np.uint8, "r")
    header, offset = _header(patch, data)
    out = np.memmap(target, np.uint8, "r+")
    if header["size"] != len(out):
        raise CorruptArtifact(f"{target} must have {header['size']} bytes for {patch.name}, got {len(out)}.")
    starts = []
    for entry in header["blocks"]:
        starts.append(offset)
        offset += sum(length for length, _ in entry["streams"])
    with ThreadPoolExecutor(num_threads) as pool:
        jobs = zip(header["blocks"], starts, strict=True)
        list(pool.map(lambda job: _apply(job[0], data, job[1], out, patch.name), jobs))
    out.flush()


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


def _elements(data: NDArray[np.uint8], block: Block) -> NDArray[Any]:
    return data[block.start : block.stop].view(f"<u{block.width}")


def _encode(
    block: Block, old_bytes: NDArray[np.uint8], new_bytes: NDArray[np.uint8]
) -> tuple[dict[str, Any], list[bytes]] | None:
    """The header's entry and the compressed streams of a block; None if nothing changed in it."""
    how, raw = encode(_elements(old_bytes, block), _elements(new_bytes, block))
    if not raw:
        return None
    streams = [_compress(part.data) for part in raw]
    entry = {
        "tensor": block.tensor,
        "start": block.start,
        "stop": block.stop,
        "width": block.width,
        **how,
        "sha256": sha256(new_bytes[block.start : block.stop].data).hexdigest(),
        "streams": [(len(stream), len(part)) for stream, part in zip(streams, raw, strict=True)],
    }
    return entry, streams


def _apply(
    entry: dict[str, Any], data: NDArray[np.uint8], offset: int, out: NDArray[np.uint8], name: str
) -> None:
    block = Block(tensor=entry["tensor"], start=entry["start"], stop=entry["stop"], width=entry["width"])
    try:
        decode(entry, _decompressed(entry["streams"], data, offset), _elements(out, block))
        got = sha256(out[block.start : block.stop].data).hexdigest()
    except (OSError, ValueError, IndexError) as error:
        got = f"{type(error).__name__}: {error}"
    if got != entry["sha256"]:
        raise CorruptArtifact(
            f"tensor {block.tensor} must have its published content after {name}, sha256 "
            f"{entry['sha256'][:16]}, got {got} in bytes {block.start} to {block.stop}."
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
