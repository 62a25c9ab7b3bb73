"""A safetensors file that is never written: tensors in memory, read as the file that they would be.

Byte for byte what ``safetensors.torch.save_file`` writes, so that a content keeps its name in the store; the
tensors' own memory is handed out. Serialising a rank's optimizer state to a disk first, reading it back to
hash it and again to send it took longer than hashing and sending do.
"""

from __future__ import annotations

import bisect
import json
import struct
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""In the order in which a file has them: the widest first."""
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES)}
_ALIGNMENT = 8


class TensorFile:
    """Tensors as a ``Content``; they must stay as they are while it is read."""

    def __init__(self, tensors: Mapping[str, Tensor], *, require_unchanged: Callable[[], None]) -> None:
        self.require_unchanged = require_unchanged
        ordered = sorted(tensors.items(), key=lambda item: (_RANKS[item[1].dtype], item[0].encode()))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        views, offset = [], 0
        for name, tensor in ordered:
            view = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + len(view)],
            }
            offset += len(view)
            views.append(view)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._views = [memoryview(struct.pack("<Q", len(text)) + text), *filter(len, views)]
        self._starts = [0]
        for view in self._views[:-1]:
            self._starts.append(self._starts[-1] + len(view))

    @property
    def size(self) -> int:
        return self._starts[-1] + len(self._views[-1])

    def read(self, start: int, stop: int) -> memoryview:
        """The rest of one tensor, or as much of it as was asked for."""
        number = bisect.bisect_right(self._starts, start) - 1
        return self._views[number][start - self._starts[number] : stop - self._starts[number]]
