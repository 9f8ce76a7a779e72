"""The noisy law: ``constant + factor * n ** power``, possibly above a plateau, fitted to scattered points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memkit._core.errors import InputError
from memkit.predict.gpus import CapacityLike, capacity_bytes
from memkit.predict.scaling.law import FARTHEST, Tier, checked_size, too_far

FloatArray: TypeAlias = npt.NDArray[np.float64]

FEWEST_POINTS = 6
LEAST_SPAN = 30
MOST_ERROR = 0.05
MOST_WIDTH = 0.3

_POWERS = np.arange(25, 1501) / 500  # 0.05 to 3
_HUBER = 1.345  # in standard deviations: residuals beyond it count less
_MOST_REWEIGHTINGS = 20
_EXACT = 1e-9  # relative scatter below which points are assumed to lie on the curve
# A plateau has three more parameters (its level, where it ends, whether it exists), which must improve the fit enough.
_PLATEAU_COST = 4.0
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5 %, for 1, 2, ... degrees of freedom


class Curves(NamedTuple):
    """The best curve for each power: the higher of ``plateau`` and ``constants + factors * (n / unit) ** powers``.

    Arrays are float64, shape ``(num_powers,)``.
    """

    plateau: float
    unit: float
    powers: FloatArray
    constants: FloatArray
    factors: FloatArray
    errors: FloatArray  # weighted sum of squares of the relative residuals
    normal: FloatArray  # (2, 2, num_powers): the normal equations of constants and factors
    num_free: int  # number of points minus number of parameters
    num_all: int

    def at(self, n: int) -> FloatArray:
        """Return the value of every curve at ``n``."""
        curves: FloatArray = np.maximum(self.plateau, self.constants + self.factors * (n / self.unit) ** self.powers)
        return curves

    @property
    def best(self) -> int:
        """Index of the curve with the smallest error."""
        return int(self.errors.argmin())

    def admitted(self) -> FloatArray:
        """Mask of the powers in the 95 % profile interval: bool, shape ``(num_powers,)``."""
        mask: FloatArray = self.errors <= self.errors.min() * (1 + _student(self.num_free) ** 2 / self.num_free) + 1e-18
        return mask

    def margins(self, n: int) -> FloatArray:
        """Return each curve's 95 % margin at ``n`` from the uncertainty of its constant and factor."""
        power = (n / self.unit) ** self.powers
        ((aa, ab), (_, bb)) = self.normal
        variances = (bb - 2 * ab * power + aa * power**2) / (aa * bb - ab**2) * self.errors.min() / self.num_free
        margins: FloatArray = _student(self.num_free) * np.sqrt(np.maximum(variances, 0))
        return margins


@dataclass(frozen=True)
class NoisyLaw:
    """A fitted curve with its interval.

    The fit minimizes the relative error, is robust against outliers, and solves exactly for the constant and the factor
    at each power on a grid (variable projection). It is not a valid law, and every query raises an error, if the points
    are too few or too close together, if it misses the largest point, held out, by more than 5 %, or if the interval of
    the power is wider than 0.3.

    Attributes:
        sizes: Ascending.
        peaks: Peak bytes at each size.
        reason: Why it is not a valid law; empty if it is one.
        held_out_error: Error at the largest size when predicted from the others.
    """

    tier: ClassVar[Tier] = "noisy"
    breakpoints: ClassVar[tuple[int, ...]] = ()

    sizes: tuple[int, ...]
    peaks: tuple[int, ...]
    reason: str
    held_out_error: float | None

    @cached_property
    def curves(self) -> Curves:
        """The fit, computed on first access."""
        return fit_curves(self.sizes, self.peaks)

    @property
    def order(self) -> float | None:
        """The power of ``n``; None if this is not a valid law."""
        return None if self.reason else float(self.curves.powers[self.curves.best])

    @property
    def order_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the power; None if this is not a valid law."""
        return None if self.reason else _ends(self.curves)

    @property
    def constant_bytes(self) -> int | None:
        """The part that does not grow with ``n``; None if this is not a valid law."""
        return None if self.reason else round(float(self.curves.constants[self.curves.best]))

    def predict(self, n: int) -> int:
        """Return the peak in bytes by the curve, up to four times the largest size."""
        self._check(n, f"law.predict({n!r})")
        return round(float(self.curves.at(n)[self.curves.best]))

    def interval(self, n: int) -> tuple[int, int | None]:
        """Return the 95 % interval of the curve, over all powers that the points do not exclude."""
        self._check(n, f"law.interval({n!r})")
        mask, curves, margins = self.curves.admitted(), self.curves.at(n), self.curves.margins(n)
        lowest, highest = (curves - margins)[mask].min(), (curves + margins)[mask].max()
        return max(0, math.floor(lowest)), math.ceil(highest)

    def max_n(self, budget: CapacityLike) -> int | None:
        """Return the largest size whose predicted peak fits, up to four times the largest known size."""
        call, most = f"law.max_n({budget!r})", capacity_bytes(budget)
        self._check(self.sizes[0], call)
        farthest = FARTHEST * self.sizes[-1]
        if self.predict(farthest) <= most:
            raise too_far(call, f"a budget that size {farthest} does not use up", self.sizes[-1])
        return bisect_right(range(1, farthest + 1), most, key=self.predict)

    def peak_where(self, n: int) -> str:
        """Return empty text: a fitted curve has no place of the peak."""
        self._check(n, f"law.peak_where({n!r})")
        return ""

    def _check(self, n: int, call: str) -> None:
        checked_size(n, call)
        if self.reason:
            raise InputError(
                call,
                got=f"no law: {self.reason}",
                expected="points that lie on one of the known curves",
                fix="measure more sizes, farther apart, or read the measured points directly.",
            )
        if n > FARTHEST * self.sizes[-1]:
            raise too_far(call, f"{n}", self.sizes[-1])


def noisy_law(sizes: Sequence[int], peaks: Sequence[int]) -> NoisyLaw:
    """Fit peaks at ascending sizes, and check whether the fit is a valid law."""
    if len(sizes) < FEWEST_POINTS or sizes[-1] < LEAST_SPAN * sizes[0]:
        span = f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"
        reason = f"{span}; it takes {FEWEST_POINTS} that span a factor of {LEAST_SPAN}"
        return NoisyLaw(tuple(sizes), tuple(peaks), reason, None)
    without = fit_curves(sizes[:-1], peaks[:-1])
    error = abs(float(without.at(sizes[-1])[without.best]) / peaks[-1] - 1)
    low, high = _ends(fit_curves(sizes, peaks))
    if error > MOST_ERROR:
        reason = f"the largest size, held out, is missed by {error:.1%}"
    elif high - low > MOST_WIDTH:
        reason = f"the power of n is known only to lie between {low:.2f} and {high:.2f}"
    else:
        reason = ""
    return NoisyLaw(tuple(sizes), tuple(peaks), reason, error)


def fit_curves(sizes: Sequence[int], peaks: Sequence[int]) -> Curves:
    """Fit the curve, with a plateau over the smallest sizes if the points support one."""
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(peaks, dtype=np.float64)
    candidates = [_law_alone(x, y)]
    for num_flat in range(2, len(y) - 3):
        level = float(np.median(y[:num_flat]))
        law = _law_alone(x[num_flat:], y[num_flat:])
        flat_errors = float(np.sum((level / y[:num_flat] - 1) ** 2))
        candidates.append(law._replace(plateau=level, errors=law.errors + flat_errors, num_all=len(y)))
    return min(candidates, key=_cost)


def _cost(curves: Curves) -> float:
    """Return Schwarz's criterion (BIC)."""
    num_parameters = 5 if curves.plateau else 3
    scatter = max(float(curves.errors.min()) / curves.num_all, _EXACT**2)
    penalty = num_parameters * math.log(curves.num_all) + (_PLATEAU_COST if curves.plateau else 0)
    return curves.num_all * math.log(scatter) + penalty


def _law_alone(x: FloatArray, y: FloatArray) -> Curves:
    """Fit the curve without a plateau, with Huber's weights."""
    num_free = max(1, len(y) - 3)
    rising = (x / x[-1]) ** _POWERS[:, None] / y
    weights = np.ones_like(y)
    for _ in range(_MOST_REWEIGHTINGS):
        constants, factors, normal = _solve(1 / y, rising, weights)
        residuals = constants[:, None] / y + factors[:, None] * rising - 1
        errors = (weights * residuals**2).sum(axis=1)
        distances = np.abs(residuals[errors.argmin()])
        scatter = 1.4826 * float(np.median(distances)) * math.sqrt(len(y) / num_free)
        if scatter < _EXACT:
            break
        before, weights = weights, np.minimum(1, _HUBER * scatter / np.maximum(distances, _EXACT))
        if np.allclose(before, weights, atol=1e-6):
            break
    return Curves(0.0, float(x[-1]), _POWERS, constants, factors, errors, normal, num_free, len(y))


def _solve(flat: FloatArray, rising: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Solve ``constant * flat + factor * rising == 1`` by nonnegative weighted least squares for every power."""
    aa = np.broadcast_to((weights * flat**2).sum(), len(rising))
    ab, bb = (weights * flat * rising).sum(axis=1), (weights * rising**2).sum(axis=1)
    a, b = (weights * flat).sum(), (weights * rising).sum(axis=1)
    determinant = aa * bb - ab**2
    constants, factors = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    constants, factors = np.where(factors < 0, a / aa, constants), np.maximum(factors, 0)
    factors, constants = np.where(constants < 0, b / bb, factors), np.maximum(constants, 0)
    return constants, factors, np.asarray([[aa, ab], [ab, bb]])


def _ends(curves: Curves) -> tuple[float, float]:
    admitted = curves.powers[curves.admitted()]
    return float(admitted[0]), float(admitted[-1])


def _student(degrees: int) -> float:
    return _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 1.96 + 2.7 / degrees
