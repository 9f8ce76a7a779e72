"""Tile geometry, one dimension at a time: integers only, no tensors.

A shift-equivariant network shifts in whole periods: moving the input by ``period`` positions moves the result by
``step`` positions. A convolution has 1 and 1, a network that halves the size 2 and 1, a U-Net with three poolings 8 and
8. Tiles start at multiples of the period. The whole length and a tile's length are equal modulo the period, so that odd
sizes are rounded the same way in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reach:
    """The receptive field of a result along one dimension, in input positions.

    Period ``m`` of the result covers positions ``m * step`` to ``(m + 1) * step``. It depends only on the input from
    ``m * period - before`` to ``(m + 1) * period + after``.

    Attributes:
        before: Input positions needed before the period.
        after: Input positions needed after it.
        period: Input positions by which the network shifts.
        step: Result positions per period.
    """

    before: int
    after: int
    period: int = 1
    step: int = 1

    def covers(self, size: int) -> bool:
        """Return whether a tile of any size would read a whole dimension of this size."""
        return self.before + self.after >= size


@dataclass(frozen=True, slots=True)
class TileSpan:
    """One tile along one dimension.

    Attributes:
        start: First input position that the tile reads.
        out_start: First result position that the tile contributes.
        out_stop: End of these positions.
        offset: Where they start in the tile's own result.
    """

    start: int
    out_start: int
    out_stop: int
    offset: int

    @property
    def part(self) -> slice:
        """Positions of the tile's own result that it contributes."""
        return slice(self.offset, self.offset + self.out_stop - self.out_start)


@dataclass(frozen=True, slots=True)
class ExactAxis:
    """A dimension cut so that each result position comes from one tile, which reads everything it depends on.

    Tiles at the border extend inwards, so all have the same length. Build it with `ExactAxis.cut`.

    Attributes:
        size: Length of the input.
        length: Length that each tile reads.
        core: Periods of the result owned by a tile; the last one may own fewer.
        reach: The network's reach.
    """

    size: int
    length: int
    core: int
    reach: Reach

    @classmethod
    def cut(cls, size: int, tile_size: int, reach: Reach) -> ExactAxis:
        """Cut ``size`` positions into tiles that own at most ``tile_size`` positions each (at least one period)."""
        period = reach.period
        num_periods = -(-size // period)
        most = max(tile_size // period, 1)
        core = -(-num_periods // -(-num_periods // most))  # equal tiles read less than a small one at the end would
        length = (core + -(-reach.before // period)) * period + reach.after
        length += (size - length) % period
        if tile_size >= size or length >= size:
            return cls(size, size, num_periods, reach)
        return cls(size, length, core, reach)

    def out_size(self, tile_out_size: int) -> int:
        """Return the length of the whole result, given that of one tile's result."""
        return tile_out_size + (self.size - self.length) // self.reach.period * self.reach.step

    def pieces(self, tile_out_size: int) -> Iterator[TileSpan]:
        """Yield the tiles in ascending order, the first one at 0.

        Args:
            tile_out_size: Length of one tile's result, the same for all.
        """
        if self.length == self.size:
            yield TileSpan(0, 0, tile_out_size, 0)
            return
        period, step = self.reach.period, self.reach.step
        before = -(-self.reach.before // period) * period
        out_size = self.out_size(tile_out_size)
        for out_start in range(0, out_size, self.core * step):
            start = min(max(out_start // step * period - before, 0), self.size - self.length)
            offset = out_start - start // period * step
            yield TileSpan(start, out_start, min(out_start + self.core * step, out_size), offset)


def place_of(pieces: Iterable[TileSpan]) -> tuple[Any, ...]:
    """Return the index of a tile in the whole result, one piece for each of the last dimensions."""
    return ..., *(slice(piece.out_start, piece.out_stop) for piece in pieces)


def tiles(axes: Iterable[ExactAxis], tile_out_sizes: Iterable[int]) -> Iterator[tuple[TileSpan, ...]]:
    """Iterate over all tiles: one piece per dimension, the last dimension fastest.

    Args:
        axes: The dimensions.
        tile_out_sizes: Size of one tile's result along each of them.
    """
    return itertools.product(*(axis.pieces(size) for axis, size in zip(axes, tile_out_sizes, strict=True)))
