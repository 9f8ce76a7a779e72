"""Random dropout of voxels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit._core.words import guided
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.operation import VoxelOperation
from memkit.voxel.words import CALLS, WORDS


@guided(words=WORDS | {"prob": "dropout_prob"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class DropoutAugmentation(VoxelOperation):
    """Empty random voxels in all channels; sparse voxels and points are removed instead.

    Attributes:
        prob: Probability that a voxel is emptied.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> drop = mk.voxel.DropoutAugmentation(prob=0.25)
        >>> round(drop(torch.ones(1, 32, 32, 32)).mean().item(), 2)
        0.75
    """

    prob: float = 0.1
    layout: VoxelLayout | None = None

    fields = ("dropout_prob",)

    def __post_init__(self) -> None:
        super().__post_init__()
        Checker("DropoutAugmentation(...)").number("prob", self.prob, 0.0, 1.0)

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, float]:  # noqa: ARG002 - its random numbers come from the draw's seed
        """Return ``{"dropout_prob": prob}``."""
        return {"dropout_prob": self.prob}
