"""Render a report as one self-contained HTML file: charts, a small script, and nothing loaded from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator

from memkit._charts.axes import ChartAxis, shown_levels, x_axis, y_axis
from memkit._charts.charts import Bars, Curve, Lines
from memkit._core.packaged import packaged_text
from memkit._core.units import format_bytes
from memkit._version import __version__
from memkit.report.allocation_html import view_parts
from memkit.report.markdown import is_right
from memkit.report.nodes import AllocationView, Bullets, Cell, Node, Paragraph, Report, Size, Table
from memkit.report.words import Words, exact_bytes

# The page may run its own script and style, and load nothing else.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
_WIDTH, _HEIGHT = 1000, 300  # of a curve's coordinate system; the page scales it
_NUM_COLORS = 4
_MOST_DASHED = 120  # points of a curve; with more of them, dashes are not visible


def to_html(report: Report, mark: str) -> str:
    """Render a report as one HTML file."""
    words = Words(report.language)
    has_view = any(isinstance(node, AllocationView) for section in report.sections for node in section.nodes)
    assets = ("page", "allocations") if has_view else ("page",)
    links = (f'<li><a href="#s{n}">{_text(section.title)}</a></li>' for n, section in enumerate(report.sections))
    tiles = (f"<div><dt>{_text(name)}</dt><dd>{_cell(value, words)}</dd></div>" for name, value in report.highlights)
    hints = "".join(f'<p class="hint">{_text(hint)}</p>' for hint in report.hints)
    parts = [
        f'<!doctype html>\n<html lang="{report.language}">\n<!-- {mark} -->\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<link rel="icon" href="data:,">\n<title>{_text(report.headline)}</title>',
        f"<style>\n{''.join(_resource(f'{name}.css') for name in assets)}</style>",
        "</head>\n<body>\n<header>",
        f'<div class="finding {report.severity}"><h1>{_text(report.headline)}</h1>{hints}</div>',
        f'<p class="verdict">{_text(report.verdict)}</p>\n<dl class="tiles">{"".join(tiles)}</dl>',
        f'<nav aria-label="{_text(words("contents"))}"><ul>{"".join(links)}</ul>',
        f'<div><button type="button" id="exact" aria-pressed="false">{_text(words("exact_bytes"))}</button>',
        f'<button type="button" id="theme">{_text(words("theme"))}</button></div></nav>\n</header>\n<main>',
    ]
    for number, section in enumerate(report.sections):
        parts.append(f'<section id="s{number}"><h2>{_text(section.title)}</h2>')
        for node in section.nodes:
            parts += _node(node, words)
        parts.append("</section>")
    parts.append(f"</main>\n<footer><p>{_text(words('made_by', version=__version__))}</p></footer>")
    parts.append(f"<script>\n{''.join(_resource(f'{name}.js') for name in assets)}</script>\n</body>\n</html>\n")
    return "\n".join(parts)


def _resource(name: str) -> str:
    return packaged_text("memkit.report", name)


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
            yield from _lines(node, words)
        case AllocationView():
            yield from view_parts(node, words, "".join(_table(node.table, words)))


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
    text = _text(words.cell(cell))
    if text == _text(words("not_recorded")):
        return f'<span class="none">{text}</span>'
    return (
        f'<data title="{exact_bytes(cell)}" value="{cell.low or cell.high or 0}">{text}</data>'
        if isinstance(cell, Size)
        else text
    )


def _bars(bars: Bars) -> Iterator[str]:
    yield f'<figure><figcaption>{_text(bars.caption)}</figcaption><div class="bars">'
    for name, size in bars.rows:
        share = f" · {size / bars.whole_bytes:.1%}" if bars.whole_bytes else ""
        width = min(100.0, 100 * max(0, size) / bars.full_bytes)
        value = f'<b><data title="{size:,} B" value="{size}">{format_bytes(size)}</data>{share}</b>'
        yield f'<div><span>{_text(name)}</span><i style="--w:{width:.2f}%"></i>{value}</div>'
    yield "</div></figure>"


def _lines(chart: Lines, words: Words) -> Iterator[str]:
    across, up = x_axis(chart), y_axis(chart)

    def at(x: float | None, y: float | None) -> str:
        left = "" if x is None else f"left:{100 * across.place(x):.2f}%;"
        return left + ("" if y is None else f"top:{100 - 100 * up.place(y):.2f}%")

    yield f'<figure><figcaption>{_text(chart.caption)}</figcaption>{_key(chart)}<div class="plot">'
    ticks = (f'<span style="{at(None, tick)}">{text} {chart.unit}</span>' for tick, text in up.ticks)
    yield f'<div class="y">{_text(chart.y_name)}</div><div class="ys">{"".join(ticks)}</div>'
    label = _text(f"{chart.caption}. {words('chart_hint')}")
    yield f'<div class="area" tabindex="0" role="img" aria-label="{label}">'
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
    yield from (_rule(_HEIGHT - _HEIGHT * up.place(tick)) for tick, _ in up.ticks)
    levels = shown_levels(chart, up)
    yield from (_rule(_HEIGHT - _HEIGHT * up.place(height), "level") for _, height in levels)
    for line in chart.lines:
        if line.is_line:
            points = zip(line.x, line.y, strict=True)
            places = (f"{_WIDTH * across.place(x):.1f},{_HEIGHT - _HEIGHT * up.place(y):.1f}" for x, y in points)
            yield f'<polyline class="{_classes(chart, line)}" points="{" ".join(places)}"/>'
    yield "</svg>"
    yield from (f'<span class="level" style="{at(None, height)}">{_text(name)}</span>' for name, height in levels)
    for line in chart.lines:
        if not line.is_line:
            marks = (at(x, y) for x, y in zip(line.x, line.y, strict=True))
            yield from (f'<span class="{_classes(chart, line)}" style="{mark}"></span>' for mark in marks)
    highest = max((line for line in chart.lines if len(line.x)), key=lambda line: max(line.y))
    top = max(highest.y)
    place = at(highest.x[list(highest.y).index(top)], top)
    yield f'<span class="top {_classes(chart, highest)}" style="{place}"></span>'
    yield f'<span class="dot"></span><output class="tip"></output>{_data(chart, across, up)}</div>'
    for strip in chart.strips:
        spans = (_span(*(100 * min(1, max(0, across.place(x))) for x in span)) for span in strip.spans)
        kind = "strip marked" if strip.is_marked else "strip"
        yield f'<div class="strip-name">{_text(strip.name)}</div><div class="{kind}">{"".join(spans)}</div>'
    marks = (f'<span style="{at(tick, None)}">{text}</span>' for tick, text in across.ticks)
    yield f'<div class="xs">{"".join(marks)}</div><div class="x">{_text(chart.x_name)}</div></div></figure>'


def _span(begin: float, end: float) -> str:
    return f'<i style="left:{begin:.2f}%;width:{max(0.3, end - begin):.2f}%"></i>'


def _rule(y: float, name: str = "rule") -> str:
    return f'<line class="{name}" x1="0" x2="{_WIDTH}" y1="{y:g}" y2="{y:g}"/>'


def _classes(chart: Lines, line: Curve) -> str:
    """Return a curve's classes. Dashes distinguish colors on paper, unless they are invisible or mean something."""
    is_dense = max(len(each.x) for each in chart.lines) > _MOST_DASHED
    is_told = not line.is_line or is_dense or any(each.style == "dashed" for each in chart.lines)
    return f"l{chart.colors[line.name] % _NUM_COLORS}" + f" {line.style}" * is_told


def _key(chart: Lines) -> str:
    """Return the legend, with an entry for each name."""
    entries = []
    for name in chart.colors:
        line = next(line for line in chart.lines if line.name == name)
        places = "0,5 24,5" if line.is_line else "12,5 12,5"
        stroke = f'<polyline class="{_classes(chart, line)}" points="{places}"/>'
        entries.append(f'<li><svg viewBox="0 0 24 10" aria-hidden="true">{stroke}</svg>{_text(name)}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _data(chart: Lines, across: ChartAxis, up: ChartAxis) -> str:
    """Embed the points for the script. No text in them can end the element."""
    lines = [
        {
            "n": line.name,
            "l": chart.colors[line.name] % _NUM_COLORS,
            "x": [round(x, 4) for x in line.x],
            "y": line.y,
            "t": line.labels,
        }
        for line in chart.lines
    ]
    axes = {name: [axis.low, axis.high, axis.is_log] for name, axis in (("across", across), ("up", up))}
    data = {**axes, "xName": chart.x_name, "unit": chart.unit, "factor": chart.factor, "lines": lines}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
