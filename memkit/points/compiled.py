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
from memkit.points.passes import Bits, Bytes, Floats, Ints
from memkit.points.philox import AGAIN_BITS, FACTORS, GOLDEN, LAST_SHIFT, MIXING, ROUNDS, STEPS

Words64 = NDArray[np.uint64]
Compiled = TypeVar("Compiled", bound=Callable[..., Any])

_MANY = 512  # blocks of random bits at a time
_FEW = 128  # slots that are checked together
_MOST_KEYS = 8  # per point: 32 bytes of counts
_FACTOR_A, _FACTOR_B = (np.uint64(each) for each in FACTORS)
_STEP_A, _STEP_B = (np.uint64(each) for each in STEPS)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
(_SHIFT_A, _MIX_A), (_SHIFT_B, _MIX_B) = ((np.uint64(each) for each in pair) for pair in MIXING)
_GOLDEN, _LAST_SHIFT, _AGAIN_BITS = np.uint64(GOLDEN), np.uint64(LAST_SHIFT), np.uint64(AGAIN_BITS)


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


def choose(
    bounds: Ints,
    needed: Bytes,
    bits: Bits,
    seed: int,
    below: Bytes,  # noqa: ARG001 # used by NumPy's
    chosen: Bytes,
) -> None:
    """See `Passes`."""
    state: Any = bits.state["state"]
    is_fast = isinstance(bits, np.random.SFC64)
    words = state["state"] if is_fast else np.concatenate([state["key"], state["counter"]])
    _choose(bounds, needed, is_fast, words, np.uint64(seed), chosen)


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
            slots[order[start + place]] = bounds[len(bounds) - 1 - sizes[piece] + place] + rank[piece]
        start += sizes[piece]


@_compiled
def _choose(bounds: Ints, needed: Bytes, is_fast: bool, state: Words64, seed: np.uint64, chosen: Bytes) -> None:
    made, words = np.empty((4, _MANY), np.uint64), np.empty(4 * _MANY, np.uint64)
    drawn = words.view(np.uint16)
    step, last = 0, bounds[max(len(bounds) - 2, 0)]
    for first in range(0, last, len(drawn)):
        if is_fast:
            _make_words(state, words)
        else:
            _make_blocks(np.uint64(first // 16), state[0], state[4], state[5], made[0], made[1], made[2], made[3])
            for block in range(_MANY):
                for word in range(4):
                    words[4 * block + word] = made[word, block]
        slot, stop = first, min(first + len(drawn), last)
        while slot < stop:
            end, left = min(bounds[step + 1], stop), len(bounds) - 1 - step
            begin, part = slot - bounds[step], drawn[slot - first : end - first]
            _redraw(part, np.uint64(slot), left, seed)
            _one_step(part, np.uint16(65535 // left), needed[begin : begin + len(part)], chosen[slot:end])
            step += end == bounds[step + 1]
            slot = end
    for slot in range(last, len(chosen)):
        chosen[slot] = needed[slot - last]


@_compiled
def _redraw(drawn: NDArray[np.uint16], first: np.uint64, left: int, seed: np.uint64) -> None:
    """Replace numbers that `left` quotients do not use by the smallest one with the quotient that `again` gives."""
    size = np.uint16(65535 // left)
    limit = np.uint16(size * left)
    for start in range(0, len(drawn), _FEW):
        few = drawn[start : start + _FEW]
        if _num_refused(few, limit):  # rare
            for place in range(len(few)):
                if few[place] >= limit:
                    more = _again(first + np.uint64(start + place), seed)
                    few[place] = np.uint16(more * np.uint64(left) >> _AGAIN_BITS) * size


@_compiled
def _num_refused(drawn: NDArray[np.uint16], limit: np.uint16) -> int:
    num = np.uint16(0)
    for place in range(len(drawn)):  # on slices, so that it is vectorized
        num += np.uint16(drawn[place] >= limit)
    return int(num)


@_compiled
def _again(number: np.uint64, seed: np.uint64) -> np.uint64:
    word = (number + np.uint64(1)) * _GOLDEN + seed
    word = (word ^ (word >> _SHIFT_A)) * _MIX_A
    word = (word ^ (word >> _SHIFT_B)) * _MIX_B
    return (word ^ (word >> _LAST_SHIFT)) >> (np.uint64(64) - _AGAIN_BITS)


@_compiled
def _make_words(state: Words64, words: Words64) -> None:
    """Continue SFC64 from its state."""
    a, b, c, count = state
    for place in range(len(words)):
        word = a + b + count
        count += np.uint64(1)
        a, b = b ^ (b >> np.uint64(11)), c + (c << np.uint64(3))
        c = ((c << np.uint64(24)) | (c >> np.uint64(40))) + word
        words[place] = word
    state[0], state[1], state[2], state[3] = a, b, c, count


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
def _one_step(drawn: NDArray[np.uint16], size: np.uint16, needed: Bytes, chosen: Bytes) -> None:
    for piece in range(len(drawn)):  # compares without dividing; on slices, as above
        chosen[piece] = np.uint8(drawn[piece] < np.uint16(needed[piece] * size))
        needed[piece] = np.uint8(needed[piece] - chosen[piece])


@_compiled
def _rows(chosen: Bytes, slots: NDArray[np.int32], found: Ints) -> None:
    num = np.int64(0)
    for row in range(len(slots)):
        found[num] = row
        num += np.int64(chosen[slots[row]])
