"""Plots of a sweep: peaks by mode, training over inference, theory against actual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from memkit._charts.charts import Curve, Lines, Style
from memkit._core.units import format_bytes
from memkit.predict.gpus import GPU
from memkit.predict.scaling.figures import curve_of, peak_curves
from memkit.predict.scaling.points import StepMode
from memkit.recipes.memory_test.curves import ScalingCurve

Analysis: TypeAlias = Literal["full", "core", "script"]
_MODES: dict[StepMode, str] = {"train": "training", "inference": "inference"}
_STYLES: dict[StepMode, Style] = {"train": "line", "inference": "points"}
_LINE_WITH_DOTS: tuple[Style, ...] = ("line", "points")
_Named: TypeAlias = Sequence[tuple[str, ScalingCurve]]


def charts(
    analysis: Analysis, curves: Sequence[ScalingCurve], shown: Sequence[ScalingCurve], cards: Sequence[GPU]
) -> Iterator[Lines]:
    """Yield the charts, except for empty ones.

    Args:
        analysis: The analysis.
        curves: All of its curves.
        shown: The curves with a line of their own.
        cards: Their memory available to torch is drawn as horizontal lines.
    """
    x_name = "size" if analysis == "script" else "number of edges"
    names = [_mlp(curve) if analysis == "core" else curve.name for curve in shown]
    named = list(zip(names, shown, strict=True))
    levels = [(f"{gpu.name}: {format_bytes(gpu.usable_bytes)}", gpu.usable_bytes) for gpu in cards]
    for mode, text in _MODES.items():
        if peaks := list(_peaks(named, mode)):
            yield Lines(peaks, x_name, f"Peak memory, {text}", "peak", levels=levels, scale="log")
    if ratios := list(_ratios(named)):
        yield Lines(ratios, x_name, "Training peak over inference peak", "ratio", "", scale="log-x")
    if analysis == "full" and (theory := list(_theory(named))):
        caption = "Edges: training (line), inference (dots), theory (dashed)"
        yield Lines(theory, x_name, caption, "memory of the edges", scale="log")
    if analysis == "core" and (per_edge := list(_per_edge(named, curves))):
        caption = "One edge: training (line), theory (dashed)"
        yield Lines(per_edge, "feature dimension", caption, "per edge", "KiB", scale="log-x")


def _mlp(curve: ScalingCurve) -> str:
    return curve.name.partition(",")[0]


def _peaks(named: _Named, mode: StepMode) -> Iterator[Curve]:
    for name, curve in named:
        points = [point for point in curve.result.points if point.mode == mode]
        yield from peak_curves(name, points, curve.result.law.get(mode))


def _ratios(named: _Named) -> Iterator[Curve]:
    for name, curve in named:
        for style in _LINE_WITH_DOTS:
            yield from curve_of(name, curve.ratios(), style)


def _theory(named: _Named) -> Iterator[Curve]:
    for name, curve in named:
        if curve.case is None:
            continue
        sizes = sorted({point.size for point in curve.result.points})
        for mode, style in _STYLES.items():
            yield from curve_of(name, {size: curve.growth_bytes(mode, size) for size in sizes}, style)
        yield from curve_of(name, {size: curve.case.edge_bytes(size) for size in sizes}, "dashed")


def _per_edge(named: _Named, curves: Sequence[ScalingCurve]) -> Iterator[Curve]:
    """Yield bytes per edge by feature dimension, at the largest size and the coordinate dimension shown."""
    for name, shown in named:
        actual, theory = dict[int, float | None](), dict[int, float | None]()
        for curve in curves:
            if curve.case is None or shown.case is None or curve.case.coord_dim != shown.case.coord_dim:
                continue
            if curve.case.mlp == shown.case.mlp:
                size = max(point.size for point in curve.result.points)
                growth = curve.growth_bytes("train", size)
                actual[curve.case.feature_dim] = None if growth is None else growth / size
                theory[curve.case.feature_dim] = curve.case.edge_bytes(1)
        for style in _LINE_WITH_DOTS:
            yield from curve_of(name, actual, style)
        yield from curve_of(name, theory, "dashed")
