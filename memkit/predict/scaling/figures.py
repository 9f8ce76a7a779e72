"""A figure's content as plain data, and its two renderings: SVG drawn here, PNG by matplotlib if installed."""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal, TypeAlias

from memkit._version import __version__

Style: TypeAlias = Literal["line", "dashed", "points", "oom"]
COLORS = ("#0072b2", "#c2500a", "#007a5a", "#a5417f", "#6b5b00", "#3b3b8f")
_INK, _SOFT, _RULE = "#1b2330", "#5a6577", "#dfe4eb"
_MOST_TICKS = 8
_WIDTH, _HEIGHT = 560, 360  # of one panel in an SVG, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 52, 46  # around the area of a panel


@dataclass(frozen=True, slots=True)
class Series:
    """Points or a line.

    Attributes:
        name: Name in the legend; empty text leaves it out.
        x: Positions.
        y: Values, one for each x.
        color: Number of its color.
        style: Dots, a line, a dashed line, or crosses for points that ran out of memory.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    style: Style


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: Title above the panel.
        x_name: Label of the horizontal axis, with the unit; the axis is logarithmic.
        y_name: Label of the vertical axis, with the unit.
        series: Series in drawing order.
        levels: Name and height of horizontal lines, drawn if they are within the axis.
        is_log: Whether the vertical axis is logarithmic; otherwise it starts at zero.
    """

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    levels: Sequence[tuple[str, float]] = ()
    is_log: bool = True

    @property
    def x_range(self) -> tuple[float, float]:
        """Lowest and highest x, a little beyond the outermost points."""
        every = [x for series in self.series for x in series.x]
        return min(every) / 1.15, max(every) * 1.15

    @property
    def x_ticks(self) -> list[float]:
        """Return every x if there are few, round numbers otherwise."""
        every = sorted({x for series in self.series if series.style in ("points", "oom") for x in series.x})
        return every if 1 < len(every) <= _MOST_TICKS else ticks(*self.x_range, is_log=True)

    @property
    def y_range(self) -> tuple[float, float]:
        """Lowest and highest y, including the next level above."""
        every = [y for series in self.series for y in series.y]
        top = min((height for _, height in self.levels if height >= max(every)), default=max(every))
        return (min(every) / 1.3, top * 1.6) if self.is_log else (0.0, top * 1.12)

    @property
    def shown_levels(self) -> list[tuple[str, float]]:
        """The levels within the axis."""
        low, high = self.y_range
        return [(name, height) for name, height in self.levels if low <= height <= high]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels, two in a row, under a title, with notes below."""

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = ()


def ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return round numbers in a range: 1, 2 and 5 times powers of ten (fewer on a long axis), or equal steps."""
    if is_log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if high / low < 5_000 else (1,)
        return [factor * 10.0**decade for decade in decades for factor in factors if low <= factor * 10**decade <= high]
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (5, 2, 1) if factor * step * 3 <= high - low or factor == 1)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short_number(value: float) -> str:
    """Write a tick: ``0.05``, ``20k``, ``1M``."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------------ SVG


def to_svg(figure: Figure) -> str:
    """Draw a figure as one self-contained SVG file."""
    rows = math.ceil(len(figure.panels) / 2)
    width = _WIDTH * max(1, min(2, len(figure.panels)))
    height = 40 + rows * _HEIGHT + 18 * len(figure.notes) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<g font-family="system-ui, sans-serif">',
        f"<title>{html.escape(figure.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _label(16, 26, figure.title, size=16, weight="bold"),
    ]
    for number, panel in enumerate(figure.panels):
        parts.append(f'<g transform="translate({number % 2 * _WIDTH} {40 + number // 2 * _HEIGHT})">')
        parts += _panel(panel)
        parts.append("</g>")
    for number, note in enumerate(figure.notes):
        parts.append(_label(16, 40 + rows * _HEIGHT + 18 * number + 12, note, color=_SOFT))
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _panel(panel: Panel) -> Iterator[str]:
    (left, right), (low, high) = panel.x_range, panel.y_range
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + wide * math.log(x / left) / math.log(right / left)

    def down(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if panel.is_log else (y - low) / (high - low)
        return _TOP + tall * (1 - share)

    yield _label(_LEFT, 22, panel.title, size=13, weight="bold")
    for tick in panel.x_ticks:
        yield f'<line x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{_TOP}" y2="{_TOP + tall}" stroke="{_RULE}"/>'
        yield _label(across(tick), _TOP + tall + 16, short_number(tick), anchor="middle", color=_SOFT)
    for tick in ticks(low, high, is_log=panel.is_log):
        yield f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{down(tick):.1f}" y2="{down(tick):.1f}" stroke="{_RULE}"/>'
        yield _label(_LEFT - 6, down(tick) + 4, short_number(tick), anchor="end", color=_SOFT)
    yield f'<rect x="{_LEFT}" y="{_TOP}" width="{wide}" height="{tall}" fill="none" stroke="{_SOFT}"/>'
    yield _label(_LEFT + wide / 2, _HEIGHT - 10, panel.x_name, anchor="middle")
    middle = _TOP + tall / 2
    yield f'<g transform="rotate(-90 14 {middle})">{_label(14, middle, panel.y_name, anchor="middle")}</g>'
    for name, height in panel.shown_levels:
        yield _line([(_LEFT, down(height)), (_LEFT + wide, down(height))], _SOFT, "2 3")
        yield _label(_LEFT + 6, down(height) - 4, name, color=_SOFT)
    for series in panel.series:
        yield from _drawn([(across(x), down(y)) for x, y in zip(series.x, series.y, strict=True)], series)
    yield from _legend([series for series in panel.series if series.name])


def _drawn(places: list[tuple[float, float]], series: Series) -> Iterator[str]:
    color = _color(series)
    if series.style == "points":
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_radius(series)}" fill="{color}"/>' for x, y in places)
    elif series.style == "oom":
        for x, y in places:
            cross = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
            yield f'<path d="{cross}" stroke="{color}" stroke-width="2.5" fill="none"/>'
    else:
        yield _line(places, color, "6 4" if series.style == "dashed" else "")


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x = float(_LEFT)
    for each in series:
        ends = (0, 16) if each.style in ("line", "dashed") else (8,)
        yield from _drawn([(x + end, _TOP - 12.0) for end in ends], each)
        yield _label(x + 22, _TOP - 8, each.name)
        x += 46 + 6.2 * len(each.name)


def _color(series: Series) -> str:
    return COLORS[series.color % len(COLORS)]


def _radius(series: Series) -> float:
    """Return the radius: larger for earlier series, so that they stay visible under later ones."""
    return max(2.2, 4.0 - 0.9 * series.color)


def _line(places: Sequence[tuple[float, float]], color: str, dashes: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"{dashed}/>'


def _label(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = _INK, size: int = 11, weight: str = "normal"
) -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


# ------------------------------------------------------------------------------------------------------------ PNG


def to_png(figure: Figure) -> bytes | None:
    """Draw a figure as PNG, 2240 x 1560 pixels for 2 x 2 panels. Needs no display and leaves pyplot's state unchanged.

    Returns:
        The file's bytes; None if matplotlib is not installed.
    """
    try:
        drawn = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    rows, columns = max(1, math.ceil(len(figure.panels) / 2)), max(1, min(2, len(figure.panels)))
    drawing = drawn.Figure(figsize=(7 * columns, 4.6 * rows + 0.8), dpi=160, layout="constrained")
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axis, panel in zip(axes, figure.panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    drawing.suptitle(figure.title, fontsize=14, fontweight="bold", x=0.01, ha="left")
    drawing.supxlabel("\n".join(figure.notes), fontsize=9, color=_SOFT, x=0.01, ha="left")
    buffer = BytesIO()
    drawing.savefig(buffer, format="png", metadata={"Software": f"memkit {__version__}"})
    return buffer.getvalue()


def _draw_panel(axis: Any, panel: Panel) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log" if panel.is_log else "linear")
    axis.set_xticks(panel.x_ticks, [short_number(tick) for tick in panel.x_ticks])
    heights = ticks(*panel.y_range, is_log=panel.is_log)
    axis.set_yticks(heights, [short_number(tick) for tick in heights])
    axis.set_xlim(*panel.x_range)
    axis.set_ylim(*panel.y_range)
    axis.minorticks_off()
    axis.set_title(panel.title, fontsize=11, fontweight="bold", loc="left", pad=24)
    axis.set_xlabel(panel.x_name)
    axis.set_ylabel(panel.y_name)
    axis.grid(color=_RULE)
    axis.set_axisbelow(True)
    for name, height in panel.shown_levels:
        axis.axhline(height, color=_SOFT, linestyle=(0, (2, 3)), linewidth=1.2)
        axis.annotate(name, (0.01, height), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", ha="left", color=_SOFT, fontsize=8.5)  # fmt: skip
    forms: dict[str, dict[str, Any]] = {
        "points": {"marker": "o", "linestyle": "none"},
        "oom": {"marker": "x", "linestyle": "none", "markersize": 9, "markeredgewidth": 2.5},
        "line": {"linestyle": "-", "linewidth": 1.6},
        "dashed": {"linestyle": "--", "linewidth": 1.4},
    }
    for series in panel.series:
        form = {"markersize": 2 * _radius(series)} | forms[series.style]
        axis.plot(series.x, series.y, color=_color(series), label=series.name or "_", **form)
    if any(series.name for series in panel.series):
        axis.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=6,
            fontsize=9,
            frameon=False,
            borderaxespad=0.2,
            handlelength=1.6,
        )
