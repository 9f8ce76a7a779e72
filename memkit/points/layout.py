"""A scene's cells laid out for sampling: points with equally many left in their cell lie together.

A step of a draw then reads one contiguous slice, regardless of the cells' sizes, and divides by one number. The first
step is that of the largest cells' first points, the last step that of every cell's last point. Cells are sorted by
descending size, so that those that take part in a step come first. A cell with more than 255 points is cut into pieces
of at most 255 whose sizes differ by at most one: counts then fit a byte, and a draw has at most 255 steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memkit.points.cells import Groups, read_only
from memkit.points.passes import Passes

MOST = 255  # points per piece


class Layout(NamedTuple):
    """A scene ordered by the points left, with P pieces; a slot is a position in this order.

    Attributes:
        slots: (N,) int32, the slot of each point.
        bounds: (T + 1,) int64, start of each step, and end of the last one. T is the largest piece's size; a piece has
            T points left at step 0, then T - 1, and 1 in the last step.
        piece_cell: (P,) int64, the cell of each piece, by descending piece size.
        big: The cells that were cut into pieces.
    """

    slots: NDArray[np.int32]
    bounds: NDArray[np.int64]
    piece_cell: NDArray[np.int64]
    big: BigCells

    @property
    def nbytes(self) -> int:
        """Total bytes of all arrays."""
        return sum(each.nbytes for each in (self.slots, self.bounds, self.piece_cell, *self.big))


class BigCells(NamedTuple):
    """Cells that were cut into pieces.

    Attributes:
        cells: (B,) int64, their numbers.
        first: (B,) int64, start of each cell's pieces in the two arrays below.
        stop: (B,) int64, end of them.
        before: (Q + 1,) int64, points in the pieces before each piece.
        rank: (Q,) int64, number of each piece in `Layout.piece_cell`.
    """

    cells: NDArray[np.int64]
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    before: NDArray[np.int64]
    rank: NDArray[np.int64]


def lay_out(groups: Groups, passes: Passes) -> Layout:
    """Lay out a scene; takes 4 bytes per point and 8 per cell."""
    counts = groups.counts
    num_pieces = -(-counts // MOST)
    piece_cell = np.repeat(np.arange(len(counts)), num_pieces)
    first = np.cumsum(num_pieces) - num_pieces
    number = np.arange(len(piece_cell)) - first[piece_cell]
    small, longer = np.divmod(counts, num_pieces)
    sizes = small[piece_cell] + (number < longer[piece_cell])

    by_size = (MOST - sizes).astype(np.uint8).argsort(kind="stable")
    rank = np.empty(len(sizes), np.int64)
    rank[by_size] = np.arange(len(sizes))
    longest = int(sizes.max(initial=0))
    taking_part = len(sizes) - np.cumsum(np.bincount(sizes, minlength=longest + 1)[:longest])
    bounds = np.concatenate([[0], np.cumsum(taking_part[::-1])])
    layout = Layout(
        slots=passes.find_slots(groups.order, sizes, rank, bounds),
        bounds=bounds,
        piece_cell=piece_cell.take(by_size),
        big=_big_cells(num_pieces, sizes, rank),
    )
    read_only(layout.bounds, layout.piece_cell, *layout.big)
    return layout


def _big_cells(num_pieces: NDArray[np.int64], sizes: NDArray[np.int64], rank: NDArray[np.int64]) -> BigCells:
    cells = np.flatnonzero(num_pieces > 1)
    pieces = np.repeat(num_pieces > 1, num_pieces)
    stop = np.cumsum(num_pieces[cells])
    before = np.concatenate([[0], np.cumsum(sizes[pieces])])
    return BigCells(cells, stop - num_pieces[cells], stop, before, rank[pieces])
