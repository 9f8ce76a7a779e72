"""Whether held memory rises from step to step without end, how fast, and how often. Pure functions."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memkit._core.units import GIB

LEAST_RATE = GIB / 100_000  # per step: less than 1 GiB in 100,000 steps, days of training, is not worth a search
_FEWEST = 3  # values, if their rises are equal
_FEW = 8  # with fewer values there are no statistics: every step must add, and about the same
_MOST_POINTS = 200  # evenly chosen, because the slopes of all pairs are computed
_CERTAIN = 3.0  # standard deviations of Kendall's statistic: noise reaches them once in 700 logs
_LEAST_RISES = 5  # a running peak of noise rises 1.4 times on average in the last three quarters of a log
_END = 8  # the last eighth of a log: a series that does not rise in it has stopped growing
_INPUTS = 1.5  # times the growth of held memory: if the peaks rise faster than this, the inputs grow
_LASTING = 0.3  # of the mean rate, at least, in the last quarter: a cache that fills up has stopped by then


@dataclass(frozen=True, slots=True)
class Trend:
    """Median slope of all pairs of values, and its 95 % interval, by Theil and Sen.

    Attributes:
        slope: In bytes per step.
        low: Lower end of the interval.
        high: Upper end of the interval.
        deviations: Kendall's statistic in its standard deviations, without a trend.
    """

    slope: float
    low: float
    high: float
    deviations: float


@dataclass(frozen=True, slots=True)
class HeldGrowth:
    """Growth of values that still rose at the end.

    Attributes:
        rate: Bytes per step.
        every: Steps from one rise to the next: 1 if each step adds.
        is_certain: Whether there are enough values to exclude noise.
    """

    rate: float
    every: int
    is_certain: bool

    @property
    def rise_bytes(self) -> int:
        """Bytes per rise."""
        return round(self.rate * self.every)


def growth_of(values: Sequence[int], *, least_rate: float = LEAST_RATE) -> HeldGrowth | None:
    """Find out whether values at the ends of steps grow without end.

    The first ones do not count, because the first step creates gradients and the optimizer's state. Values that rise
    and then stay (a cache, a warm-up), that return (a list cleared at each epoch) or that go up and down (batches of
    different lengths) do not count as growth.

    Example:
        >>> from memkit.report.growth import growth_of
        >>> growth_of([500, *range(2**20, 40 * 2**20, 2**20)]).rate == 2**20, growth_of([2**20] * 40)
        (True, None)
    """
    found = _find_jumps(values) or _find_steady(values)
    return found if found is not None and found.rate >= least_rate else None


def is_of_inputs(growth: HeldGrowth, peaks: Sequence[int]) -> bool:
    """Whether the steps' peaks rise faster than the memory they hold: then the steps take more, and free it again.

    A leak raises both equally. Growing resolutions or lengths raise the peaks more. The first peak does not count: the
    first step's backward runs before the optimizer has its state.
    """
    peaks = peaks[1:]
    if len(peaks) < 2:
        return False
    first, last = (statistics.median(part) for part in (peaks[: len(peaks) // 2], peaks[len(peaks) // 2 :]))
    return last - first > _INPUTS * growth.rate * len(peaks) / 2


def _find_jumps(values: Sequence[int]) -> HeldGrowth | None:
    """Find equal rises at equal distances, such as once in an epoch, with no change between them."""
    rises = [later - earlier for earlier, later in pairwise(values)][1:]
    largest = max(rises, default=0)
    jumps = [index for index, rise in enumerate(rises) if 2 * rise >= largest]
    if largest <= 0 or len(jumps) < 2 or any(10 * abs(rise) > largest for rise in rises if 2 * rise < largest):
        return None
    gaps = [later - earlier for earlier, later in pairwise(jumps)]
    every = round(statistics.median(gaps))
    ends = max(jumps[0], len(rises) - 1 - jumps[-1])  # steps before the first and after the last of them
    is_regular = max(gaps) - min(gaps) <= 1 + every // 10 and ends <= every + 1
    evenness = min(rises[index] for index in jumps) / largest
    if every == 1 or not is_regular or evenness < (0.98 if len(jumps) == 2 else 0.75):
        return None
    return HeldGrowth(statistics.mean(rises[index] for index in jumps) / every, every, is_certain=len(jumps) > 2)


def _find_steady(values: Sequence[int]) -> HeldGrowth | None:
    """Find values that rise at most of the steps, even with noise."""
    tail = values[max(1, len(values) // 4) if len(values) > _FEWEST else 0 :]
    rises = [later - earlier for earlier, later in pairwise(tail)]
    if len(tail) < _FEW:
        evenness = min(rises, default=0) / max(rises, default=1) if max(rises, default=0) > 0 else 0.0
        is_even = evenness > (0.3 if len(values) > _FEWEST + 1 else 0.98)
        if len(tail) < _FEWEST or not is_even:
            return None
        return HeldGrowth(statistics.mean(rises), 1, is_certain=evenness > 0.98 and len(rises) > 2)
    quarters = [min(tail[len(tail) * n // 4 : len(tail) * (n + 1) // 4]) for n in range(4)]
    is_lasting = quarters[3] - quarters[2] > _LASTING * (quarters[3] - quarters[0]) / 3
    last = rises[-max(2, len(tail) // _END) :]
    is_over = max(map(abs, last)) * 10 * len(rises) < tail[-1] - tail[0]  # flat at the end: perhaps a full cache
    is_rising = all(earlier < later for earlier, later in pairwise(quarters)) and is_lasting
    if not is_rising or is_over or sum(each > 0 for each in rises) < _LEAST_RISES:
        return None
    trend = find_trend(list(enumerate(tail)))
    if trend is None or trend.deviations < _CERTAIN:
        return None
    return HeldGrowth(trend.slope or (tail[-1] - tail[0]) / len(rises), 1, is_certain=True)


def find_trend(values: Sequence[tuple[int, int]]) -> Trend | None:
    """Estimate the slope of (step, bytes); None for fewer than 8 values."""
    if len(values) < _FEW:
        return None
    points = values[:: math.ceil(len(values) / _MOST_POINTS)]
    count = len(points)
    slopes = []
    for index, (step, num_bytes) in enumerate(points, 1):
        slopes += [(more_bytes - num_bytes) / (later - step) for later, more_bytes in points[index:]]
    slopes.sort()
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    half = 1.96 * deviation
    low = max(0, round((len(slopes) - half) / 2))
    high = min(len(slopes) - 1, round((len(slopes) + half) / 2))
    excess = len(slopes) - bisect.bisect_right(slopes, 0) - bisect.bisect_left(slopes, 0)  # rising minus falling
    return Trend(slopes[len(slopes) // 2], slopes[low], slopes[high], excess / deviation)
