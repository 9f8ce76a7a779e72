"""The passes over all points of a scene, in NumPy. `compiled` implements the same passes with identical results."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memkit.points.bits import REDRAW_BITS, Key, WordBlocks, redraw_bits

BLOCK = 1 << 15  # points at a time, so that intermediate results stay in the CPU cache
_MOST_KEYS = 2  # per point: 16 bytes of counts
_MANY_DIGITS = 1 << 18
_SCATTERED = 1 << 17  # points at a time
_SIGN = np.uint16(1 << 15)
_DIVISORS = [np.array((2**16 - 1) // max(left, 1), np.uint16) for left in range(256)]  # by points left

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rounding = Literal["nearest", "floor"]


class Passes(Protocol):
    """Interface of both modules, for N points and P pieces of cells."""

    def number_cells(
        self, points: NDArray[Any], size: Floats, origin: Floats, low: Floats, extent: Ints
    ) -> NDArray[Any]:
        """Return the row-major cell number of each point, counted from ``low``: (N, A) to (N,), unsigned."""

    def group(self, keys: NDArray[Any]) -> tuple[NDArray[np.int32], Ints]:
        """Return the stable order of at least one unsigned integer, and where each distinct value starts in it."""

    def find_slots(self, order: NDArray[np.int32], sizes: Ints, rank: Ints, bounds: Ints) -> NDArray[np.int32]:
        """Return each point's slot: its piece's place in the step for the points left in the piece from it on."""

    def kept_counts(
        self, counts: Ints, ratio: tuple[float, float], rounding: Rounding, key: Key, words: WordBlocks
    ) -> Ints:
        """Draw how many points each cell keeps: its own ratio of them, at least one."""

    def choose_places(self, counts: Ints, key: Key, words: WordBlocks) -> Ints:
        """Draw for each cell an integer in [0, count).

        It is the high half of 32 random bits times the count. If the low half is one of those that would favor some
        integers (Lemire, 2019), other bits are used.
        """

    def ascending(self, rows: NDArray[np.int32], num_points: int) -> Ints:
        """Sort rows, each of which occurs once."""

    def take_steps(self, bounds: Ints, needed: Bytes, key: Key, below: Bytes, chosen: Bytes, words: WordBlocks) -> None:
        """Draw for each slot an integer in [0, left), and run the steps: write 1 for each kept point.

        The integer is a 16-bit random number, divided by the largest divisor that gives `left` quotients. The few
        numbers beyond these are rejected, and 55 other bits, which depend on the slot's number, are used instead: each
        probability is exact to within 2^-63. The last step needs no bits. `needed` and `below` are overwritten.
        """

    def rows(self, chosen: Bytes, slots: NDArray[np.int32], spare: Bytes, num: int) -> Ints:
        """Return the `num` points whose slot is chosen, ascending."""


def grid_coords(points: NDArray[Any], size: Floats, origin: Floats, out: Floats | None = None) -> Floats:
    """Return grid coordinates, floor((x - origin) / size) in float64: (N, A) to (A, N)."""
    scaled = np.empty(points.shape[::-1]) if out is None else out[:, : len(points)]
    np.copyto(scaled, points.T)
    with np.errstate(over="ignore"):  # infinity is refused later as too many cells away
        if origin.any():
            scaled -= origin[:, None]
        scaled /= size[:, None]  # not multiplied by 1 / size, which would move border points into the other cell
    return np.floor(scaled, out=scaled)


def keys_for(num_points: int, extent: Ints) -> NDArray[Any]:
    """Allocate memory for the cell numbers of a box."""
    return np.empty(num_points, np.uint32 if math.prod(extent.tolist()) <= 2**32 else np.uint64)


def number_cells(points: NDArray[Any], size: Floats, origin: Floats, low: Floats, extent: Ints) -> NDArray[Any]:
    """See `Passes`."""
    keys, block = keys_for(len(points), extent), np.empty((len(extent), BLOCK))
    for start in range(0, len(points), BLOCK):
        coords = grid_coords(points[start : start + BLOCK], size, origin, block)
        coords -= low[:, None]
        linear = coords[0]
        for axis in range(1, len(extent)):
            linear *= extent[axis]
            linear += coords[axis]
        keys[start : start + BLOCK] = linear
    return keys


def group(keys: NDArray[Any]) -> tuple[NDArray[np.int32], Ints]:
    """See `Passes`. If the keys are dense enough to count, only those that occur are numbered, to sort fewer digits."""
    num_keys = int(keys.max()) + 1
    if num_keys > max(_MOST_KEYS * len(keys), 2**16):
        order = sort_order(keys)
        ordered = keys.take(order)
        return order, np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
    numbers = keys.astype(np.intp)
    counts = np.bincount(numbers)
    present = np.flatnonzero(counts != 0)  # of truth values, they are found faster
    rank = np.empty(num_keys, np.uint16 if len(present) <= 2**16 else np.uint32)
    rank[present] = np.arange(len(present))
    ends = np.cumsum(counts[present])
    return sort_order(rank.take(numbers)), np.concatenate([[0], ends[:-1]])


def sort_order(keys: NDArray[Any]) -> NDArray[np.int32]:
    """Return the stable order of unsigned integers: a radix sort of 16-bit digits."""
    order = _order_of_digits(keys.astype(np.uint16))  # their lowest digit
    for shift in range(16, int(keys.max(initial=0)).bit_length(), 16):
        order = order.take(_order_of_digits((keys >> shift).astype(np.uint16).take(order)))
    return order


def _order_of_digits(digits: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Return their stable order. NumPy and torch both sort 16 bits by radix; torch is faster with many."""
    if len(digits) < _MANY_DIGITS:
        return digits.argsort(kind="stable").astype(np.int32)
    digits ^= _SIGN  # torch sorts them as signed
    order: NDArray[np.int64] = torch.from_numpy(digits.view(np.int16)).sort(stable=True).indices.numpy()
    return order.astype(np.int32)


def find_slots(order: NDArray[np.int32], sizes: Ints, rank: Ints, bounds: Ints) -> NDArray[np.int32]:
    """See `Passes`."""
    ends = np.empty(len(sizes), np.int64)
    ends[rank] = np.cumsum(sizes)
    rows = np.empty(len(order), np.int32)
    for step, (start, stop) in enumerate(pairwise(bounds.tolist())):
        left = len(bounds) - 1 - step
        order.take(ends[: stop - start] - left, out=rows[start:stop], mode="clip")  # never clips; avoids a buffer
    slots = np.empty(len(order), np.int32)
    place, slot = np.empty(_SCATTERED, np.intp), np.arange(_SCATTERED, dtype=np.int32)
    for start in range(0, len(order), _SCATTERED):  # so that the memory for indexes is used again
        part = rows[start : start + _SCATTERED]
        place[: len(part)] = part
        slots[place[: len(part)]] = slot[: len(part)]
        slot += len(part)
    return slots


def kept_counts(counts: Ints, ratio: tuple[float, float], rounding: Rounding, key: Key, words: WordBlocks) -> Ints:
    """See `Passes`."""
    low, high = ratio
    kept = words.numbers(len(counts), key.key).astype(np.float64)
    kept *= (high - low) / 2**32
    kept += low
    kept *= counts
    (np.rint if rounding == "nearest" else np.floor)(kept, out=kept)
    return np.maximum(kept, 1, out=kept).astype(np.int64)


def choose_places(counts: Ints, key: Key, words: WordBlocks) -> Ints:
    """See `Passes`."""
    products = words.numbers(len(counts), key.key).astype(np.int64)
    products *= counts
    suspects = np.flatnonzero(products.astype(np.uint32) < counts)
    refused = suspects[products[suspects] % 2**32 < 2**32 % counts[suspects]]
    products >>= 32
    drawn = redraw_bits(refused, key) >> REDRAW_BITS - 53  # float64 has 53 bits
    products[refused] = drawn * 2.0**-53 * counts[refused]
    return products


def ascending(rows: NDArray[np.int32], num_points: int) -> Ints:  # noqa: ARG001 # used by numba
    """See `Passes`."""
    return rows.take(sort_order(rows)).astype(np.int64)


def take_steps(bounds: Ints, needed: Bytes, key: Key, below: Bytes, chosen: Bytes, words: WordBlocks) -> None:
    """See `Passes`."""
    draw_below(bounds, key, below, words)
    flags = chosen.view(np.bool_)
    for start, stop in pairwise(bounds.tolist()):
        still = needed[: stop - start]
        np.less(below[start:stop], still, flags[start:stop])
        np.subtract(still, chosen[start:stop], still)


def draw_below(bounds: Ints, key: Key, out: Bytes, words: WordBlocks) -> None:
    """Draw the integers of `take_steps`."""
    ends = bounds.tolist()
    step, left, last = 1, len(ends) - 1, ends[max(len(ends) - 2, 0)]
    suspects = [np.zeros(0, np.int64)]
    words.start(-(-last // 4), key.tag)
    for start in range(0, last, 4 * words.SIZE):
        stop = min(start + 4 * words.SIZE, last)
        drawn = words.next(-(-(stop - start) // 4)).view(np.uint16)[: stop - start]
        suspects.append(np.flatnonzero(drawn >= 2**16 - left) + start)
        slot = start
        while slot < stop:
            end = min(ends[step], stop)
            part = drawn[slot - start : end - start]
            np.floor_divide(part, _DIVISORS[left], part)
            if end == ends[step]:
                step, left = step + 1, left - 1
            slot = end
        np.copyto(out[start:stop], drawn, casting="unsafe")
    out[last:] = 0
    slots = np.concatenate(suspects)
    left_there = len(ends) - np.searchsorted(bounds, slots, "right")
    refused = out[slots] == left_there
    slots, left_there = slots[refused], left_there[refused]
    out[slots] = redraw_bits(slots, key) * left_there >> REDRAW_BITS


def rows(chosen: Bytes, slots: NDArray[np.int32], spare: Bytes, num: int) -> Ints:  # noqa: ARG001 # used by numba
    """See `Passes`."""
    by_point = torch.from_numpy(spare)  # torch's gather is faster
    torch.index_select(torch.from_numpy(chosen), 0, torch.from_numpy(slots), out=by_point)
    return np.flatnonzero(spare.view(np.bool_))
