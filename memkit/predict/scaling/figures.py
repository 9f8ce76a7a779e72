"""Points and laws as the curves of a chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memkit._charts.charts import Curve, Style
from memkit.predict.scaling.law import Law, predicted
from memkit.predict.scaling.points import ScalingPoint

_NUM_STEPS = 60  # points along the line of a law


def peak_curves(name: str, points: Sequence[ScalingPoint], law: Law | None) -> Iterator[Curve]:
    """Yield the law of one mode as a line, its points as dots, and those that ran out of memory as crosses.

    A cross is at the predicted peak, or, if the law does not predict one, at the request that failed.
    """
    sizes = [point.size for point in points]
    if sizes:
        low, ratio = min(sizes), max(sizes) / min(sizes)
        along = sorted({*sizes, *(round(low * ratio ** (step / _NUM_STEPS)) for step in range(_NUM_STEPS))})
        yield from curve_of(name, {size: predicted(law, size) for size in along})
    yield from curve_of(name, {point.size: point.peak_bytes for point in points}, "points")
    failed = [point for point in points if point.status == "oom"]
    yield from curve_of(name, {p.size: predicted(law, p.size) or p.requested_bytes for p in failed}, "crosses")


def curve_of(name: str, heights: Mapping[int, float | None], style: Style = "line") -> Iterator[Curve]:
    """Yield a curve of the heights that are known and above zero, for a logarithmic axis; none if there are none."""
    there = {x: y for x, y in heights.items() if y}
    if there:
        yield Curve(name, tuple(there), tuple(there.values()), style=style)
