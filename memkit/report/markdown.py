"""Render a report as Markdown, for hosting sites, and as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memkit._charts.charts import Bars, Lines
from memkit._charts.text import chart_lines, in_columns, wrap
from memkit._version import __version__
from memkit.report.nodes import AllocationView, Bullets, Cell, Node, Paragraph, Report, Table
from memkit.report.words import Words

# Names come from a file: none of them may turn into a link, a tag, emphasis, or a new cell.
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)
_AT_START = re.compile(r"^(\d*)([#+=-]|(?<=\d)[.)](?=\s|$))")


def to_markdown(report: Report, mark: str) -> str:
    """Render a report as Markdown."""
    words = Words(report.language)
    lines = [f"<!-- {mark} -->", f"# {escape(report.headline)}", ""]
    lines += [line for hint in report.hints for line in (f"**{escape(hint)}**", "")]
    lines += [escape(report.verdict), ""]
    if report.highlights:
        names, values = zip(*report.highlights, strict=True)
        lines += _markdown_rows(tuple(names), (tuple(values),), words)
    for section in report.sections:
        lines += ["", f"## {escape(section.title)}"]
        for node in section.nodes:
            lines += ["", *_markdown(node, words)]
    return "\n".join([*lines, "", f"*{escape(words('made_by', version=__version__))}*", ""])


def to_text(report: Report, mark: str) -> str:
    """Render a report as plain text, in 80 columns."""
    words = Words(report.language)
    lines = [*wrap(report.headline), *(line for hint in report.hints for line in wrap(hint))]
    lines += ["", *wrap(report.verdict), "", f"{report.title} ({mark})"]
    for section in report.sections:
        lines += ["", section.title, "-" * 60]
        for node in section.nodes:
            lines += ["", *_text(node, words)]
    return "\n".join([*lines, "", words("made_by", version=__version__), ""])


def escape(text: str) -> str:
    """Escape text so that Markdown shows it literally, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\g<0>", text)


def _start(text: str) -> str:
    """Escape text at the start of a line, so that it cannot become a heading or a list."""
    return _AT_START.sub(r"\1\\\2", escape(text))


def _markdown(node: Node, words: Words) -> Iterator[str]:
    match node:
        case Paragraph():
            yield _start(node.text)
        case Bullets():
            yield from (f"{mark} {_start(item)}" for mark, item in _marked(node))
        case Table():
            # GitHub and others fold this; renderers that do not support the tag show its content.
            count = words("show_rows", count=len(node.rows))
            if node.caption:
                yield f"**{escape(node.caption)}**"
                yield ""
            if node.is_folded:
                yield from (f"<details><summary>{escape(count)}</summary>", "")
            yield from _markdown_rows(node.columns, node.rows, words)
            if node.is_folded:
                yield from ("", "</details>")
        case AllocationView():
            yield from _markdown(node.table, words)
        case Bars() | Lines():
            yield f"{escape(node.caption)}:"
            yield ""
            # Indented code, because a name could end a fence but not an indented block.
            yield from (f"    {line}" for line in chart_lines(node))


def _markdown_rows(columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...], words: Words) -> list[str]:
    lines = [columns, *([words.cell(cell) for cell in row] for row in rows)]
    text = [f"| {' | '.join(escape(cell) or ' ' for cell in line)} |" for line in lines]
    rule = "".join("---:|" if right else "---|" for right in is_right(len(columns), rows))
    return [text[0], f"|{rule}", *text[1:]]


def _text(node: Node, words: Words) -> Iterator[str]:
    match node:
        case Paragraph():
            yield from wrap(node.text)
        case Bullets():
            for mark, item in _marked(node):
                yield from wrap(item, f"{mark} ")
        case Table():
            if node.caption:
                yield from wrap(node.caption)
            if node.is_folded:
                yield words("folded", count=len(node.rows))
                return
            rows = [node.columns, *([words.cell(cell) for cell in row] for row in node.rows)]
            yield from in_columns(rows, is_right(len(node.columns), node.rows))
        case AllocationView():
            yield from _text(node.table, words)
        case Bars() | Lines():
            yield from wrap(f"{node.caption}:")
            yield from (f"  {line}" for line in chart_lines(node))


def _marked(node: Bullets) -> Iterator[tuple[str, str]]:
    for number, item in enumerate(node.items, 1):
        yield f"{number}." if node.is_numbered else "-", item


def is_right(num_columns: int, rows: tuple[tuple[Cell, ...], ...]) -> list[bool]:
    """Return which columns are mostly figures, and so are right-aligned."""
    balance = [0] * num_columns
    for row in rows:
        for column, cell in enumerate(row):
            balance[column] += 0 if cell is None else -1 if isinstance(cell, str) else 1
    return [each > 0 for each in balance]
