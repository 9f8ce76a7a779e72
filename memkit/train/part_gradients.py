"""Gradients of a batch's parts, as sketches: their sums, their errors, and the weights that would explain the whole."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memkit.train.sketches import Vector

TIMES_ROUNDING = 10.0  # an error that rounding explains is at most so many times what rounding alone has changed
_FIT = 1e-3  # how well other weights must explain the whole
_LEFT_OUT = 1e-6  # share of a part that does not count; one valid token among those of a few rows has more


@dataclass(slots=True)
class PartGradient:
    """Summed loss, its gradient as one sketch per parameter, and the count to divide both by.

    Attributes:
        vectors: The sketch of each parameter's gradient; None for a parameter that has none.
        count: Divisor of gradient and loss.
        loss: The summed loss.
        adds_up: Whether the parts' gradients add up to the batch's without being divided.
    """

    vectors: list[Vector | None]
    count: float
    loss: float
    adds_up: bool = False

    @property
    def mean_loss(self) -> float:
        """The loss per count; NaN if there is none."""
        return self.loss / self.count if self.count else math.nan

    @property
    def norm(self) -> float:
        """Norm of the summed gradient."""
        return math.sqrt(sum(float(each @ each) for each in self.vectors if each is not None))

    @property
    def is_finite(self) -> bool:
        """Whether all of the gradient is finite."""
        return all(np.isfinite(each).all() for each in self.vectors if each is not None)

    def mean(self) -> list[Vector | None]:
        """Return the gradient per count."""
        return [None if each is None else each / self.count for each in self.vectors]

    def __add__(self, other: PartGradient) -> PartGradient:
        with np.errstate(invalid="ignore"):  # of gradients that are not finite, which their sum shows
            pairs = zip(self.vectors, other.vectors, strict=True)
            vectors = [a if b is None else b if a is None else a + b for a, b in pairs]
        adds_up = self.adds_up and other.adds_up
        count = self.count if adds_up else self.count + other.count
        return PartGradient(vectors, count, self.loss + other.loss, adds_up)


def summed(parts: Sequence[PartGradient]) -> PartGradient:
    """Return the sum of one or more parts."""
    return functools.reduce(operator.add, parts)


def errors_of(whole: PartGradient, other: PartGradient) -> tuple[Vector, Vector]:
    """Return the norms of the differences and of the whole, for each parameter."""
    if not other.count:
        return np.full(len(whole.vectors), np.inf), np.ones(len(whole.vectors))
    pairs = list(zip(whole.mean(), other.mean(), strict=True))
    differences = [0.0 if a is b else float(np.linalg.norm(_minus(a, b))) for a, b in pairs]
    norms = [0.0 if a is None else float(np.linalg.norm(a)) for a, _ in pairs]
    return np.array(differences), np.array(norms)


def take_workspace() -> None:
    """Make NumPy allocate its linear-algebra workspace now: OpenBLAS kills the process if it cannot do so later."""
    np.linalg.lstsq(np.eye(2), np.ones(2), rcond=None)


def find_weights(
    whole: PartGradient, parts: Sequence[PartGradient], rounding: Vector
) -> Literal["weights", "sum"] | None:
    """Return whether the whole is a weighted mean or the sum of the parts; None if it is neither.

    Args:
        whole: The gradient of all rows.
        parts: Those of the parts.
        rounding: How much rounding alone has changed the gradient of each parameter.
    """
    if any(not each.is_finite or not (each.count or each.norm) for each in parts):
        return "weights"  # a part without any items: 0 / 0
    parts = [each for each in parts if each.count]
    if any(_reaches_more(each, whole) for each in parts):
        return None
    # All parameters have equal weight, but for coarse gradients: those of a few casts must not excuse the others.
    norms = np.array([0.0 if each is None else float(np.linalg.norm(each)) for each in whole.mean()])
    coarse = TIMES_ROUNDING * rounding
    scales = np.where(norms > coarse, 1 / np.maximum(np.where(norms > 0, norms, 1.0), coarse / _FIT), 0.0)
    wanted = _flat(whole.mean(), whole.mean(), scales)
    columns = np.stack([_flat(each.mean(), whole.mean(), scales) for each in parts], axis=1)
    columns = columns[:, np.linalg.norm(columns, axis=0) > 0]  # without parts whose rows are all masked
    if not columns.size:
        return None
    shares, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    is_mean = abs(shares.sum() - 1) < _FIT and (shares > -_FIT).all()
    is_sum = np.ptp(shares) < _FIT  # the same factor for all: a sum, divided by something independent of the part
    # The residual that rounding explains, of gradients scaled per parameter.
    limit = max(_FIT, TIMES_ROUNDING * float(np.linalg.norm(rounding * scales)))
    if not (is_mean or is_sum) or np.linalg.norm(columns @ shares - wanted) > limit:
        return None
    if (np.linalg.norm(columns, axis=0)[abs(shares) < _LEFT_OUT] > _FIT).any():
        return None  # one part alone decides: a maximum, or the larger of two means
    return "weights" if is_mean or abs(shares.mean() - 1) > _FIT else "sum"


def is_one_sided(parts: Sequence[PartGradient]) -> bool:
    """Whether one part alone has a gradient: the whole is its sum as well as its mean."""
    return sum(each.norm > 0 for each in parts) == 1


def _minus(one: Vector | None, other: Vector | None) -> Vector:
    if one is None or other is None:
        there = one if other is None else other
        return there if there is not None else np.zeros(0)
    return one - other


def _reaches_more(part: PartGradient, whole: PartGradient) -> bool:
    """Return whether a part has a gradient for a parameter that the whole does not reach."""
    pairs = zip(part.vectors, whole.vectors, strict=True)
    return any(each is not None and other is None and each.any() for each, other in pairs)


def _flat(vectors: Sequence[Vector | None], like: Sequence[Vector | None], scales: Vector) -> Vector:
    """Concatenate the vectors of what ``like`` has vectors of, scaled; None becomes zeros."""
    pairs = [(each, other, s) for each, other, s in zip(vectors, like, scales, strict=True) if other is not None]
    filled = [np.zeros(0), *(np.zeros(len(other)) if each is None else each * s for each, other, s in pairs)]
    return np.concatenate(filled)
