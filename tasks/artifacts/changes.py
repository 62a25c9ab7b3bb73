"""How the changes of a block's elements become bytes, few before and fewer after compression.

Which elements change is no coin toss. An optimizer's step moves every weight by about the same amount, and a
small weight has its next representable neighbour nearer: of bfloat16 weights below some magnitude most
change, of the others one in a hundred. So a block is split at magnitudes, which a reader sees in what it has,
and each class lists its changed elements by their gaps among the elements of the class. Then come the signs
of the differences, one bit each, and what of them exceeds one unit in the last place: mostly nothing.

Elements are unsigned integers here: a NaN or a negative zero is a bit pattern like any other.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Bytes = NDArray[np.uint8]

DENSE_SHARE = 0.25
"""Where more of a block's elements changed, all differences are listed and no positions."""
MOST_SPLITS = 4
LARGEST_INNER = 0.05
"""Of a block's elements, below a split. Looking for these takes a reader's time: 1.5 s a GB of weights on one
core, 0.2 without classes; 0.3 in its place would take 2.1 s and save another twentieth of the bytes."""
LEAST_GAIN = 0.005
_SAMPLE = 16
_ESCAPE = 255
_PIECE = 1 << 16
"""Elements looked at together: with what is made of them they stay in a core's cache."""


def encode(old: NDArray[Any], new: NDArray[Any]) -> tuple[dict[str, Any], list[Bytes]]:
    """What ``decode`` needs to know, and streams to compress; none if nothing changed."""
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return {}, []
    if len(changed) > DENSE_SHARE * len(new):
        return {"dense": True}, _planes(zigzag(new - old))
    splits = choose_splits(old, changed)
    order, streams = _classes_of(changed, old, splits)
    order = _by_magnitude(order, old)
    difference = new[order] - old[order]
    is_down = difference.view(f"<i{difference.itemsize}") < 0
    beyond = np.where(is_down, 0 - difference, difference) - 1
    return {"dense": False, "splits": splits}, [*streams, np.packbits(is_down), *_planes(beyond)]


def decode(entry: dict[str, Any], raw: list[Bytes], elements: NDArray[Any]) -> None:
    """Make the new elements of the old ones, in place."""
    width = elements.itemsize
    if entry["dense"]:
        elements += unzigzag(_joined(raw, elements.dtype))
    elif (splits := entry.get("splits")) is None:  # of earlier releases, which knew no classes
        elements[unpack_gaps(raw[0])] += unzigzag(_joined(raw[1:], elements.dtype))
    else:
        order = _by_magnitude(_places_of(raw[: len(splits) + 1], elements, splits), elements)
        is_down = np.unpackbits(raw[len(splits) + 1], count=len(order)).view(bool)
        difference = _joined(raw[-width:], elements.dtype) + elements.dtype.type(1)
        elements[order] += np.where(is_down, 0 - difference, difference)


def _by_magnitude(places: Indices, old: NDArray[Any]) -> Indices:
    """Elements of one exponent after another: about as many units in the last place each."""
    return places[np.argsort(_top_bits(old[places]), kind="stable")]


def choose_splits(old: NDArray[Any], changed: Indices) -> list[int]:
    """Magnitudes, descending, at which splitting saves bits, estimated from some of the elements."""
    members = np.bincount(_top_bits(old[::_SAMPLE]), minlength=256) * float(_SAMPLE)
    moved = np.bincount(_top_bits(old[changed]), minlength=256).astype(float)
    members = np.maximum(members, moved)
    total, below, moved_below = members.sum(), np.cumsum(members), np.cumsum(moved)
    splits: list[int] = []
    bits, least = _bits(below[-1], moved_below[-1]), LEAST_GAIN * _bits(below[-1], moved_below[-1])
    last = int(np.searchsorted(below, LARGEST_INNER * total))  # splits lie below it
    while len(splits) < MOST_SPLITS:
        costs = [_cost([*splits, at], below, moved_below) for at in range(1, last + 1)]
        if not costs or min(costs) > bits - least:
            break
        bits = min(costs)
        splits.append(1 + int(np.argmin(costs)))
    return [at << _shift(old) for at in sorted(splits, reverse=True)]


def _cost(splits: list[int], below: NDArray[np.float64], moved_below: NDArray[np.float64]) -> float:
    edges = [0, *sorted(splits), len(below)]
    counts = [(below[edge - 1], moved_below[edge - 1]) if edge else (0.0, 0.0) for edge in edges]
    return sum(_bits(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts))


def _bits(members: float, moved: float) -> float:
    """Entropy of which of the members moved."""
    return sum(-n * np.log2(n / members) for n in (moved, members - moved) if n > 0)


def _top_bits(elements: NDArray[Any]) -> Bytes:
    """Eight bits behind the sign: a bfloat16's exponent."""
    return (_magnitudes(elements) >> elements.dtype.type(_shift(elements))).astype(np.uint8)


def _shift(elements: NDArray[Any]) -> int:
    return max(0, 8 * elements.itemsize - 9)


def _magnitudes(elements: NDArray[Any]) -> NDArray[Any]:
    """Without the sign's bit: ascending with a floating-point number's magnitude."""
    return elements & elements.dtype.type((1 << (8 * elements.itemsize - 1)) - 1)


def _below(elements: NDArray[Any], split: int) -> Indices:
    """Places of the elements whose magnitude is below the split."""
    mask = elements.dtype.type((1 << (8 * elements.itemsize - 1)) - 1)
    bound = elements.dtype.type(split)
    magnitudes, is_below = np.empty(_PIECE, elements.dtype), np.empty(_PIECE, bool)
    found = [np.empty(0, np.int64)]
    for start in range(0, len(elements), _PIECE):
        piece = elements[start : start + _PIECE]
        size = len(piece)
        np.bitwise_and(piece, mask, out=magnitudes[:size])
        np.less(magnitudes[:size], bound, out=is_below[:size])
        places = np.flatnonzero(is_below[:size])
        places += start
        found.append(places)
    return np.concatenate(found)


def _classes_of(changed: Indices, old: NDArray[Any], splits: list[int]) -> tuple[Indices, list[Bytes]]:
    """The changed elements ordered by class, and a stream of gaps a class: largest magnitudes first."""
    order, streams, inner_of = [], [], None
    for split in splits:
        inner = _below(old, split)
        is_inner = _magnitudes(old[changed]) < split
        outer = changed[~is_inner]
        streams.append(pack_gaps(outer - np.searchsorted(inner, outer)))
        order.append(outer if inner_of is None else inner_of[outer])
        changed = np.searchsorted(inner, changed[is_inner])
        old, inner_of = old[inner], inner if inner_of is None else inner_of[inner]
    streams.append(pack_gaps(changed))
    order.append(changed if inner_of is None else inner_of[changed])
    return np.concatenate(order), streams


def _places_of(streams: list[Bytes], elements: NDArray[Any], splits: list[int]) -> Indices:
    """The order that ``_classes_of`` returned."""
    order, inner_of = [], None
    for split, stream in zip(splits, streams, strict=False):
        inner, ranks = _below(elements, split), unpack_gaps(stream)
        outer = ranks + np.searchsorted(inner - np.arange(len(inner)), ranks, side="right")
        order.append(outer if inner_of is None else inner_of[outer])
        elements, inner_of = elements[inner], inner if inner_of is None else inner_of[inner]
    changed = unpack_gaps(streams[-1])
    order.append(changed if inner_of is None else inner_of[changed])
    return np.concatenate(order)


def zigzag(difference: NDArray[Any]) -> NDArray[Any]:
    """Small differences of either sign become small numbers."""
    signed = difference.view(f"<i{difference.itemsize}")
    sign = signed >> (8 * difference.itemsize - 1)
    return ((signed << 1) ^ sign).view(difference.dtype)


def unzigzag(coded: NDArray[Any]) -> NDArray[Any]:
    return (coded >> 1) ^ (0 - (coded & 1))


def pack_gaps(positions: Indices) -> Bytes:
    """Elements passed over before each position, base 255: so many escapes, then the rest."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes, rest = np.divmod(gaps, _ESCAPE)
    packed = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, np.uint8)
    packed[np.cumsum(escapes + 1) - 1] = rest
    return packed


def unpack_gaps(packed: Bytes) -> Indices:
    ends = np.flatnonzero(packed != _ESCAPE)
    escapes = np.diff(ends, prepend=-1) - 1
    return np.cumsum(escapes * _ESCAPE + packed[ends].astype(np.int64) + 1) - 1


def _planes(values: NDArray[Any]) -> list[Bytes]:
    """A stream for each byte of the values."""
    return [np.ascontiguousarray(plane) for plane in values.view(np.uint8).reshape(-1, values.itemsize).T]


def _joined(planes: list[Bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(np.stack(planes, axis=1)).view(dtype).ravel()
