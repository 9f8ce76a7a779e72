"""Integer keys for grid cells: row-major numbers and Morton codes, both exact.

Row-major numbers (`LinearKeys`) turn a step to a neighbor into an addition. Morton codes interleave the bits of the
coordinates: in Morton order, the cells of every coarser power-of-two grid are contiguous, and ``code >> num_axes`` is
the code of the parent cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError

MORTON_BITS = {2: 31, 3: 21}  # bits per coordinate, by number of axes: together they fit into a non-negative int64
_MOST_KEYS = 2**62  # so that a key plus a step stays within an int64


@dataclass(frozen=True, slots=True)
class LinearKeys:
    """Row-major numbers of the cells of a box from 0.

    Attributes:
        shape: Number of cells along each axis. A batch index may be the first axis.
        margin: Maximum step along each axis: numbers are left free between rows, so that a step out of the box
            never lands on the number of a cell inside. Empty means 0 for all axes.

    Raises:
        InputError: The box has too many cells to number; the message names its extent.
    """

    shape: tuple[int, ...]
    margin: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if math.prod(self._periods) > _MOST_KEYS:
            raise InputError(
                f"LinearKeys(shape={self.shape})",
                got=f"an extent of {' x '.join(map(str, self.shape))} cells",
                expected="at most 2^62 cells, margins included",
                fix="use a coarser grid, or drop points that lie far outside.",
            )

    @property
    def _periods(self) -> list[int]:
        """Return the number of keys per axis, as the radices of a mixed-radix number."""
        return [size + extra for size, extra in zip(self.shape, self.margin or (0,) * len(self.shape), strict=True)]

    def encode(self, coords: Tensor, *, call: str = "LinearKeys.encode(coords)") -> Tensor:
        """Number cells.

        Args:
            coords: (N, A) integers within the box.
            call: The user's call, for messages.

        Returns:
            (N,) int64; different for different cells, in the order of the coordinates.

        Raises:
            InputTypeError: The coordinates are not integers.
            InputError: A coordinate is outside the box.
        """
        _refuse_other_coords(coords, (len(self.shape),), call)
        _refuse_outside(coords, self.shape, call)
        keys = torch.zeros(len(coords), dtype=torch.int64, device=coords.device)
        for axis, period in enumerate(self._periods):
            keys.mul_(period).add_(coords[:, axis])
        return keys

    def step(self, offset: Sequence[int]) -> int:
        """Return the key difference for a step by ``offset``, which may be at most ``margin`` along each axis."""
        total = 0
        for period, each in zip(self._periods, offset, strict=True):
            total = total * period + each
        return total


def morton_encode(coords: Tensor, *, call: str = "morton_encode(coords)") -> Tensor:
    """Interleave the bits of coordinates.

    Args:
        coords: (N, 3) integers in [0, 2^21), or (N, 2) integers in [0, 2^31). Subtract an origin from negative ones.
        call: The user's call, for messages.

    Returns:
        (N,) int64, non-negative.

    Raises:
        InputTypeError: The coordinates are not integers.
        InputError: A coordinate is outside these ranges.
    """
    _refuse_other_coords(coords, tuple(MORTON_BITS), call)
    num_axes = coords.shape[1]
    _refuse_outside(coords, (2 ** MORTON_BITS[num_axes],) * num_axes, call)
    codes = torch.zeros(len(coords), dtype=torch.int64, device=coords.device)
    for axis in range(num_axes):
        spread = coords[:, axis].long()
        for group, mask in zip(_GROUPS, _masks(num_axes)[1:], strict=True):
            spread = (spread << group * (num_axes - 1)).bitwise_or_(spread).bitwise_and_(mask)
        codes.bitwise_left_shift_(1).bitwise_or_(spread)
    return codes


_GROUPS = (16, 8, 4, 2, 1)  # size of the bit groups that stay together at each spreading step


def _masks(num_axes: int) -> list[int]:
    """Return the bit masks of one coordinate at each step, from contiguous to ``num_axes`` apart."""
    bits = MORTON_BITS[num_axes]
    return [2**bits - 1] + [
        sum(2 ** (place // group * group * num_axes + place % group) for place in range(bits)) for group in _GROUPS
    ]


def _refuse_other_coords(coords: Tensor, num_axes: tuple[int, ...], call: str) -> None:
    if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
        raise InputTypeError(
            call,
            got=f"coordinates of dtype {coords.dtype}",
            expected="integers",
            fix="divide positions by the size of a cell, take the floor, and convert: (x / size).floor().long().",
        )
    if coords.dim() != 2 or coords.shape[1] not in num_axes:
        raise InputError(
            call,
            got=f"coordinates of shape {tuple(coords.shape)}",
            expected=f"(N, {' or '.join(map(str, num_axes))})",
            fix="pass one row for each cell.",
        )


def _refuse_outside(coords: Tensor, shape: Sequence[int], call: str) -> None:
    if not len(coords):
        return
    low, high = (side.tolist() for side in torch.aminmax(coords, dim=0))
    for axis, (least, most, size) in enumerate(zip(low, high, shape, strict=True)):
        if least < 0 or most >= size:
            raise InputError(
                call,
                got=f"coordinates from {least} to {most} along axis {axis}",
                expected=f"an extent of {size} cells from 0: 0 to {size - 1}",
                fix="subtract the smallest coordinate, use a coarser grid, or drop points that lie outside.",
            )
