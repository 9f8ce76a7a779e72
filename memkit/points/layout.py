"""A scene's cells laid out for sampling: points with the same number left in their cell are contiguous.

Each step of a draw then reads one contiguous slice, regardless of the cells' sizes, and divides by one number. The
first step handles the first points of the largest cells, the last step the last point of every cell. Cells are sorted
by descending size, so that the cells that take part in a step come first. A cell with more than 127 points is cut into
pieces of at most 127 whose sizes differ by at most one: counts then fit a byte, and a draw has at most 127 steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memkit.points.cells import Groups, read_only
from memkit.points.passes import Passes

MOST = 127  # points per piece: fewer steps than at 255, for a few more pieces


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
    """B cells that were cut into Q pieces by S splits in two. Parts are numbered: the cells, then each split's parts.

    Attributes:
        cells: (B,) int64, their numbers.
        part: (S,) int64, the part that each split divides; by levels, a level's left parts before its right parts.
        left: (S,) int64, points in its left part.
        right: (S,) int64, points in its right part.
        level_ends: Number of splits up to the end of each level.
        piece: (Q,) int64, the number of each piece among the parts.
        rank: (Q,) int64, number of each piece in `Layout.piece_cell`.
    """

    cells: NDArray[np.int64]
    part: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    level_ends: NDArray[np.int64]
    piece: NDArray[np.int64]
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
    before = np.concatenate([[0], np.cumsum(sizes[pieces])])  # points in the pieces before each piece
    stop = np.cumsum(num_pieces[cells])  # end of each part's pieces
    first, part, piece = stop - num_pieces[cells], np.arange(len(cells)), np.empty(len(before) - 1, np.int64)
    splits, level_ends = [np.zeros((3, 0), np.int64)], []
    num_parts = len(cells)
    while len(part):
        whole = stop - first == 1
        piece[first[whole]] = part[whole]
        first, stop, part = first[~whole], stop[~whole], part[~whole]
        middle = (first + stop) // 2
        splits.append(np.stack([part, before[middle] - before[first], before[stop] - before[middle]]))
        first, stop = np.concatenate([first, middle]), np.concatenate([middle, stop])
        part = np.arange(num_parts, num_parts + len(first))
        num_parts += len(first)
        level_ends.append((num_parts - len(cells)) // 2)
    part, left, right = np.concatenate(splits, axis=1)
    return BigCells(cells, part, left, right, np.array(level_ends[:-1], np.int64), piece, rank[pieces])
