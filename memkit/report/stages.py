"""Peak of each stage, and how memory changes from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from memkit.report.growth import LEAST_RATE, HeldGrowth, Trend, find_trend, growth_of, is_of_inputs
from memkit.report.nodes import Size
from memkit.report.observed import Observed, larger_known

OWN_MARKS = frozenset({"track", "kept", "leaks"})
"""Events that memkit adds by itself: other sections report their content."""

Measure = Literal["incremental", "held", "record"]


@dataclass(frozen=True, slots=True)
class EventStage:
    """All events of one phase, or of one name outside phases.

    Attributes:
        name: Path of the phase, or the event's name.
        num_events: Number of events.
        peak: Peak bytes in tensors during it, exact or as bounds.
        added_bytes: The largest recorded addition; None if not recorded.
        host_ns: Total host time; None if not recorded.
    """

    name: str
    num_events: int
    peak: Size
    added_bytes: int | None
    host_ns: int | None


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step; for several processes the largest figures.

    Attributes:
        number: Number in the log.
        peak: Peak bytes during the step.
        held_bytes: Bytes in tensors at its end.
        change_bytes: Change by `LoggedSteps.measure`; None if not recorded, and for the first step of a difference.
    """

    number: int
    peak: Size
    held_bytes: int | None
    change_bytes: int | None


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """All steps, in order of their numbers.

    Attributes:
        steps: The steps.
        num_missing: Numbers between the first and the last one that are missing from the log.
        measure: How a change is measured: ``"incremental"``, as the program recorded it; ``"held"``, the difference
            between the memory held at the ends of two steps; ``"record"``, the growth of the running peak; None if
            there is no measure.
        trend: Slope of held memory, or of the sum of the bytes that the steps added; None for too few steps, and if a
            running peak shows that these bytes were freed, or may have been.
        growth: The same as a verdict: None unless it grows for certain, and so fast that it matters.
        slow: Certain growth that is slower.
        has_larger_inputs: Whether held memory grows only because the steps take more and more, and free it again.
        rise: The sum of the bytes that the steps added, and the rise of the running peak over them, if that is less;
            else None.
    """

    steps: tuple[LoggedStep, ...]
    num_missing: int
    measure: Measure | None
    trend: Trend | None
    growth: HeldGrowth | None
    slow: HeldGrowth | None
    has_larger_inputs: bool
    rise: tuple[int, int] | None

    @property
    def spread(self) -> float | None:
        """Spread of the steps' peaks: (largest - smallest) / largest; None unless all are known."""
        peaks = [step.peak.low for step in self.steps if step.peak.is_known and step.peak.low is not None]
        if len(peaks) < max(2, len(self.steps)) or max(peaks) <= 0:
            return None
        return (max(peaks) - min(peaks)) / max(peaks)

    @property
    def course(self) -> str | None:
        """How memory grows: ``"growth"``, ``"slow"`` or ``"flat"``; None if unknown.

        ``"growth_added"``, ... if that is the sum of the bytes that steps added.
        """
        if self.trend is None and self.growth is None:
            return None
        course = "growth" if self.growth else "slow" if self.slow else "flat"
        return f"{course}_added" if self.measure == "incremental" else course

    @property
    def growth_bytes(self) -> float | None:
        """Growth over all steps: by the trend, or else by the rise of a running peak that the steps themselves set."""
        growth = self.growth or self.slow
        if growth is not None:
            return growth.rate * (self.steps[-1].number - self.steps[0].number)
        if self.trend is not None:
            return 0.0
        return self.rise[1] if self.rise is not None and self.rise[1] > 0 else None


@dataclass(slots=True)
class _Bounds:
    """The largest of several peaks, each known only within bounds."""

    low: int | None = None
    high: int | None = 0
    num: int = 0
    added: int | None = None
    host_ns: int | None = None

    def add(self, each: Observed) -> None:
        event, low, high = each.event, each.low, each.high
        self.num += 1
        added = event.incremental_bytes
        if added is not None and (self.added is None or added > self.added):
            self.added = added
        if low is not None and (self.low is None or low > self.low):
            self.low = low
        if high is None or (self.high is not None and high > self.high):
            self.high = high
        if event.duration_ns is not None:
            self.host_ns = (self.host_ns or 0) + event.duration_ns

    @property
    def size(self) -> Size:
        return Size(self.low, self.high)


@dataclass(slots=True)
class _OneStep(_Bounds):
    held: int | None = None
    grown: int | None = None


_NOTHING = (None,) * 4
_LEVEL = 0.001  # of the peak: growth by less over all of the steps is none


def find_stages(observed: Iterable[Observed]) -> tuple[EventStage, ...]:
    """Collect the events of each stage; steps are not stages."""
    found: dict[str, _Bounds] = {}
    for each in observed:
        event = each.event
        if (
            each.step is None
            and event.event not in OWN_MARKS
            and (each.low, each.high, event.duration_ns, event.incremental_bytes) != _NOTHING
        ):
            name = event.phase or event.event
            bounds = found.get(name)
            if bounds is None:
                bounds = found[name] = _Bounds()
            bounds.add(each)
    return tuple(
        EventStage(name, bounds.num, bounds.size, bounds.added, bounds.host_ns) for name, bounds in found.items()
    )


def find_steps(observed: Sequence[Observed]) -> LoggedSteps | None:
    """Collect the steps, by number."""
    found: dict[int, _OneStep] = {}
    for each in observed:
        if each.step is not None:
            one = found.get(each.step)
            if one is None:
                one = found[each.step] = _OneStep()
            _add_step(one, each)
    if not found:
        return None
    numbers = sorted(found)
    measure, change = _choose_change(found.values())
    before: int | None = None
    steps = []
    for number in numbers:
        one = found[number]
        steps.append(LoggedStep(number, one.size, one.held, change(one, before)))
        before = one.held
    held = [(step.number, step.held_bytes) for step in steps if step.held_bytes is not None]
    added = [(number, found[number].added) for number in numbers]
    rise = _find_rise(observed, [num_bytes for _, num_bytes in added])
    series = held if len(held) > 1 else _summed(added) if rise is None else []
    growth = _growth_per_step(series)
    peaks = [step.peak.low for step in steps if step.peak.is_known and step.peak.low is not None]
    slow = None
    if growth is not None and growth.rate < LEAST_RATE:
        is_seen = growth.rate * (numbers[-1] - numbers[0]) > _LEVEL * max(peaks, default=0)
        slow = growth if growth.is_certain and is_seen else None
        growth = None
    has_larger_inputs = growth is not None and 2 * len(peaks) > len(steps) and is_of_inputs(growth, peaks)
    return LoggedSteps(
        tuple(steps),
        num_missing=numbers[-1] - numbers[0] + 1 - len(numbers),
        measure=measure,
        trend=find_trend(series),
        growth=None if has_larger_inputs else growth,
        slow=slow,
        has_larger_inputs=has_larger_inputs,
        rise=rise,
    )


def _growth_per_step(series: Sequence[tuple[int, int]]) -> HeldGrowth | None:
    """Return the growth per step, also if only every tenth step is in the log."""
    gap = max(1, (series[-1][0] - series[0][0]) // (len(series) - 1)) if len(series) > 1 else 1
    growth = growth_of([num_bytes for _, num_bytes in series], least_rate=0)
    return None if growth is None else replace(growth, rate=growth.rate / gap, every=growth.every * gap)


def _summed(added: Sequence[tuple[int, int | None]]) -> list[tuple[int, int]]:
    """Return running sums of what steps added; empty if one of them does not report it."""
    sums = itertools.accumulate(num_bytes or 0 for _, num_bytes in added)
    is_whole = all(num_bytes is not None for _, num_bytes in added)
    return [(number, total) for (number, _), total in zip(added, sums, strict=True)] if is_whole else []


def _add_step(one: _OneStep, each: Observed) -> None:
    event, before = each.event, each.before
    one.add(each)
    one.held = larger_known(one.held, event.allocated_bytes)
    if event.peak_total_bytes is not None and before is not None and before.peak_total_bytes is not None:
        one.grown = larger_known(one.grown, event.peak_total_bytes - before.peak_total_bytes)


def _choose_change(
    steps: Iterable[_OneStep],
) -> tuple[Measure | None, Callable[[_OneStep, int | None], int | None]]:
    """Choose the best measure of change in the log."""
    steps = list(steps)
    if any(one.added is not None for one in steps):
        return "incremental", lambda one, _: one.added
    if any(one.held is not None for one in steps):
        return "held", lambda one, before: None if one.held is None or before is None else one.held - before
    if any(one.grown is not None for one in steps):
        return "record", lambda one, _: one.grown
    return None, lambda _, __: None


def _find_rise(observed: Sequence[Observed], increments: Sequence[int | None]) -> tuple[int, int] | None:
    """Compare the bytes that steps added with the rise of the running peak from before the first to after the last."""
    added = sum(value for value in increments if value is not None)
    indices = [index for index, each in enumerate(observed) if each.event.incremental_bytes and each.step is not None]
    if not indices:
        return None
    first, last = observed[indices[0]], indices[-1]
    start = first.before.peak_total_bytes if first.before else None
    records = (each.event.peak_total_bytes for each in observed[last + 1 :] if each.track == first.track)
    end = max((record for record in records if record is not None), default=None)
    return (added, end - start) if start is not None and end is not None and end - start < added else None
