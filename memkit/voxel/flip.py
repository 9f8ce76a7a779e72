"""Random flips of volumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit._core.words import guided
from memkit.voxel.layout import VoxelLayout, read_axes
from memkit.voxel.operation import VoxelOperation
from memkit.voxel.words import CALLS, WORDS


@guided(words=WORDS | {"axes='X'": "spatial_axis", "axes": "flip_axes", "prob": "flip_probability"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class FlipAugmentation(VoxelOperation):
    """Flip each axis with a probability, about the center of the grid.

    Attributes:
        prob: Flip probability of each axis.
        axes: The axes that may be flipped, out of X, Y and Z.
        same_on_batch: Whether all samples of a batch share the draw.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> flip = mk.voxel.FlipAugmentation(prob=1.0, axes="X")
        >>> flip(torch.arange(4.0).reshape(1, 4, 1, 1)).flatten()
        tensor([3., 2., 1., 0.])
    """

    prob: float = 0.5
    axes: str = "XYZ"
    same_on_batch: bool = False
    layout: VoxelLayout | None = None

    fields = ("flips",)
    _keeps_axes = "remove these letters from axes"

    def __post_init__(self) -> None:
        super().__post_init__()
        check = Checker("FlipAugmentation(...)")
        check.number("prob", self.prob, 0.0, 1.0)
        read_axes(check, "axes", self.axes)

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, str]:  # noqa: ARG002 - the same for any grid
        """Return ``{"flips": axes}``."""
        drawn = zip("XYZ", chance.random(3), strict=True)
        return {"flips": "".join(axis for axis, each in drawn if axis in self.axes and each < self.prob)}

    def moved_axes(self, shape: Triple, layout: VoxelLayout) -> str:  # noqa: ARG002 - the same for any grid
        """Return the axes that may be flipped."""
        return self.axes if self.prob else ""
