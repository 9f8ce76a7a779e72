"""Text-mode charts, for plain text and Markdown."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from memkit.report.nodes import Bars, Curve, Lines, Share
from memkit.report.words import gib_text, share_text

_BAR_WIDTH, _LINE_WIDTH = 30, 60
_HEIGHTS = "▁▂▃▄▅▆▇█"
_LONGEST_NAME = 36


def bar_lines(bars: Bars) -> list[str]:
    """Draw bars, one line each; lengths are rounded, but a nonzero bar always shows."""
    whole = bars.whole_bytes or max((size for _, size in bars.rows), default=0) or 1
    names = [_shorten(name) for name, _ in bars.rows]
    width = max((display_width(name) for name in names), default=0)
    lines = []
    for name, (_, size) in zip(names, bars.rows, strict=True):
        filled = min(_BAR_WIDTH, max(int(size > 0), round(_BAR_WIDTH * size / whole)))
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        share = f"{share_text(Share(size / whole)):>7}" if bars.whole_bytes else ""
        lines.append(f"{pad(name, width)}  {bar} {gib_text(size):>12}{share}")
    return lines


def curve_lines(chart: Lines) -> list[str]:
    """Draw each curve as one line of block heights; each cell shows the largest value that falls on it."""
    start = min(min(line.x) for line in chart.lines)
    end = max(max(line.x) for line in chart.lines)
    top = max(max(line.y) for line in chart.lines)
    width = max(display_width(line.name) for line in chart.lines)
    lines = [
        f"{pad(line.name, width)}  {_curve(line, start, end, top)}  {gib_text(min(line.y))} .. {gib_text(max(line.y))}"
        for line in chart.lines
    ]
    return [*lines, f"{' ' * width}  {start:g} .. {end:g}: {chart.x_name}"]


def _curve(line: Curve, start: float, end: float, top: int) -> str:
    places: list[int | None] = [None] * _LINE_WIDTH
    for x, y in zip(line.x, line.y, strict=True):
        place = min(_LINE_WIDTH - 1, int(_LINE_WIDTH * (x - start) / (end - start or 1)))
        places[place] = max(y, places[place] or 0)
    last = len(_HEIGHTS) - 1
    return "".join(" " if y is None else _HEIGHTS[round(last * max(0, y) / (top or 1))] for y in places)


def display_width(text: str) -> int:
    """Count the terminal columns of a text: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Pad with spaces."""
    spaces = " " * (width - display_width(text))
    return spaces + text if right else text + spaces


def align(rows: Sequence[Sequence[str]], is_right: Sequence[bool]) -> list[str]:
    """Align rows in columns."""
    widths = [max(display_width(row[column]) for row in rows) for column in range(len(is_right))]
    return [
        "  ".join(
            pad(text, width, right=right) for text, width, right in zip(row, widths, is_right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
