"""Draws from one scene: how many points each cell keeps, and which ones.

Points are selected by Algorithm S (Knuth, TAOCP 2, 3.4.2), for all cells at once: a point is kept with probability
``needed / left``, where ``left`` counts the points of its cell from it on, and ``needed`` how many of them must still
be kept. Every subset of the wanted size is equally likely, and the size is exact. The decision uses integers: a random
integer below ``left`` is compared with ``needed``.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memkit.points.cells import Groups
from memkit.points.layout import BigCells, Layout
from memkit.points.passes import Bits, Passes

Rounding = Literal["nearest", "floor"]


class Workspace(threading.local):
    """Per-thread memory reused by draws: 2 bytes per point of the largest scene so far."""

    def __init__(self) -> None:
        self._bytes = np.empty((2, 0), np.uint8)

    def bytes_of(self, num_points: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return two uninitialized byte arrays."""
        if self._bytes.shape[1] < num_points:
            self._bytes = np.empty((2, num_points), np.uint8)
        first, second = self._bytes[:, :num_points]
        return first, second

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, ()  # not sent to other processes


def kept_counts(
    counts: NDArray[np.int64], ratio: tuple[float, float], rounding: Rounding, bits: Bits
) -> NDArray[np.int64]:
    """Draw how many points each cell keeps: its own ratio of them, at least one."""
    low, high = ratio
    kept = bits.random_raw(-(-len(counts) // 2)).view(np.uint32)[: len(counts)].astype(np.float64)
    kept *= (high - low) / 2**32
    kept += low
    kept *= counts
    (np.rint if rounding == "nearest" else np.floor)(kept, out=kept)
    return np.maximum(kept, 1, out=kept).astype(np.int64)


def choose(
    layout: Layout,
    needed: NDArray[np.uint8],
    num_kept: int,
    bits: Bits,
    seed: int,
    passes: Passes,
    workspace: Workspace,
) -> NDArray[np.int64]:
    """Choose ``needed`` points of each piece uniformly without replacement; return their rows, ascending."""
    below, chosen = workspace.bytes_of(len(layout.slots))
    passes.choose(layout.bounds, needed, bits, seed, below, chosen)
    return passes.rows(chosen, layout.slots, below, num_kept)  # `below` is no longer needed: reuse its memory


def choose_one(groups: Groups, bits: Bits) -> NDArray[np.int64]:
    """Choose one point of each cell; return their rows, ascending."""
    places = _uniform(bits, len(groups.counts))
    places *= groups.counts
    rows = groups.order.take(places.astype(np.int64) + groups.starts)
    rows.sort()
    return rows.astype(np.int64)


def _uniform(bits: Bits, num: int) -> NDArray[np.float64]:
    """Draw numbers in [0, 1), multiples of 2^-53."""
    drawn = bits.random_raw(num)
    drawn >>= 11
    scaled = drawn.astype(np.float64)
    scaled *= 2.0**-53
    return scaled


def pieces_kept(layout: Layout, kept: NDArray[np.int64], bits: Bits) -> NDArray[np.uint8]:
    """Return how many points each piece keeps: its cell's count, or a random share of it if the cell was cut."""
    pieces = kept.astype(np.uint8).take(layout.piece_cell)
    if len(layout.big.cells):
        _share_out(layout.big, kept[layout.big.cells], pieces, bits)
    return pieces


def _share_out(big: BigCells, kept: NDArray[np.int64], pieces: NDArray[np.uint8], bits: Bits) -> None:
    """Split the pieces of all cut cells in half repeatedly; the left half's share is hypergeometric."""
    rng = np.random.Generator(bits)
    first, stop = big.first, big.stop
    while len(first):
        whole = stop - first == 1
        pieces[big.rank[first[whole]]] = kept[whole]
        first, stop, kept = first[~whole], stop[~whole], kept[~whole]
        middle = (first + stop) // 2
        left, right = big.before[middle] - big.before[first], big.before[stop] - big.before[middle]
        share = rng.hypergeometric(left, right, kept)
        first, stop = np.concatenate([first, middle]), np.concatenate([middle, stop])
        kept = np.concatenate([share, kept - share])
