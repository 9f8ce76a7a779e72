"""Agreement of two voxel grids: occupancy scores and feature errors."""

from __future__ import annotations

import math
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels
from memkit._core.voxel_keys import LinearKeys
from memkit._core.words import guided

Grid: TypeAlias = Tensor | SparseVoxels
_RESIZE = "bring them to one shape first."
_DENSE = (3, 4, 5)  # dimensions: (D, H, W), (B, D, H, W), (B, 1, D, H, W)


class VoxelScores(NamedTuple):
    """Occupancy scores, 0-dim float64 means over the samples. Both empty: 1. One empty: 0.

    Attributes:
        iou: Voxels occupied in both, over voxels occupied in at least one.
        precision: Fraction of the predicted voxels that are correct.
        recall: Fraction of the target's voxels that are found.
        f_score: Harmonic mean of precision and recall.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> mk.voxel.voxel_scores(torch.ones(1, 2, 2, 2), torch.ones(1, 2, 2, 2)).recall.item()
        1.0
    """

    iou: Tensor
    precision: Tensor
    recall: Tensor
    f_score: Tensor


def voxel_scores(prediction: Grid, target: Grid, *, threshold: float = 0.5) -> VoxelScores:
    """Compare the occupied voxels of two grids.

    Args:
        prediction: (D, H, W), (B, D, H, W) or (B, 1, D, H, W): bool, or numbers, where values above ``threshold`` count
            as occupied; or `SparseVoxels`, whose voxels are all occupied. A sample with a NaN gives NaN.
        target: The same type and shape.
        threshold: Threshold for tensors that are not bool.

    Returns:
        Intersection over union, precision, recall and F-score, each the mean over the samples.

    Raises:
        InputTypeError: An argument is not a grid, or only one is sparse.
        InputError: The shapes differ.

    Memory cost: dense: four bool grids of one sample. Sparse: one number per voxel, sorted.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> target = torch.zeros(1, 4, 4, 4)
        >>> target[0, 0, 0, :2] = 1
        >>> found = target.clone()
        >>> found[0, 0, 1, :2] = 1
        >>> scores = mk.voxel.voxel_scores(found, target)
        >>> scores.iou.item(), scores.precision.item(), scores.recall.item()
        (0.5, 0.5, 1.0)
    """
    counts = count_voxels(prediction, target, threshold=threshold)
    return VoxelScores(*(each.mean() for each in scores_of_counts(counts)))


def voxel_iou(prediction: Grid, target: Grid, *, threshold: float = 0.5) -> Tensor:
    """Compute the intersection over union of `voxel_scores`: 0-dim, float64.

    Args:
        prediction: As for `voxel_scores`.
        target: As for `voxel_scores`.
        threshold: As for `voxel_scores`.

    Raises:
        InputTypeError: An argument is not a grid, or only one is sparse.
        InputError: The shapes differ.

    Memory cost: see `voxel_scores`.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> empty = torch.zeros(1, 8, 8, 8)
        >>> mk.voxel.voxel_iou(empty, empty).item(), mk.voxel.voxel_iou(empty + 1, empty).item()
        (1.0, 0.0)
    """
    return voxel_scores(prediction, target, threshold=threshold).iou


@guided()
def feature_mae(
    prediction: Grid,
    target: Grid,
    *,
    mask: Tensor | None = None,
    per_channel: bool = False,
) -> Tensor:
    """Compute the mean absolute difference of voxel features.

    Args:
        prediction: (B, C, D, H, W), or `SparseVoxels`.
        target: The same type.
        mask: (B, D, H, W) bool: the voxels of a dense volume to compare; None for all. Sparse volumes are compared at
            the voxels that both have.
        per_channel: Whether to return (C,) instead of the mean over the channels.

    Returns:
        A 0-dim tensor, or (C,), with gradients; float32 for integers and bool. If nothing is compared: 0 if both are
        empty, otherwise inf.

    Raises:
        InputTypeError: An argument is not a grid, or only one is sparse.
        InputError: The shapes differ, or a mask is given for anything but a dense volume.

    Memory cost: the compared differences.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> target = torch.zeros(1, 2, 4, 4, 4)
        >>> mask = torch.zeros(1, 4, 4, 4, dtype=torch.bool)
        >>> mask[0, 0, 0, 0] = True
        >>> mk.voxel.feature_mae(target + torch.tensor([1.0, 3.0])[:, None, None, None], target, mask=mask).item()
        2.0
    """
    call = "feature_mae(prediction, target)"
    if mask is not None and isinstance(prediction, SparseVoxels):
        _refuse(
            call,
            "a mask for sparse volumes",
            "a mask only for dense volumes",
            "omit mask, and pass only the voxels to compare.",
        )
    if isinstance(prediction, SparseVoxels) and isinstance(target, SparseVoxels):
        _check_alike(prediction, target, call)
        ours, theirs = _shared_rows(prediction, target)
        difference = _difference(prediction.features[ours], target.features[theirs])
        are_empty = not len(prediction.coords) and not len(target.coords)
    else:
        prediction, target = _both_dense(prediction, target, call)
        difference = _difference(prediction, target).movedim(1, -1).reshape(-1, prediction.shape[1])
        are_empty = not len(difference)
        if mask is not None:
            form = (len(target), *target.shape[2:])
            if (getattr(mask, "shape", None), getattr(mask, "dtype", None)) != (form, torch.bool):
                _refuse(
                    call,
                    f"a mask, {described(mask)}",
                    f"bool {form}",
                    "create the mask from the occupancy: mask = occupancy[:, 0] > 0.5.",
                )
            difference = difference[mask.flatten()]
            are_empty = not len(difference)  # the mask is empty
    mean = difference.abs().mean(0) if len(difference) else difference.sum(0) + (0.0 if are_empty else math.inf)
    return mean if per_channel else mean.mean()


def count_voxels(prediction: Grid, target: Grid, *, threshold: float) -> Tensor:
    """Count the voxels in both, in the prediction, and in the target: (3, B) float64, NaN for samples with NaN."""
    call = "voxel_scores(prediction, target)"
    Checker("voxel_scores(...)").number("threshold", threshold, fix="pass threshold=0.5, the usual one.")
    if isinstance(prediction, SparseVoxels) and isinstance(target, SparseVoxels):
        _check_alike(prediction, target, call, features=False)
        samples = [
            prediction.coords[_shared_rows(prediction, target)[0], 0],
            prediction.coords[:, 0],
            target.coords[:, 0],
        ]
        return torch.stack([each.bincount(minlength=prediction.batch_size) for each in samples]).double()
    if isinstance(prediction, SparseVoxels) or isinstance(target, SparseVoxels):
        _refuse_types(call, prediction, target)
    grids = [_samples(each, call) for each in (prediction, target)]
    if grids[0].shape != grids[1].shape:
        _refuse(call, f"{tuple(prediction.shape)} and {tuple(target.shape)}", "two grids of the same shape", _RESIZE)
    rows = []
    for sample in zip(*grids, strict=True):
        has_nan = sample[0].isnan().any() | sample[1].isnan().any()  # it is above no threshold, nor below one
        a, b = (each if each.dtype == torch.bool else each > threshold for each in sample)
        # sum() would convert the grids to int64.
        counts = torch.stack([each.count_nonzero() for each in (a, b, a & b)])
        rows.append(counts.double().masked_fill(has_nan, math.nan))
    of_prediction, of_target, both = torch.stack(rows, 1)
    return torch.stack([both, of_prediction, of_target])


def scores_of_counts(counts: Tensor) -> Tensor:
    """Compute IoU, precision, recall and F-score: (3, B) to (4, B); all 1 where both are empty."""
    both, of_prediction, of_target = counts
    are_empty = (of_prediction + of_target) == 0
    wholes = torch.stack([of_prediction + of_target - both, of_prediction, of_target, (of_prediction + of_target) / 2])
    return torch.where(are_empty, 1, both / wholes.clamp_min(0.5))  # nonzero values are integers, or at least one half


def _samples(grid: object, call: str) -> Tensor:
    """Return the samples of a grid as (B, D, H, W)."""
    channels = grid.shape[1] if isinstance(grid, Tensor) and grid.dim() == 5 else 1
    if not isinstance(grid, Tensor) or grid.dim() not in _DENSE or channels != 1 or grid.is_complex():
        raise InputTypeError(
            call,
            got=described(grid),
            expected="(D, H, W), (B, D, H, W) or (B, 1, D, H, W), or SparseVoxels",
            fix="pass the occupancy channel, for example volume[:, 0].",
        )
    samples = grid.detach() if grid.dim() != 5 else grid.detach().squeeze(1)
    if not len(samples):
        _refuse(call, f"a batch {tuple(grid.shape)}", "at least one sample", "skip empty batches.")
    return samples[None] if samples.dim() == 3 else samples


def _shared_rows(a: SparseVoxels, b: SparseVoxels) -> tuple[Tensor, Tensor]:
    """Return the rows of the voxels that both have, ordered by position."""
    keys = LinearKeys((a.batch_size, *a.shape))
    ours, order_a = keys.encode(a.coords).sort()
    theirs, order_b = keys.encode(b.coords).sort()
    if not len(theirs):
        return order_a[:0], order_b
    place = torch.searchsorted(theirs, ours).clamp_(max=len(theirs) - 1)
    is_shared = theirs[place] == ours
    return order_a[is_shared], order_b[place[is_shared]]


def _difference(a: Tensor, b: Tensor) -> Tensor:
    a, b = (each if each.is_floating_point() else each.float() for each in (a, b))  # uint8 would wrap
    return a - b


def _both_dense(a: Grid, b: Grid, call: str) -> tuple[Tensor, Tensor]:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        _refuse_types(call, a, b)
    if a.shape != b.shape or a.dim() != 5 or a.is_complex() or b.is_complex():
        forms = f"{described(a)} and {described(b)}"
        if a.shape == b.shape and a.dim() == 4:
            fix = f"add the batch dimension: {call.partition('(')[0]}(prediction[None], target[None])"
            _refuse(call, forms, "two volumes (B, C, D, H, W)", fix)
        _refuse(call, forms, "two volumes (B, C, D, H, W) of the same shape, with real numbers", _RESIZE)
    return a, b


def _check_alike(a: SparseVoxels, b: SparseVoxels, call: str, *, features: bool = True) -> None:
    forms = [(each.batch_size, *each.shape, *([each.features.shape[1]] if features else [])) for each in (a, b)]
    if forms[0] != forms[1]:
        _refuse(
            call, f"sparse volumes of {forms[0]} and {forms[1]}", "the same batch size, shape and channels", _RESIZE
        )


def _refuse_types(call: str, a: object, b: object) -> NoReturn:
    raise InputTypeError(
        call,
        got=f"a {type(a).__name__} and a {type(b).__name__}",
        expected="two tensors, or two SparseVoxels",
        fix="convert one of them with SparseVoxels.from_dense(volume) or voxels.to_dense().",
    )


def _refuse(call: str, got: str, expected: str, fix: str) -> NoReturn:
    raise InputError(call, got=got, expected=expected, fix=fix)
