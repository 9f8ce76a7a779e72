"""Efficiency figures, and a rating with public weights and curves. Missing figures never count as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkit.report.figures import ReportFigures
from memkit.report.finding import ReportFinding

_LEAST_INPUTS = 3


@dataclass(frozen=True, slots=True)
class RatedFigure:
    """One figure of the rating.

    Attributes:
        name: Name of the figure.
        weight: Its weight in the rating, if recorded.
        points: The curve from the figure to a mark between 0 and 1: linear between these points.
    """

    name: str
    weight: int
    points: tuple[tuple[float, float], ...]

    def mark(self, value: float) -> float:
        """Return the mark for a value."""
        (before, low), *rest = self.points
        if value <= before:
            return low
        for place, mark in rest:
            if value <= place:
                return low + (mark - low) * (value - before) / (place - before)
            before, low = place, mark
        return low


RULES = (
    RatedFigure("headroom", 30, ((0.0, 0.0), (0.10, 1.0), (0.40, 1.0), (0.95, 0.3))),
    RatedFigure("fragmentation", 25, ((0.05, 1.0), (0.30, 0.0))),
    RatedFigure("growth", 20, ((0.0, 1.0), (0.10, 0.0))),
    RatedFigure("spread", 15, ((0.02, 1.0), (0.30, 0.0))),
    RatedFigure("unattributed", 10, ((0.10, 1.0), (0.60, 0.0))),
)
"""Free at the peak; reserved but not in tensors; growth over all steps; spread of the peaks; not in a component."""


CAPS: dict[str, int] = {"fault": 40, "warning": 80}
"""The most points with such a finding: a run that leaks is not good, however little it wastes otherwise."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One rule's figure and its mark from 0 to 1; None if not recorded."""

    rule: RatedFigure
    value: float | None
    mark: float | None


@dataclass(frozen=True, slots=True)
class Rating:
    """The rating.

    Attributes:
        marks: One for each of `RULES`.
        points: From 0 to 100: the weighted mean of the available marks, but at most `CAPS` of the worst finding; None
            with fewer than three.
        uncapped: The same without the cap.
        least_inputs: Three.
    """

    marks: tuple[Mark, ...]
    points: int | None
    uncapped: int | None = None
    least_inputs: int = _LEAST_INPUTS

    @property
    def num_inputs(self) -> int:
        """Number of available marks."""
        return sum(each.mark is not None for each in self.marks)


def rate(figures: ReportFigures, findings: Sequence[ReportFinding] = ()) -> Rating:
    """Rate a run by its figures; faults and warnings among the findings cap the rating."""
    values = _values(figures)
    marks = tuple(
        Mark(rule, values[rule.name], None if (value := values[rule.name]) is None else rule.mark(value))
        for rule in RULES
    )
    known = [(each.rule.weight, each.mark) for each in marks if each.mark is not None]
    if len(known) < _LEAST_INPUTS:
        return Rating(marks, None)
    weighed = sum(weight * mark for weight, mark in known)
    uncapped = round(100 * weighed / sum(weight for weight, _ in known))
    return Rating(marks, min([uncapped, *(CAPS.get(each.severity, 100) for each in findings)]), uncapped)


def _values(figures: ReportFigures) -> dict[str, float | None]:
    peak, steps = figures.peak, figures.steps
    held, reserved, total = figures.held_bytes, figures.layers.reserved_bytes, figures.layers.total_bytes
    peak_bytes = peak.num_bytes if peak else None
    unattributed = figures.unattributed.low
    growth_bytes = steps.growth_bytes if steps else None
    return {
        "headroom": max(0.0, 1 - held / total) if held is not None and total else None,
        "fragmentation": max(0.0, 1 - peak_bytes / reserved) if peak_bytes is not None and reserved else None,
        "growth": growth_bytes / peak_bytes if growth_bytes is not None and peak_bytes else None,
        "spread": steps.spread if steps else None,
        "unattributed": max(0.0, unattributed / peak_bytes) if unattributed is not None and peak_bytes else None,
    }
