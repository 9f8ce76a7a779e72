"""The passes over all points of a scene, compiled by numba (the extra ``numba``).

Each one is compiled at its first call, which takes a few seconds in total; numba caches the code on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba  # type: ignore[import-not-found,import-untyped,unused-ignore]
import numpy as np
from numpy.typing import NDArray

from memkit.points import passes
from memkit.points.bits import GOLDEN, HALFWAY, LAST_SHIFT, MIXING, REDRAW_BITS, Key, WordBlocks
from memkit.points.passes import Bytes, Floats, Ints, Rounding

Words64 = NDArray[np.uint64]
Compiled = TypeVar("Compiled", bound=Callable[..., Any])

_MANY = 2048  # words of random bits at a time
_FEW = 128  # slots that are checked together
_MOST_KEYS = 8  # per point: 32 bytes of counts
(_SHIFT_A, _MIX_A), (_SHIFT_B, _MIX_B) = ((np.uint64(each) for each in pair) for pair in MIXING)
_LOW = np.uint64(0xFFFFFFFF)
_GOLDEN, _LAST_SHIFT, _HALFWAY, _REDRAW_BITS = (np.uint64(each) for each in (GOLDEN, LAST_SHIFT, HALFWAY, REDRAW_BITS))

# The six highest bits of this word, shifted by any number of places, are different each time: they number a bit.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_OF = np.argsort([(0x03F79D71B4CB0A89 << bit) % 2**64 >> 58 for bit in range(64)])


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


def kept_counts(
    counts: Ints,
    ratio: tuple[float, float],
    rounding: Rounding,
    key: Key,
    words: WordBlocks,  # noqa: ARG001 # used by the NumPy version
) -> Ints:
    """See `Passes`."""
    kept, (low, high) = np.empty_like(counts), ratio
    _kept_counts(counts, low, (high - low) / 2**32, np.bool_(rounding == "nearest"), np.uint64(key.key), kept)
    return kept


def choose_places(counts: Ints, key: Key, words: WordBlocks) -> Ints:  # noqa: ARG001 # used by the NumPy version
    """See `Passes`."""
    places = np.empty_like(counts)
    _choose_places(counts, np.uint64(key.key), places)
    return places


def ascending(rows: NDArray[np.int32], num_points: int) -> Ints:
    """See `Passes`. Marks each row with a bit, and reads the bits in order."""
    found = np.empty(len(rows), np.int64)
    _ascending(rows, np.zeros(-(-num_points // 64), np.uint64), _BIT_OF, found)
    return found


def take_steps(
    bounds: Ints,
    needed: Bytes,
    key: Key,
    below: Bytes,  # noqa: ARG001 # used by the NumPy version
    chosen: Bytes,
    words: WordBlocks,  # noqa: ARG001 # used by the NumPy version
) -> None:
    """See `Passes`."""
    _take_steps(bounds, needed, np.uint64(key.tag), np.uint64(key.key), chosen)


def rows(chosen: Bytes, slots: NDArray[np.int32], spare: Bytes, num: int) -> Ints:  # noqa: ARG001 # used by the NumPy version
    """See `Passes`."""
    found = np.empty(num + 1, np.int64)  # one more, because the loop writes before it tests
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
            slots[np.uint32(order[start + place])] = bounds[len(bounds) - 1 - sizes[piece] + place] + rank[piece]
        start += sizes[piece]


@_compiled
def _kept_counts(counts: Ints, low: float, scale: float, is_nearest: np.bool_, seed: np.uint64, kept: Ints) -> None:
    for cell in range(len(counts)):
        share = (np.float64(_number(np.uint64(cell), seed)) * scale + low) * counts[cell]
        rounded = np.rint(share) if is_nearest else np.floor(share)
        kept[cell] = np.int64(max(rounded, 1.0))


@_compiled
def _choose_places(counts: Ints, seed: np.uint64, places: Ints) -> None:
    for cell in range(len(counts)):
        count = np.uint64(counts[cell])
        product = _number(np.uint64(cell), seed) * count
        places[cell] = product >> np.uint64(32)
        if product & _LOW < count and product & _LOW < (_LOW + np.uint64(1)) % count:  # rare
            bits = _word(np.uint64(cell) + _HALFWAY, seed) >> np.uint64(11)
            places[cell] = np.int64(np.float64(bits) * 2.0**-53 * np.float64(count))


@_compiled
def _ascending(rows: NDArray[np.int32], marks: Words64, bit_of: Ints, found: Ints) -> None:
    for each in rows:
        row = np.uint32(each)
        marks[row >> np.uint32(6)] |= np.uint64(1) << np.uint64(row & np.uint32(63))
    num = np.uint64(0)
    for number in range(len(marks)):
        word = marks[number]
        while word:
            lowest = word & (~word + np.uint64(1))
            found[num] = 64 * number + bit_of[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            num += np.uint64(1)
            word ^= lowest


@_compiled
def _number(place: np.uint64, seed: np.uint64) -> np.uint64:
    """Return the number that `WordBlocks.numbers` gives at an index."""
    return _word(place >> np.uint64(1), seed) >> (np.uint64(32) * (place & np.uint64(1))) & _LOW


@_compiled
def _take_steps(bounds: Ints, needed: Bytes, seed: np.uint64, redraw_seed: np.uint64, chosen: Bytes) -> None:
    words = np.empty(_MANY, np.uint64)
    drawn = words.view(np.uint16)
    step, last = 0, bounds[max(len(bounds) - 2, 0)]
    for first in range(0, last, len(drawn)):
        _make_words(np.uint64(first // 4), seed, words)
        slot, stop = first, min(first + len(drawn), last)
        while slot < stop:
            end, left = min(bounds[step + 1], stop), len(bounds) - 1 - step
            begin, part = slot - bounds[step], drawn[slot - first : end - first]
            _redraw(part, np.uint64(slot), left, redraw_seed)
            _one_step(part, np.uint16(65535 // left), needed[begin : begin + len(part)], chosen[slot:end])
            step += end == bounds[step + 1]
            slot = end
    for slot in range(last, len(chosen)):
        chosen[slot] = needed[slot - last]


@_compiled
def _make_words(first: np.uint64, seed: np.uint64, words: Words64) -> None:
    for place in range(len(words)):
        words[place] = _word(first + np.uint64(place), seed)


@_compiled
def _word(number: np.uint64, seed: np.uint64) -> np.uint64:
    word = (number + np.uint64(1)) * _GOLDEN + seed
    word = (word ^ (word >> _SHIFT_A)) * _MIX_A
    word = (word ^ (word >> _SHIFT_B)) * _MIX_B
    return word ^ (word >> _LAST_SHIFT)


@_compiled
def _redraw(drawn: NDArray[np.uint16], first: np.uint64, left: int, seed: np.uint64) -> None:
    """Replace numbers beyond the `left` quotients by the smallest one with the quotient that the redrawn bits give."""
    size = np.uint16(65535 // left)
    limit = np.uint16(size * left)
    for start in range(0, len(drawn), _FEW):
        few = drawn[start : start + _FEW]
        if _num_refused(few, limit):  # rare
            for place in range(len(few)):
                if few[place] >= limit:
                    more = _word(first + np.uint64(start + place) + _HALFWAY, seed) >> (np.uint64(64) - _REDRAW_BITS)
                    few[place] = np.uint16(more * np.uint64(left) >> _REDRAW_BITS) * size


@_compiled
def _num_refused(drawn: NDArray[np.uint16], limit: np.uint16) -> int:
    num = np.uint16(0)
    for place in range(len(drawn)):  # on slices, so that it is vectorized
        num += np.uint16(drawn[place] >= limit)
    return int(num)


@_compiled
def _one_step(drawn: NDArray[np.uint16], size: np.uint16, needed: Bytes, chosen: Bytes) -> None:
    for piece in range(len(drawn)):  # compares without a division; on slices, so that it is vectorized
        chosen[piece] = np.uint8(drawn[piece] < np.uint16(needed[piece] * size))
        needed[piece] = np.uint8(needed[piece] - chosen[piece])


@_compiled
def _rows(chosen: Bytes, slots: NDArray[np.int32], found: Ints) -> None:
    num = np.uint64(0)  # unsigned, like the slots: numba tests each time whether a signed index is negative
    for row in range(len(slots)):
        found[num] = row
        num += np.uint64(chosen[np.uint32(slots[row])])
