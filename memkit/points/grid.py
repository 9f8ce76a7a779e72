"""GridIndex: the grid cell of each point, for a scene or a batch of scenes; built once, sampled many times."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly
from memkit.points import passes as in_numpy
from memkit.points.backends import HostBackend, host_passes
from memkit.points.cells import (
    Groups,
    Lengths,
    Points,
    grid_lengths,
    group_coords,
    group_ids,
    host_array,
    read_only,
)
from memkit.points.layout import Layout, lay_out
from memkit.points.passes import Passes, grid_coords

_AXES = 4  # space and time; coordinates of at most this many points, with more axes, are taken as transposed
_FROM_COORDS = "GridIndex.from_coords(coords, grid_size)"
_FROM_CELLS = "GridIndex.from_cells(cell_ids)"


class Scene(NamedTuple):
    """One scene of an index.

    Attributes:
        groups: Its points, grouped by cell; rows count from its first point.
        layout: The same points, laid out for samplers.
        first_point: Row of its first point in the batch.
        first_cell: Number of its first cell in the batch.
    """

    groups: Groups
    layout: Layout
    first_point: int
    first_cell: int


@guided(
    absent={
        "index.num_cells": "num_voxels num_grids num_clusters",
        "index.cell_of_point()": "cluster inverse inverse_indices []",
        "index.offsets": "ptr offset",
        "GridIndex.from_coords(coords, grid_size=0.05): an index is always on the host": "to cuda cpu",
    },
    methods=("from_coords", "from_cells"),
    rewrite={"__init__": lambda _: "GridIndex.from_coords(coords, grid_size=0.05)"},
)
@final
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class GridIndex:
    """The points of each grid cell. Immutable: its arrays are read-only.

    Scenes of a batch are kept apart: no cell holds points of two scenes. Cells are in ascending order within a scene.
    An index belongs to the coordinates it was built from: sample before points are rotated or shifted, or accept that
    the cells are those of the original coordinates.

    Attributes:
        cells: int64; from coordinates (C, A), the grid coordinates of each cell, possibly negative; from cell ids (C,),
            the ids.
        counts: (C,) int64, points in each cell, at least 1.
        offsets: (B,) int64, end of each scene's points; ``[N]`` for one scene of N points. If the index was built from
            offsets that begin with 0, such as PyG's ``ptr``, these begin with 0 too, and so do those of its samples.
        cell_offsets: (B,) int64, end of each scene's cells, in the same form.
        scenes: Per-scene data read by samplers.

    Memory cost: 8 bytes per point and about 50 per cell, on the host; `nbytes` gives the total.

    Example:
        >>> import torch
        >>> from memkit import GridIndex
        >>> coords = torch.tensor([[0.01, 0.02], [0.31, 0.0], [0.04, 0.03], [-0.01, 0.0]])
        >>> index = GridIndex.from_coords(coords, grid_size=0.05)
        >>> index
        GridIndex(num_points=4, num_cells=3, num_scenes=1)
        >>> index.cells.tolist(), index.counts.tolist()
        ([[-1, 0], [0, 0], [6, 0]], [1, 2, 1])
        >>> index.cell_of_point().tolist()
        [1, 2, 1, 0]
    """

    cells: NDArray[np.int64]
    counts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    cell_offsets: NDArray[np.int64]
    scenes: tuple[Scene, ...]

    @classmethod
    @runs_eagerly
    def from_coords(
        cls,
        coords: Points,
        grid_size: Lengths = 0.05,
        offsets: Points | None = None,
        *,
        batch: Points | None = None,
        origin: Lengths = 0.0,
        backend: HostBackend = "numpy",
    ) -> GridIndex:
        """Find the cell of each point: ``floor((coords - origin) / grid_size)``, in float64.

        With the default origin the partition is that of Pointcept's ``GridSample``, which divides, takes the floor, and
        then subtracts the minimum cell. Cell borders lie at multiples of ``grid_size``. For borders that start at the
        minimum coordinate, pass ``origin=coords.amin(0).tolist()``.

        Args:
            coords: (N, A) floats or integers, any number of axes; NumPy or torch. A tensor on an accelerator is
                copied to the host.
            grid_size: Side of a cell in the unit of the coordinates; one number, or one per axis.
            offsets: (B,) ints, end of each scene's points in a batch (cumulative, the last is N); or PyG's ``ptr``,
                which begins with 0: the same scenes.
            batch: Instead of offsets, (N,) ints, the scene of each point, never decreasing: PyG's ``batch``. A missing
                number is an empty scene.
            origin: Corner of the cell (0, 0, ...); one number, or one per axis.
            backend: ``"numba"`` builds the same index faster, see `GridAwareSampler`.

        Raises:
            ConfigError: ``backend`` is not installed.
            InputError: A coordinate is not finite (the row is named) or more than 2^53 cells away from the origin, or
                shapes, sizes or offsets do not match.
            InputTypeError: The coordinates are not real numbers.

        Warns: MemkitWarning: The coordinates' dtype cannot resolve 1% of ``grid_size``.

        Memory cost: during construction, about 40 bytes per point of a scene.
        """
        if isinstance(coords, Mapping):
            raise InputTypeError(
                _FROM_COORDS,
                got=f"a {type(coords).__name__}",
                expected="only the coordinates",
                fix="write GridIndex.from_coords(sample['coord'], grid_size=0.05)",
            )
        points = host_array(coords, _FROM_COORDS, "coords")
        if points.ndim == 2 and points.shape[0] <= _AXES < points.shape[1]:
            raise InputError(
                _FROM_COORDS,
                got=f"coords of shape {points.shape}, {points.shape[0]} points of {points.shape[1]} axes",
                expected="(N, A): one row for each point",
                fix="write GridIndex.from_coords(coords.T, grid_size=0.05)",
            )
        if points.ndim != 2 or not points.shape[1]:
            raise InputError(
                _FROM_COORDS,
                got=f"coords of shape {points.shape}",
                expected="(N, A): one row for each point",
                fix="concatenate the scenes of a batch, and pass offsets=.",
            )
        size = grid_lengths(grid_size, points.shape[1], "GridIndex.from_coords(grid_size=...)", positive=True)
        corner = grid_lengths(origin, points.shape[1], "GridIndex.from_coords(origin=...)", positive=False)
        ends, is_ptr = _scene_ends(offsets, batch, len(points), _FROM_COORDS)
        passes = host_passes(backend, _FROM_COORDS)
        groups, firsts = [], [points[:0]]
        for part, end in zip(_cut(points, ends), ends.tolist(), strict=True):
            groups.append(group_coords(part, size, corner, passes, _FROM_COORDS, first_row=end - len(part)))
            firsts.append(part.take(groups[-1].order[groups[-1].starts], axis=0))
        cells = grid_coords(np.concatenate(firsts), size, corner)
        return _assemble(groups, cells.T.astype(np.int64, order="C"), passes, is_ptr=is_ptr)

    @classmethod
    @runs_eagerly
    def from_cells(
        cls,
        cell_ids: Points,
        offsets: Points | None = None,
        *,
        batch: Points | None = None,
        backend: HostBackend = "numpy",
    ) -> GridIndex:
        """Build an index from known cell ids.

        Args:
            cell_ids: (N,) integers, any int64 values: gaps and negative ids are allowed.
            offsets: See `from_coords`. Equal ids in two scenes are two cells.
            batch: See `from_coords`.
            backend: See `from_coords`.

        Raises:
            InputError: Shapes or offsets do not match.
            InputTypeError: The ids are not integers.
        """
        ids = _integers(cell_ids, _FROM_CELLS, "cell_ids")
        ends, is_ptr = _scene_ends(offsets, batch, len(ids), _FROM_CELLS)
        passes = host_passes(backend, _FROM_CELLS)
        groups, cells = [], [ids[:0]]
        for part in _cut(ids, ends):
            groups.append(group_ids(part, passes, _FROM_CELLS))
            cells.append(part[groups[-1].order[groups[-1].starts]])
        return _assemble(groups, np.concatenate(cells), passes, is_ptr=is_ptr)

    @property
    def num_points(self) -> int:
        """Number of points in all scenes."""
        return sum(len(scene.groups.order) for scene in self.scenes)

    @property
    def num_cells(self) -> int:
        """Number of cells in all scenes."""
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        """Size of the index in bytes."""
        own = (self.cells, self.counts, self.offsets, self.cell_offsets)
        scenes = (each.layout.nbytes + each.groups.order.nbytes + each.groups.starts.nbytes for each in self.scenes)
        return sum(each.nbytes for each in own) + sum(scenes)

    @runs_eagerly
    def cell_of_point(self) -> Tensor:
        """Return each point's row in `cells` and `counts`: (N,) int64."""
        rows = np.empty(self.num_points, np.int64)
        for groups, _, point, cell in self.scenes:
            numbers = np.arange(cell, cell + len(groups.counts))
            rows[point : point + len(groups.order)][groups.order] = np.repeat(numbers, groups.counts)
        return torch.from_numpy(rows)

    def __repr__(self) -> str:
        return f"GridIndex(num_points={self.num_points}, num_cells={self.num_cells}, num_scenes={len(self.scenes)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The layout is rebuilt after unpickling, which is faster than sending it; plain pickling would also lose the
        # read-only flags.
        is_ptr = len(self.offsets) > len(self.scenes)
        return functools.partial(_assemble, is_ptr=is_ptr), ([scene.groups for scene in self.scenes], self.cells)


def _assemble(
    groups: Sequence[Groups], cells: NDArray[np.int64], passes: Passes = in_numpy, *, is_ptr: bool = False
) -> GridIndex:
    offsets = np.cumsum([0, *(len(each.order) for each in groups)])
    cell_offsets = np.cumsum([0, *(len(each.counts) for each in groups)])
    counts = np.concatenate([np.zeros(0, np.int64), *(each.counts for each in groups)])
    read_only(cells, counts, offsets, cell_offsets)
    scenes = []
    for each, point, (cell, last) in zip(groups, offsets.tolist(), pairwise(cell_offsets.tolist()), strict=False):
        shared = each._replace(counts=counts[cell:last])
        read_only(*shared)
        scenes.append(Scene(shared, lay_out(shared, passes), point, cell))
    # Copies without the leading 0: torch.compile cannot read arrays that are views.
    own = (offsets, cell_offsets) if is_ptr else (offsets[1:].copy(), cell_offsets[1:].copy())
    read_only(*own)
    return GridIndex(cells, counts, *own, tuple(scenes))


def _cut(rows: NDArray[Any], ends: NDArray[np.int64]) -> list[NDArray[Any]]:
    return np.split(rows, ends[:-1])[: len(ends)]  # no ends, no scenes


def _are_ends(ends: NDArray[Any], num_rows: int) -> bool:
    """Return whether these are cumulative ends of parts that cover all rows."""
    if ends.ndim != 1 or (np.diff(ends, prepend=0) < 0).any():
        return False
    return num_rows == (ends[-1] if len(ends) else 0)


def _scene_ends(
    offsets: Points | None, batch: Points | None, num_points: int, call: str
) -> tuple[NDArray[np.int64], bool]:
    """Return the end of each scene, and whether the offsets began with 0."""
    if offsets is not None and batch is not None:
        raise InputError(
            call, got="offsets and batch", expected="one of them", fix="write offsets=offsets, without batch."
        )
    if batch is not None:
        return _ends_of_batch(_integers(batch, call, "batch"), num_points, call), False
    if offsets is None:
        return np.array([num_points]), False
    ends = _integers(offsets, call, "offsets")
    if not _are_ends(ends, num_points):
        is_batch = len(ends) == num_points and not (np.diff(ends, prepend=0) < 0).any()
        raise InputError(
            call,
            got=f"offsets {ends[:5].tolist()}{'...' if len(ends) > 5 else ''} for {num_points} points",
            expected="the end of each scene's points, not decreasing, with the number of points last",
            fix="write batch= instead of offsets=, if this is the scene of each point."
            if is_batch
            else "pass offsets=torch.tensor([len(scene) for scene in scenes]).cumsum(0).",
        )
    is_ptr = len(ends) > 1 and not ends[0]
    return (ends[1:] if is_ptr else ends), is_ptr


def _ends_of_batch(scenes: NDArray[np.int64], num_points: int, call: str) -> NDArray[np.int64]:
    if len(scenes) != num_points or (np.diff(scenes, prepend=0) < 0).any():
        raise InputError(
            call,
            got=f"batch {scenes[:5].tolist()}{'...' if len(scenes) > 5 else ''} for {num_points} points",
            expected="the scene of each point, from 0, never decreasing",
            fix="sort the points by scene first: order = batch.argsort(stable=True).",
        )
    return np.searchsorted(scenes, np.arange(1, scenes.max(initial=-1) + 2))


def _integers(values: Points, call: str, name: str) -> NDArray[np.int64]:
    array = host_array(values, call, name)
    if array.dtype.kind not in "iu":
        raise InputTypeError(
            call,
            got=f"{name} of dtype {array.dtype}",
            expected="integers",
            fix=f"convert {name} to int64; from positions use GridIndex.from_coords.",
        )
    if array.ndim != 1 or (array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max):
        raise InputError(
            call,
            got=f"{name} of dtype {array.dtype} and shape {array.shape}",
            expected="a 1-dimensional array of integers that fit into int64",
            fix=f"flatten {name}; if its values are too large, renumber them from 0.",
        )
    return np.ascontiguousarray(array, dtype=np.int64)
