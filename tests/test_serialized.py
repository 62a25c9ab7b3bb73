"""Files that are never written: the bytes that the library would write, read in any ranges."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save

from tasks.artifacts.content import BytesContent, FileContent, Part, digests_of, sha256_of
from tasks.policy.checkpoint.serialized import DTYPES, TensorFile


def content_of(tensors: dict[str, torch.Tensor]) -> TensorFile:
    return TensorFile(tensors, require_unchanged=lambda: None)


def read(part: Part, size: int = -1) -> bytes:
    got = b""
    while piece := part.read(size):
        got += piece
    return got


def some_tensors() -> dict[str, torch.Tensor]:
    """Every type, in no order; names that JSON escapes, and sizes that align nothing."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"scalar": torch.tensor(3), "empty": torch.empty(0, 4), "last": torch.ones(1)}
    for number, dtype in enumerate(reversed(DTYPES)):
        raw = torch.randint(0, 2, (8 * (number + 1),), generator=generator, dtype=torch.uint8)
        for name in (f"layer.{number}.weight", f'ä"\\\n{number}'):
            tensors[name] = raw.clone().view(dtype)
    tensors["strided"] = torch.arange(12.0).view(3, 4).T
    return tensors


def test_a_file_in_memory_has_the_bytes_that_the_library_writes():
    tensors = some_tensors()
    expected = save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}
    )
    content = content_of(tensors)
    assert content.size == len(expected)
    assert read(Part(content, 0, content.size)) == expected
    assert digests_of(content) == digests_of(BytesContent(expected))
    for length in range(8):  # each header padded by another number
        named = {"a" * length: torch.ones(1)}
        small = content_of(named)
        assert read(Part(small, 0, small.size)) == save(named, metadata={"format": "pt"})


def test_ranges_of_a_content_are_read_again_from_anywhere(tmp_path):
    """As a client does that sends a part twice; whatever lies in it."""
    content = content_of(some_tensors())
    whole = read(Part(content, 0, content.size))
    (tmp_path / "file").write_bytes(whole)
    rng = random.Random(1)
    with FileContent(tmp_path / "file") as file:
        for source in (content, file, BytesContent(whole)):
            for _ in range(50):
                start = rng.randrange(len(whole))
                stop = rng.randint(start, len(whole))
                part = Part(source, start, stop)
                assert len(part) == stop - start
                got = read(part, rng.randint(1, 300))
                assert got == whole[start:stop] and part.tell() == len(part)
                assert part.seek(-len(part), 2) == 0 and read(part) == got
                assert sha256_of(source, start, stop) == sha256_of(BytesContent(got), 0, len(got))


def test_what_is_sent_lies_in_the_tensors_own_memory():
    tensor = torch.zeros(1000)
    content = content_of({"a": tensor})
    view = content.read(content.size - 4000, content.size)
    tensor[0] = 1.0
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"


def test_a_file_that_got_shorter_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with FileContent(path) as content:
        path.write_bytes(b"x" * 10)
        with pytest.raises(ValueError, match="must not change while it is stored"):
            digests_of(content)
