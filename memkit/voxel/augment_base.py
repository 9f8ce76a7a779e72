"""What every augmentation of voxels shares: draw once, apply to volumes, sparse voxels and points, bring back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels, Triple, carries_affine
from memkit.voxel.affine import compose, described_as
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import AugmentationParams, Box

BLOCK = 2**12  # voxels that are changed at once: fewer would cost time, more memory


class VoxelPoints(NamedTuple):
    """Points of one sample, in the frame of a `VoxelLayout`.

    Attributes:
        coords: (N, 3) floating point: metres along X, Y, Z.
        features: (N, C): the channels of the layout.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> aug = mk.VoxelAugmentation(layout=mk.voxel.VoxelLayout(("scalar",), origin=(-4.0, -4.0, 0.0)))
        >>> params = mk.voxel.VoxelParams((8, 8, 4), batched=False, draws=(mk.voxel.VoxelDraw(flips="X"),))
        >>> aug.apply(mk.voxel.VoxelPoints(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 1)), params).coords
        tensor([[-1.,  2.,  3.]])
    """

    coords: Tensor
    features: Tensor


Content: TypeAlias = Tensor | SparseVoxels | VoxelPoints
X = TypeVar("X", bound=Content)
P = TypeVar("P", bound=AugmentationParams)


class BatchShape(NamedTuple):
    """The shape that parameters are drawn for."""

    shape: Triple
    num_channels: int
    num_samples: int
    batched: bool


class Augmentation(ABC, Generic[P]):
    """Draw parameters with `sample`; `apply` them; `inverse` undoes flips and turns.

    Args are those of each augmentation. What is drawn depends on seed, epoch and index alone: not on the number of
    workers, on other samples, or on any global random state.
    """

    layout: VoxelLayout | None
    _params: type[P]

    @abstractmethod
    def sample(self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0) -> P:
        """Draw parameters.

        Args:
            shape: (C, D, H, W) of a sample, or (B, C, D, H, W) of a batch, in which each sample draws its own. For
                sparse voxels that is ``(voxels.batch_size, C, *voxels.shape)``.
            seed: Of the run.
            epoch: Of the run; another one draws anew.
            index: Of the sample in its data set. For a batch: the indices of its samples, which then draw what each
                would draw alone; or one number, the batch's.

        Raises:
            InputError: The shape or a number cannot be.
        """

    def apply(self, x: X, params: P, *, layout: VoxelLayout | None = None, inplace: bool = False) -> X:
        """Apply what was drawn.

        Args:
            x: (C, D, H, W) or (B, C, D, H, W), as drawn for; `SparseVoxels` of as many samples; or `VoxelPoints` of
                one sample. Volumes of integers or bools are labels: they are moved, and not changed.
            params: What `sample` drew.
            layout: The channels of this volume, where they are not those of the augmentation; a target's.
            inplace: A tensor may be overwritten, and its memory used for the result. Without it ``x`` stays as it is.

        Returns:
            The same form; never the memory of ``x``, but with ``inplace``. A tensor with an ``affine`` (MONAI's
            MetaTensor) keeps its class and metadata, and the affine follows the voxels.

        Raises:
            InputTypeError: ``x`` is no such volume, or ``params`` are another augmentation's; its ``affine`` cannot be
                set.
            InputError: Its shape is not the one that was drawn for; its ``affine`` cannot follow.

        Memory cost: the result; beside it about 60 bytes, and three times its channels, for each voxel of a part of a
            sample: a 64th of the grid, or 4096 voxels.
        """
        call = f"{type(self).__name__}.apply(x, params)"
        self._refuse_other_params(call, params)
        if not isinstance(x, Tensor) or not carries_affine(x):
            return self._apply(x, params, layout or self.layout, inplace=inplace)
        result = self._apply(x.as_subclass(Tensor), params, layout or self.layout, inplace=inplace)
        moves, batched = self._moves(params, layout or self.layout), x.dim() == 5
        return cast("X", described_as(call, result, x, moves, batched=batched))

    def affine_after(self, affine: Tensor, params: P, *, layout: VoxelLayout | None = None) -> Tensor:
        """Where the voxels lie in the world after flips and turns; tensors with an ``affine`` have it in their result.

        Args:
            affine: (4, 4), or (B, 4, 4) of a batch: from a voxel's place along D, H, W to the world, as of NIfTI files.
            params: What `sample` drew.
            layout: As for `apply`.

        Returns:
            The same shape and dtype.

        Raises:
            InputTypeError: ``params`` are another augmentation's.
            InputError: Another shape; or one affine for samples that are moved in different ways.

        Example:
            >>> import torch, memkit as mk
            >>> aug = mk.VoxelAugmentation()
            >>> params = mk.voxel.VoxelParams((4, 8, 8), batched=False, draws=(mk.voxel.VoxelDraw(flips="X"),))
            >>> aug.affine_after(torch.eye(4), params)[0]
            tensor([-1.,  0.,  0.,  3.])
        """
        call = f"{type(self).__name__}.affine_after(affine, params)"
        self._refuse_other_params(call, params)
        moves = self._moves(params, layout or self.layout)
        if moves is None:
            return affine
        return compose(call, affine, moves, batched=len(moves) > 1 or torch.as_tensor(affine).dim() == 3)

    def moves_voxels(self, params: P) -> bool:
        """Say whether this augmentation flips or turns at all, whatever was drawn this time."""
        return self._moves(params, self.layout) is not None

    def _moves(self, params: P, layout: VoxelLayout | None) -> list[Tensor] | None:  # noqa: ARG002 - of those that move
        """For each sample, (4, 4) float64 from a voxel's new place to its old one; None where none moves."""
        return None

    def _refuse_other_params(self, call: str, params: object) -> None:
        if not isinstance(params, self._params):
            raise InputTypeError(
                call,
                got=f"params of type {type(params).__name__}",
                expected=self._params.__name__,
                fix="pass what sample() of this augmentation drew.",
            )

    @abstractmethod
    def _apply(self, x: X, params: P, layout: VoxelLayout | None, *, inplace: bool) -> X: ...

    def inverse(self, y: X, params: P, *, layout: VoxelLayout | None = None) -> X:
        """Undo the flips and turns of `apply`: bring an output, or a prediction, back into the frame of its input.

        ``inverse(apply(x, p.geometry()), p)`` is ``x``, bit for bit; of points, up to rounding. Noise, jitter, dropout,
        holes and mixing stay.

        Args:
            y: As for `apply`.
            params: What was applied.
            layout: As for `apply`.

        Raises:
            InputTypeError: As for `apply`.
            InputError: As for `apply`.
        """
        self._refuse_other_params(f"{type(self).__name__}.inverse(y, params)", params)
        back: Any = params.inverse()
        return self.apply(y, back, layout=layout)

    def apply_joint(
        self,
        sample: Mapping[Any, Any],
        params: P,
        *,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> dict[Any, Any]:
        """Apply the same parameters to several volumes: input, target, labels.

        Args:
            sample: Volumes by name.
            params: What `sample` drew.
            photometric: Names whose values change (noise, jitter, dropout, holes); the others get
                ``params.geometry()``. None is all.
            layouts: For names whose channels are not those of the augmentation.

        Returns:
            The same names.

        Raises:
            InputError: A name in ``photometric`` or ``layouts`` is not in the sample.
            InputTypeError: As for `apply`.
        """
        named = layouts or {}
        for name in (*(photometric or ()), *named):
            if name not in sample:
                raise InputError(
                    f"{type(self).__name__}.apply_joint(sample, params)",
                    got=f"the name {name!r}",
                    expected="names of its volumes: " + ", ".join(map(str, sample)),
                    fix="write the name as it is in the sample.",
                )
        geometry: Any = params.geometry()
        return {
            name: self.apply(
                x, params if photometric is None or name in photometric else geometry, layout=named.get(name)
            )
            for name, x in sample.items()
        }


def read_grid(call: str, shape: Sequence[int], layout: VoxelLayout | None) -> BatchShape:
    """Check a shape (C, D, H, W) or (B, C, D, H, W)."""
    check = Checker(call, InputError)
    sizes = tuple(check.whole("shape", each, 1, 2**31) for each in check.items("shape", tuple(shape)))
    if len(sizes) not in (4, 5):
        raise InputError(
            call,
            got=f"the shape {sizes}",
            expected="(C, D, H, W) of a sample or (B, C, D, H, W) of a batch",
            fix="give x.shape of a volume; for SparseVoxels (voxels.batch_size, C, *voxels.shape).",
        )
    num_samples, (num_channels, depth, height, width) = (1, sizes) if len(sizes) == 4 else (sizes[0], sizes[1:])
    grid = BatchShape((depth, height, width), num_channels, num_samples, batched=len(sizes) == 5)
    if layout is not None and len(layout.channels) != num_channels:
        raise _other_channels(call, num_channels, layout)
    return grid


def generators(
    call: str, grid: BatchShape, seed: int, epoch: int, index: int | Sequence[int]
) -> Iterator[np.random.Generator]:
    """A fresh generator for each sample."""
    check = Checker(call, InputError)
    if grid.batched and isinstance(index, Sequence):
        names = [[each] for each in check.items("index", tuple(index), grid.num_samples)]
    else:
        names = [[index, number] if grid.batched else [index] for number in range(grid.num_samples)]
    for each in names:
        yield generator(check, seed=seed, epoch=epoch, index=each)


def generator(check: Checker, *, seed: int, epoch: int, index: Sequence[Any]) -> np.random.Generator:
    """A fresh generator; what it draws is a function of these numbers, each below 2^63."""
    named = [("seed", seed), ("epoch", epoch), *(("index", each) for each in index)]
    numbers = [check.whole(name, value) for name, value in named]
    # Two words of 32 bits each, also where one would do: to NumPy, 2^32 + 1 and the numbers 1, 1 are one seed.
    return np.random.default_rng([word for each in numbers for word in (each % 2**32, each >> 32)])


def layout_of(call: str, x: object, grid: tuple[Triple, int, bool], layout: VoxelLayout | None) -> VoxelLayout:
    """The layout of a volume, after its form was checked against shape, number of samples and whether it is a batch."""
    shape, num_samples, batched = grid
    if isinstance(x, Tensor):
        wanted = ("B, " if batched else "") + "C, D, H, W"
        found = (x.dim(), tuple(x.shape[-3:]), len(x) if x.dim() == 5 else 1)
        num_channels = x.shape[-4] if x.dim() >= 4 else 0
        form = f"a tensor {tuple(x.shape)}"
        expected = f"({wanted}) with {num_samples} samples of {shape}"
        is_right = found == (5 if batched else 4, shape, num_samples)
    elif isinstance(x, SparseVoxels):
        num_channels, form = x.features.shape[1], f"SparseVoxels of {x.batch_size} samples of {x.shape}"
        expected = f"{num_samples} samples of {shape}"
        is_right = (x.shape, x.batch_size) == (shape, num_samples)
    elif isinstance(x, VoxelPoints) and all(isinstance(each, Tensor) for each in x):
        sizes = tuple(x.coords.shape), tuple(x.features.shape)
        form = f"points {sizes[0]}, {x.coords.dtype}, with features {sizes[1]}"
        expected = f"coordinates (N, 3) and features (N, C), floating point, of one sample; there are {num_samples}"
        is_right = len(sizes[1]) == 2 and sizes[0] == (sizes[1][0], 3) and num_samples == 1
        is_right = is_right and x.coords.is_floating_point() and x.features.is_floating_point()
        num_channels = sizes[1][-1] if sizes[1] else 0
    else:
        raise InputTypeError(
            call,
            got=f"a {type(x).__name__}",
            expected="a tensor, SparseVoxels or VoxelPoints",
            fix="call apply_joint() for a mapping of volumes.",
        )
    if not is_right or not num_channels:
        raise InputError(call, got=form, expected=expected, fix="draw parameters for the shape of this volume.")
    if isinstance(x, Tensor) and not x.is_floating_point():
        return VoxelLayout(("scalar",) * num_channels, axes=layout.axes if layout else "XYZ")  # labels
    if layout is None and isinstance(x, VoxelPoints):
        raise InputError(
            call,
            got="points, and no layout",
            expected="a layout, whose origin and voxel_size say where the grid lies among the points",
            fix="make the augmentation with layout=VoxelLayout(channels, voxel_size=..., origin=...).",
        )
    if layout is None:
        return VoxelLayout(("scalar",) * max(num_channels, 1))
    if len(layout.channels) != num_channels:
        raise _other_channels(call, num_channels, layout)
    return layout


def _other_channels(call: str, num_channels: int, layout: VoxelLayout) -> InputError:
    return InputError(
        call,
        got=f"{num_channels} channels",
        expected=f"the layout's {len(layout.channels)}: {', '.join(layout.channels)}",
        fix="pass layout=, one that describes the channels of this volume.",
    )


def blocks_of(shape: Triple) -> Iterator[tuple[slice, slice]]:
    """Parts along D and H, of a 64th of the grid, or a few thousand voxels; row-major numbers of each have no gap."""
    rows = max(1, min(max(BLOCK, math.prod(shape) // 64), 8 * BLOCK) // shape[2])
    layers = max(1, rows // shape[1])
    for depth in range(0, shape[0], layers):
        for height in range(0, shape[1], min(rows, shape[1])):
            yield slice(depth, min(depth + layers, shape[0])), slice(height, min(height + rows, shape[1]))


def numbers_of(places: Tensor, shape: Triple) -> Tensor:
    """Row-major numbers of voxels: (N, 3) int64 to (N,) int64."""
    return (places[:, 0] * shape[1] + places[:, 1]) * shape[2] + places[:, 2]


def with_rows(voxels: SparseVoxels, coords: Tensor, features: Tensor) -> SparseVoxels:
    """Other voxels in the same grid."""
    return SparseVoxels.from_coords(coords, features, shape=voxels.shape, batch_size=voxels.batch_size)


def filled(empties: Sequence[float], like: Tensor) -> Tensor:
    """The empty values, one for each channel, (C,), as a tensor like another."""
    return torch.tensor(empties, dtype=like.dtype, device=like.device)


def box_of(chance: np.random.Generator, shape: Triple, share: float) -> Box:
    """A box inside of a grid, whose sides are a share of the grid's, rounded to voxels."""
    sides = [round(share * size) for size in shape]
    d, h, w = (int(chance.integers(size - side + 1)) for size, side in zip(shape, sides, strict=True))
    return (d, h, w), (d + sides[0], h + sides[1], w + sides[2])


def in_box(places: Tensor, box: Box) -> Tensor:
    """Which voxels (N, 3) are in a box: (N,) bool."""
    start, stop = (torch.tensor(each, device=places.device) for each in box)
    return ((places >= start) & (places < stop)).all(1)
