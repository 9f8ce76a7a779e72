"""The passes over all points of a scene, compiled by numba (extra ``memkit[numba]``).

Each is compiled on its first call, a few seconds in total; numba caches the result on disk for later processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba  # type: ignore[import-not-found,import-untyped,unused-ignore]
import numpy as np
from numpy.typing import NDArray

from memkit.points import passes
from memkit.points.passes import Bytes, Floats, Ints, Scratch
from memkit.points.philox import FACTORS, ROUNDS, STEPS, Key, Stream

Words64 = NDArray[np.uint64]
Compiled = TypeVar("Compiled", bound=Callable[..., Any])

_MANY = 512  # blocks of random bits at a time
_FEW = 128  # slots that are checked together
_MOST_KEYS = 8  # per point: 32 bytes of counts
_POINTS, _AGAIN = np.uint64(Stream.POINTS), np.uint64(Stream.AGAIN)
_FACTOR_A, _FACTOR_B = (np.uint64(each) for each in FACTORS)
_STEP_A, _STEP_B = (np.uint64(each) for each in STEPS)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


sides = passes.sides  # fast enough


def _compiled(function: Compiled) -> Compiled:
    return cast("Compiled", numba.njit(cache=True, nogil=True)(function))


def number_cells(points: NDArray[Any], size: Floats, origin: Floats, low: Floats, extent: Ints) -> NDArray[Any]:
    """See `Passes`."""
    keys = passes.keys_for(len(points), extent)
    readable = points.astype(np.float32) if points.dtype == np.float16 else points  # numba has no float16
    _number_cells(readable, size, origin, low, extent, keys)
    return keys


def group(keys: NDArray[Any]) -> tuple[NDArray[np.int32], Ints]:
    """See `Passes`. Uses a counting sort unless there are many more keys than points."""
    num_keys = int(keys.max()) + 1
    if num_keys > max(_MOST_KEYS * len(keys), 2**16):
        return passes.group(keys)
    order, starts = np.empty(len(keys), np.int32), np.empty(min(num_keys, len(keys)), np.int64)
    num_groups = _group(keys, np.zeros(num_keys, np.int32), order, starts)
    return order, starts[:num_groups].copy()


def find_slots(order: NDArray[np.int32], sizes: Ints, rank: Ints, bounds: Ints) -> NDArray[np.int32]:
    """See `Passes`."""
    slots = np.empty(len(order), np.int32)
    _find_slots(order, sizes, rank, bounds, slots)
    return slots


def draw_below(left: Bytes, key: Key, out: Bytes, scratch: Scratch) -> None:  # noqa: ARG001 # used by NumPy's
    """See `Passes`."""
    _draw_below(left, np.uint64(key.key), np.uint64(key.tag), out)


def keep(below: Bytes, needed: Bytes, bounds: Ints, chosen: Bytes) -> None:
    """See `Passes`."""
    _keep(below, needed, bounds, chosen)


def rows(chosen: Bytes, slots: NDArray[np.int32], spare: Bytes, num: int) -> Ints:  # noqa: ARG001 # used by NumPy's
    """See `Passes`."""
    found = np.empty(num + 1, np.int64)  # one spare: the loop writes before it tests
    _rows(chosen, slots, found)
    return found[:num]


@_compiled
def _number_cells(points: NDArray[Any], size: Floats, origin: Floats, low: Floats, extent: Ints, keys: Ints) -> None:
    for row in range(len(points)):
        linear = 0.0
        for axis in range(len(size)):
            coordinate = np.floor((np.float64(points[row, axis]) - origin[axis]) / size[axis]) - low[axis]
            linear = linear * extent[axis] + coordinate
        keys[row] = linear


@_compiled
def _group(keys: NDArray[Any], places: NDArray[np.int32], order: NDArray[np.int32], starts: Ints) -> int:
    for key in keys:
        places[key] += 1
    num_groups = start = 0
    for key in range(len(places)):
        count = places[key]
        places[key] = start
        if count:
            starts[num_groups] = start
            num_groups += 1
        start += count
    for row in range(len(keys)):
        order[places[keys[row]]] = row
        places[keys[row]] += 1
    return num_groups


@_compiled
def _find_slots(order: NDArray[np.int32], sizes: Ints, rank: Ints, bounds: Ints, slots: NDArray[np.int32]) -> None:
    start = 0
    for piece in range(len(sizes)):
        for place in range(sizes[piece]):
            slots[order[start + place]] = bounds[place] + rank[piece]
        start += sizes[piece]


@_compiled
def _draw_below(left: Bytes, key: np.uint64, tag: np.uint64, out: Bytes) -> None:
    made, again, words = np.empty((4, _MANY), np.uint64), np.empty((4, 1), np.uint64), np.empty(4 * _MANY, np.uint64)
    drawn = words.view(np.uint16)
    for first in range(0, len(left), 16 * _MANY):
        _make_blocks(np.uint64(first // 16), key, tag, _POINTS, made[0], made[1], made[2], made[3])
        for block in range(_MANY):
            for word in range(4):
                words[4 * block + word] = made[word, block]
        stop = min(first + 16 * _MANY, len(left))
        _scale(drawn, left[first:stop], out[first:stop])
        for start in range(first, stop, _FEW):
            end = min(start + _FEW, stop)
            if _num_suspects(drawn[start - first : end - first], left[start:end]):  # rare
                for slot in range(start, end):
                    each = np.uint32(left[slot])
                    if np.uint16(np.uint32(drawn[slot - first]) * each) < np.uint32(65536) % each:
                        _make_blocks(np.uint64(slot), key, tag, _AGAIN, again[0], again[1], again[2], again[3])
                        out[slot] = ((again[0, 0] >> np.uint64(9)) * np.uint64(each)) >> np.uint64(55)


@_compiled
def _make_blocks(
    first: np.uint64,
    key: np.uint64,
    tag: np.uint64,
    stream: np.uint64,
    a: Words64,
    b: Words64,
    c: Words64,
    d: Words64,
) -> None:
    """Compute `philox.blocks` until the arrays are full."""
    for block in range(len(a)):
        number, second, third, fourth = first + np.uint64(block) + np.uint64(1), np.uint64(0), tag, stream
        key_a, key_b = key, np.uint64(0)
        for _ in range(ROUNDS):
            high_a, low_a = _product(number, _FACTOR_A)
            high_b, low_b = _product(third, _FACTOR_B)
            number, second, third, fourth = high_b ^ second ^ key_a, low_b, high_a ^ fourth ^ key_b, low_a
            key_a += _STEP_A
            key_b += _STEP_B
        a[block], b[block], c[block], d[block] = number, second, third, fourth


@_compiled
def _product(word: np.uint64, factor: np.uint64) -> tuple[np.uint64, np.uint64]:
    low, high, factor_low, factor_high = word & _LOW, word >> _HALF, factor & _LOW, factor >> _HALF
    bottom = low * factor_low
    middle = high * factor_low + (bottom >> _HALF)
    other = low * factor_high + (middle & _LOW)
    return high * factor_high + (middle >> _HALF) + (other >> _HALF), (other << _HALF) | (bottom & _LOW)


@_compiled
def _scale(drawn: NDArray[np.uint16], left: Bytes, out: Bytes) -> None:
    for slot in range(len(left)):  # on slices, so that it is vectorized
        out[slot] = (np.uint32(drawn[slot]) * np.uint32(left[slot])) >> np.uint32(16)


@_compiled
def _num_suspects(drawn: NDArray[np.uint16], left: Bytes) -> int:
    num = np.uint16(0)
    for slot in range(len(left)):
        num += np.uint16(np.uint16(np.uint32(drawn[slot]) * np.uint32(left[slot])) < np.uint16(left[slot]))
    return int(num)


@_compiled
def _keep(below: Bytes, needed: Bytes, bounds: Ints, chosen: Bytes) -> None:
    for step in range(len(bounds) - 1):
        _one_step(below[bounds[step] : bounds[step + 1]], needed, chosen[bounds[step] : bounds[step + 1]])


@_compiled
def _one_step(below: Bytes, needed: Bytes, chosen: Bytes) -> None:
    for piece in range(len(below)):  # on slices, as in `_scale`
        chosen[piece] = np.uint8(below[piece] < needed[piece])
        needed[piece] = np.uint8(needed[piece] - chosen[piece])


@_compiled
def _rows(chosen: Bytes, slots: NDArray[np.int32], found: Ints) -> None:
    num = np.int64(0)
    for row in range(len(slots)):
        found[num] = row
        num += np.int64(chosen[slots[row]])
