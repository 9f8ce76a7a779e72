"""The passes over all points of a scene, in NumPy. `compiled` has the same passes with identical results."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memkit.points.philox import Key, Stream, blocks_at, random_bits

BLOCK = 1 << 15  # points at a time, so that intermediate results stay in the CPU cache

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Scratch:
    """Temporary memory for one block."""

    def __init__(self) -> None:
        self.product, self.factor = np.empty((2, BLOCK), np.int32)
        self.left = np.empty(BLOCK, np.uint16)
        self.suspect = np.empty(BLOCK, np.bool_)


class Passes(Protocol):
    """Interface of both modules, for N points and P pieces of cells."""

    def sides(self, points: NDArray[Any]) -> NDArray[Any]:
        """Return the minimum and maximum coordinate along each axis, (2, A); NaN if a coordinate is NaN."""

    def number_cells(
        self, points: NDArray[Any], size: Floats, origin: Floats, low: Floats, extent: Ints
    ) -> NDArray[Any]:
        """Return the row-major cell number of each point, counted from ``low``: (N, A) to (N,), unsigned."""

    def group(self, keys: NDArray[Any]) -> tuple[NDArray[np.int32], Ints]:
        """Return the stable order of at least one unsigned integer, and where each distinct value starts in it."""

    def find_slots(self, order: NDArray[np.int32], sizes: Ints, rank: Ints, bounds: Ints) -> NDArray[np.int32]:
        """Return each point's slot: that of its piece, at the step given by its position in the piece."""

    def draw_below(self, left: Bytes, key: Key, out: Bytes, scratch: Scratch) -> None:
        """Draw for each slot an integer in [0, left): the high half of ``left`` times 16 random bits.

        Dividing 2^16 values among `left` integers would favor some of them; values whose low half of the product is
        below ``2^16 % left`` are therefore rejected, which leaves the same number for each. Rejected slots use 55 other
        bits, from the block of `Stream.AGAIN` with the slot's number: each probability is exact to within 2^-63.
        """

    def keep(self, below: Bytes, needed: Bytes, bounds: Ints, chosen: Bytes) -> None:
        """Run the steps and write 1 for each kept point. `needed` is overwritten."""

    def rows(self, chosen: Bytes, slots: NDArray[np.int32], spare: Bytes, num: int) -> Ints:
        """Return the `num` points whose slot is chosen, ascending."""


def grid_coords(points: NDArray[Any], size: Floats, origin: Floats) -> Floats:
    """Return grid coordinates, floor((x - origin) / size) in float64: (N, A) to (A, N)."""
    scaled = points.T.astype(np.float64)
    with np.errstate(over="ignore"):  # infinity is refused later as too many cells away
        if origin.any():
            scaled -= origin[:, None]
        scaled /= size[:, None]  # not multiplied by 1 / size, which would move border points into the other cell
    return np.floor(scaled, out=scaled)


def sides(points: NDArray[Any]) -> NDArray[Any]:
    """See `Passes`."""
    found = []
    for start in range(0, len(points), BLOCK):
        block = points[start : start + BLOCK].T.copy()
        found += [block.min(axis=1), block.max(axis=1)]
    return np.stack([np.min(found[::2], axis=0), np.max(found[1::2], axis=0)])


def keys_for(num_points: int, extent: Ints) -> NDArray[Any]:
    """Allocate memory for the cell numbers of a box."""
    return np.empty(num_points, np.uint32 if math.prod(extent.tolist()) <= 2**32 else np.uint64)


def number_cells(points: NDArray[Any], size: Floats, origin: Floats, low: Floats, extent: Ints) -> NDArray[Any]:
    """See `Passes`."""
    keys = keys_for(len(points), extent)
    for start in range(0, len(points), BLOCK):
        coords = grid_coords(points[start : start + BLOCK], size, origin)
        coords -= low[:, None]
        linear = coords[0]
        for axis in range(1, len(extent)):
            linear *= extent[axis]
            linear += coords[axis]
        keys[start : start + BLOCK] = linear
    return keys


def group(keys: NDArray[Any]) -> tuple[NDArray[np.int32], Ints]:
    """See `Passes`."""
    order = sort_order(keys)
    ordered = keys.take(order)
    return order, np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])


def sort_order(keys: NDArray[Any]) -> NDArray[np.int32]:
    """Return the stable order of unsigned integers: a radix sort of 16-bit digits, which NumPy sorts by radix."""
    order = (keys & 0xFFFF).astype(np.uint16).argsort(kind="stable")
    for shift in range(16, int(keys.max(initial=0)).bit_length(), 16):
        digit = keys.take(order)
        digit >>= shift
        order = order.take(digit.astype(np.uint16).argsort(kind="stable"))
    return order.astype(np.int32)


def find_slots(order: NDArray[np.int32], sizes: Ints, rank: Ints, bounds: Ints) -> NDArray[np.int32]:
    """See `Passes`."""
    place = np.arange(len(order), dtype=np.int32)
    place -= np.repeat((np.cumsum(sizes) - sizes).astype(np.int32), sizes)
    slots = np.empty(len(order), np.int32)
    slots[order] = bounds.astype(np.int32).take(place) + np.repeat(rank.astype(np.int32), sizes)
    return slots


def draw_below(left: Bytes, key: Key, out: Bytes, scratch: Scratch) -> None:
    """See `Passes`."""
    scale_bits(left, random_bits(key, Stream.POINTS), random_bits(key, Stream.AGAIN), out, scratch)


def scale_bits(left: Bytes, bits: np.random.Philox, again: np.random.Philox, out: Bytes, scratch: Scratch) -> None:
    """Run `draw_below` with two unused streams."""
    suspects, low_halves = [np.zeros(0, np.int64)], [np.zeros(0, np.uint16)]
    for start in range(0, len(left), BLOCK):
        here = left[start : start + BLOCK]
        drawn = bits.random_raw(-(-len(here) // 4)).view(np.uint16)[: len(here)]
        suspect = _scale(drawn, here, out[start : start + BLOCK], scratch)
        suspects.append(suspect + start)
        low_halves.append(drawn[suspect])
    slots = np.concatenate(suspects)
    slots = slots[np.concatenate(low_halves) < 2**16 % left[slots].astype(np.uint32)]
    out[slots] = (blocks_at(slots.tolist(), again) >> 9) * left[slots] >> 55


def _scale(drawn: NDArray[np.uint16], left: Bytes, out: Bytes, scratch: Scratch) -> Ints:
    """Write the high half of ``left`` times 16 bits; return where the low half, left in `drawn`, is below ``left``."""
    num = len(left)
    product, factor, wide = scratch.product[:num], scratch.factor[:num], scratch.left[:num]
    np.copyto(wide, left)
    np.copyto(factor, wide)
    np.copyto(product, drawn)
    np.multiply(product, factor, out=product)
    np.right_shift(product, 16, out=product)
    np.copyto(out, product, casting="unsafe")
    np.multiply(drawn, wide, out=drawn)  # modulo 2^16: the low half
    return np.flatnonzero(np.less(drawn, wide, out=scratch.suspect[:num]))


def keep(below: Bytes, needed: Bytes, bounds: Ints, chosen: Bytes) -> None:
    """See `Passes`."""
    flags = chosen.view(np.bool_)
    for start, stop in pairwise(bounds.tolist()):
        still = needed[: stop - start]
        np.less(below[start:stop], still, out=flags[start:stop])
        np.subtract(still, chosen[start:stop], out=still)


def rows(chosen: Bytes, slots: NDArray[np.int32], spare: Bytes, num: int) -> Ints:  # noqa: ARG001 # found, not given
    """See `Passes`."""
    by_point = torch.from_numpy(spare)  # torch's gather is faster
    torch.index_select(torch.from_numpy(chosen), 0, torch.from_numpy(slots), out=by_point)
    return np.flatnonzero(spare.view(np.bool_))
