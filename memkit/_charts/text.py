"""Charts as text, for plain text, Markdown and a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from memkit._charts.axes import ChartAxis, shown_levels, x_axis, y_axis
from memkit._charts.charts import Bars, Curve, Lines
from memkit._core.units import format_bytes

_BAR_WIDTH, _LINE_WIDTH, _BLOCKS = 28, 60, 72
_FIELD_HEIGHT = 13
_HEIGHTS = "▁▂▃▄▅▆▇█"
_SIGNS = "*o+#@"  # by color; crosses are an x
_LONGEST_NAME = 24
WIDTH = 80  # columns of a terminal
_NARROWEST = 8
_GAP = re.compile(r"(?<=\S) {2,}")  # between two columns
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60"  # Chinese characters and their punctuation
_LAST_INDENT = 0.6  # of the width: a column further right would leave too little for its text
_SIZE = r"[+-]?\d[\d.,]* [KMGT]?i?B\b"  # a size is never broken
_WORD = re.compile(rf"\s*(?:[{_WIDE}]|{_SIZE}[^\s{_WIDE}]*|[^\s{_WIDE}]+)")


def chart_lines(chart: Bars | Lines) -> list[str]:
    """Draw a chart: bars as one line each, curves as two, points as a field."""
    if isinstance(chart, Bars):
        return _bars(chart)
    return _rows(chart) if any(line.is_line for line in chart.lines) else _field(chart)


def _bars(bars: Bars) -> list[str]:
    """Draw bars; lengths are rounded, but a nonzero bar always shows."""
    names = [_shorten(name) for name, _ in bars.rows]
    width = max((display_width(name) for name in names), default=0)
    lines = []
    for name, (_, size) in zip(names, bars.rows, strict=True):
        filled = min(_BAR_WIDTH, max(int(size > 0), round(_BAR_WIDTH * size / bars.full_bytes)))
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        share = f"{size / bars.whole_bytes:>7.1%}" if bars.whole_bytes else ""
        lines.append(f"{pad(name, width)}  {bar} {format_bytes(size):>12}{share}")
    return lines


def _rows(chart: Lines) -> list[str]:
    """Draw each curve as a line of block heights below its name; each cell shows the largest value that falls on it."""
    across, up = x_axis(chart), y_axis(chart)
    num = Counter(line.name for line in chart.lines)
    names = [line.name if num[line.name] == 1 else f"{line.name}, {line.style}" for line in chart.lines]
    xs = [x for line in chart.lines for x in line.x]
    lines: list[str] = []
    for name, line in zip(names, chart.lines, strict=True):
        lines += [f"{name}: {chart.text(min(line.y))} .. {chart.text(max(line.y))}", _blocks(line, across, up)]
    return [
        *lines,
        f"{min(xs):g} .. {max(xs):g}: {chart.x_name}",
        *(f"- {name}" for name, _ in shown_levels(chart, up)),
    ]


def _blocks(line: Curve, across: ChartAxis, up: ChartAxis) -> str:
    places: dict[int, float] = {}
    for x, y in zip(line.x, line.y, strict=True):
        place = min(_BLOCKS - 1, int(_BLOCKS * across.place(x)))
        places[place] = max(up.place(y), places.get(place, 0.0))
    last = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round(last * places[n])] if n in places else " " for n in range(_BLOCKS)).rstrip()


def _field(chart: Lines) -> list[str]:
    """Draw points on a pair of axes, those of the first curve on top, with the levels as lines."""
    across, up = x_axis(chart), y_axis(chart)

    def row(y: float) -> int:
        return round((_FIELD_HEIGHT - 1) * (1 - up.place(y)))

    levels = shown_levels(chart, up)
    field = [[" "] * _LINE_WIDTH for _ in range(_FIELD_HEIGHT)]
    for _, height in levels:
        field[row(height)] = ["-"] * _LINE_WIDTH
    keys: list[str] = []
    for line in reversed(chart.lines):
        sign = "x" if line.style == "crosses" else _SIGNS[chart.colors[line.name] % len(_SIGNS)]
        keys.insert(0, f"{sign} {line.name}")
        for x, y in zip(line.x, line.y, strict=True):
            field[row(y)][round((_LINE_WIDTH - 1) * across.place(x))] = sign
    ticks = {row(tick): f"{text} {chart.unit}".rstrip() for tick, text in up.ticks}
    width = max(map(display_width, ticks.values()))
    lines = [f"{pad(ticks.get(n, ''), width, right=True)} |{''.join(cells)}".rstrip() for n, cells in enumerate(field)]
    start, end = (f"{value:.3g}" for value in (across.low, across.high))
    axis = f"{start} {chart.x_name:^{_LINE_WIDTH - len(start) - len(end) - 2}} {end}"
    keys += [f"- {name}" for name, _ in levels]
    return [*lines, f"{' ' * (width + 2)}{axis}", f"{' ' * (width + 2)}{'   '.join(keys)}"]


def display_width(text: str) -> int:
    """Count the terminal columns of a text: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Pad with spaces."""
    spaces = " " * (width - display_width(text))
    return spaces + text if right else text + spaces


def fold(line: str, width: int, *, indent: int | None = None) -> list[str]:
    r"""Break a line at spaces so that its parts take at most ``width`` columns; a longer word stays whole.

    The parts after the first are indented to the last column if the line belongs to a table, otherwise by two columns
    more than the line itself; or by ``indent``.

    Args:
        line: One line. Text without spaces, such as Chinese, breaks between any two wide characters.
        width: The columns.
        indent: Spaces before the parts after the first.

    Example:
        >>> from memkit._charts.text import fold
        >>> print("\n".join(fold("source  one report, another one and a third", 30)))
        source  one report, another
                one and a third
    """
    if display_width(line) <= width:
        return [line]
    is_given = indent is not None
    indent = display_width(line) - display_width(line.lstrip()) + 2 if indent is None else indent
    for gap in () if is_given else _GAP.finditer(line):
        column = display_width(line[: gap.end()])
        if column <= _LAST_INDENT * width:
            indent = column
    parts, part = [], ""
    for word in _WORD.findall(line):
        if part.strip() and display_width(part + word) > width:
            parts.append(part)
            part = " " * indent + word.lstrip()
        else:
            part += word
    return [*parts, part]


def wrap(text: str, mark: str = "", width: int = WIDTH) -> list[str]:
    """Break a text into lines of at most ``width`` columns, indented below the mark."""
    return fold(mark + text, width, indent=display_width(mark))


def in_columns(rows: Sequence[Sequence[str]], is_right: Sequence[bool], width: int = WIDTH) -> list[str]:
    """Align rows within a width: texts that are too wide break within their column, figures stay whole."""
    widths = [max(display_width(row[column]) for row in rows) for column in range(len(is_right))]
    texts = [column for column, right in enumerate(is_right) if not right]
    while texts and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(texts, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    lines: list[list[str]] = []
    for row in rows:
        cells = [_broken(cell, size) for cell, size in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        lines += ([cell[n] if n < len(cell) else "" for cell in cells] for n in range(height))
    return align(lines, is_right)


def _broken(text: str, width: int) -> list[str]:
    """Break a cell into lines, and words that are too long themselves."""
    lines = []
    for line in wrap(text, width=width):
        while display_width(line) > width:
            cut = max(1, min(len(line), width * len(line) // display_width(line)))
            lines.append(line[:cut])
            line = line[cut:]  # noqa: PLW2901 - the rest of it
        lines.append(line)
    return lines


def align(rows: Sequence[Sequence[str]], is_right: Sequence[bool] | None = None) -> list[str]:
    """Align rows in columns, those of figures to the right: all but the first unless ``is_right`` says which."""
    is_right = is_right or [column > 0 for column in range(len(rows[0]))]
    widths = [max(display_width(row[column]) for row in rows) for column in range(len(is_right))]
    return [
        "  ".join(
            pad(text, width, right=right) for text, width, right in zip(row, widths, is_right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
