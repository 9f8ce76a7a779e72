"""A figure as a picture. It is laid out once, as marks on a sheet; these are written as SVG, or drawn as PNG."""

from __future__ import annotations

import html
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from memkit._charts.axes import shown_levels, x_axis, y_axis
from memkit._charts.charts import Curve, Figure, Lines
from memkit._core.errors import ConfigError
from memkit._machine.files import write_bytes, write_text
from memkit._version import __version__

COLORS = ("#0072b2", "#c2500a", "#007a5a", "#a5417f", "#6b5b00", "#3b3b8f")
_INK, _SOFT, _RULE = "#1b2330", "#5a6577", "#dfe4eb"
_WIDTH, _HEIGHT = 560, 360  # of one chart, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 36, 46  # around the area of a chart; at the top without the legend
_LEGEND_ROW = 16
_SCALE = 2  # pixels of a PNG for one of an SVG


@dataclass(frozen=True, slots=True)
class _Stroke:
    places: Sequence[tuple[float, float]]
    color: str
    width: float = 1.6
    dashes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Dot:
    x: float
    y: float
    radius: float
    color: str


@dataclass(frozen=True, slots=True)
class _Text:
    x: float
    y: float
    text: str
    color: str = _INK
    anchor: Literal["start", "middle", "end"] = "start"
    size: int = 11
    is_bold: bool = False
    is_upright: bool = False


_Mark = _Stroke | _Dot | _Text


def to_svg(figure: Figure) -> str:
    """Draw a figure as one self-contained SVG file."""
    width, height = _size(figure)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<g font-family="system-ui, sans-serif" fill="none">',
        f"<title>{html.escape(figure.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    return "\n".join([*parts, *map(_svg_mark, _marks(figure)), "</g></svg>"]) + "\n"


class Picture(str):
    """SVG text that a notebook shows as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def save_picture(figure: Figure, path: str | os.PathLike[str] | None, call: str) -> Picture:
    """Write a figure as SVG or PNG, by the suffix of the path, and return it as a picture.

    Args:
        figure: The figure.
        path: The file; None: no file is written.
        call: The user's call without its arguments, for messages.

    Raises:
        ConfigError: The path is a PNG and matplotlib is not installed, or the suffix is unknown.
        InputError: ``path`` is a directory, or lies in one that does not exist.
        OSError: The file cannot be written.
    """
    if path is not None:
        suffix = Path(path).suffix.lower()
        png = to_png(figure) if suffix == ".png" else None
        if png is not None:
            write_bytes(path, png)
        elif suffix == ".svg":
            write_text(path, to_svg(figure))
        else:
            raise ConfigError(
                f"{call}({str(path)!r})",
                got=f"the suffix {suffix!r}" + (", but matplotlib is not installed" if suffix == ".png" else ""),
                expected=".svg, or .png if matplotlib is installed",
                fix=f"write {call}({str(Path(path).with_suffix('.svg'))!r}), or run `pip install matplotlib` for .png.",
            )
    return Picture(to_svg(figure))


def _svg_mark(mark: _Mark) -> str:
    match mark:
        case _Stroke():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.places)
            dashes = f' stroke-dasharray="{mark.dashes[0]} {mark.dashes[1]}"' if mark.dashes else ""
            return f'<polyline points="{points}" stroke="{mark.color}" stroke-width="{mark.width}"{dashes}/>'
        case _Dot():
            return f'<circle cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{mark.radius}" fill="{mark.color}"/>'
        case _Text():
            style = f'text-anchor="{mark.anchor}" fill="{mark.color}" font-size="{mark.size}"'
            style += ' font-weight="bold"' * mark.is_bold
            style += f' transform="rotate(-90 {mark.x:.1f} {mark.y:.1f})"' * mark.is_upright
            return f'<text x="{mark.x:.1f}" y="{mark.y:.1f}" {style}>{html.escape(mark.text)}</text>'


def to_png(figure: Figure) -> bytes | None:
    """Draw the same figure as PNG, twice as large. Needs no display and leaves pyplot's state unchanged.

    Returns:
        The file's bytes; None if matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    width, height = _size(figure)
    # An inch has 72 points: with as many pixels to the inch, sizes in points are those of the SVG in pixels.
    drawing = matplotlib.Figure(figsize=(width / 72, height / 72), dpi=72 * _SCALE)
    sheet = drawing.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    for mark in _marks(figure):
        _png_mark(sheet, mark)
    buffer = BytesIO()
    drawing.savefig(buffer, format="png", metadata={"Software": f"memkit {__version__}"})
    return buffer.getvalue()


def _png_mark(sheet: Any, mark: _Mark) -> None:
    match mark:
        case _Stroke():
            style = (0, [each / mark.width for each in mark.dashes]) if mark.dashes else "-"
            sheet.plot(*zip(*mark.places, strict=True), color=mark.color, linewidth=mark.width, linestyle=style)
        case _Dot():
            size = 2 * mark.radius
            sheet.plot([mark.x], [mark.y], "o", color=mark.color, markersize=size, markeredgewidth=0)
        case _Text():
            anchor = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
            sheet.text(mark.x, mark.y, mark.text, color=mark.color, fontsize=mark.size, ha=anchor, va="baseline",
                       weight="bold" if mark.is_bold else "normal", rotation=90 if mark.is_upright else 0,
                       rotation_mode="anchor", parse_math=False)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ layout


def _size(figure: Figure) -> tuple[int, int]:
    rows = math.ceil(len(figure.charts) / 2)
    return _WIDTH * max(1, min(2, len(figure.charts))), 40 + rows * _HEIGHT + 18 * len(figure.notes) + 12


def _marks(figure: Figure) -> Iterator[_Mark]:
    yield _Text(16, 26, figure.title, size=16, is_bold=True)
    for number, chart in enumerate(figure.charts):
        yield from _chart(chart, number % 2 * _WIDTH, 40 + number // 2 * _HEIGHT)
    bottom = 40 + math.ceil(len(figure.charts) / 2) * _HEIGHT
    for number, note in enumerate(figure.notes):
        yield _Text(16, bottom + 18 * number + 12, note, _SOFT)


def _chart(chart: Lines, x0: float, y0: float) -> Iterator[_Mark]:
    across, up = x_axis(chart), y_axis(chart)
    left, right, bottom = x0 + _LEFT, x0 + _WIDTH - _RIGHT, y0 + _HEIGHT - _BOTTOM
    legend, num_rows = _legend(chart, left, y0 + _TOP - 4, right)
    top = y0 + _TOP + _LEGEND_ROW * num_rows

    def x(value: float) -> float:
        return left + (right - left) * across.place(value)

    def y(value: float) -> float:
        return bottom + (top - bottom) * up.place(value)

    yield _Text(left, y0 + 22, chart.caption, size=13, is_bold=True)
    for tick, text in across.ticks:
        yield _Stroke([(x(tick), top), (x(tick), bottom)], _RULE, 1)
        yield _Text(x(tick), bottom + 16, text, _SOFT, "middle")
    for tick, text in up.ticks:
        yield _Stroke([(left, y(tick)), (right, y(tick))], _RULE, 1)
        yield _Text(left - 6, y(tick) + 4, text, _SOFT, "end")
    yield _Stroke([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], _SOFT, 1)
    yield _Text((left + right) / 2, bottom + 36, chart.x_name, anchor="middle")
    name = f"{chart.y_name} ({chart.unit})" if chart.y_name and chart.unit else chart.y_name or chart.unit
    yield _Text(x0 + 20, (top + bottom) / 2, name, anchor="middle", is_upright=True)
    for text, height in shown_levels(chart, up):
        yield _Stroke([(left, y(height)), (right, y(height))], _SOFT, dashes=(2, 3))
        yield _Text(left + 6, y(height) - 4, text, _SOFT)
    for line in chart.lines:
        yield from _curve(line, [(x(a), y(b)) for a, b in zip(line.x, line.y, strict=True)], chart.colors[line.name])
    yield from legend


def _curve(line: Curve, places: Sequence[tuple[float, float]], number: int) -> Iterator[_Mark]:
    color = COLORS[number % len(COLORS)]
    match line.style:
        case "points":  # larger for earlier curves, so that they stay visible under later ones
            yield from (_Dot(x, y, max(2.2, 4.0 - 0.9 * number), color) for x, y in places)
        case "crosses":
            for x, y in places:
                yield _Stroke([(x - 5, y - 5), (x + 5, y + 5)], color, 2.5)
                yield _Stroke([(x - 5, y + 5), (x + 5, y - 5)], color, 2.5)
        case _:
            yield _Stroke(places, color, dashes=(6, 4) if line.style == "dashed" else None)


def _legend(chart: Lines, left: float, y: float, right: float) -> tuple[list[_Mark], int]:
    """Return an entry for each name, with all of its styles but the crosses, and the number of rows that they take."""
    marks: list[_Mark] = []
    x, num_rows = left, 1
    for name, number in chart.colors.items():
        width = 46 + 6.2 * len(name)
        if x + width > right and x > left:
            x, y, num_rows = left, y + _LEGEND_ROW, num_rows + 1
        styles = [line for line in chart.lines if line.name == name]
        for line in [line for line in styles if line.style != "crosses"] or styles:
            marks += _curve(line, [(x, y + 6), (x + 16, y + 6)] if line.is_line else [(x + 8, y + 6)], number)
        marks.append(_Text(x + 22, y + 10, name))
        x += width
    return marks, num_rows
