"""Flips and quarter turns of one sample, for volumes, voxel coordinates, points in meters, and vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memkit._core.sparse_voxels import Triple
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import VoxelDraw


@dataclass(frozen=True, slots=True)
class Move:
    """Mirror some axes, then optionally swap X and Y: this covers every flip and quarter turn.

    Attributes:
        mirrored: Axes that are mirrored.
        exchanged: Whether X and Y are swapped afterwards.
    """

    mirrored: frozenset[str]
    exchanged: bool

    @classmethod
    def of(cls, draw: VoxelDraw) -> Move:
        """Return the move of a draw: a quarter turn is a mirrored axis and a swap."""
        turned = {0: "", 1: "Y", 2: "XY", 3: "X"}[draw.turns]
        return cls(frozenset(set(draw.flips) ^ set(turned)), draw.turns % 2 == 1)

    def __bool__(self) -> bool:
        return bool(self.mirrored) or self.exchanged

    def dims(self, layout: VoxelLayout) -> list[int]:
        """Return which of D, H, W are mirrored."""
        return [layout.dim(axis) for axis in sorted(self.mirrored)]

    def aligned(self, target: Tensor, layout: VoxelLayout) -> Tensor:
        """Return a view of the result (C, D, H, W) with the source's dimension order."""
        return target.transpose(1 + layout.dim("X"), 1 + layout.dim("Y")) if self.exchanged else target

    def places(self, coords: Tensor, shape: Triple, layout: VoxelLayout) -> Tensor:
        """Return the new voxel indices: (N, 3) int64 along D, H, W to the same."""
        places = coords.clone()
        for dim in self.dims(layout):
            places[:, dim] = shape[dim] - 1 - coords[:, dim]
        if self.exchanged:
            x, y = layout.dim("X"), layout.dim("Y")
            places[:, [x, y]] = places[:, [y, x]]
        return places

    def points(self, coords: Tensor, shape: Triple, layout: VoxelLayout) -> Tensor:
        """Return the new point coordinates: (N, 3) meters along X, Y, Z to the same, about the grid center."""
        middle = torch.tensor(layout.center(shape), dtype=coords.dtype, device=coords.device)
        columns = list(coords.unbind(1))
        for axis in self.mirrored:
            number = "XYZ".index(axis)
            columns[number] = 2 * middle[number] - columns[number]
        if self.exchanged:
            columns[:2] = columns[1] - middle[1] + middle[0], columns[0] - middle[0] + middle[1]
        return torch.stack(columns, 1)

    def matrix(self, shape: Triple, layout: VoxelLayout) -> Tensor:
        """Return the (4, 4) float64 matrix from voxel indices along D, H, W after the move to those before."""
        mirror, exchange = torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
        for dim in self.dims(layout):
            mirror[dim, dim], mirror[dim, 3] = -1.0, shape[dim] - 1.0
        if self.exchanged:
            x, y = layout.dim("X"), layout.dim("Y")
            exchange[[x, y]] = exchange[[y, x]]
        return mirror @ exchange

    def turn_vectors(self, rows: Tensor, layout: VoxelLayout) -> None:
        """Rotate and mirror the vector channels in place: (C, N)."""
        for field in layout.vectors:
            for axis, channel in zip("XYZ", field, strict=True):
                if axis in self.mirrored and channel is not None:
                    rows[channel] = -rows[channel]
            if self.exchanged:
                rows[[field.x, field.y]] = rows[[field.y, field.x]]
