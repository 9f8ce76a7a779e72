"""Per-cell means, one point per occupied cell, and all points of a scene in rounds of one point per cell."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.words import guided
from memkit._gradients.streamed import accumulator_dtype
from memkit._torch.compiler import runs_eagerly
from memkit.points.grid import GridIndex


@guided(words={"it is the mean": "aggr reduce", "values": "x feats"})
@runs_eagerly
def voxel_mean(values: Tensor, index: GridIndex) -> Tensor:
    """Average values over the points of each cell: coordinates, colors, features.

    Args:
        values: (N, ...) numbers, one row per point of the index; on any device. Gradients flow through.
        index: Index of these points.

    Returns:
        (C, ...), in the order of ``index.cells``. ``voxel_mean(x, index)[index.cell_of_point()]`` broadcasts the means
        back to the points. Half precision is accumulated in float32; integers, in int64, with float means.

    Raises:
        InputError: There is not exactly one row per point.
        InputTypeError: ``values`` is not a tensor with rows, or ``index`` is not an index.

    Example:
        >>> import torch
        >>> from memkit import GridIndex
        >>> from memkit.points import voxel_mean
        >>> index = GridIndex.from_cells(torch.tensor([4, 1, 4]))
        >>> voxel_mean(torch.tensor([1.0, 5.0, 3.0]), index).tolist()
        [5.0, 2.0]
    """
    given: object = values
    if isinstance(given, GridIndex):
        raise InputTypeError(
            "voxel_mean(values, index)",
            got="the index first",
            expected="the values, then the index",
            fix="write voxel_mean(values, index)",
        )
    _check_index("voxel_mean(values, index)", index)
    if not isinstance(given, Tensor) or not given.dim():
        got, fix = described(given), "pass torch.as_tensor(values)."
        raise InputTypeError("voxel_mean(values, index)", got=got, expected="a tensor (N, ...)", fix=fix)
    if len(values) != index.num_points:
        raise InputError(
            "voxel_mean(values, index)",
            got=f"{len(values)} rows for an index of {index.num_points} points",
            expected="one row for each point",
            fix="pass values in the order of the points that the index was built from.",
        )
    cell = index.cell_of_point().to(values.device)
    is_inexact = values.is_floating_point() or values.is_complex()
    dtype = accumulator_dtype(values.dtype) if is_inexact else torch.int64  # uint8 would wrap at 256
    sums = values.new_zeros(index.num_cells, *values.shape[1:], dtype=dtype).index_add(0, cell, values.to(dtype))
    counts = torch.tensor(index.counts, dtype=dtype, device=values.device)
    means = sums / counts.reshape(-1, *[1] * (values.dim() - 1))
    return means.to(values.dtype) if is_inexact else means


@runs_eagerly
def first_points(index: GridIndex) -> Tensor:
    """Return the row of the first point of each cell: (C,) int64, in the order of ``index.cells``.

    Use it to represent each cell deterministically; for a random point see `GridAwareSampler.sample_single_per_grid`.

    Example:
        >>> import torch
        >>> from memkit import GridIndex
        >>> from memkit.points import first_points
        >>> first_points(GridIndex.from_cells(torch.tensor([4, 1, 4, 4]))).tolist()
        [1, 0]
    """
    _check_index("first_points(index)", index)
    rows = [scene.groups.order[scene.groups.starts] + np.int64(scene.first_point) for scene in index.scenes]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows]))


@runs_eagerly
def fragments(index: GridIndex) -> Iterator[Tensor]:
    """Yield all points in rounds of at most one point per cell; every point is in exactly one round.

    Use it to test on all points of a scene with a network that takes one point per cell. There are as many rounds as
    points in the fullest cell; the first round holds a point of every cell.

    Args:
        index: Index of one scene or a batch.

    Yields:
        Rows of points, (K,) int64, ascending.

    Example:
        >>> import torch
        >>> from memkit import GridIndex
        >>> from memkit.points import fragments
        >>> [rows.tolist() for rows in fragments(GridIndex.from_cells(torch.tensor([4, 1, 4, 4])))]
        [[0, 1], [2], [3]]
    """
    _check_index("fragments(index)", index)
    places = np.zeros(index.num_points, np.int64)
    for groups, _, point, _ in index.scenes:
        within = np.arange(len(groups.order)) - np.repeat(groups.starts, groups.counts)
        places[point : point + len(groups.order)][groups.order] = within
    order = torch.from_numpy(places.argsort(kind="stable"))
    yield from torch.split(order, np.bincount(places).tolist())


def _check_index(call: str, index: object) -> None:
    if not isinstance(index, GridIndex):
        raise InputTypeError(
            call,
            got=described(index),
            expected="a GridIndex",
            fix="build it once for each cloud: GridIndex.from_coords(coords, grid_size=0.05).",
        )
