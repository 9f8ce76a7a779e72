"""Group points by grid cell: each cell is one exact integer key, by which the points are sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError, warn_user
from memkit.points.passes import Passes, grid_coords

Points = ArrayLike | Tensor
Lengths = float | Sequence[float]  # one for all axes, or one per axis

MOST_POINTS = 10**9  # per scene: rows fit an int32, and this is the limit of NumPy's hypergeometric draw
_EXACT = 2**53  # integers up to here are exact in float64


class Groups(NamedTuple):
    """The points of a scene, grouped by cell.

    Attributes:
        order: (N,) int32, point rows; cells in ascending order, rows ascending within a cell.
        counts: (C,) int64, points per cell, at least 1.
        starts: (C,) int64, start of each cell in `order`.
    """

    order: NDArray[np.int32]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]


def read_only(*arrays: NDArray[Any]) -> None:
    """Make arrays read-only."""
    for array in arrays:
        array.flags.writeable = False


def host_array(values: Points, call: str, name: str) -> NDArray[Any]:
    """Convert numbers to a host array; a tensor on an accelerator is copied, a CPU tensor is not."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.is_floating_point() and values.dtype not in (torch.float16, torch.float32, torch.float64):
            values = values.float()  # NumPy has no bfloat16
        values = values.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InputTypeError(
            call,
            got=f"{name} that cannot be converted to an array: {error}",
            expected="rows of equal length",
            fix="concatenate the scenes of a batch, and pass offsets=.",
        ) from error
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise InputTypeError(
            call,
            got=f"{name} of dtype {array.dtype}",
            expected="integers or floats of at most 64 bits",
            fix=f"convert {name} to float64, float32 or int64.",
        )
    return array


def grid_lengths(value: Lengths, num_axes: int, call: str, *, positive: bool) -> NDArray[np.float64]:
    """Return one length per axis."""
    try:
        lengths = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        lengths = np.array(np.nan)  # refused below
    fits = lengths.shape in ((), (num_axes,)) and bool(np.isfinite(lengths).all())
    if not fits or (positive and bool((lengths <= 0).any())):
        raise InputError(
            call,
            got=f"{value!r} for points with {num_axes} axes",
            expected=f"one finite number{' above 0' if positive else ''}, or {num_axes} such numbers",
            fix="pass lengths in the unit of the coordinates.",
        )
    return np.broadcast_to(lengths, (num_axes,))


def group_coords(
    points: NDArray[Any],
    size: NDArray[np.float64],
    origin: NDArray[np.float64],
    passes: Passes,
    call: str,
    *,
    first_row: int,
) -> Groups:
    """Group the points of one scene by cell; cells are ordered by their grid coordinates.

    Raises:
        InputError: A coordinate is NaN or infinite, or too many cells away from the origin to be exact.
    """
    if not len(points):
        return group_ids(np.zeros(0, np.int64), passes, call)
    sides = np.stack([_reduced(points, np.minimum), _reduced(points, np.maximum)])
    if not np.isfinite(sides).all():
        row = int(np.flatnonzero(~np.isfinite(points).all(axis=1))[0])
        raise InputError(
            call,
            got=f"coordinates {points[row].tolist()} in row {first_row + row}",
            expected="finite coordinates",
            fix="drop these points first: coords[torch.isfinite(coords).all(1)].",
        )
    low, high = grid_coords(sides, size, origin).T
    if max(-low.min(), high.max()) >= _EXACT:
        far = grid_coords(points, size, origin)
        row = int(np.abs(far).max(axis=0).argmax())
        raise InputError(
            call,
            got=f"coordinates {points[row].tolist()} in row {first_row + row}, "
            f"{np.abs(far[:, row]).max():.3g} cells away",
            expected="fewer than 2^53 cells between a point and the origin",
            fix="use a larger grid_size, or an origin near the points.",
        )
    _warn_coarse(points.dtype, sides, size, call)
    extent = [int(b) - int(a) + 1 for a, b in zip(low, high, strict=True)]
    if math.prod(extent) > _EXACT:
        return group_ids(_compact_keys(points, size, origin), passes, call)
    keys = passes.number_cells(points, size, origin, low, np.array(extent))
    return _group_keys(keys, passes, call)


def _reduced(points: NDArray[Any], pick: np.ufunc) -> NDArray[Any]:
    """Return the minimum, or maximum, along each axis; NaN if a coordinate is NaN."""
    width = min(len(points), 1 << 10)  # rows are joined into long ones: NumPy reduces short rows slowly
    wide = points[: len(points) // width * width].reshape(-1, width * points.shape[1])
    reduced: NDArray[Any] = pick.reduce(pick(pick.reduce(wide).reshape(width, -1), points[-width:]))
    return reduced


def group_ids(ids: NDArray[np.int64], passes: Passes, call: str) -> Groups:
    """Group points by arbitrary integers; cells in ascending order."""
    if not len(ids):
        return Groups(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    keys = ids.view(np.uint64) - np.uint64(int(ids.min()) % 2**64)  # correct for all int64: the difference wraps around
    return _group_keys(keys.astype(np.uint32) if keys.max() < 2**32 else keys, passes, call)


def _group_keys(keys: NDArray[Any], passes: Passes, call: str) -> Groups:
    if len(keys) > MOST_POINTS:
        raise InputError(
            call,
            got=f"{len(keys)} points in one scene",
            expected=f"at most {MOST_POINTS}",
            fix="cut the scene, and pass the parts as scenes of a batch with offsets=.",
        )
    order, starts = passes.group(keys)
    return Groups(order, np.diff(starts, append=len(keys)), starts)


def _compact_keys(points: NDArray[Any], size: NDArray[np.float64], origin: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return keys for a box with too many cells to number them all: number only occupied cells, axis by axis."""
    keys = np.zeros(len(points), np.int64)
    for along in grid_coords(points, size, origin):
        values, rank = np.unique(along, return_inverse=True)
        _, keys = np.unique(keys * len(values) + rank, return_inverse=True)  # below N * N, so below 2^63
    return keys


def _warn_coarse(dtype: np.dtype[Any], sides: NDArray[Any], size: NDArray[np.float64], call: str) -> None:
    if dtype.kind == "f" and bool((np.spacing(np.abs(sides).max(axis=0)) > 0.01 * size).any()):
        warn_user(
            f"{call}: so far from the origin, {dtype} resolves distances only above 1% of grid_size, so near cell "
            "borders rounding decides the cell. Way out: subtract an offset in float64 before the points are stored."
        )
