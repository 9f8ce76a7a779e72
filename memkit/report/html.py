"""Render a report as one self-contained HTML file: charts, a small script, and nothing loaded from elsewhere."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator
from pathlib import Path

from memkit._core.units import GIB
from memkit._version import __version__
from memkit.report.markdown import is_right
from memkit.report.nodes import Bars, Bullets, Cell, Lines, Node, Paragraph, Report, Share, Size, Table
from memkit.report.words import Words, bytes_text, gib_text, share_text

# The page may run its own script and style, and load nothing else.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
_WIDTH, _HEIGHT = 1000, 300  # of a curve's own coordinates; the page scales them
_NUM_COLORS = 4


def to_html(report: Report, mark: str) -> str:
    """Render a report as one HTML file."""
    words = Words(report.language)
    links = (f'<li><a href="#s{n}">{_text(section.title)}</a></li>' for n, section in enumerate(report.sections))
    tiles = (f"<div><dt>{_text(name)}</dt><dd>{_cell(value, words)}</dd></div>" for name, value in report.highlights)
    parts = [
        f'<!doctype html>\n<html lang="{report.language}">\n<!-- {mark} -->\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<link rel="icon" href="data:,">\n<title>{_text(report.title)}</title>',
        f"<style>\n{_resource('page.css')}</style>",
        f'</head>\n<body>\n<header>\n<div class="bar-top"><h1>{_text(report.title)}</h1>',
        f'<button type="button">{_text(words("theme"))}</button></div>',
        f'<p class="verdict">{_text(report.verdict)}</p>\n<dl class="tiles">{"".join(tiles)}</dl>',
        f'<nav aria-label="{_text(words("contents"))}"><ul>{"".join(links)}</ul></nav>\n</header>\n<main>',
    ]
    for number, section in enumerate(report.sections):
        parts.append(f'<section id="s{number}"><h2>{_text(section.title)}</h2>')
        for node in section.nodes:
            parts += _node(node, words)
        parts.append("</section>")
    parts.append(f"</main>\n<footer><p>{_text(words('made_by', version=__version__))}</p></footer>")
    parts.append(f"<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n")
    return "\n".join(parts)


def _resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _text(text: str) -> str:
    return html.escape(text)


def _node(node: Node, words: Words) -> Iterator[str]:
    match node:
        case Paragraph():
            yield f"<p>{_text(node.text)}</p>"
        case Bullets():
            tag = "ol" if node.is_numbered else "ul"
            yield f"<{tag}>{''.join(f'<li>{_text(item)}</li>' for item in node.items)}</{tag}>"
        case Table():
            yield from _table(node, words)
        case Bars():
            yield from _bars(node)
        case Lines():
            yield from _curves(node, words)


def _table(table: Table, words: Words) -> Iterator[str]:
    right = [' class="n"' if each else "" for each in is_right(len(table.columns), table.rows)]
    label = _text(table.caption or table.columns[0])
    two = ' class="two"' if len(table.columns) == 2 else ""
    if table.is_folded:
        yield f"<details><summary>{label}: {_text(words('show_rows', count=len(table.rows)))}</summary>"
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table{two}>'
    if table.caption and not table.is_folded:
        yield f"<caption>{label}</caption>"
    head = "".join(f'<th scope="col"{right[n]}>{_text(name)}</th>' for n, name in enumerate(table.columns))
    yield f"<thead><tr>{head}</tr></thead><tbody>"
    heads = [f' data-head="{_text(name)}"' for name in table.columns]  # a phone shows them in each row
    for row in table.rows:
        cells = (f"<td{right[n]}{heads[n]}>{_cell(cell, words)}</td>" for n, cell in enumerate(row) if n)
        yield f'<tr><th scope="row"{right[0]}>{_cell(row[0], words)}</th>{"".join(cells)}</tr>'
    yield "</tbody></table></div>"
    if table.is_folded:
        yield "</details>"


def _cell(cell: Cell, words: Words) -> str:
    text = _text(words.cell(cell, exact=False))
    if text == _text(words("not_recorded")):
        return f'<span class="none">{text}</span>'
    if isinstance(cell, Size):
        ends = dict.fromkeys(bytes_text(each, cell) for each in (cell.low, cell.high) if each is not None)
        return f"{text}<small>{' … '.join(ends)}</small>"
    return text


def _bars(bars: Bars) -> Iterator[str]:
    whole = bars.whole_bytes or max((size for _, size in bars.rows), default=0) or 1
    yield f'<figure><figcaption>{_text(bars.caption)}</figcaption><div class="bars">'
    for name, size in bars.rows:
        share = f" · {share_text(Share(size / whole))}" if bars.whole_bytes else ""
        width = min(100.0, 100 * max(0, size) / whole)
        value = f"<b>{gib_text(size)}{share}</b>"
        yield f'<div><span>{_text(name)}</span><i style="--w:{width:.2f}%"></i>{value}</div>'
    yield "</div></figure>"


def _curves(chart: Lines, words: Words) -> Iterator[str]:
    start, end = min(min(line.x) for line in chart.lines), max(max(line.x) for line in chart.lines)
    bottom, top, ticks = _scale(min(min(line.y) for line in chart.lines), max(max(line.y) for line in chart.lines))
    height = top - bottom
    across = _WIDTH / (end - start or 1)
    yield f'<figure><figcaption>{_text(chart.caption)}</figcaption><div class="plot">'
    yield f'<div class="ys">{"".join(f"<span>{tick}</span>" for tick in reversed(ticks))}</div>'
    label = _text(f"{chart.caption}. {words('chart_hint')}")
    yield f'<div class="area" tabindex="0" role="img" aria-label="{label}">'
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
    for tick in range(len(ticks)):
        y = _HEIGHT * tick / (len(ticks) - 1)
        yield f'<line x1="0" x2="{_WIDTH}" y1="{y:g}" y2="{y:g}"/>'
    for number, line in enumerate(chart.lines):
        places = (
            f"{across * (x - start):.1f},{_HEIGHT * (top - y) / height:.1f}"
            for x, y in zip(line.x, line.y, strict=True)
        )
        yield f'<polyline class="l{number % _NUM_COLORS}" points="{" ".join(places)}"/>'
    yield "</svg>"
    number, line = max(enumerate(chart.lines), key=lambda each: max(each[1].y))
    y = max(line.y)
    x = line.x[line.y.index(y)]
    place = f"left:{100 * (x - start) / (end - start or 1):.2f}%;top:{100 * (top - y) / height:.2f}%"
    yield f'<span class="top l{number % _NUM_COLORS}" style="{place}"></span>'
    yield f'<span class="dot"></span><output class="tip"></output>{_data(chart, start, end, bottom, top)}</div>'
    marks = (f"<span>{mark}</span>" for mark in _marks(start, end))
    yield f'<div class="xs">{"".join(marks)}</div><div class="x">{_text(chart.x_name)}</div></div>'
    yield f'<ul class="legend">{"".join(_key(number, line.name) for number, line in enumerate(chart.lines))}</ul>'
    yield "</figure>"


def _key(number: int, name: str) -> str:
    line = f'<polyline class="l{number % _NUM_COLORS}" points="0,5 24,5"/>'
    return f'<li><svg viewBox="0 0 24 10" aria-hidden="true">{line}</svg>{_text(name)}</li>'


def _data(chart: Lines, start: float, end: float, bottom: float, top: float) -> str:
    """Embed the points for the script. No text in them can end the element."""
    lines = [
        {"n": line.name, "x": [round(x, 4) for x in line.x], "y": line.y, "t": line.labels} for line in chart.lines
    ]
    data = {"x0": start, "x1": end, "bottom": bottom, "top": top, "unit": chart.x_name, "lines": lines}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def _scale(smallest: int, largest: int) -> tuple[float, float, list[str]]:
    """Choose the range of an axis in bytes, and its tick labels from the bottom up; zero is one of them."""
    low, high = min(smallest, 0) / GIB, max(largest, 0) / GIB
    gib = high - low or 1 / GIB
    step = 10 ** math.floor(math.log10(gib / 4))
    step *= next(factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if 4 * step * factor >= gib * (1 - 1e-9))
    first = math.floor(low / step * (1 - 1e-9))
    last = max(math.ceil(high / step * (1 - 1e-9)), first + 4)
    return first * step * GIB, last * step * GIB, [f"{step * tick:.3g} GiB" for tick in range(first, last + 1)]


def _marks(start: float, end: float) -> list[str]:
    """Choose evenly spaced tick labels for an axis; counts get whole numbers."""
    num = 4
    if start == int(start) and end == int(end) and end - start < 40:
        num = next(each for each in (4, 3, 2, 1) if (end - start) % each == 0)
    places = (start + (end - start) * part / num for part in range(num + 1))
    return [f"{place:,.0f}" if abs(place) >= 100 or place == int(place) else f"{place:.3g}" for place in places]
