"""Sparse volumes that store only the occupied voxels: their coordinates, and one row of features for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.voxel_keys import LinearKeys

CALL = "SparseVoxels(coords, features, shape)"
Triple = tuple[int, int, int]


class Pairs(NamedTuple):
    """Pairs of sites connected by one kernel offset, and in reverse by the mirrored offset.

    Attributes:
        number: Index of the offset within the kernel, before its center; the mirrored offset has the last index minus
            this one.
        near: (P,) int32, row indices of sites.
        far: (P,) int32, row indices of the sites at that offset from ``near``.
    """

    number: int
    near: Tensor
    far: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """Occupied voxels of a volume. Sorted once; the neighbor pairs that convolutions need are cached here.

    Attributes:
        coords: (N, 4) int64: sample index, and position along D, H, W; unique, in any order.
        shape: (D, H, W).
        batch_size: Number of samples.
    """

    coords: Tensor
    shape: Triple
    batch_size: int
    _order: Tensor = field(init=False)
    _maps: dict[tuple[Triple, Triple], list[Pairs]] = field(init=False)

    def __post_init__(self) -> None:
        ordered, order = self._keys((0, 0, 0)).sort()
        twice = ordered[1:] == ordered[:-1]
        if bool(twice.any()):
            first = self.coords[order[1:][twice][0]].tolist()
            raise InputError(
                CALL,
                got=f"{int(twice.sum())} repeated coordinates, the first {tuple(first)}",
                expected="each voxel once",
                fix="first add up or average the features that fall into the same voxel, with coords.unique(dim=0, "
                "return_inverse=True).",
            )
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_maps", {})

    def _keys(self, margin: Triple) -> Tensor:
        return self._numbers(margin).encode(self.coords, call=CALL)

    def _numbers(self, margin: Triple) -> LinearKeys:
        return LinearKeys((self.batch_size, *self.shape), (0, *margin))

    def pairs(self, kernel: Triple, dilation: Triple) -> list[Pairs]:
        """Return the pairs of sites connected by a kernel; computed once per kernel size and dilation.

        Memory cost: 4 bytes for each neighbor of each site, as long as the sites are alive; no dense lookup table.
        """
        if (kernel, dilation) not in self._maps:
            self._maps[kernel, dilation] = self._find_pairs(kernel, dilation)
        return self._maps[kernel, dilation]

    def _find_pairs(self, kernel: Triple, dilation: Triple) -> list[Pairs]:
        far = [size // 2 * step for size, step in zip(kernel, dilation, strict=True)]
        numbers, keys = self._numbers((far[0], far[1], far[2])), self._keys((far[0], far[1], far[2]))
        ordered = keys[self._order]
        axes = (range(-reach, reach + 1, step) for reach, step in zip(far, dilation, strict=True))
        offsets = itertools.islice(itertools.product(*axes), math.prod(kernel) // 2)  # up to the center
        found = []
        for number, offset in enumerate(offsets):
            wanted = keys + numbers.step((0, *offset))
            place = torch.searchsorted(ordered, wanted).clamp_(max=len(keys) - 1)
            near = (ordered[place] == wanted).nonzero().squeeze(1)
            found.append(Pairs(number, near.int(), self._order[place[near]].int()))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class SparseVoxels:
    """A volume (B, C, D, H, W) that stores only the occupied voxels.

    Create it with `from_coords` or `from_dense`. Everything derived from the coordinates (their order, their
    neighbors) is computed once, and shared by all volumes that `with_features` returns.

    Attributes:
        sites: The occupied voxels.
        features: (N, C), any floating dtype; differentiable.

    Memory cost: the features, and 40 bytes for each voxel.

    Example:
        >>> import torch
        >>> from memkit.voxel import SparseVoxels
        >>> volume = torch.zeros(1, 2, 8, 8, 8)
        >>> volume[0, :, 3, 4, 5] = torch.tensor([1.0, 2.0])
        >>> voxels = SparseVoxels.from_dense(volume)
        >>> voxels.coords.tolist(), voxels.features.tolist(), voxels.occupancy
        ([[0, 3, 4, 5]], [[1.0, 2.0]], 0.001953125)
        >>> torch.equal(voxels.to_dense(), volume)
        True
    """

    sites: Sites
    features: Tensor

    def __post_init__(self) -> None:
        coords, features = self.sites.coords, without_affine(self.features)
        object.__setattr__(self, "features", features)  # rows of voxels have no position in world space
        if not features.is_floating_point() or features.dim() != 2 or len(features) != len(coords):
            raise InputTypeError(
                CALL,
                got=f"features of shape {tuple(features.shape)}, {features.dtype}",
                expected=f"floating-point features ({len(coords)}, C), one row for each coordinate",
                fix="pass one row of features for each voxel; use features[:, None] for a single channel.",
            )
        if features.device != coords.device:
            raise InputError(
                CALL,
                got=f"features on {features.device}, coordinates on {coords.device}",
                expected="both on one device",
                fix="move the coordinates with coords.to(features.device).",
            )

    @classmethod
    def from_coords(
        cls, coords: Tensor, features: Tensor, *, shape: Sequence[int], batch_size: int = 1
    ) -> SparseVoxels:
        """Create a sparse volume from coordinates and features.

        Args:
            coords: (N, 4) integers: sample index, and position along D, H, W; (N, 3) without the sample index, for one
                sample. Any order.
            features: (N, C), floating point.
            shape: (D, H, W).
            batch_size: Number of samples.

        Raises:
            InputTypeError: The coordinates are not integers, or the features are not rows of floats.
            InputError: A coordinate is repeated, or lies outside the volume.
        """
        if coords.dim() == 2 and coords.shape[1] == 3 and batch_size == 1:
            coords = torch.nn.functional.pad(coords, (1, 0))
        sizes = tuple(shape)
        if len(sizes) != 3 or coords.dim() != 2 or coords.shape[1] != 4:
            raise InputError(
                CALL,
                got=f"coordinates of shape {tuple(coords.shape)} and a volume of shape {sizes}",
                expected="coordinates (N, 4), the sample first, and a shape (D, H, W)",
                fix="pass the sample index in the first column, or (N, 3) if there is only one sample.",
            )
        return cls(Sites(coords.long() if _is_integer(coords) else coords, sizes, batch_size), features)

    @classmethod
    def from_dense(cls, volume: Tensor, *, mask: Tensor | None = None) -> SparseVoxels:
        """Create a sparse volume from the voxels that are nonzero in any channel, or from those in a mask.

        Args:
            volume: (B, C, D, H, W), floating point. Gradients flow back to the voxels that are kept.
            mask: (B, D, H, W) bool: True for voxels to keep.

        Raises:
            InputTypeError: The volume or the mask has the wrong shape or dtype.
        """
        if volume.dim() != 5 or not volume.is_floating_point():
            raise InputTypeError(
                "SparseVoxels.from_dense(volume)",
                got=f"a tensor of shape {tuple(volume.shape)}, {volume.dtype}",
                expected="a floating point volume (B, C, D, H, W)",
                fix="add the missing dimensions with volume[None, None]; convert with volume.float().",
            )
        volume, mask = without_affine(volume), None if mask is None else without_affine(mask)
        kept = (volume.detach() != 0).any(1) if mask is None else mask
        if kept.shape != (len(volume), *volume.shape[2:]) or kept.dtype != torch.bool:
            raise InputTypeError(
                "SparseVoxels.from_dense(volume, mask)",
                got=f"a mask of shape {tuple(kept.shape)}, {kept.dtype}",
                expected=f"a bool mask {(len(volume), *volume.shape[2:])}",
                fix="drop the mask's channel with mask[:, 0]; convert it to bool with mask != 0.",
            )
        coords = kept.nonzero()
        features = volume.movedim(1, -1)[coords.unbind(1)]
        depth, height, width = volume.shape[2:]
        return cls(Sites(coords, (depth, height, width), len(volume)), features)

    @property
    def coords(self) -> Tensor:
        """(N, 4) int64: sample index, and position along D, H, W."""
        return self.sites.coords

    @property
    def shape(self) -> Triple:
        """(D, H, W)."""
        return self.sites.shape

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self.sites.batch_size

    @property
    def occupancy(self) -> float:
        """Fraction of voxels that are occupied."""
        return len(self.coords) / max(self.batch_size * math.prod(self.shape), 1)

    def with_features(self, features: Tensor) -> SparseVoxels:
        """Return a volume with other features (N, C) at the same sites."""
        return SparseVoxels(self.sites, features)

    def to_dense(self) -> Tensor:
        """Return the dense volume (B, C, D, H, W), zero at empty voxels; differentiable."""
        volume = self.features.new_zeros(self.batch_size, self.features.shape[1], *self.shape)
        sample, *places = self.coords.unbind(1)
        volume[sample, :, places[0], places[1], places[2]] = self.features
        return volume


def carries_affine(x: object) -> bool:
    """Whether a tensor carries a position in world space: a subclass with an ``affine``, such as MONAI's MetaTensor."""
    return isinstance(x, Tensor) and type(x) is not Tensor and getattr(x, "affine", None) is not None


def without_affine(x: Tensor) -> Tensor:
    """Convert to a plain tensor, for results that the affine would not describe; differentiable."""
    return x.as_subclass(Tensor) if carries_affine(x) else x


def _is_integer(coords: Tensor) -> bool:
    return not (coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool)
