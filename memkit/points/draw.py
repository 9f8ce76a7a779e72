"""Draws from one scene: how many points each cell keeps, and which ones.

Points are selected by Algorithm S (Knuth, TAOCP 2, 3.4.2), for all cells at once: a point is kept with probability
``needed / left``, where ``left`` is the number of points of its cell from this one on, and ``needed`` is how many of
them must still be kept. Every subset of the wanted size is equally likely, and the size is exact. The decision uses
integers: a random integer below ``left`` is compared with ``needed``.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memkit.points.bits import Key, WordBlocks, random_bits
from memkit.points.cells import Groups
from memkit.points.layout import BigCells, Layout
from memkit.points.passes import Passes


class Workspace(threading.local):
    """Per-thread memory reused by draws: 2 bytes per point of the largest scene so far."""

    def __init__(self) -> None:
        self._bytes = np.empty((2, 0), np.uint8)
        self.words = WordBlocks()

    def bytes_of(self, num_points: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return two uninitialized byte arrays."""
        if self._bytes.shape[1] < num_points:
            self._bytes = np.empty((2, num_points), np.uint8)
        first, second = self._bytes[:, :num_points]
        return first, second

    def __reduce__(self) -> tuple[Any, ...]:
        return Workspace, ()  # its content is not sent to other processes


def choose(
    layout: Layout,
    needed: NDArray[np.uint8],
    num_kept: int,
    key: Key,
    passes: Passes,
    workspace: Workspace,
) -> NDArray[np.int64]:
    """Choose ``needed`` points of each piece uniformly without replacement; return their rows, ascending."""
    below, chosen = workspace.bytes_of(len(layout.slots))
    passes.take_steps(layout.bounds, needed, key, below, chosen, workspace.words)
    return passes.rows(chosen, layout.slots, below, num_kept)  # `below` is no longer needed: reuse its memory


def choose_one(groups: Groups, key: Key, passes: Passes, words: WordBlocks) -> NDArray[np.int64]:
    """Choose one point of each cell; return their rows, ascending."""
    places = passes.choose_places(groups.counts, key, words)
    places += groups.starts
    rows = groups.order.take(places)
    del places
    return passes.ascending(rows, len(groups.order))


def pieces_kept(layout: Layout, kept: NDArray[np.int64], key: Key) -> NDArray[np.uint8]:
    """Return how many points each piece keeps: its cell's count, or a random share of it if the cell was cut."""
    pieces = kept.astype(np.uint8).take(layout.piece_cell)
    if len(layout.big.cells):
        _share_out(layout.big, kept[layout.big.cells], pieces, key)
    return pieces


def _share_out(big: BigCells, kept: NDArray[np.int64], pieces: NDArray[np.uint8], key: Key) -> None:
    """Split the kept points of cut cells among their parts, level by level; the left part's share is hypergeometric."""
    rng = np.random.Generator(random_bits(key))
    parts = np.empty(len(kept) + 2 * len(big.part), np.int64)
    parts[: len(kept)] = kept
    start, made = 0, len(kept)
    for stop in big.level_ends.tolist():
        whole, num = parts[big.part[start:stop]], stop - start
        share = rng.hypergeometric(big.left[start:stop], big.right[start:stop], whole)
        parts[made : made + num] = share
        np.subtract(whole, share, out=parts[made + num : made + 2 * num])
        start, made = stop, made + 2 * num
    pieces[big.rank] = parts[big.piece]
