"""Mixing of two samples of a batch, voxel by voxel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels
from memkit._core.words import guided
from memkit.voxel.augment_base import (
    Augmentation,
    X,
    blocks_of,
    generator,
    layout_of,
    numbers_of,
    read_grid,
    with_rows,
)
from memkit.voxel.layout import VoxelLayout, refuse_no_layout
from memkit.voxel.params import MixupParams
from memkit.voxel.samples import VoxelPoints, is_volume
from memkit.voxel.words import ALWAYS, CALLS, WORDS


class MixedLabels(NamedTuple):
    """Labels of mixed samples, for ``weight * loss(x, first) + (1 - weight) * loss(x, second)``.

    Attributes:
        first: (B, ...) labels of the samples themselves.
        second: (B, ...) labels of their partners.
        weight: (B,) float64 in [0, 1].

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> mix = mk.MixupAugmentation()
        >>> labels = mix.labels(torch.tensor([5, 6]), mix.sample((2, 1, 8, 8, 8), seed=0))
        >>> labels.first.tolist(), labels.weight.dtype
        ([5, 6], torch.float64)
    """

    first: Tensor
    second: Tensor
    weight: Tensor


@guided(words=WORDS | ALWAYS | {"labels may be of any number of classes": "num_classes"}, **CALLS)
@dataclass(frozen=True, kw_only=True)
class MixupAugmentation(Augmentation[MixupParams]):
    """Mix each sample of a batch with another one; where one of the two is empty, the other is kept unchanged.

    The result contains the occupied voxels of both; a voxel occupied in both gets the weighted mean, and the larger
    occupancy. Mix targets with the same parameters, and class labels with `labels`; a call does both.

    Attributes:
        alpha: A sample's own weight is drawn from Beta(alpha, alpha), separately for each sample.
        layout: Meaning of the channels. Without one, all are scalars, and empty voxels hold 0.

    Raises:
        ConfigError: A setting is invalid; the message names it.

    Memory cost: the result.

    Source: `docs/augmentation.md`; Zhang et al., "mixup: beyond empirical risk minimization", 2018.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> x = torch.rand(4, 2, 8, 8, 8)
        >>> mix = mk.MixupAugmentation(alpha=0.4)
        >>> y, labels = mix(x, torch.arange(4))
        >>> y.shape, labels.weight.shape
        (torch.Size([4, 2, 8, 8, 8]), torch.Size([4]))
    """

    alpha: float = 0.2
    layout: VoxelLayout | None = None

    _params = MixupParams

    def __post_init__(self) -> None:
        check = Checker("MixupAugmentation(...)")
        check.number("alpha", self.alpha, 1e-3, 1e3)
        refuse_no_layout(check, self.layout)

    def sample(self, shape: Sequence[int], *, seed: int, epoch: int = 0, index: int | Sequence[int] = 0) -> MixupParams:
        """Draw parameters for a batch; see `Augmentation.sample`.

        Raises:
            InputError: The shape is not that of a batch (B, C, D, H, W), or a number is invalid.
        """
        call = "MixupAugmentation.sample(shape)"
        grid = read_grid(call, shape, self.layout)
        if not grid.batched:
            raise InputError(
                call,
                got=f"the shape {tuple(shape)} of one sample",
                expected="(B, C, D, H, W)",
                fix="apply the mix after the samples are collated into a batch.",
            )
        named = tuple(index) if isinstance(index, Sequence) else (index,)
        chance = generator(Checker(call, InputError), seed=seed, epoch=epoch, index=named)
        partners = chance.permutation(grid.num_samples).tolist()
        weights = chance.beta(self.alpha, self.alpha, grid.num_samples).tolist()
        return MixupParams(grid.shape, tuple(partners), tuple(weights))

    def labels(self, labels: Tensor, params: MixupParams) -> MixedLabels:
        """Return the labels of mixed samples: their own, their partners', and the weights of their own.

        Args:
            labels: (B, ...), one row per sample.
            params: Parameters drawn by `sample`.

        Raises:
            InputError: The number of labels differs from the number of samples.
        """
        if labels.dim() < 1 or len(labels) != len(params.partners):
            raise InputError(
                "MixupAugmentation.labels(labels, params)",
                got=f"labels of shape {tuple(labels.shape)}",
                expected=f"one row for each of {len(params.partners)} samples",
                fix="draw the parameters for this batch with sample(x.shape, seed=...).",
            )
        weight = torch.tensor(params.weights, dtype=torch.float64, device=labels.device)
        return MixedLabels(labels, labels[list(params.partners)], weight)

    def _check(self, x: X, params: MixupParams, layout: VoxelLayout | None) -> VoxelLayout:
        call = "MixupAugmentation.apply(x, params)"
        if isinstance(x, VoxelPoints):
            raise InputTypeError(
                call,
                got="points of one sample",
                expected="a batch of volumes, dense or sparse",
                fix="mix clouds by concatenating their points with torch.cat, or voxelize them first.",
            )
        return layout_of(call, x, (params.shape, len(params.partners), True), layout)

    def apply_joint(
        self,
        sample: Mapping[Any, Any],
        params: MixupParams,
        *,
        photometric: Collection[Any] | None = None,
        layouts: Mapping[Any, VoxelLayout] | None = None,
    ) -> Any:
        """Mix the volumes of a batch, and its labels; see `Augmentation.apply_joint`.

        Entries with one or two dimensions and a row for each sample are labels, and become `MixedLabels`.

        Raises:
            InputError: As for `Augmentation.apply_joint`.
            InputTypeError: As for `Augmentation.apply_joint`.
        """
        mixed = super().apply_joint(sample, params, photometric=photometric, layouts=layouts)
        for name, value in sample.items():
            is_label = isinstance(value, Tensor) and value.dim() in (1, 2) and not is_volume(value)
            if is_label and len(value) == len(params.partners):
                mixed[name] = self.labels(value, params)
        return mixed

    def _apply(self, x: X, params: MixupParams, layout: VoxelLayout | None, *, inplace: bool) -> X:  # noqa: ARG002 # partners are still read
        known = self._check(x, params, layout)
        if isinstance(x, SparseVoxels):
            return cast("X", _mix_sparse(x, params, known))
        volume = cast("Tensor", x)
        if not volume.is_floating_point():
            raise InputTypeError(
                "MixupAugmentation.apply(x, params)",
                got=f"labels of dtype {volume.dtype}",
                expected="floating-point volumes",
                fix="use labels(), and weight one loss for each of the two labels.",
            )
        out = torch.empty_like(volume, memory_format=torch.contiguous_format)
        for number, (partner, weight) in enumerate(zip(params.partners, params.weights, strict=True)):
            for depth, height in blocks_of(params.shape):
                a, b = (volume[each, :, depth, height] for each in (number, partner))
                out[number, :, depth, height] = _mix(a, b, (known.occupied(a), known.occupied(b)), weight, known)
        return cast("X", out)


def _mix(a: Tensor, b: Tensor, occupied: tuple[Tensor, Tensor], weight: float, layout: VoxelLayout) -> Tensor:
    """Mix voxel values (C, ...) given their occupancies (...), with the same arithmetic for both forms of volumes."""
    mixed = (a * weight).add_(b * (1 - weight))
    for channel, kind in enumerate(layout.channels):
        if kind == "occupancy":
            mixed[channel] = torch.maximum(a[channel], b[channel])
    in_a, in_b = occupied
    return torch.where(in_a & in_b, mixed, torch.where(in_b, b, a))


def _mix_sparse(voxels: SparseVoxels, params: MixupParams, layout: VoxelLayout) -> SparseVoxels:
    coords, features = [], []
    for number, (partner, weight) in enumerate(zip(params.partners, params.weights, strict=True)):
        (places_a, a), (places_b, b) = (_rows(voxels, each) for each in (number, partner))
        keys, order = numbers_of(places_b, params.shape).sort()
        wanted = numbers_of(places_a, params.shape)
        found = torch.searchsorted(keys, wanted)
        is_shared = torch.zeros_like(found, dtype=torch.bool)
        is_inside = found < len(keys)
        is_shared[is_inside] = keys[found[is_inside]] == wanted[is_inside]
        theirs = order[found[is_shared]]
        ones = torch.ones_like(theirs, dtype=torch.bool)
        united = a.clone()
        united[is_shared] = _mix(a[is_shared].T, b[theirs].T, (ones, ones), weight, layout).T
        is_new = torch.ones(len(b), dtype=torch.bool, device=b.device)
        is_new[theirs] = False
        places = torch.cat([places_a, places_b[is_new]])
        coords.append(torch.nn.functional.pad(places, (1, 0), value=number))
        features.append(torch.cat([united, b[is_new]]))
    return with_rows(voxels, torch.cat(coords), torch.cat(features))


def _rows(voxels: SparseVoxels, number: int) -> tuple[Tensor, Tensor]:
    """Return the voxel coordinates (N, 3) and features (N, C) of one sample."""
    rows = voxels.coords[:, 0] == number
    return voxels.coords[rows, 1:], voxels.features[rows]
