"""Flips, quarter turns, noise, dropout and jitter of voxels, identical for dense, sparse and point data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from memkit._core.errors import InputError, warn_user
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels, Triple
from memkit.voxel.augment_base import (
    BLOCK,
    Augmentation,
    VoxelPoints,
    X,
    blocks_of,
    filled,
    generators,
    layout_of,
    numbers_of,
    read_grid,
    with_rows,
)
from memkit.voxel.augment_moves import Move
from memkit.voxel.layout import VoxelLayout, refuse_no_layout
from memkit.voxel.params import VoxelDraw, VoxelParams
from memkit.voxel.placed_noise import LANES, is_below, normal, words

OnNonsquare = Literal["half_turns", "error", "skip"]
_KIND_OF_JITTER = {"intensity_jitter": "intensity", "doppler_jitter": "doppler"}


@dataclass(frozen=True, kw_only=True)
class VoxelAugmentation(Augmentation[VoxelParams]):
    """Random flips along X, Y, Z, quarter turns in XY, noise, dropout, intensity and Doppler jitter.

    Flips and turns are about the center of the grid. Noise, jitter and dropout affect occupied voxels only, depend on
    the voxel's position before the move, and are bit-identical for dense and sparse volumes.

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
        layout: Meaning of the channels. Without one all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Memory cost: see `apply`.

    Source: `docs/augmentation.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.rand(4, 32, 32, 16)
        >>> aug = mk.VoxelAugmentation(flip_prob=0.5, rotate_prob=0.3, noise_std=0.02)
        >>> params = aug.sample(x.shape, seed=0, epoch=0, index=3)
        >>> y = aug.apply(x, params)
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

    _params = VoxelParams

    def __post_init__(self) -> None:
        check = Checker("VoxelAugmentation(...)")
        for name in ("flip_prob", "rotate_prob", "dropout_prob", "intensity_jitter"):
            check.number(name, getattr(self, name), 0.0, 1.0)
        for name in ("noise_std", "doppler_jitter"):
            check.number(name, getattr(self, name), 0.0)
        check.axes("flip_axes", self.flip_axes)
        check.choice("on_nonsquare", self.on_nonsquare, ("half_turns", "error", "skip"))
        check.flag("same_on_batch", self.same_on_batch)
        refuse_no_layout(check, self.layout)
        for name, kind in _KIND_OF_JITTER.items():
            if getattr(self, name) and (self.layout is None or kind not in self.layout.channels):
                warn_user(
                    f"VoxelAugmentation({name}={getattr(self, name)}) has no effect: no channel of the layout is "
                    f"{kind!r}. Way out: name the channel in layout=VoxelLayout(channels)."
                )

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
            raise check.refuse("config", config, "a mapping of names to values")
        given = dict(config)
        if isinstance(given.get("layout"), Mapping):
            given["layout"] = check.record(VoxelLayout, given["layout"])
        return check.record(cls, {"layout": layout} | given)

    def sample(self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0) -> VoxelParams:
        """Draw parameters; see `Augmentation.sample`.

        Raises:
            InputError: The shape or a number is invalid; or the grid is not square, and ``on_nonsquare="error"``.
        """
        call = "VoxelAugmentation.sample(shape)"
        grid = read_grid(call, shape, self.layout)
        layout = self.layout or VoxelLayout(("scalar",))
        is_square = layout.is_square(grid.shape)
        if not is_square and self.rotate_prob and self.on_nonsquare == "error":
            raise InputError(
                call,
                got=f"a grid {grid.shape} with voxels of {tuple(layout.voxel_size)} m along X, Y, Z",
                expected="as many voxels along Y as along X, of the same size, for quarter turns",
                fix="pass on_nonsquare='half_turns' or 'skip', or crop the grid.",
            )
        self._warn_of_the_sensor(layout, grid.shape)
        draws = [self._draw(chance, is_square=is_square) for chance in generators(call, grid, seed, epoch, index)]
        if self.same_on_batch:
            draws = [replace(draws[0], seed=each.seed) for each in draws]
        return VoxelParams(grid.shape, grid.batched, tuple(draws))

    def _draw(self, chance: np.random.Generator, *, is_square: bool) -> VoxelDraw:
        # Everything is always drawn, in a fixed order, so changing one probability does not affect the other draws.
        flips, turn, quarters, gain = chance.random(3), chance.random(), chance.integers(1, 4), chance.random()
        seed = int(chance.integers(2**63))
        turns = int(quarters) if is_square else 2 if self.on_nonsquare == "half_turns" else 0
        return VoxelDraw(
            flips="".join(
                axis
                for axis, each in zip("XYZ", flips, strict=True)
                if axis in self.flip_axes and each < self.flip_prob
            ),
            turns=turns if turn < self.rotate_prob else 0,
            noise_std=self.noise_std,
            doppler_std=self.doppler_jitter,
            intensity_gain=1 + self.intensity_jitter * (2 * float(gain) - 1),
            dropout_prob=self.dropout_prob,
            seed=seed,
        )

    def _warn_of_the_sensor(self, layout: VoxelLayout, shape: Triple) -> None:
        moved = set(self.flip_axes) if self.flip_prob else set()
        if self.rotate_prob and (layout.is_square(shape) or self.on_nonsquare == "half_turns"):
            moved |= {"X", "Y"}
        wrong = "".join(axis for axis in layout.off_center(shape) if axis in moved)
        if wrong and "doppler" in layout.channels:
            warn_user(
                f"VoxelAugmentation moves the sensor along {wrong}: it is not at the center of the grid there, so a "
                "network sees Doppler values of a sensor at another position. Way out: remove these axes from "
                "flip_axes, and set rotate_prob=0 for X or Y; or pass the sensor's position from "
                "sensor_after(params) to the network."
            )

    def sensor_after(self, params: VoxelParams) -> Tensor:
        """Return the sensor position after flips and turns: (3,) or (B, 3) float64, meters along X, Y, Z.

        Doppler values are unchanged by flips and turns, and are those measured from this position.

        Raises:
            InputError: The layout has no sensor.
        """
        if self.layout is None or self.layout.sensor_origin is None:
            raise InputError(
                "VoxelAugmentation.sensor_after(params)",
                got="a layout without a sensor",
                expected="a layout with sensor_origin",
                fix="pass layout=VoxelLayout(channels, sensor_origin=(x, y, z)).",
            )
        place = torch.tensor([self.layout.sensor_origin], dtype=torch.float64)
        places = [Move.of(draw).points(place, params.shape, self.layout) for draw in params.draws]
        return torch.cat(places) if params.batched else places[0][0]

    def _moves(self, params: VoxelParams, layout: VoxelLayout | None) -> list[Tensor]:
        known = layout or VoxelLayout(("scalar",))
        return [Move.of(draw).matrix(params.shape, known) for draw in params.draws]

    def _apply(self, x: X, params: VoxelParams, layout: VoxelLayout | None, *, inplace: bool) -> X:
        grid = params.shape, len(params.draws), params.batched
        known = layout_of("VoxelAugmentation.apply(x, params)", x, grid, layout)
        size_x, size_y = (params.shape[known.dim(axis)] for axis in "XY")
        if size_x != size_y and any(draw.turns % 2 for draw in params.draws):
            raise InputError(
                "VoxelAugmentation.apply(x, params)",
                got=f"a quarter turn of a volume of shape {params.shape}, {size_x} x {size_y} in XY",
                expected="as many voxels along Y as along X",
                fix="use turns=2, or crop the grid.",
            )
        if isinstance(x, Tensor):
            return cast("X", _move_volume(x, params, known, inplace=inplace))
        if isinstance(x, SparseVoxels):
            return cast("X", _move_sparse(x, params, known))
        return cast("X", _move_points(x, params.draws[0], params.shape, known))


def _move_volume(x: Tensor, params: VoxelParams, layout: VoxelLayout, *, inplace: bool) -> Tensor:
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    samples = zip(x, out, strict=True) if params.batched else [(x, out)]
    for (source, target), draw in zip(samples, params.draws, strict=True):
        _move_sample(source.clone() if inplace and Move.of(draw) else source, target, draw, params.shape, layout)
    return out


def _move_sample(source: Tensor, target: Tensor, draw: VoxelDraw, shape: Triple, layout: VoxelLayout) -> None:
    """Write a moved sample (C, D, H, W) into the result, block by block."""
    move = Move.of(draw)
    dims = [1 + dim for dim in move.dims(layout)]
    is_changed = source.is_floating_point() and _changes(draw, move, layout)
    aligned = move.aligned(target, layout)
    whole = [(slice(0, shape[0]), slice(0, shape[1]))]
    for block in blocks_of(shape) if dims or is_changed else whole:
        part = source[:, *block]
        if is_changed:
            first = (block[0].start * shape[1] + block[1].start) * shape[2]
            part = _change_block(part, first, draw, move, layout)
        place = [
            slice(size - each.stop, size - each.start) if dim in dims else each
            for dim, each, size in zip((1, 2), block, shape, strict=False)
        ]
        aligned[:, *place] = part.flip(dims) if dims else part


def _change_block(part: Tensor, first: int, draw: VoxelDraw, move: Move, layout: VoxelLayout) -> Tensor:
    """Change the occupied voxels of a block (C, d, h, W) whose first voxel is number ``first``."""
    place = layout.occupied(part).flatten().nonzero().squeeze(1)
    changed = part.clone(memory_format=torch.contiguous_format)
    flat = changed.view(len(part), -1)
    rows = _change(flat[:, place], place + first, draw, move, layout)
    if draw.dropout_prob:
        rows = torch.where(_kept(place + first, draw, layout), rows, filled(layout.empties, rows)[:, None])
    flat[:, place] = rows
    return changed


def _move_sparse(voxels: SparseVoxels, params: VoxelParams, layout: VoxelLayout) -> SparseVoxels:
    kept = None
    if any(draw.dropout_prob for draw in params.draws):
        kept = torch.ones(len(voxels.coords), dtype=torch.bool, device=voxels.coords.device)
        for rows, draw in _rows_of(voxels.coords[:, 0], params.draws):
            kept[rows] = _kept(numbers_of(voxels.coords[rows, 1:], params.shape), draw, layout)
    coords, features = (each.clone() if kept is None else each[kept] for each in (voxels.coords, voxels.features))
    for rows, draw in _rows_of(coords[:, 0], params.draws):
        move, places = Move.of(draw), coords[rows, 1:]
        if _changes(draw, move, layout):
            features[rows] = _change(features[rows].T, numbers_of(places, params.shape), draw, move, layout).T
        coords[rows, 1:] = move.places(places, params.shape, layout)
    return with_rows(voxels, coords, features)


def _rows_of(samples: Tensor, draws: Sequence[VoxelDraw]) -> Iterator[tuple[Tensor, VoxelDraw]]:
    """Yield the rows of each sample with its draw, block by block, from (N,) int64 sample numbers."""
    for first in range(0, len(samples), BLOCK):
        part = samples[first : first + BLOCK]
        for number, draw in enumerate(draws):
            rows = (part == number).nonzero().squeeze(1)
            if len(rows):
                yield rows + first, draw


def _move_points(points: VoxelPoints, draw: VoxelDraw, shape: Triple, layout: VoxelLayout) -> VoxelPoints:
    move = Move.of(draw)
    rows = torch.arange(len(points.coords), device=points.coords.device)  # a point's number is its row
    if draw.dropout_prob:
        rows = rows[_kept(rows, draw, layout)]
    coords, features = points.coords[rows], points.features[rows]
    for block in torch.split(torch.arange(len(rows), device=rows.device), BLOCK):
        features[block] = _change(features[block].T, rows[block], draw, move, layout).T
    return VoxelPoints(move.points(coords, shape, layout) if move else coords, features)


def _changes(draw: VoxelDraw, move: Move, layout: VoxelLayout) -> bool:
    """Return whether values change, not only positions."""
    is_gained = draw.intensity_gain != 1 and "intensity" in layout.channels
    is_noisy = any(_noise_of(draw, kind) for kind in layout.channels)
    return is_gained or is_noisy or draw.dropout_prob > 0 or bool(move and layout.vectors)


def _noise_of(draw: VoxelDraw, kind: str) -> float:
    return {"intensity": draw.noise_std, "scalar": draw.noise_std, "doppler": draw.doppler_std}.get(kind, 0.0)


def _kept(numbers: Tensor, draw: VoxelDraw, layout: VoxelLayout) -> Tensor:
    """Return which voxels survive dropout: (N,) int64 numbers to (N,) bool."""
    return ~is_below(words(_first_words(numbers, layout), draw.seed), draw.dropout_prob)


def _first_words(numbers: Tensor, layout: VoxelLayout) -> Tensor:
    """Return the number of each voxel's first random word, used by dropout; the words of its noise follow."""
    return numbers * (1 + -(-len(layout.channels) // LANES))


def _change(rows: Tensor, numbers: Tensor, draw: VoxelDraw, move: Move, layout: VoxelLayout) -> Tensor:
    """Change the values of occupied voxels, identically for every form of a volume.

    Args:
        rows: (C, N) values, which may be overwritten.
        numbers: (N,) int64, the voxel numbers.
        draw: The drawn parameters.
        move: The move of the draw.
        layout: The layout of the channels.
    """
    dtype = rows.dtype
    values = rows if dtype in (torch.float32, torch.float64) else rows.float()
    move.turn_vectors(values, layout)
    word = first = _first_words(numbers, layout)
    for channel, kind in enumerate(layout.channels):
        std = _noise_of(draw, kind)
        if channel % LANES == 0 and any(_noise_of(draw, each) for each in layout.channels[channel : channel + LANES]):
            word = words(first + (1 + channel // LANES), draw.seed)
        is_gained = kind == "intensity" and draw.intensity_gain != 1
        if is_gained:
            values[channel] *= draw.intensity_gain
        if std:
            values[channel] += normal(word, channel % LANES) * std
        ends = cast("Sequence[Any]", layout.value_range)[channel]
        if (std or is_gained) and ends is not None:
            values[channel] = values[channel].clamp(*ends)
    return values.to(dtype)
