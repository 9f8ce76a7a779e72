"""Tables of the docs, as Markdown: a line of headings, and a line of templates that is filled from a result file.

A template is text with places in braces: ``"{way} | {peak_bytes:.1f MB} ({share:.0%})"``.

- A place is keys and list numbers joined by "/". It starts in the row's figures, at a name that the table gives, or at
  "result", the whole file; "" is the row's figure itself, and "@NAME" among the keys is the key that NAME stands for.
- "?" after it: where there is no figure, or None, the words after "?" stand there; without words the cell is empty.
- After ":" comes Python's format, with a unit for bytes: ".1f MB" (".1f in MB" leaves it out); or words for true and
  false: "yes|no"; or "num": how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from textwrap import dedent
from typing import Any

UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}


def table(header: list[str], rows: list[list[str]]) -> str:
    if wrong := [row for row in rows if len(row) != len(header)]:
        raise ValueError(f"{len(header)} headings, {header}, and {len(wrong[0])} cells: {wrong[0]}")
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Row:
    """The sources of a table line.

    Attributes:
        result: The whole result file.
        figures: The line's own.
        names: Keys that were passed on the way to them, each with the figures below it.
        made: Figures that are made of others.
    """

    result: Any
    figures: Any
    names: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    made: Mapping[str, Callable[[Row], Any]] = field(default_factory=dict)

    def __getitem__(self, place: str) -> Any:
        first, *keys = (self[key[1:]] if key.startswith("@") else key for key in place.split("/"))
        if first in self.made:
            return at(self.made[first](self), keys)
        if first in self.names:
            key, figures = self.names[first]
            return at(figures, keys) if keys else key
        return at(self.result, keys) if first == "result" else at(self.figures, [first, *keys])

    def get(self, place: str) -> Any:
        try:
            return self[place]
        except KeyError:
            return None

    def show(self, template: str) -> str:
        shown = ""
        for text, field_name, form, _ in Formatter().parse(template):
            shown += text
            if field_name is None:
                continue
            place, may_lack, words = field_name.partition("?")
            value = self.get(place) if may_lack else self[place]
            if value is None and may_lack and not words:
                return ""
            shown += words if value is None and may_lack else show(value, form or "")
        return shown

    def line(self, templates: str) -> list[str]:
        return [self.show(template) for template in templates.split(" | ")]


def at(figures: Any, keys: Iterable[Any]) -> Any:
    for key in keys:
        if key != "":
            figures = figures[int(key) if isinstance(figures, list) else key]
    return figures


def show(value: Any, form: str) -> str:
    if form == "num":
        return str(len(value))
    if "|" in form:
        return form.split("|")[not value]
    if not value and (form.startswith("+") or form.endswith("e")):
        return "0"
    form, _, unit = form.partition(" ")
    if not unit:
        return format(value, form)
    unit, is_left_out = unit.removeprefix("in "), unit.startswith("in ")
    return format(value / UNITS[unit], form) + ("" if is_left_out else f" {unit}")


def rows_at(result: Any, pattern: str) -> list[Row]:
    """A row for each place that fits, as "cases/{case}/ways/{way}" or, of some keys alone, "{size:small|large}"."""
    rows = [Row(result, result["figures"])]
    for step in filter(None, pattern.split("/")):
        if not step.startswith("{"):
            rows = [replace(row, figures=at(row.figures, [step])) for row in rows]
            continue
        name, _, chosen = step[1:-1].partition(":")
        rows = [
            Row(result, row.figures[key], {**row.names, name: (key, row.figures[key])})
            for row in rows
            for key in (chosen.split("|") if chosen else keys_of(row.figures))
        ]
    return rows


def keys_of(figures: Any) -> Iterable[Any]:
    return range(len(figures)) if isinstance(figures, list) else figures


@dataclass(frozen=True)
class Across:
    """A column for each row at a place: the heading is filled from that row, a cell from the table's row beside it."""

    place: str
    heading: str
    cell: str


@dataclass(frozen=True)
class Table:
    """One table of a result file.

    Attributes:
        rows: A place of `rows_at`, or a function that makes each row's figures of the whole file; "" for one row.
        header: The headings, joined by " | ": templates too, filled from the file's figures.
        cells: The templates of a row's cells, joined by " | ", or several such lines.
        made: Figures that a function makes of a row, each by the name that templates have for it.
        across: More columns, at the right.
        is_grouped: Whether the first cell is left empty where it is that of the row above.
        last: A line below, filled from the file's figures.
        empty: What stands in place of a table without rows.
    """

    rows: str | Callable[[Any], Iterable[Any]]
    header: str
    cells: str
    made: Mapping[str, Callable[[Row], Any]] = field(default_factory=dict)
    across: Across | None = None
    is_grouped: bool = False
    last: str = ""
    empty: str = ""

    def render(self, result: Any) -> str:
        if isinstance(self.rows, str):
            rows = rows_at(result, self.rows)
        else:
            rows = [Row(result, figures) for figures in self.rows(result)]
        if self.empty and not rows:
            return self.empty
        whole = Row(result, result.get("figures"), made=self.made)
        header = whole.line(self.header)
        lines = [
            replace(row, made=self.made).line(cells)
            for row in rows
            for cells in dedent(self.cells).strip("\n").split("\n")
        ]
        if self.across:
            others = rows_at(result, self.across.place)
            header += [other.show(self.across.heading) for other in others]
            for row, line in zip(rows, lines, strict=True):
                line += [
                    replace(row, names={**row.names, **other.names}, made=self.made).show(self.across.cell)
                    for other in others
                ]
        if self.is_grouped:
            firsts = [line[0] for line in lines]
            for line, above, first in zip(lines[1:], firsts, firsts[1:], strict=False):
                line[0] = "" if first == above else first
        return table(header, lines + ([whole.line(self.last)] if self.last else []))
