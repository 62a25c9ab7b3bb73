"""Finds where the host would wait for a device, on a machine without one.

What a program does to tensors does not depend on where they are, so it runs on CPU tensors, and every call is
written down that on CUDA ends only when the device has caught up: reading a value, a result whose size
depends on values, and numbers copied from the host. Copies between devices cannot be seen here.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = Path(torch.__file__).parent.parent
"""Not the project's, also where the environment lies in its folder."""
SIZED_BY_VALUES = {
    "nonzero", "masked_select", "repeat_interleave.Tensor", "unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "histc", "_local_scalar_dense", "is_nonzero", "equal",
}  # fmt: skip
INDEXED = {"index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"}
READS = {"tolist", "numpy", "cpu", "__array__"}
UPLOADS = {torch.tensor, torch.as_tensor}


class HostReads:
    """While entered, counts them by ``operation at file:function`` of the innermost frame of the project."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._modes = _Functions(self), _Operations(self)

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def add(self, name: str) -> None:
        self.found[f"{name} at {_place()}"] += 1


def _place() -> str:
    """The innermost frame of the project or of transformers; a backward pass may have neither."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname.rpartition("<locals>.")[2]
        if "/transformers/" in str(path):
            return f"transformers/{path.name}:{name}"
        is_ours = path.is_relative_to(ROOT) and not path.is_relative_to(PACKAGES)
        if is_ours and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{name}"
        frame = frame.f_back
    return "torch"


class _Operations(TorchDispatchMode):
    def __init__(self, reads: HostReads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{func._schema.name.split('::')[1]}.{func._overloadname}"
        is_sized = name in SIZED_BY_VALUES or name.split(".")[0] in SIZED_BY_VALUES
        if name in INDEXED:
            is_sized = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        has_size = name.startswith("repeat_interleave") and (kwargs or {}).get("output_size") is not None
        if is_sized and not has_size:
            self.reads.add(name.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, reads: HostReads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS and args and isinstance(args[0], Tensor):
            self.reads.add(name)
        if func in UPLOADS and (kwargs or {}).get("device") is not None and not isinstance(args[0], Tensor):
            self.reads.add("upload")
        return func(*args, **(kwargs or {}))
