"""Plots of a sweep: peaks by mode, training over inference, theory against actual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from memkit._core.units import GIB, KIB, format_bytes
from memkit.predict.gpus import GPU
from memkit.predict.scaling.figures import Panel, Series, Style
from memkit.predict.scaling.points import StepMode
from memkit.recipes.memory_test.curves import ScalingCurve

Analysis: TypeAlias = Literal["full", "core", "script"]
_NUM_STEPS = 60  # of a law's line
_MODES: dict[StepMode, str] = {"train": "training", "inference": "inference"}
_STYLES: dict[StepMode, Style] = {"train": "line", "inference": "points"}
_LINE_WITH_DOTS: tuple[Style, ...] = ("line", "points")
_Named: TypeAlias = Sequence[tuple[str, ScalingCurve]]


def panels(
    analysis: Analysis, curves: Sequence[ScalingCurve], shown: Sequence[ScalingCurve], cards: Sequence[GPU]
) -> list[Panel]:
    """Lay out the panels, leaving out empty ones.

    Args:
        analysis: The analysis.
        curves: All of its curves.
        shown: The curves with a line of their own.
        cards: Their memory available to torch is drawn as horizontal lines.
    """
    x_name = "size" if analysis == "script" else "number of edges"
    names = [_mlp(curve) if analysis == "core" else curve.name for curve in shown]
    named = list(zip(names, shown, strict=True))
    levels = [(f"{gpu.name}: {format_bytes(gpu.usable_bytes)}", gpu.usable_bytes / GIB) for gpu in cards]
    every = [Panel(f"Peak memory, {_MODES[m]}", x_name, "peak (GiB)", _peaks(named, m), levels) for m in _MODES]
    every.append(Panel("Training peak over inference peak", x_name, "ratio", _ratios(named), is_log=False))
    if analysis == "full":
        title = "What the edges take; line: training, dots: inference, dashed: theory"
        every.append(Panel(title, x_name, "memory of the edges (GiB)", _theory(named)))
    elif analysis == "core":
        title = "What one edge takes in training; dashed: theory"
        every.append(Panel(title, "feature dimension", "KiB per edge", _per_edge(named, curves), is_log=False))
    return [panel for panel in every if panel.series]


def _mlp(curve: ScalingCurve) -> str:
    return curve.name.partition(",")[0]


def _peaks(named: _Named, mode: StepMode) -> list[Series]:
    series = []
    for color, (name, curve) in enumerate(named):
        failed = {
            point.size: curve.predicted_bytes(mode, point.size) or point.requested_bytes
            for point in curve.result.points
            if point.mode == mode and point.status == "oom"
        }
        heights: dict[Style, Mapping[int, float | None]] = {
            "line": _law(curve, mode),
            "points": curve.result.peaks(mode),
            "oom": failed,
        }
        for style, by_size in heights.items():
            series.append(_series(name if style == "points" else "", by_size, GIB, color, style))
    return _filled(series)


def _law(curve: ScalingCurve, mode: StepMode) -> dict[int, int | None]:
    """Points of the law's line, from the smallest to the largest size of the sweep."""
    sizes = {point.size for point in curve.result.points if point.mode == mode}
    if not sizes:
        return {}
    low, ratio = min(sizes), max(sizes) / min(sizes)
    between = {round(low * ratio ** (step / _NUM_STEPS)) for step in range(_NUM_STEPS)}
    return {size: curve.predicted_bytes(mode, size) for size in sorted(sizes | between)}


def _ratios(named: _Named) -> list[Series]:
    return _filled(
        _series(name if style == "points" else "", curve.ratios(), 1, color, style)
        for color, (name, curve) in enumerate(named)
        for style in _LINE_WITH_DOTS
    )


def _theory(named: _Named) -> list[Series]:
    series = []
    for color, (name, curve) in enumerate(named):
        if curve.case is None:
            continue
        sizes = sorted({point.size for point in curve.result.points})
        for mode, style in _STYLES.items():
            actual = {size: curve.growth_bytes(mode, size) for size in sizes}
            series.append(_series("", actual, GIB, color, style))
        series.append(_series(name, {size: curve.case.edge_bytes(size) for size in sizes}, GIB, color, "dashed"))
    return _filled(series)


def _per_edge(named: _Named, curves: Sequence[ScalingCurve]) -> list[Series]:
    """By feature dimension: at the largest size, and the coordinate dimension shown."""
    series = []
    for color, (name, shown) in enumerate(named):
        actual, theory = dict[int, float | None](), dict[int, float | None]()
        for curve in curves:
            if curve.case is None or shown.case is None or curve.case.coord_dim != shown.case.coord_dim:
                continue
            if curve.case.mlp == shown.case.mlp:
                size = max(point.size for point in curve.result.points)
                growth = curve.growth_bytes("train", size)
                actual[curve.case.feature_dim] = None if growth is None else growth / size
                theory[curve.case.feature_dim] = curve.case.edge_bytes(1)
        series += [_series("", actual, KIB, color, style) for style in _LINE_WITH_DOTS]
        series.append(_series(name, theory, KIB, color, "dashed"))
    return _filled(series)


def _series(name: str, heights: Mapping[int, float | None], unit: int, color: int, style: Style) -> Series:
    there = {x: y / unit for x, y in heights.items() if y}  # zero cannot be shown on a logarithmic axis
    return Series(name, tuple(there), tuple(there.values()), color, style)


def _filled(series: Iterable[Series]) -> list[Series]:
    return [each for each in series if each.x]
