"""Axes of a chart, for all renderers: their ranges, their ticks, and the position of a value on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memkit._charts.charts import Lines

_MOST_TICKS = 8
_STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """One axis.

    Attributes:
        low: Value at its start.
        high: Value at its end.
        ticks: Value and text, in rising order.
        is_log: Whether it is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 at the start to 1 at the end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low or 1)


def x_axis(chart: Lines) -> ChartAxis:
    """Return the horizontal axis: it ends a little beyond the outermost points if logarithmic, else at them."""
    every = [x for line in chart.lines for x in line.x]
    if chart.scale == "linear":
        low, high = min(every), max(every)
        return ChartAxis(low, high, _texts(_even(low, high, is_whole=all(x == int(x) for x in every))))
    low, high = min(every) / 1.15, max(every) * 1.15
    points = sorted({x for line in chart.lines if not line.is_line for x in line.x})
    ticks = points if 1 < len(points) <= _MOST_TICKS else log_ticks(low, high)
    return ChartAxis(low, high, tuple((tick, short_number(tick)) for tick in ticks), is_log=True)


def y_axis(chart: Lines) -> ChartAxis:
    """Return the vertical axis, up to the next level above the values; a linear one shows zero and ends on ticks."""
    every = [y / chart.factor for line in chart.lines for y in line.y]
    top = min((y / chart.factor for _, y in chart.levels if y / chart.factor >= max(every)), default=max(every))
    if chart.scale == "log":
        low, high = min(every) / 1.3, top * 1.6
        ticks = tuple((tick * chart.factor, short_number(tick)) for tick in log_ticks(low, high))
        return ChartAxis(low * chart.factor, high * chart.factor, ticks, is_log=True)
    ticks = tuple((tick * chart.factor, text) for tick, text in _texts(linear_ticks(min(every), top)))
    return ChartAxis(ticks[0][0], ticks[-1][0], ticks)


def shown_levels(chart: Lines, axis: ChartAxis) -> list[tuple[str, float]]:
    """Return the levels within the vertical axis."""
    return [(name, height) for name, height in chart.levels if axis.low <= height <= axis.high]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within a range: 1, 2 and 5 times powers of ten; on a long axis only the powers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 5_000 else (1,)
    return [factor * 10.0**decade for decade in decades for factor in factors if low <= factor * 10**decade <= high]


def linear_ticks(low: float, high: float) -> list[float]:
    """Return round numbers in at least four equal steps that enclose a range and include zero."""
    low, high = min(low, 0), max(high, 0)
    step = _step(high - low)
    first = math.floor(low / step * (1 - 1e-9))
    last = max(math.ceil(high / step * (1 - 1e-9)), first + 4)
    return [step * tick for tick in range(first, last + 1)]


def _step(length: float) -> float:
    """Return the smallest round step that covers a length in four steps."""
    length = length or 1
    power: float = 10.0 ** math.floor(math.log10(length / 4))
    return power * next(factor for factor in _STEPS if 4 * power * factor >= length * (1 - 1e-9))


def _even(low: float, high: float, *, is_whole: bool) -> Sequence[float]:
    """Return round numbers within a range, in equal steps; whole ones for counts."""
    if low == high:
        return [low]
    step = math.ceil(_step(high - low)) if is_whole else _step(high - low)
    return [step * tick for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _texts(ticks: Iterable[float]) -> tuple[tuple[float, str], ...]:
    """Add the texts: all digits, without those that rounding adds."""
    return tuple((tick, f"{tick:,.12g}") for tick in ticks)


def short_number(value: float) -> str:
    """Write a tick of a long axis: ``0.05``, ``20k``, ``1M``."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
