"""Precision, recall and F-score of point clouds at one or more distance thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.voxel.clouds import Cloud, mean_of_clouds
from memkit.voxel.nearest import NearestBackend, NearestPoints

_WORDS = {"threshold": "tau th radius distance_threshold"}


class PrecisionRecall(NamedTuple):
    """Fractions of points near the other cloud, for one threshold or for (T,) thresholds.

    Attributes:
        precision: Fraction of the prediction's points.
        recall: Fraction of the target's points.
        f_score: Harmonic mean of both; 0 if both are 0.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> scores = mk.voxel.precision_recall(torch.zeros(1, 3), torch.ones(2, 3), threshold=[1.0, 2.0])
        >>> scores.precision.tolist(), scores.f_score.tolist()
        ([0.0, 1.0], [0.0, 1.0])
    """

    precision: Tensor
    recall: Tensor
    f_score: Tensor


@guided(words=_WORDS)
def precision_recall(
    prediction: Cloud | NearestPoints,
    target: Cloud | None = None,
    *,
    threshold: float | Sequence[float],
    backend: NearestBackend = "auto",
    memory_budget: SupportsIndex | str = "16MiB",
) -> PrecisionRecall:
    """Compute the fractions of points closer than a threshold to the other cloud, as in Tanks and Temples.

    Args:
        prediction: As ``a`` for `chamfer_distance`.
        target: As ``b`` for `chamfer_distance`.
        threshold: One or several distances above zero, in the unit of the coordinates; a distance counts if it is
            smaller.
        backend: As for `nearest_points`.
        memory_budget: As for `nearest_points`.

    Returns:
        Precision, recall and F-score: 0-dim, or (T,) for several thresholds. Both clouds empty: 1. One empty: 0.

    Raises:
        ConfigError: A threshold or the backend is invalid.
        InputTypeError: An argument is not a point cloud.
        InputError: The batch sizes differ, or a coordinate is not finite.

    Memory cost: see `nearest_points`; one search for all thresholds.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> found, truth = torch.tensor([[0.0, 0, 0], [9, 0, 0]]), torch.tensor([[0.0, 0, 0.1]])
        >>> precision, recall, f_score = mk.voxel.precision_recall(found, truth, threshold=0.2)
        >>> precision.item(), recall.item()
        (0.5, 1.0)
    """
    return _precision_recall("precision_recall", prediction, target, threshold, backend, memory_budget)


@guided(words=_WORDS)
def f_score(
    prediction: Cloud | NearestPoints,
    target: Cloud | None = None,
    *,
    threshold: float | Sequence[float],
    backend: NearestBackend = "auto",
    memory_budget: SupportsIndex | str = "16MiB",
) -> Tensor:
    """Compute the F-score of `precision_recall`: 0-dim, or (T,) for several thresholds.

    Args:
        prediction: As for `precision_recall`.
        target: As for `precision_recall`.
        threshold: As for `precision_recall`.
        backend: As for `nearest_points`.
        memory_budget: As for `nearest_points`.

    Raises: The same errors as `precision_recall`.

    Memory cost: see `nearest_points`.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> cloud = torch.rand(50, 3)
        >>> [mk.voxel.f_score(each, cloud, threshold=0.01).item() for each in (cloud + 0.001, cloud[:0])]
        [1.0, 0.0]
    """
    return _precision_recall("f_score", prediction, target, threshold, backend, memory_budget).f_score


def _precision_recall(
    name: str, prediction: Any, target: Any, threshold: float | Sequence[float], *search: Any
) -> PrecisionRecall:
    limits = _limits(name, threshold)
    call = f"{name}(prediction, target)"
    found = mean_of_clouds(call, lambda pairs: _shares(pairs, limits), prediction, target, *search)
    return PrecisionRecall(*(found if isinstance(threshold, list | tuple) else found[:, 0]))


def _limits(name: str, threshold: float | Sequence[float]) -> list[float]:
    check, fix = Checker(f"{name}(...)"), "pass for example threshold=0.1, in the unit of the coordinates."
    given = threshold if isinstance(threshold, list | tuple) else [threshold]
    if not given:
        raise check.refusal("threshold", threshold, "one or several distances above 0", fix=fix)
    return [check.number("threshold", each, above=0, fix=fix) for each in given]


@torch.no_grad()
def _shares(pairs: NearestPoints, limits: Sequence[float]) -> Tensor:
    """Compute precision, recall and F-score: (3, T)."""
    limit = torch.tensor(limits, dtype=pairs.a.dtype, device=pairs.a.device)
    if not len(pairs.a) or not len(pairs.b):
        return limit.new_full((3, len(limit)), float(len(pairs.a) == len(pairs.b)))
    precision, recall = (
        torch.stack([(each < one).mean(dtype=limit.dtype) for one in limit]) for each in pairs.distances()
    )
    both = precision + recall
    return torch.stack([precision, recall, torch.where(both > 0, 2 * precision * recall / both, 0)])
