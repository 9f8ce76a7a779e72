"""VoxelOperation: one random change of a volume; the base class of flips, turns and noise, and of your own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError, warn_user
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels, Triple
from memkit.voxel.augment_base import Augmentation, X, generators, layout_of, read_grid
from memkit.voxel.augment_moves import Move
from memkit.voxel.layout import VoxelLayout, refuse_no_layout, scalars
from memkit.voxel.operate import run_on_points, run_on_sparse, run_on_volume
from memkit.voxel.params import VoxelDraw, VoxelParams
from memkit.voxel.placed_noise import PlacedNoise
from memkit.voxel.samples import VoxelPoints

_UNCHANGED = VoxelDraw()
_FIELDS = ("flips", "turns", "noise_std", "doppler_std", "intensity_gain", "dropout_prob")


class VoxelOperation(Augmentation[VoxelParams]):
    """One random change of volumes, sparse voxels and points. Subclass it for a noise of your own.

    A subclass is a frozen dataclass with two methods: `draw` returns numbers for a sample, `change` changes one channel
    with them. It then works like the other augmentations: in a call, for dense and sparse volumes, points, batches and
    datasets, with a record that converts to and from JSON. Values change at occupied voxels only, and are then clamped
    to the layout's ``value_range``.

    Attributes:
        same_on_batch: Whether all samples of a batch share their draw; noise differs in any case. False, unless a
            subclass makes it a field of its own.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.
        kinds: The kinds of channels to which `change` is applied; a class attribute.
        fields: The attributes of `VoxelDraw` that `draw` returns besides its own numbers, such as
            ``("dropout_prob",)``; a class attribute.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Memory cost: see `apply`.

    Source: `docs/augmentation.md`.

    Example:
        >>> import dataclasses, torch
        >>> import memkit as mk
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Speckle(mk.voxel.VoxelOperation):
        ...     std: float = 0.1
        ...     layout: mk.voxel.VoxelLayout | None = None
        ...     def draw(self, chance, shape, layout):
        ...         return {"std": chance.uniform(0, self.std)}
        ...     def change(self, values, noise, channel, draw):
        ...         return values * (1 + draw.extra["std"] * noise.normal(channel))
        >>> both = mk.ComposedAugmentation([mk.voxel.FlipAugmentation(), Speckle(std=0.2)])
        >>> both(torch.rand(2, 8, 8, 8)).shape
        torch.Size([2, 8, 8, 8])
        >>> both.last_params.steps[1].draws[0].operation
        'Speckle'
    """

    same_on_batch: bool = False
    layout: VoxelLayout | None = None

    fields: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = ("intensity", "scalar")

    _params = VoxelParams
    _keeps_axes: ClassVar[str] = "leave this augmentation out"  # the way out if the sensor would move

    def __post_init__(self) -> None:
        check = Checker(f"{type(self).__name__}(...)")
        check.flag("same_on_batch", self.same_on_batch)
        refuse_no_layout(check, self.layout)

    @property
    def operations(self) -> tuple[VoxelOperation, ...]:
        """The operations in order: this one."""
        return (self,)

    @abstractmethod
    def draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> Mapping[str, Any]:
        """Draw the numbers of one sample.

        Args:
            chance: The sample's generator. Draw the same number of times whatever the settings are, so that a setting
                does not change the draws of the operations after it.
            shape: (D, H, W) of the grid.
            layout: The layout of the channels.

        Returns:
            Numbers by name. Those named in ``fields`` become attributes of the sample's `VoxelDraw`, the others items
            of its ``extra``.
        """

    def change(self, values: Tensor, noise: PlacedNoise, channel: int, draw: VoxelDraw) -> Tensor:  # noqa: ARG002 - for subclasses
        """Return the changed values of one channel.

        Args:
            values: (N,) float32 or float64, the channel's values of N occupied voxels. They may be overwritten.
            noise: ``noise.normal(channel)`` and ``noise.uniform(channel)`` give (N,) float32 that depend only on the
                draw's seed, the channel and the voxels' positions.
            channel: Number of the channel.
            draw: The draw of the sample.
        """
        return values

    def is_active(self, draw: VoxelDraw) -> bool:
        """Return whether `change` changes values under this draw."""
        return draw.operation == type(self).__name__

    def check_grid(self, call: str, shape: Triple, layout: VoxelLayout) -> None:
        """Refuse a grid on which the operation cannot run."""

    def moved_axes(self, shape: Triple, layout: VoxelLayout) -> str:  # noqa: ARG002 - used by flips and turns
        """Return the axes among X, Y and Z along which voxels may move."""
        return ""

    def moves_voxels(self, params: VoxelParams) -> bool:  # noqa: ARG002 - the signature of the base class
        """Return whether this augmentation can flip or turn voxels, regardless of the current draw."""
        return any({"flips", "turns"} & set(each.fields) for each in self.operations)

    def sample(self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0) -> VoxelParams:
        """Draw parameters; see `Augmentation.sample`.

        Raises:
            InputError: The shape or a number is invalid; or the grid is not square, and ``on_nonsquare="error"``.
        """
        call = f"{type(self).__name__}.sample(shape)"
        grid = read_grid(call, shape, self.layout)
        layout = self.layout or scalars(1)
        for each in self.operations:
            each.check_grid(call, grid.shape, layout)
        self._warn_of_the_sensor(layout, grid.shape)
        draws = [self._draw(chance, grid.shape, layout) for chance in generators(call, grid, seed, epoch, index)]
        if self.same_on_batch:
            draws = [replace(draws[0], seed=each.seed) for each in draws]
        return VoxelParams(grid.shape, grid.batched, tuple(draws))

    def _draw(self, chance: np.random.Generator, shape: Triple, layout: VoxelLayout) -> VoxelDraw:
        drawn: dict[str, Any] = {}
        for each in self.operations:
            found = dict(each.draw(chance, shape, layout))
            drawn |= {name: found.pop(name) for name in each.fields}
            if type(each).is_active is VoxelOperation.is_active and type(each).change is not VoxelOperation.change:
                drawn |= {"operation": type(each).__name__, "extra": found}
        return VoxelDraw(**drawn, seed=int(chance.integers(2**63)))

    def _warn_of_the_sensor(self, layout: VoxelLayout, shape: Triple) -> None:
        if "doppler" not in layout.channels:
            return
        moved = {axis for each in self.operations for axis in each.moved_axes(shape, layout)}
        wrong = "".join(axis for axis in layout.off_center(shape) if axis in moved)
        if wrong:
            warn_user(
                f"{type(self).__name__} moves the sensor along {wrong}: it is not at the center of the grid there, so "
                f"a network sees Doppler values of a sensor at another position. Way out: {self._keeps_axes}; or pass "
                "the sensor's position from sensor_after(params) to the network."
            )

    def sensor_after(self, params: VoxelParams) -> Tensor:
        """Return the sensor position after flips and turns: (3,) or (B, 3) float64, meters along X, Y, Z.

        Flips and turns do not change Doppler values: they are the ones that a sensor at this position measures.

        Raises:
            InputError: The layout has no sensor.
        """
        if self.layout is None or self.layout.sensor_origin is None:
            raise InputError(
                f"{type(self).__name__}.sensor_after(params)",
                got="a layout without a sensor",
                expected="a layout with sensor_origin",
                fix="pass layout=VoxelLayout(channels, sensor_origin=(x, y, z)).",
            )
        place = torch.tensor([self.layout.sensor_origin], dtype=torch.float64)
        places = [Move.of(draw).points(place, params.shape, self.layout) for draw in params.draws]
        return torch.cat(places) if params.batched else places[0][0]

    def _moves(self, params: VoxelParams, layout: VoxelLayout | None) -> list[Tensor] | None:
        if not self.moves_voxels(params):
            return None
        known = layout or scalars(1)
        return [Move.of(draw).matrix(params.shape, known) for draw in params.draws]

    def _refuse_other_params(self, call: str, params: object) -> None:
        super()._refuse_other_params(call, params)
        known = {name for each in self.operations for name in each.fields}
        unknown = [name for name in _FIELDS if name not in known]  # empty for VoxelAugmentation
        for draw in cast("VoxelParams", params).draws:
            others = [
                f"{name}={getattr(draw, name)!r}"
                for name in unknown
                if getattr(draw, name) != getattr(_UNCHANGED, name)
            ]
            if draw.operation and all(draw.operation != type(each).__name__ for each in self.operations):
                others.append(f"operation={draw.operation!r}")
            if others:
                raise InputTypeError(
                    call,
                    got=f"parameters with {', '.join(others)}",
                    expected=f"parameters of {type(self).__name__}",
                    fix="pass the parameters that sample() of this augmentation returned.",
                )

    def _apply(self, x: X, params: VoxelParams, layout: VoxelLayout | None, *, inplace: bool) -> X:
        call = f"{type(self).__name__}.apply(x, params)"
        known = layout_of(call, x, (params.shape, len(params.draws), params.batched), layout)
        size_x, size_y = (params.shape[known.dim(axis)] for axis in "XY")
        if size_x != size_y and any(draw.turns % 2 for draw in params.draws):
            raise InputError(
                call,
                got=f"a quarter turn of a volume of shape {params.shape}, {size_x} x {size_y} in XY",
                expected="as many voxels along Y as along X",
                fix="use turns=2, or crop the grid.",
            )
        if isinstance(x, Tensor):
            return cast("X", run_on_volume(x, params, known, self.operations, inplace=inplace))
        if isinstance(x, SparseVoxels):
            return cast("X", run_on_sparse(x, params, known, self.operations))
        return cast("X", run_on_points(cast("VoxelPoints", x), params.draws[0], params.shape, known, self.operations))
