"""The parts of a report, before rendering as Markdown, HTML, text or JSON: sections made of a few kinds of nodes.

Sizes stay numbers until they are rendered, so that every format shows the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memkit._charts.charts import Bars as Bars, Curve as Curve, Lines as Lines
from memkit._core.printable import printable
from memkit._events.reader import EventLog
from memkit.report.finding import Severity

_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, known exactly, within bounds, or not at all.

    Attributes:
        low: Lower bound; None if unknown.
        high: Upper bound; None if unknown. Equal to ``low`` if the size is known exactly.
        is_change: Whether it is a difference, which is shown with its sign.

    Example:
        >>> from memkit.report.nodes import Size
        >>> Size.of(512).is_known, Size(None, 512).is_known
        (True, False)
    """

    low: int | None
    high: int | None
    is_change: bool = False

    @classmethod
    def of(cls, num_bytes: int | None, *, is_change: bool = False) -> Size:
        """Make a known size, or for None one that is not recorded."""
        return cls(num_bytes, num_bytes, is_change)

    @property
    def is_known(self) -> bool:
        """Whether it is a single number."""
        return self.low is not None and self.low == self.high


@dataclass(frozen=True, slots=True)
class Share:
    """A fraction, shown as a percentage; None if not recorded."""

    value: float | None
    is_change: bool = False


Cell = str | int | Size | Share | None
"""One entry of a table: text (escaped by the renderers), a count, a size or a share; None is "not recorded"."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of plain texts, numbered or bulleted."""

    items: tuple[str, ...]
    is_numbered: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first column names the row.

    Attributes:
        columns: Column headings.
        rows: Rows with one cell per column.
        caption: Caption of the table.
        is_folded: Whether HTML folds it because it is long.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class AllocationView:
    """An interactive view of allocations, in HTML.

    Attributes:
        data: Data for the page's script.
        table: The table that other formats show instead.
        rooms: Name of a moment, and the allocator's segments then: size, and start and end of each block in use.
    """

    data: dict[str, Any]
    table: Table
    rooms: tuple[tuple[str, Sequence[tuple[int, Sequence[tuple[int, int]]]]], ...] = ()


Node = Paragraph | Bullets | Table | Bars | Lines | AllocationView


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the nodes under it.

    Example:
        >>> from memkit.report.nodes import Paragraph, Section
        >>> Section("Batch", (Paragraph("32 images of 224 x 224."),)).title
        'Batch'
    """

    title: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report.

    Attributes:
        title: What kind of report it is.
        headline: The main finding in one sentence: the first line of every format.
        severity: How bad that is.
        hints: Where it comes from, and what to do next.
        verdict: The most important figures in one sentence.
        highlights: Those figures individually: label and value.
        sections: In reading order.
        language: ``"en"`` or ``"zh"``.
        figures: Returns the underlying numbers, as plain JSON values.
    """

    title: str
    headline: str
    severity: Severity
    hints: tuple[str, ...]
    verdict: str
    highlights: tuple[tuple[str, Cell], ...]
    sections: tuple[Section, ...]
    language: str
    figures: Callable[[], dict[str, Any]]


class SectionMaker(Protocol):
    """A custom section: called with the log and the language, it returns the section, or None for no section."""

    def __call__(self, log: EventLog, language: str, /) -> Section | None:
        """Build the section."""


def clean(name: str) -> str:
    """Make a name from a file safe for a page: one line, no control or direction characters, limited length."""
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 1]}…"
    return printable(name)
