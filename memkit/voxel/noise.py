"""Normal noise on the values of occupied voxels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit._core.words import guided
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.operation import VoxelOperation
from memkit.voxel.params import VoxelDraw
from memkit.voxel.placed_noise import PlacedNoise
from memkit.voxel.words import ALWAYS, CALLS, WORDS


@guided(words=WORDS | ALWAYS | {"std": "noise_std", "the mean of the noise is 0": "mean"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class NoiseAugmentation(VoxelOperation):
    """Add normal noise to intensity and scalar channels of occupied voxels.

    Attributes:
        std: Standard deviation of the noise, in the unit of the channels.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> noise = mk.voxel.NoiseAugmentation(std=0.5)
        >>> round(noise(torch.ones(1, 32, 32, 32)).std().item(), 2)
        0.5
    """

    std: float = 0.02
    layout: VoxelLayout | None = None

    fields = ("noise_std",)

    def __post_init__(self) -> None:
        super().__post_init__()
        Checker("NoiseAugmentation(...)").number("std", self.std, 0.0)

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, float]:  # noqa: ARG002 - its random numbers come from the draw's seed
        """Return ``{"noise_std": std}``."""
        return {"noise_std": self.std}

    def is_active(self, draw: VoxelDraw) -> bool:
        """Return whether there is noise."""
        return draw.noise_std > 0

    def change(self, values: Tensor, noise: PlacedNoise, channel: int, draw: VoxelDraw) -> Tensor:
        """Add the noise."""
        return values.add_(noise.normal(channel) * draw.noise_std)
