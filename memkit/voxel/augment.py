"""VoxelAugmentation: flips, quarter turns, noise, dropout and jitter in one pass over the volume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Triple
from memkit._core.words import ForeignWords, guided
from memkit.voxel.dropout import DropoutAugmentation
from memkit.voxel.flip import FlipAugmentation
from memkit.voxel.jitter import (
    DopplerJitterAugmentation,
    IntensityJitterAugmentation,
    has_channel,
    warn_of_no_channel,
)
from memkit.voxel.layout import VoxelLayout, read_axes
from memkit.voxel.noise import NoiseAugmentation
from memkit.voxel.operation import VoxelOperation
from memkit.voxel.rotate import OnNonsquare, RotateAugmentation
from memkit.voxel.words import CALLS, WORDS

_KIND_OF_JITTER = {"intensity_jitter": "intensity", "doppler_jitter": "doppler"}
_EACH_ITS_OWN = "each operation has its own probability: flip_prob, rotate_prob, dropout_prob"
_ALWAYS_NOISY = "noise is always added: set its size, noise_std, or dropout_prob to empty voxels"
_ITS_WORDS = {
    _EACH_ITS_OWN: "p prob probability",
    "flip_prob": "flip_probability",
    "rotate_prob": "rotate_probability rotation_prob",
    "flip_axes='XY'": "axes",
    "flip_axes='X'": "axis spatial_axis",
    "noise_std": "std noise",
    _ALWAYS_NOISY: "noise_prob",
    "dropout_prob": "dropout",
    "intensity_jitter": "jitter",
    "turns are in XY, by one, two or three quarters": "max_k degrees",
}


@guided(words=WORDS | _ITS_WORDS, **CALLS)
@dataclass(frozen=True, kw_only=True)
class VoxelAugmentation(VoxelOperation):
    """Random flips along X, Y, Z, quarter turns in XY, noise, dropout, intensity and Doppler jitter.

    It composes `FlipAugmentation`, `RotateAugmentation`, `IntensityJitterAugmentation`, `NoiseAugmentation`,
    `DopplerJitterAugmentation` and `DropoutAugmentation` in one pass over the volume. Flips and turns are about the
    center of the grid. Noise, jitter and dropout affect occupied voxels only, depend on the voxel's position before
    the move, and are bit-identical for dense and sparse volumes.

    Attributes:
        flip_prob: Flip probability of each axis.
        rotate_prob: Probability of a turn in XY, by one, two or three quarters.
        noise_std: Standard deviation of normal noise on intensity and scalar channels.
        dropout_prob: Probability that a voxel is emptied in all channels; a sparse voxel or a point is removed instead.
        intensity_jitter: Intensities are multiplied by one factor per sample from [1 - this, 1 + this].
        doppler_jitter: Standard deviation of normal noise on Doppler channels, in their unit.
        flip_axes: The axes that may be flipped.
        on_nonsquare: Whether a grid whose X and Y differ in size or voxel size is turned by half turns only, refused,
            or not turned.
        same_on_batch: Whether all samples of a batch share flips, turns and the intensity factor.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Memory cost: see `apply`.

    Source: `docs/augmentation.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.rand(4, 32, 32, 16)
        >>> aug = mk.VoxelAugmentation(flip_prob=0.5, rotate_prob=0.3, noise_std=0.02)
        >>> y = aug(x)
        >>> bool(torch.equal(aug.apply(x, aug.last_params), y))
        True
        >>> params = aug.sample(x.shape, seed=0, epoch=0, index=3)
        >>> bool(torch.equal(aug.inverse(aug.apply(x, params.geometry()), params), x))
        True
    """

    flip_prob: float = 0.5
    rotate_prob: float = 0.3
    noise_std: float = 0.02
    dropout_prob: float = 0.0
    intensity_jitter: float = 0.0
    doppler_jitter: float = 0.0
    flip_axes: str = "XYZ"
    on_nonsquare: OnNonsquare = "half_turns"
    same_on_batch: bool = False
    layout: VoxelLayout | None = None

    _keeps_axes = "remove these axes from flip_axes, and set rotate_prob=0 for X or Y"

    def __post_init__(self) -> None:
        super().__post_init__()
        check = Checker("VoxelAugmentation(...)")
        for name in ("flip_prob", "rotate_prob", "dropout_prob", "intensity_jitter"):
            check.number(name, getattr(self, name), 0.0, 1.0)
        for name in ("noise_std", "doppler_jitter"):
            check.number(name, getattr(self, name), 0.0)
        read_axes(check, "flip_axes", self.flip_axes)
        check.choice("on_nonsquare", self.on_nonsquare, get_args(OnNonsquare), fix="pass on_nonsquare='half_turns'.")
        jitters = {}
        for name, kind in _KIND_OF_JITTER.items():
            jitters[name] = getattr(self, name) if has_channel(self.layout, kind) else 0.0
            if getattr(self, name) != jitters[name]:
                warn_of_no_channel(f"VoxelAugmentation({name}={getattr(self, name)})", kind)
        operations = (
            FlipAugmentation(prob=self.flip_prob, axes=self.flip_axes),
            RotateAugmentation(prob=self.rotate_prob, on_nonsquare=self.on_nonsquare),
            IntensityJitterAugmentation(amount=jitters["intensity_jitter"], layout=self.layout),
            NoiseAugmentation(std=self.noise_std),
            DopplerJitterAugmentation(std=jitters["doppler_jitter"], layout=self.layout),
            DropoutAugmentation(prob=self.dropout_prob),
        )
        object.__setattr__(self, "_operations", operations)  # as a frozen dataclass does

    @property
    def operations(self) -> tuple[VoxelOperation, ...]:
        """The operations in the order in which they draw; values change in this order, then voxels move."""
        operations: tuple[VoxelOperation, ...] = self._operations  # type: ignore[attr-defined]  # set above
        return operations

    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, Any]:
        """Return what the operations draw, one after the other."""
        return {name: value for each in self.operations for name, value in each.draw(chance, shape, layout).items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, layout: VoxelLayout | None = None) -> VoxelAugmentation:
        """Create one from a mapping, such as ``{"flip_prob": 0.5, "rotate_prob": 0.3, "noise_std": 0.02}``.

        Args:
            config: The class's attributes by name. ``"layout"`` may be a mapping of `VoxelLayout`'s attributes.
            layout: The layout, if the mapping has none.

        Raises:
            ConfigError: A key is unknown, or its value is invalid; the message names it.
        """
        check = Checker("VoxelAugmentation.from_config(config)")
        if not isinstance(config, Mapping):
            raise check.refusal(
                "config", config, "a mapping of names to values", fix="pass for example {'flip_prob': 0.5}."
            )
        words = ForeignWords(_ITS_WORDS).own
        for key in config:
            word = words.get(key, key)
            if word != key and not word.isidentifier():
                raise check.refusal(key, config[key], "the attributes of VoxelAugmentation", fix=f"{word}.")
        given = dict(config)
        if isinstance(given.get("layout"), Mapping):
            given["layout"] = check.record(VoxelLayout, given["layout"])
        return check.record(cls, {"layout": layout} | given)
