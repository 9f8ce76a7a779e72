"""Choose the finest resolution that stays within limits on occupied voxels and points per voxel."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError, StateError
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels, without_affine
from memkit._core.voxel_keys import MORTON_BITS, morton_encode
from memkit._core.words import guided

Downsample = Literal["area", "max", "sum", "nearest"]
_CHOOSE = "DynamicResolutionProcessor.choose(coords)"
_APPLY = "DynamicResolutionProcessor.apply(volume)"
_RESTORE = "DynamicResolutionProcessor.restore(y)"
_POSITION_LEVELS = 10  # 1024 cells along a side at the finest
_MOST_LEVELS = 20  # Morton codes of a cell have 21 bits an axis


@dataclass(frozen=True, slots=True)
class ResolutionChoice:
    """A chosen resolution, with the figures of the other levels.

    Attributes:
        level: Number of halvings of the finest grid.
        resolution: Cells along the longest side at this level.
        num_active: Occupied cells at this level, in the sample that has the most.
        num_active_by_level: The same for all levels, the finest first.
    """

    level: int
    resolution: int
    num_active: int
    num_active_by_level: tuple[int, ...]


@guided(
    words={
        "max_active_voxels": "max_voxels max_num_voxels voxel_budget",
        "min_points_per_voxel": "min_points points_per_voxel",
        "levels": "num_levels max_level max_levels",
        "the resolution is chosen: bound it by levels": "voxel_size grid_size resolution",
        "downsample": "reduce mode",
    },
    absent={
        "processor.choose(points), then processor.apply(volume); points of a volume: volume.nonzero()": "()",
        "apply(volume), after choose(points)": "forward",
        "restore(y)": "upsample",
        "apply(volume)": "downsample",
        "processor.choice.resolution": "resolution",
        "processor.choice.level": "level",
    },
    methods={"choose": {"pass batch=, the sample of each point": "offsets"}, "apply": {}, "restore": {}},
)
class DynamicResolutionProcessor:
    """Choose a volume's resolution from its points; downsample volumes to it and restore them.

    Args:
        max_active_voxels: Maximum occupied voxels per sample. Never exceeded.
        min_points_per_voxel: Minimum mean number of points per occupied voxel. A finer grid would be emptier, not
            sharper. If no level reaches it, the last one is used.
        levels: Maximum number of halvings. None: down to one cell; 10 for positions.
        stride: `apply` zero-pads its result to multiples of this.
        downsample: How the voxels of a cell are reduced: their mean (``"area"``), ``"max"``, ``"sum"`` (for counts and
            densities), or the middle one (``"nearest"``, for labels).

    Attributes:
        choice: The last choice; None before the first call of `choose`.

    Example:
        >>> import torch
        >>> from memkit import DynamicResolutionProcessor
        >>> volume = torch.zeros(1, 1, 64, 64, 64)
        >>> volume[0, 0, 32] = 1.0
        >>> processor = DynamicResolutionProcessor(max_active_voxels=1100)
        >>> choice = processor.choose(volume[0, 0].nonzero())
        >>> choice.level, choice.resolution, choice.num_active
        (1, 32, 1024)
        >>> processor.apply(volume).shape, processor.restore(processor.apply(volume)).shape
        (torch.Size([1, 1, 32, 32, 32]), torch.Size([1, 1, 64, 64, 64]))
    """

    def __init__(
        self,
        max_active_voxels: int = 100_000,
        *,
        min_points_per_voxel: float = 1.0,
        levels: int | None = None,
        stride: int = 1,
        downsample: Downsample = "area",
    ) -> None:
        check = Checker("DynamicResolutionProcessor(...)")
        self._max_active = check.whole("max_active_voxels", max_active_voxels, 1)
        self._min_points = check.number("min_points_per_voxel", min_points_per_voxel, 0)
        self._levels = None if levels is None else check.whole("levels", levels, 0, _MOST_LEVELS)
        self._stride = check.whole("stride", stride, 1)
        self._downsample = check.choice("downsample", downsample, get_args(Downsample))
        # Of the last volume: its size before and after, and the downsampling factor.
        self._applied: tuple[torch.Size, torch.Size, int] | None = None
        self.choice: ResolutionChoice | None = None

    def choose(self, coords: Tensor, *, batch: Tensor | None = None) -> ResolutionChoice:
        """Choose the finest level within the limits.

        Args:
            coords: (N, 3) or (N, 2). Integers are voxels of the finest grid, from any origin. Positions (floats) are
                binned into 2^levels cells along the longest side of their bounding box.
            batch: (N,) integers from 0, the sample of each point. The limits apply to each sample. None: one sample.

        Raises:
            InputError: There are no points, positions are not finite, ``batch`` does not match the points, the extent
                does not fit a Morton code, or the last level still has too many occupied voxels.

        Cells of all levels are counted with a single sort of Morton codes.

        Memory cost: temporarily ten 8-byte values per point.
        """
        if not isinstance(coords, Tensor):
            raise InputTypeError(
                _CHOOSE,
                got=f"a {type(coords).__name__}",
                expected="a tensor (N, 3) or (N, 2) of points",
                fix="write choose(voxels.coords[:, 1:], batch=voxels.coords[:, 0])"
                if isinstance(coords, SparseVoxels)
                else "write choose(torch.as_tensor(coords))",
            )
        cells, levels = _finest_cells(coords, self._levels)
        samples = coords.new_zeros(len(coords), dtype=torch.int64) if batch is None else _samples_of(coords, batch)
        counts = _count_cells(cells, samples, levels)
        points = torch.bincount(samples, minlength=len(counts))
        # Samples without points are ignored.
        density = (points[:, None] / counts.clamp(min=1)).masked_fill(counts == 0, math.inf).amin(0)
        num_active = tuple(counts.amax(0).tolist())
        level = self._finest(num_active, density.tolist())
        sides = (cells >> level).amax(0) - (cells >> level).amin(0) + 1
        self.choice = ResolutionChoice(level, int(sides.max()), num_active[level], num_active)
        return self.choice

    def _finest(self, num_active: tuple[int, ...], density: list[float]) -> int:
        """Return the finest level within the limits; the last one if no level has enough points per voxel."""
        last = len(num_active) - 1
        if num_active[-1] > self._max_active:
            raise InputError(
                _CHOOSE,
                got=f"{num_active[-1]} occupied voxels at the last level, {last}",
                expected=f"at most max_active_voxels={self._max_active}",
                fix="allow more levels, or raise max_active_voxels.",
            )
        levels = enumerate(zip(num_active, density, strict=True))
        fits = (level for level, (num, points) in levels if num <= self._max_active and points >= self._min_points)
        return next(fits, last)

    def apply(self, volume: Tensor) -> Tensor:
        """Downsample volumes to the chosen level.

        Args:
            volume: (B, C, D, H, W) or (B, C, H, W) on the finest grid; floating point, or any dtype with
                ``downsample="nearest"``.

        Returns:
            (B, C, ...), sides halved ``level`` times, rounded up, and padded to a multiple of the stride. A plain
            tensor: an affine, such as that of MONAI's MetaTensor, would no longer match the voxels.

        Raises:
            StateError: `choose` was not called before.
            InputTypeError: The volume has the wrong shape or dtype.
        """
        factor, volume = 2 ** self._chosen().level, without_affine(volume)
        is_nearest = self._downsample == "nearest"
        if volume.dim() not in (4, 5) or not (is_nearest or volume.is_floating_point()):
            raise InputTypeError(
                _APPLY,
                got=f"a tensor of shape {tuple(volume.shape)}, {volume.dtype}",
                expected="a floating point volume (B, C, D, H, W) or (B, C, H, W)",
                fix='add the missing dimensions, for example volume[None, None]; use downsample="nearest" for labels.',
            )
        pooled = _nearest(volume, factor) if is_nearest else self._pool(volume, factor)
        filling = [(0, -size % self._stride) for size in reversed(pooled.shape[2:])]
        pooled = F.pad(pooled, [each for pair in filling for each in pair])
        self._applied = volume.shape[2:], pooled.shape[2:], factor
        return pooled

    def restore(self, y: Tensor, *, mode: Literal["nearest", "trilinear", "bilinear"] = "nearest") -> Tensor:
        """Upsample a result to the size of the last volume passed to `apply`, regardless of later choices.

        Args:
            y: (B, C, ...), with the spatial size that `apply` returned; any dtype with ``mode="nearest"``.
            mode: As in `torch.nn.functional.interpolate`.

        Raises:
            StateError: `apply` was not called before.
            InputError: The spatial size differs.
            InputTypeError: Labels come with another mode than ``"nearest"``.
        """
        if self._applied is None:
            raise StateError(
                _RESTORE,
                got="a call before apply(volume)",
                expected="apply(volume) before restore(y)",
                fix="call apply(volume) first, which stores the size to restore.",
            )
        before, after, factor = self._applied
        if y.shape[2:] != after:
            raise InputError(
                _RESTORE,
                got=f"a result of shape {tuple(y.shape)}",
                expected=f"the spatial size that apply returned, {tuple(after)}",
                fix="pass the network's output for the last volume given to apply, from a network that keeps its "
                "spatial size.",
            )
        is_label = not (y.is_floating_point() or y.is_complex())
        if is_label and mode != "nearest":
            raise InputTypeError(
                _RESTORE,
                got=f"{y.dtype} with mode={mode!r}",
                expected="a floating point result, because labels cannot be averaged",
                fix='pass mode="nearest".',
            )
        if is_label:  # torch interpolates numbers only
            whole = functools.reduce(lambda part, dim: part.repeat_interleave(factor, dim), range(2, y.dim()), y)
        else:
            whole = y if factor == 1 else F.interpolate(y, scale_factor=factor, mode=mode)
        places: Any = (..., *(slice(size) for size in before))
        return whole[places]

    def _chosen(self) -> ResolutionChoice:
        if self.choice is None:
            raise StateError(
                _APPLY,
                got="a call before choose(coords)",
                expected="choose(coords) first",
                fix="call choose(coords) first.",
            )
        return self.choice

    def _pool(self, volume: Tensor, factor: int) -> Tensor:
        if self._downsample == "sum":
            return _sum(volume, factor)
        if self._downsample == "max":
            pool = F.max_pool3d if volume.dim() == 5 else F.max_pool2d
            return pool(volume, factor, ceil_mode=True)
        # Cells at the end may extend beyond the volume: only the part inside counts.
        return _sum(volume, factor) / _sum(torch.ones_like(volume[:1, :1]), factor)


def _points_of(coords: Tensor) -> str:
    """Return the way out for a value given in place of points: a volume, a batch of clouds, points as columns."""
    if coords.dim() in (4, 5):
        return "for a volume: at = (volume != 0).any(1).nonzero(); write choose(at[:, 1:], batch=at[:, 0])"
    if coords.dim() == 3 and coords.shape[2] in MORTON_BITS:
        return (
            "for a batch of clouds: write choose(coords.flatten(0, 1), "
            "batch=torch.arange(len(coords)).repeat_interleave(coords.shape[1]))"
        )
    if coords.dim() == 3:
        return "for a volume without batch and channels: write choose(volume.nonzero())"
    if coords.dtype is torch.bool:
        return "for a mask: write choose(mask.nonzero())"
    if not coords.numel():
        return "skip this sample: without points there is no resolution to choose."
    if coords.dim() == 2 and coords.shape[0] in MORTON_BITS:
        return "write choose(coords.T)"
    if coords.dim() == 2 and coords.shape[1] - 1 in MORTON_BITS:
        return "for rows that begin with the sample: write choose(coords[:, 1:], batch=coords[:, 0])"
    return "pass points as rows, and the sample index of each point as batch=."


def _finest_cells(coords: Tensor, levels: int | None) -> tuple[Tensor, int]:
    """Return the cells of the finest grid, (N, A) int64, nonnegative; and the number of halvings."""
    is_mask = coords.dtype is torch.bool
    if coords.dim() != 2 or coords.shape[1] not in MORTON_BITS or not len(coords) or is_mask:
        raise InputError(
            _CHOOSE,
            got=f"a tensor of shape {tuple(coords.shape)}{', torch.bool' if is_mask else ''}",
            expected="(N, 3) or (N, 2), one row for each point, and at least one point",
            fix=_points_of(coords),
        )
    low = coords.amin(0)
    side = (coords.amax(0) - low).max()
    if not coords.is_floating_point():
        levels = min(int(side).bit_length(), _MOST_LEVELS) if levels is None else levels
        # The origin is a corner of the coarsest grid, so the cells match those of a volume that starts at 0.
        return coords.long() - (low.long() >> levels << levels), levels
    if not bool(side.isfinite()):
        raise InputError(
            _CHOOSE,
            got="positions that are not finite",
            expected="finite coordinates",
            fix="drop them: coords[coords.isfinite().all(1)].",
        )
    levels = _POSITION_LEVELS if levels is None else levels
    cells = (coords - low) / side.clamp(min=torch.finfo(coords.dtype).tiny) * 2**levels
    return cells.long().clamp_(max=2**levels - 1), levels


def _samples_of(coords: Tensor, batch: Tensor) -> Tensor:
    """Check ``batch`` and return it as (N,) int64."""
    if batch.shape != coords.shape[:1] or batch.is_floating_point() or batch.is_complex() or int(batch.min()) < 0:
        raise InputError(
            "DynamicResolutionProcessor.choose(coords, batch=...)",
            got=f"batch of shape {tuple(batch.shape)}, {batch.dtype}, for {len(coords)} points",
            expected=f"({len(coords)},) integers, 0 or more: the sample of each point",
            fix="number the samples from 0.",
        )
    return batch.long()


def _count_cells(cells: Tensor, samples: Tensor, levels: int) -> Tensor:
    """Count the occupied cells of each sample at each level with one sort: (B, levels + 1) int64.

    Two neighbors in Morton order share a cell from the level on at which their codes agree.
    """
    num_axes = cells.shape[1]
    codes = morton_encode(cells, call=_CHOOSE)
    bits = int(cells.max()).bit_length() * num_axes
    num_samples = int(samples.max()) + 1
    if bits + (num_samples - 1).bit_length() > 63:
        raise InputError(
            _CHOOSE,
            got=f"an extent of {int(cells.max()) + 1} cells, for {num_samples} samples",
            expected="cells and samples that together fit into 63 bits",
            fix="use larger cells at the finest level, or fewer samples in a call.",
        )
    ordered = (codes | samples << bits).sort().values
    apart = ordered[1:] ^ ordered[:-1]
    thresholds = torch.tensor([2 ** (num_axes * level) for level in range(levels + 1)], device=cells.device)
    merged_at = torch.bucketize(apart, thresholds, right=True)  # levels + 1: never
    merged_at[apart >> bits != 0] = levels + 1  # another sample
    merged_at = F.pad(merged_at, (1, 0), value=levels + 1)
    table = torch.bincount((ordered >> bits) * (levels + 2) + merged_at, minlength=num_samples * (levels + 2))
    return table.view(num_samples, levels + 2).flip(1).cumsum(1).flip(1)[:, 1:]


def _sum(volume: Tensor, factor: int) -> Tensor:
    """Sum over cells; those at the end may be smaller."""
    filling = [(0, -size % factor) for size in reversed(volume.shape[2:])]
    pool = F.avg_pool3d if volume.dim() == 5 else F.avg_pool2d
    wide = volume.float() if volume.dtype is torch.float16 else volume  # a CPU does not average float16
    return pool(F.pad(wide, [each for pair in filling for each in pair]), factor, divisor_override=1).to(volume.dtype)


def _nearest(volume: Tensor, factor: int) -> Tensor:
    for dim in range(2, volume.dim()):
        places = torch.arange(factor // 2, volume.shape[dim] + factor // 2, factor, device=volume.device)
        volume = volume.index_select(dim, places.clamp_(max=volume.shape[dim] - 1))
    return volume
