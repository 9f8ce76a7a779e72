"""GridSample: the result of a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Scenario = Literal["dense", "half", "single"]


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

    def __repr__(self) -> str:
        return f"GridSample({self.scenario!r}, {self.num_kept} of {self.num_points} points, {len(self.counts)} cells)"
