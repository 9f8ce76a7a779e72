"""The deterministic law: straight lines through exact peaks, where the step itself cannot be traced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from memkit._core.errors import InputError
from memkit.predict.gpus import CapacityLike, capacity_bytes
from memkit.predict.scaling.law import FARTHEST, Tier, checked_size, too_far


@dataclass(frozen=True)
class DeterministicLaw:
    """Lines between exact peaks, and the last line drawn on.

    A peak is the highest of many curves, and bends upwards as long as the step runs the same operators. Then the line
    through two peaks lies above the truth between them and below it elsewhere: drawn on, it is a lower bound. What does
    not fit by it does not fit. Where the last three peaks bend downwards (work in chunks, another kernel), it says
    nothing beyond them.

    Attributes:
        sizes: Ascending.
        peaks: Peak bytes at each size.
        places: Place of the peak at each size; empty text where it is not known.
    """

    tier: ClassVar[Tier] = "deterministic"
    order: ClassVar[None] = None

    sizes: tuple[int, ...]
    peaks: tuple[int, ...]
    places: tuple[str, ...]
    reason: str = ""

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """The known sizes at which the peak is in another place than at the one before."""
        return tuple(self.sizes[k] for k in range(1, len(self.sizes)) if self.places[k] != self.places[k - 1])

    @property
    def held_out_error(self) -> float | None:
        """How far the line through the two peaks before it passes from the last one."""
        if len(self.sizes) < 3:
            return None
        predicted = self._line(len(self.sizes) - 3, self.sizes[-1])
        return abs(predicted / self.peaks[-1] - 1)

    def predict(self, n: int) -> int:
        """Peak in bytes: an upper bound between known sizes, a lower bound beyond the largest; see the class."""
        n = self._checked(n, f"law.predict({n!r})")
        if n == self.sizes[-1]:
            return self.peaks[-1]
        return self._line(min(bisect_right(self.sizes, n), len(self.sizes) - 1) - 1, n)

    def interval(self, n: int) -> tuple[int, int | None]:
        """Lower and upper bound, as far as the peaks bend upwards; beyond the largest size there is no upper one.

        Where they bend downwards, the lines on both sides lie above the one between: then all of them are within.
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
        """The largest size that fits by the lines: one above it does not fit. Sizes below the smallest count as 0."""
        call, most = f"law.max_n({budget!r})", capacity_bytes(budget)
        if most < self.peaks[0]:
            return 0
        inside = [k for k in range(1, len(self.sizes)) if self.peaks[k] > most >= self.peaks[k - 1]]
        if inside:
            start = inside[-1] - 1
        elif len(self.sizes) > 1 and self._bends_upwards() and self.peaks[-1] > self.peaks[-2]:
            start = len(self.sizes) - 2
        else:
            raise too_far(call, "a budget that no known size fills", self.sizes[-1])
        (low, high), (at_low, at_high) = self.sizes[start : start + 2], self.peaks[start : start + 2]
        n = low + (most - at_low) * (high - low) // (at_high - at_low)
        if n > FARTHEST * self.sizes[-1]:
            raise too_far(call, f"a budget for a size of about {n}", self.sizes[-1])
        return n

    def peak_where(self, n: int) -> str:
        """The place of the peak at the known size next below ``n``."""
        n = self._checked(n, f"law.peak_where({n!r})")
        return self.places[bisect_right(self.sizes, n) - 1]

    def _checked(self, n: int, call: str) -> int:
        n = checked_size(n, call)
        if n < self.sizes[0]:
            raise InputError(
                call,
                got=f"{n}",
                expected=f"a size from {self.sizes[0]} on",
                fix="add a smaller size to the known ones.",
            )
        if n > FARTHEST * self.sizes[-1]:
            raise too_far(call, f"{n}", self.sizes[-1])
        if n > self.sizes[-1] and not self._bends_upwards():
            raise InputError(
                call,
                got=f"{n}, beyond the largest known size {self.sizes[-1]}",
                expected="two known sizes or more, the last three of which bend upwards",
                fix="add larger sizes; what grows slower and slower works in chunks, or changes its kernel.",
            )
        return n

    def _bends_upwards(self) -> bool:
        """Whether the last two slopes do not fall; compared as integers."""
        rises = [(n - m, q - p) for (m, n), (p, q) in zip(pairwise(self.sizes), pairwise(self.peaks), strict=True)][-2:]
        return bool(rises) and rises[0][1] * rises[-1][0] <= rises[-1][1] * rises[0][0]

    def _line(self, k: int, n: int) -> int:
        """The line through the peaks number ``k`` and ``k + 1``, at ``n``."""
        (x, y), (p, q) = self.sizes[k : k + 2], self.peaks[k : k + 2]
        return p + (q - p) * (n - x) // (y - x)
