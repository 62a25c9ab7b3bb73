"""Triton's kernels run by its interpreter on CPU tensors: slow, and the same programs that CUDA compiles.

What it cannot see: layouts, races, registers, and what the hardware rounds in its own way.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from moe_kernels import device

NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, kernels take CPU tensors; skips where Triton is not installed."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 from the start: Triton reads it when it is imported")
    pytest.importorskip("triton", reason="needs triton (pip install 'moe-rl[triton]')")
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        """Torch's conversion: the interpreter's own loses the carry of a mantissa that rounds up."""
        names = source.name, target.name
        if not set(names) & set(NARROW):
            return convert(data, source, target, mode)
        flat = np.ascontiguousarray(data).reshape(-1)
        if source.name in NARROW:
            bits = flat.view(np.uint8 if source.name == "fp8e4nv" else np.int16)
            wide = torch.from_numpy(bits.copy()).view(NARROW[source.name]).double()
        else:
            wide = torch.from_numpy(flat.view(f"f{source.primitive_bitwidth // 8}").copy())
        kinds = NARROW | {"fp32": torch.float32, "fp64": torch.float64}
        out = wide.to(kinds[target.name])
        size = target.primitive_bitwidth
        whole = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[size]
        return out.view(whole).numpy().view(f"u{size // 8}").reshape(np.shape(data))

    def cast(self: Any, source: Any, target: Any) -> Any:
        names = source.dtype.scalar.name, target.scalar.name
        if set(names) & set(NARROW) and names[0] != names[1]:
            bits = rounded(source.data, source.dtype.scalar, target.scalar, None)
            return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(target)), target.scalar)
        return plain(self, source, target)

    def patch(tensor: Any, scope: Any) -> None:
        patch_plain(tensor, scope)
        # a scalar is an array of one element there, which numpy no longer takes for a number
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_plain = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    plain = interpreter.InterpreterBuilder.cast_impl
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    for name in ("create_fp_ext", "create_fp_trunc"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, cast)
    monkeypatch.setattr(device, "takes_triton", lambda x: True)
