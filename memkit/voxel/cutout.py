"""Cutout: boxes of a volume are emptied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels
from memkit._core.words import guided
from memkit.voxel.augment_base import (
    Augmentation,
    X,
    box_of,
    each_sample,
    filled,
    generators,
    in_box,
    layout_of,
    read_grid,
    with_rows,
)
from memkit.voxel.layout import VoxelLayout, refuse_no_layout
from memkit.voxel.params import Box, CutoutParams
from memkit.voxel.samples import VoxelPoints
from memkit.voxel.words import CALLS, WORDS


@guided(words=WORDS | {"num_holes": "holes n_holes", "size": "hole_size spatial_size"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class CutoutAugmentation(Augmentation[CutoutParams]):
    """Empty random boxes of each sample: channels get their empty value; sparse voxels and points are removed.

    Targets and labels are not cut: ``params.geometry()`` has no holes.

    Attributes:
        prob: Probability that a sample gets holes.
        num_holes: Number of holes of such a sample. They may overlap.
        size: Side of a hole, as a fraction of the grid's side, along each axis. Holes lie inside the grid.
        layout: Defines the empty values of the channels. Without one, they are 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Memory cost: the result.

    Source: `docs/augmentation.md`; DeVries and Taylor, "Improved regularization of convolutional neural networks with
    cutout", 2017.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.ones(1, 16, 16, 16)
        >>> aug = mk.CutoutAugmentation(prob=1.0, size=0.5)
        >>> aug(x).mean().item()
        0.875
    """

    prob: float = 0.5
    num_holes: int = 1
    size: float = 0.25
    layout: VoxelLayout | None = None

    _params = CutoutParams

    def __post_init__(self) -> None:
        check = Checker("CutoutAugmentation(...)")
        check.number("prob", self.prob, 0.0, 1.0)
        check.whole("num_holes", self.num_holes, 1, 1000)
        check.number("size", self.size, 0.0, 1.0)
        refuse_no_layout(check, self.layout)

    def sample(
        self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0
    ) -> CutoutParams:
        """Draw parameters; see `Augmentation.sample`.

        Raises:
            InputError: The shape or a number is invalid.
        """
        call = "CutoutAugmentation.sample(shape)"
        grid = read_grid(call, shape, self.layout)
        holes: list[tuple[Box, ...]] = []
        for chance in generators(call, grid, seed, epoch, index):
            is_cut = chance.random() < self.prob
            boxes = tuple(box_of(chance, grid.shape, self.size) for _ in range(self.num_holes))
            holes.append(boxes if is_cut else ())
        return CutoutParams(grid.shape, grid.batched, tuple(holes))

    def _apply(self, x: X, params: CutoutParams, layout: VoxelLayout | None, *, inplace: bool) -> X:
        grid = params.shape, len(params.holes), params.batched
        known = layout_of("CutoutAugmentation.apply(x, params)", x, grid, layout)
        if isinstance(x, Tensor):
            out = x if inplace else x.clone(memory_format=torch.contiguous_format)
            if x.is_floating_point():
                for sample, boxes in zip(each_sample(out, batched=params.batched), params.holes, strict=True):
                    _cut_volume(sample, boxes, known)
            return cast("X", out)
        if isinstance(x, SparseVoxels):
            kept = _outside(x.coords[:, 0], x.coords[:, 1:], params.holes)
            return cast("X", with_rows(x, x.coords[kept], x.features[kept]))
        points = cast("VoxelPoints", x)
        kept = _outside(None, _voxels_of(points.coords, known), params.holes)
        return cast("X", VoxelPoints(points.coords[kept], points.features[kept]))


def _cut_volume(sample: Tensor, boxes: tuple[Box, ...], layout: VoxelLayout) -> None:
    for (d0, h0, w0), (d1, h1, w1) in boxes:
        sample[:, d0:d1, h0:h1, w0:w1] = filled(layout.empties, sample)[:, None, None, None]


def _outside(samples: Tensor | None, places: Tensor, holes: tuple[tuple[Box, ...], ...]) -> Tensor:
    """Return which voxels (N, 3) are outside all holes of their sample: (N,) bool."""
    kept = torch.ones(len(places), dtype=torch.bool, device=places.device)
    for number, boxes in enumerate(holes):
        for box in boxes:
            inside = in_box(places, box)
            kept &= ~(inside if samples is None else inside & (samples == number))
    return kept


def _voxels_of(coords: Tensor, layout: VoxelLayout) -> Tensor:
    """Return the voxel indices of points: (N, 3) meters along X, Y, Z to (N, 3) integral floats along D, H, W."""
    origin, size = (filled(each, coords) for each in (layout.origin, layout.voxel_size))
    voxels = ((coords - origin) / size).floor()
    return voxels[:, ["XYZ".index(axis) for axis in layout.axes]]
