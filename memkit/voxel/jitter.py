"""Jitter of intensities by one factor per sample, and of Doppler values by noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from memkit._core.errors import warn_user
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit._core.words import guided
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.operation import VoxelOperation
from memkit.voxel.params import VoxelDraw
from memkit.voxel.placed_noise import PlacedNoise
from memkit.voxel.words import ALWAYS, CALLS, WORDS


def has_channel(layout: VoxelLayout | None, kind: str) -> bool:
    """Return whether a layout has a channel of a kind."""
    return layout is not None and kind in layout.channels


def warn_of_no_channel(setting: str, kind: str) -> None:
    """Warn that a setting has no effect because its channel is missing."""
    warn_user(
        f"{setting} has no effect: no channel of the layout is {kind!r}. Way out: name the channel in "
        "layout=VoxelLayout(channels)."
    )


@guided(words=WORDS | ALWAYS | {"amount": "intensity_jitter factors std"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class IntensityJitterAugmentation(VoxelOperation):
    """Multiply the intensity channels by one factor per sample.

    Attributes:
        amount: The factor is drawn from [1 - this, 1 + this].
        same_on_batch: Whether all samples of a batch share the factor.
        layout: The layout, with an intensity channel.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Warns: MemkitWarning: The layout has no intensity channel.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> layout = mk.voxel.VoxelLayout(("intensity",))
        >>> jitter = mk.voxel.IntensityJitterAugmentation(amount=0.2, layout=layout)
        >>> y = jitter(torch.ones(1, 2, 2, 2))
        >>> bool((y == torch.tensor(jitter.last_params.draws[0].intensity_gain)).all())
        True
    """

    amount: float = 0.1
    same_on_batch: bool = False
    layout: VoxelLayout | None = None

    fields = ("intensity_gain",)
    kinds = ("intensity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        Checker("IntensityJitterAugmentation(...)").number("amount", self.amount, 0.0, 1.0)
        if self.amount and not has_channel(self.layout, "intensity"):
            warn_of_no_channel(f"IntensityJitterAugmentation(amount={self.amount})", "intensity")

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, float]:  # noqa: ARG002 - the same for any grid
        """Return ``{"intensity_gain": factor}``."""
        return {"intensity_gain": 1 + self.amount * (2 * float(chance.random()) - 1)}

    def is_active(self, draw: VoxelDraw) -> bool:
        """Return whether the factor differs from 1."""
        return draw.intensity_gain != 1

    def change(self, values: Tensor, noise: PlacedNoise, channel: int, draw: VoxelDraw) -> Tensor:  # noqa: ARG002 - one factor for all
        """Multiply by the factor."""
        return values.mul_(draw.intensity_gain)


@guided(words=WORDS | ALWAYS | {"std": "doppler_jitter amount"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class DopplerJitterAugmentation(VoxelOperation):
    """Add normal noise to the Doppler channels of occupied voxels.

    Attributes:
        std: Standard deviation of the noise, in the unit of the Doppler channels.
        layout: The layout, with a Doppler channel.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Warns: MemkitWarning: The layout has no Doppler channel.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> layout = mk.voxel.VoxelLayout(("occupancy", "doppler"), sensor_origin=(0.0, 0.0, 0.0))
        >>> jitter = mk.voxel.DopplerJitterAugmentation(std=0.3, layout=layout)
        >>> x = torch.ones(2, 4, 4, 4)
        >>> y = jitter(x)
        >>> bool(torch.equal(y[0], x[0])), bool(torch.equal(y[1], x[1]))
        (True, False)
    """

    std: float = 0.1
    layout: VoxelLayout | None = None

    fields = ("doppler_std",)
    kinds = ("doppler",)

    def __post_init__(self) -> None:
        super().__post_init__()
        Checker("DopplerJitterAugmentation(...)").number("std", self.std, 0.0)
        if self.std and not has_channel(self.layout, "doppler"):
            warn_of_no_channel(f"DopplerJitterAugmentation(std={self.std})", "doppler")

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, float]:  # noqa: ARG002 - its random numbers come from the draw's seed
        """Return ``{"doppler_std": std}``."""
        return {"doppler_std": self.std}

    def is_active(self, draw: VoxelDraw) -> bool:
        """Return whether there is noise."""
        return draw.doppler_std > 0

    def change(self, values: Tensor, noise: PlacedNoise, channel: int, draw: VoxelDraw) -> Tensor:
        """Add the noise."""
        return values.add_(noise.normal(channel) * draw.doppler_std)
