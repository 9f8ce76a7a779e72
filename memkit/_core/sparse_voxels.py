"""Volumes of which only the occupied voxels are kept: their coordinates, and one row of features for each."""

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
    """The sites that one offset of a kernel joins, and its mirror image the other way round.

    Attributes:
        number: Of the offset within the kernel, before its centre; the mirror image has the last number minus this.
        near: (P,) int32, rows of sites.
        far: (P,) int32, rows of the sites that lie at the offset from these.
    """

    number: int
    near: Tensor
    far: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sites:
    """Which voxels are occupied. Sorted once; what convolutions ask about neighbours is kept here, and goes with it.

    Attributes:
        coords: (N, 4) int64: sample, and place along D, H, W; no two alike, in any order.
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
                got=f"{int(twice.sum())} coordinates that came before, the first {tuple(first)}",
                expected="each voxel once",
                fix="add up or average what falls into one voxel first: coords.unique(dim=0, return_inverse=True).",
            )
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_maps", {})

    def _keys(self, margin: Triple) -> Tensor:
        return self._numbers(margin).encode(self.coords, call=CALL)

    def _numbers(self, margin: Triple) -> LinearKeys:
        return LinearKeys((0, 0, 0, 0), (self.batch_size, *self.shape), (0, *margin))

    def pairs(self, kernel: Triple, dilation: Triple) -> list[Pairs]:
        """Which sites see each other through a kernel; found once for each kernel size and dilation.

        Memory cost: 4 bytes for each neighbour of each site, as long as the sites live; no table of the volume.
        """
        if (kernel, dilation) not in self._maps:
            self._maps[kernel, dilation] = self._find_pairs(kernel, dilation)
        return self._maps[kernel, dilation]

    def _find_pairs(self, kernel: Triple, dilation: Triple) -> list[Pairs]:
        far = [size // 2 * step for size, step in zip(kernel, dilation, strict=True)]
        numbers, keys = self._numbers((far[0], far[1], far[2])), self._keys((far[0], far[1], far[2]))
        ordered = keys[self._order]
        axes = (range(-reach, reach + 1, step) for reach, step in zip(far, dilation, strict=True))
        offsets = itertools.islice(itertools.product(*axes), math.prod(kernel) // 2)  # up to the centre
        found = []
        for number, offset in enumerate(offsets):
            wanted = keys + numbers.step((0, *offset))
            place = torch.searchsorted(ordered, wanted).clamp_(max=len(keys) - 1)
            near = (ordered[place] == wanted).nonzero().squeeze(1)
            found.append(Pairs(number, near.int(), self._order[place[near]].int()))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class SparseVoxels:
    """A volume (B, C, D, H, W) of which only the occupied voxels are kept.

    Make it with `from_coords` or `from_dense`. What is known about the coordinates (their order, who is whose
    neighbour) is found once, and shared by all that `with_features` gives.

    Attributes:
        sites: Which voxels are occupied.
        features: (N, C), any floating dtype; a gradient flows through it.

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
        object.__setattr__(self, "features", features)  # rows of voxels lie nowhere in the world
        if not features.is_floating_point() or features.dim() != 2 or len(features) != len(coords):
            raise InputTypeError(
                CALL,
                got=f"features of shape {tuple(features.shape)}, {features.dtype}",
                expected=f"floating point features ({len(coords)}, C), one row for each of the coordinates",
                fix="give one row of features for each voxel; features[:, None] for a single channel.",
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
        """Take coordinates and features.

        Args:
            coords: (N, 4) integers: sample, and place along D, H, W; (N, 3) without the sample, for one sample. Any
                order.
            features: (N, C), floating point.
            shape: (D, H, W).
            batch_size: Number of samples.

        Raises:
            InputTypeError: Coordinates are no integers, or features no rows of floats.
            InputError: A coordinate comes twice, or lies outside of the volume.
        """
        if coords.dim() == 2 and coords.shape[1] == 3 and batch_size == 1:
            coords = torch.nn.functional.pad(coords, (1, 0))
        sizes = tuple(shape)
        if len(sizes) != 3 or coords.dim() != 2 or coords.shape[1] != 4:
            raise InputError(
                CALL,
                got=f"coordinates of shape {tuple(coords.shape)} and a volume of shape {sizes}",
                expected="coordinates (N, 4), the sample first, and a shape (D, H, W)",
                fix="leave out the sample where there is one only: (N, 3).",
            )
        return cls(Sites(coords.long() if _is_integer(coords) else coords, sizes, batch_size), features)

    @classmethod
    def from_dense(cls, volume: Tensor, *, mask: Tensor | None = None) -> SparseVoxels:
        """Take the voxels of a volume that are not zero in some channel, or those of a mask.

        Args:
            volume: (B, C, D, H, W), floating point. A gradient flows back into the voxels that are kept.
            mask: (B, D, H, W) bool: which voxels are kept.

        Raises:
            InputTypeError: The volume has another form.
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
                fix="drop the mask's channel with mask[:, 0]; compare with zero for a bool.",
            )
        coords = kept.nonzero()
        features = volume.movedim(1, -1)[coords.unbind(1)]
        depth, height, width = volume.shape[2:]
        return cls(Sites(coords, (depth, height, width), len(volume)), features)

    @property
    def coords(self) -> Tensor:
        """(N, 4) int64: sample, and place along D, H, W."""
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
        """Share of the voxels that is occupied."""
        return len(self.coords) / max(self.batch_size * math.prod(self.shape), 1)

    def with_features(self, features: Tensor) -> SparseVoxels:
        """Other features (N, C) at the same sites."""
        return SparseVoxels(self.sites, features)

    def to_dense(self) -> Tensor:
        """The volume (B, C, D, H, W), zero where nothing is; a gradient flows back."""
        volume = self.features.new_zeros(self.batch_size, self.features.shape[1], *self.shape)
        sample, *places = self.coords.unbind(1)
        volume[sample, :, places[0], places[1], places[2]] = self.features
        return volume


def carries_affine(x: object) -> bool:
    """Whether a tensor knows where it lies in the world: a subclass with an ``affine``, such as MONAI's MetaTensor."""
    return isinstance(x, Tensor) and type(x) is not Tensor and getattr(x, "affine", None) is not None


def without_affine(x: Tensor) -> Tensor:
    """Return a plain tensor where the affine would not follow what is made of it; a gradient flows back."""
    return x.as_subclass(Tensor) if carries_affine(x) else x


def _is_integer(coords: Tensor) -> bool:
    return not (coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool)
