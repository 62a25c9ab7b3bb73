"""Weights and optimizer state as they are at one moment, in host memory.

The trainer stands still only for this copy. On a GPU it goes to pinned memory, which the device writes at the
bus's speed; pinning is slow itself, so an arena pins once, while something else runs, and is used again by
the next snapshot. What is reserved is one piece: each of several would waste the rest that a tensor did not
fit into, and the first snapshot would pin more while the trainer stands still. Beside each tensor goes the
sum of its bits as integers, taken where the live tensor lies: what is written later is compared with it, so a
file of an earlier step, or one that a buffer's next user overwrote, cannot pass for this one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30
ALIGNMENT = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Copies of named tensors; the arena's next snapshot overwrites them."""

    tensors: dict[str, Tensor]
    sums: dict[str, int]
    """``bit_sum`` of each live tensor."""
    num_bytes: int
    seconds: float
    """For which the trainer stood still."""


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits read as integers, eight bytes at a time where they divide it, modulo 2**64."""
    flat = tensor.detach().contiguous().flatten()
    width = 8 if flat.nbytes % 8 == 0 else flat.element_size()
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()  # a view of wider elements must begin at a multiple of them
    return flat.view(_INTEGERS[width]).sum(dtype=torch.int64)


class HostArena:
    """Host memory that snapshots are copied to, in turn; pinned where they come from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._chunk = self._offset = 0
        self._reserving: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """What the arena holds."""
        return sum(len(chunk) for chunk in self._chunks)

    def reserve(self, num_bytes: int) -> None:
        """Start to allocate for snapshots of that size; the caller goes on meanwhile."""
        pool = ThreadPoolExecutor(1)
        self._reserving = pool.submit(self._allocate, num_bytes)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Until what was reserved is there."""
        if self._reserving is not None:
            self._reserving.result()
            self._reserving = None

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Snapshot:
        """Copy named tensors. What split tensors yield is put together one at a time (a collective)."""
        self.wait()
        start, self._chunk, self._offset = time.monotonic(), 0, 0
        copies: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        devices = set()
        for name, tensor in tensors:
            copy = self._place(tensor)
            copy.copy_(tensor, non_blocking=True)  # a freed source is reused only behind it, in the stream
            copies[name], sums[name] = copy, bit_sum(tensor)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return Snapshot(
            tensors=copies,
            sums=_read(sums),
            num_bytes=sum(copy.nbytes for copy in copies.values()),
            seconds=time.monotonic() - start,
        )

    def _allocate(self, num_bytes: int) -> None:
        if self.num_bytes < num_bytes:
            self._chunks.append(self._new_chunk(num_bytes - self.num_bytes))

    def _new_chunk(self, num_bytes: int) -> Tensor:
        chunk = torch.empty(max(num_bytes, ALIGNMENT), dtype=torch.uint8)
        chunk.fill_(0)  # memory is not there before it is touched; pinning would touch page after page
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # a thread's own would be the first
                _pin(chunk)
            weakref.finalize(self, _unpin, chunk.data_ptr())
        return chunk

    def _place(self, tensor: Tensor) -> Tensor:
        """Room for a copy of the tensor: behind the last one, or at the start of a chunk it fits into."""
        while True:
            if self._chunk == len(self._chunks):
                self._chunks.append(self._new_chunk(max(CHUNK_BYTES, tensor.nbytes)))
            chunk = self._chunks[self._chunk]
            if self._offset + tensor.nbytes <= len(chunk):
                break
            self._chunk, self._offset = self._chunk + 1, 0
        part = chunk[self._offset : self._offset + tensor.nbytes]
        self._offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return part.view(tensor.dtype).view(tensor.shape)


def _read(sums: dict[str, Tensor]) -> dict[str, int]:
    """All of a device's in one transfer."""
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    found: dict[str, int] = {}
    for names in by_device.values():
        found |= dict(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return found


def _pin(chunk: Tensor) -> None:
    """Not ``pin_memory=True``, which rounds up to a power of two."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0)))


def _unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))
