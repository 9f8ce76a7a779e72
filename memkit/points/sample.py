"""GridSample: the result of a draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly

Scenario = Literal["dense", "half", "single"]


# Names that Pointcept and PyG use for entries with a row for each point.
_OF_POINTS = frozenset(
    {"coord", "coords", "grid_coord", "pos", "feat", "feats", "color", "normal", "segment", "instance"}
)


def _count_rows(value: Any) -> int | None:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


@guided(
    absent={
        "sample.indices": "rows idx",
        "1 / sample.ratios": "weights",
        "sample.take(coords, feats)": "() []",
        "keep = torch.zeros(index.num_points, dtype=torch.bool); keep[sample.indices] = True": "mask keep",
    }
)
@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GridSample:
    """Points kept by a sampler. Its tensors are on the CPU, except `indices` on the sampler's device.

    Attributes:
        scenario: ``"dense"`` (every point), ``"half"`` (a fraction of each cell) or ``"single"`` (one point of each
            cell).
        counts: (C,) int64, points kept in each cell; never 0.
        offsets: (B,) int64, end of each scene's kept points.
        cell_sizes: (C,) int64, points in each cell before sampling; the index's own read-only array.
        num_points: Number of points before sampling.
        chosen: `indices`; None if every point is kept.
        device: Device of `indices`.

    Example:
        >>> import torch
        >>> from memkit import GridAwareSampler, GridIndex
        >>> index = GridIndex.from_cells(torch.tensor([7, 7, 7, 7, 9]))
        >>> sample = GridAwareSampler(ratio=0.5).sample_half_density(index)
        >>> sample
        GridSample('half', 3 of 5 points, 2 cells)
        >>> coords, labels = sample.take(torch.rand(5, 3), torch.arange(5))
        >>> len(coords), len(labels)
        (3, 3)
        >>> sample.counts.tolist(), sample.ratios.tolist(), sample.ratio
        ([2, 1], [0.5, 1.0], 0.6)
    """

    scenario: Scenario
    counts: Tensor
    offsets: Tensor
    cell_sizes: NDArray[np.int64]
    num_points: int
    chosen: Tensor | None
    device: torch.device

    @property
    def indices(self) -> Tensor:
        """Rows of the kept points: (K,) int64, ascending. Created at each access if all points were kept."""
        return torch.arange(self.num_points, device=self.device) if self.chosen is None else self.chosen

    @property
    @runs_eagerly
    def ratios(self) -> Tensor:
        """Fraction of its points that each cell actually kept: (C,) float64. Created at each access."""
        return torch.from_numpy(self.counts.numpy() / self.cell_sizes)

    @property
    def num_kept(self) -> int:
        """Number of kept points."""
        return self.num_points if self.chosen is None else len(self.chosen)

    @property
    def ratio(self) -> float:
        """Fraction of all points that was kept; 1.0 if there are no points."""
        return self.num_kept / self.num_points if self.num_points else 1.0

    def take(self, *values: Any) -> Any:
        """Select the kept points' rows of coordinates, features, labels.

        Args:
            *values: Tensors on any device, arrays or lists with a row per point; or one mapping, such as Pointcept's:
                its entries with a row per point are cut, ``"offset"`` and ``"ptr"`` become those of the sample, and all
                other entries are returned unchanged.

        Returns:
            The kept rows of one value, a tuple of them for several values, a dict for a mapping. If all points were
            kept, the values themselves. Gradients flow through.

        Raises:
            InputError: A value, or an entry of a mapping whose name stands for points ("coord", "feat", "segment" ...),
                does not have one row per point.

        Example:
            >>> import torch
            >>> from memkit import GridAwareSampler, GridIndex
            >>> scene = {"coord": torch.rand(4, 3), "segment": torch.arange(4), "name": "hall"}
            >>> sample = GridAwareSampler().sample_single_per_grid(GridIndex.from_cells([7, 7, 7, 9]))
            >>> {name: len(value) for name, value in sample.take(scene).items()}
            {'coord': 2, 'segment': 2, 'name': 4}
        """
        if len(values) == 1 and isinstance(values[0], Mapping):
            return {name: self._take_entry(name, value) for name, value in values[0].items()}
        if not values:
            raise InputTypeError(
                "GridSample.take(...)",
                got="no arguments",
                expected="at least one tensor, array or list with one row for each point",
                fix="write coords, feats = sample.take(coords, feats)",
            )
        for value in values:
            if _count_rows(value) != self.num_points:
                shown = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else f"type {type(value).__name__}"
                raise InputError(
                    "GridSample.take(...)",
                    got=f"a value of {shown} for an index of {self.num_points} points",
                    expected="tensors, arrays or lists with one row for each point",
                    fix="pass values with one row for each point: coords, feats = sample.take(coords, feats)",
                )
        taken = tuple(self._take_rows(value) for value in values)
        return taken[0] if len(taken) == 1 else taken

    def _take_entry(self, name: Any, value: Any) -> Any:
        if name in {"offset", "ptr"} and isinstance(value, (Tensor, np.ndarray)):
            ends = self.offsets if name == "offset" or not self.offsets[0] else F.pad(self.offsets, (1, 0))
            return ends.to(value.device, value.dtype) if isinstance(value, Tensor) else ends.numpy().astype(value.dtype)
        if _count_rows(value) == self.num_points:
            return self._take_rows(value)
        if name in _OF_POINTS and isinstance(value, (Tensor, np.ndarray)):
            raise InputError(
                "GridSample.take(mapping)",
                got=f"{name!r} of shape {tuple(value.shape)} for an index of {self.num_points} points",
                expected="one row for each point, because of its name",
                fix=f"give {name!r} a row for each indexed point, or another name if it does not belong to points.",
            )
        return value

    def _take_rows(self, value: Any) -> Any:
        if self.chosen is None:
            return value
        if isinstance(value, Tensor):
            return value.index_select(0, self.chosen.to(value.device))
        rows = self.chosen.cpu().numpy()
        return value[rows] if isinstance(value, np.ndarray) else type(value)(value[row] for row in rows.tolist())

    def __repr__(self) -> str:
        return f"GridSample({self.scenario!r}, {self.num_kept} of {self.num_points} points, {len(self.counts)} cells)"
