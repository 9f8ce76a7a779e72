"""The deterministic law: straight lines through exact peaks, for steps that cannot be traced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import ClassVar

from memkit._core.errors import InputError, InputTypeError
from memkit.predict.gpus import CapacityLike, capacity_bytes
from memkit.predict.scaling.law import FARTHEST, Tier, checked_size, too_far


@dataclass(frozen=True)
class DeterministicLaw:
    """Lines between exact peaks, with the last line extrapolated.

    The peak is the maximum of many curves and is convex as long as the step runs the same operators. Then the line
    through two peaks lies above the true peak between them and below it outside: extrapolated, it is a lower bound, so
    a size that does not fit by the line does not fit. If the last three peaks are concave (work in chunks, another
    kernel), the law says nothing beyond them.

    Attributes:
        sizes: Ascending.
        peaks: Peak bytes at each size.
        places: Place of the peak at each size; empty if unknown.
    """

    tier: ClassVar[Tier] = "deterministic"
    order: ClassVar[None] = None

    sizes: tuple[int, ...]
    peaks: tuple[int, ...]
    places: tuple[str, ...]
    reason: str = ""

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Known sizes at which the peak is in a different place than at the previous one."""
        return tuple(self.sizes[k] for k in range(1, len(self.sizes)) if self.places[k] != self.places[k - 1])

    @property
    def held_out_error(self) -> float | None:
        """Relative error of the last peak when predicted by the line through the two peaks before it."""
        if len(self.sizes) < 3:
            return None
        predicted = self._line(len(self.sizes) - 3, self.sizes[-1])
        return abs(predicted / self.peaks[-1] - 1)

    def predict(self, n: int) -> int:
        """Return the peak in bytes: an upper bound between known sizes, a lower bound beyond the largest."""
        n = self._checked(n, f"law.predict({n!r})")
        if n == self.sizes[-1]:
            return self.peaks[-1]
        return self._line(min(bisect_right(self.sizes, n), len(self.sizes) - 1) - 1, n)

    def interval(self, n: int) -> tuple[int, int | None]:
        """Return lower and upper bound where the peaks are convex; beyond the largest size there is no upper bound.

        Where they are concave, the lines on both sides lie above the one between; the interval then covers all of them.
        """
        n = self._checked(n, f"law.interval({n!r})")
        between = self.predict(n)
        if n in self.sizes:
            return between, between
        if n > self.sizes[-1]:
            return between, None
        above = bisect_left(self.sizes, n)
        beside = [self._line(k, n) for k in (above - 2, above) if 0 <= k < len(self.sizes) - 1]
        lower = max(beside, default=0)
        return (lower, between) if lower <= between else (min(between, *beside), lower)

    def max_n(self, budget: CapacityLike) -> int | None:
        """Return the largest size that fits by the lines: the next one does not. Below the smallest size it is 0."""
        call, most = f"law.max_n({budget!r})", capacity_bytes(budget, is_large=False)
        if most < self.peaks[0]:
            return 0
        inside = [k for k in range(1, len(self.sizes)) if self.peaks[k] > most >= self.peaks[k - 1]]
        if inside:
            start = inside[-1] - 1
        elif len(self.sizes) > 1 and self._bends_upwards() and self.peaks[-1] > self.peaks[-2]:
            start = len(self.sizes) - 2
        else:
            raise too_far(call, "a budget that no known size uses up", self.sizes[-1])
        (low, high), (at_low, at_high) = self.sizes[start : start + 2], self.peaks[start : start + 2]
        n = low + (most - at_low) * (high - low) // (at_high - at_low)
        if n > FARTHEST * self.sizes[-1]:
            raise too_far(call, f"a budget for a size of about {n}", self.sizes[-1])
        return n

    def peak_where(self, n: int) -> str:
        """Return the place of the peak at the largest known size up to ``n``."""
        n = self._checked(n, f"law.peak_where({n!r})")
        return self.places[bisect_right(self.sizes, n) - 1]

    def _checked(self, n: int, call: str) -> int:
        n = checked_size(n, call)
        if n < self.sizes[0]:
            raise InputError(
                call,
                got=f"{n}",
                expected=f"a size of at least {self.sizes[0]}",
                fix="measure a smaller size too.",
            )
        if n > FARTHEST * self.sizes[-1]:
            raise too_far(call, f"{n}", self.sizes[-1])
        if n > self.sizes[-1] and not self._bends_upwards():
            raise InputError(
                call,
                got=f"{n}, beyond the largest known size {self.sizes[-1]}",
                expected="at least two known sizes, and no slower growth toward the last ones",
                fix="add larger sizes to sizes=[...]; a step whose memory grows ever more slowly works in chunks or "
                "changes its kernel.",
            )
        return n

    def _bends_upwards(self) -> bool:
        """Whether the last slope is at least the one before; compared as integers."""
        rises = [(n - m, q - p) for (m, n), (p, q) in zip(pairwise(self.sizes), pairwise(self.peaks), strict=True)][-2:]
        return bool(rises) and rises[0][1] * rises[-1][0] <= rises[-1][1] * rises[0][0]

    def _line(self, k: int, n: int) -> int:
        """Return the value at ``n`` of the line through peaks ``k`` and ``k + 1``."""
        (x, y), (p, q) = self.sizes[k : k + 2], self.peaks[k : k + 2]
        return p + (q - p) * (n - x) // (y - x)


def fit_points(sizes: Sequence[int], peaks: Sequence[int]) -> DeterministicLaw:
    """Make a law of measured peaks when there is no step to trace: the lines through them.

    Args:
        sizes: Distinct sizes of 1 or more, in any order; lists or NumPy arrays.
        peaks: Peak bytes at each, 1 or more: an allocator's counts, which are the same in every run.

    Raises:
        InputError: No sizes, repeated sizes, a size or a peak below 1, or a different number of peaks than sizes.
        InputTypeError: A size or a peak is not an integer.

    Example:
        >>> import memkit as mk
        >>> law = mk.predict.fit_points([1000, 2000, 4000], [5_000_000, 8_000_000, 14_000_000])
        >>> law.tier, law.predict(8000), law.max_n("20MB")
        ('deterministic', 26000000, 6000)
    """
    call = "fit_points(sizes, peaks)"
    try:
        sizes, peaks = ([index(each) for each in numbers] for numbers in (sizes, peaks))  # NumPy's would overflow
    except TypeError as error:
        raise InputTypeError(
            call, got=str(error), expected="whole numbers", fix="convert them with int(...)."
        ) from error
    if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1 or len(peaks) != len(sizes) or min(peaks) < 1:
        raise InputError(
            call,
            got=f"sizes {sizes} and peaks {peaks}",
            expected="distinct sizes of at least 1, and a peak of at least 1 byte for each",
            fix="pass one (size, peak) pair per measured size.",
        )
    ordered = sorted(zip(sizes, peaks, strict=True))
    ascending, heights = tuple(size for size, _ in ordered), tuple(peak for _, peak in ordered)
    return DeterministicLaw(ascending, heights, ("",) * len(ascending))
