"""Routing records of a sample: the experts that each layer chose for each token, and their weights.

A record has a row for each position that was fed to the model to get a token of the response: prompt and
response without the last token, so ``[prompt + response - 1, layers, k]``. It travels as the bytes of one
``.npy`` array: self-describing, readable without a copy. Ids are uint8 or int16, weights float16 or float32.
"""

import io
from typing import Any

import numpy as np

EXPERT_TYPES = ("uint8", "int16")
WEIGHT_TYPES = ("float16", "float32")


def pack(array: np.ndarray) -> bytes:
    """The bytes of one record."""
    sink = io.BytesIO()
    np.save(sink, np.ascontiguousarray(array), allow_pickle=False)
    return sink.getvalue()


def unpack(payload: bytes) -> np.ndarray:
    """The record, as a read-only view of its bytes."""
    shape, dtype, start = _header(payload)
    return np.frombuffer(payload, dtype=dtype, offset=start).reshape(shape)


def continued(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Record of a response that was interrupted: ``after`` covers all of it, since the continuation was fed
    the tokens sampled before; but those were sampled under the routing in ``before``, which therefore stays.
    """
    return np.concatenate([before, after[len(before) :]])


def routing_fault(experts: bytes | None, weights: bytes | None, *, num_rows: int) -> str:
    """What is wrong with a sample's record; empty if nothing is, or if there is none."""
    if experts is None:
        return "" if weights is None else "weights without expert ids"
    try:
        shapes = [_checked(experts, EXPERT_TYPES)]
        shapes += [] if weights is None else [_checked(weights, WEIGHT_TYPES)]
    except (ValueError, EOFError) as error:
        return str(error)
    if any(shape != shapes[0] or len(shape) != 3 or shape[0] != num_rows for shape in shapes):
        return f"shapes must be [{num_rows}, layers, k], got {shapes}"
    return ""


def _checked(payload: bytes, types: tuple[str, ...]) -> tuple[int, ...]:
    shape, dtype, start = _header(payload)
    if dtype.name not in types:
        raise ValueError(f"type must be one of {types}, got {dtype.name}")
    if start + int(np.prod(shape)) * dtype.itemsize != len(payload):
        raise ValueError(f"bytes must be those of {shape} {dtype.name}, got {len(payload) - start}")
    return shape


def _header(payload: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    head = io.BytesIO(payload[:512])
    version = np.lib.format.read_magic(head)
    if version != (1, 0):
        raise ValueError(f"version of a .npy must be (1, 0), got {version}")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(head)
    if is_fortran or dtype.hasobject:
        raise ValueError(f"array must be numbers in C order, got {dtype}, Fortran order {is_fortran}")
    return shape, dtype, head.tell()
