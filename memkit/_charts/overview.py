"""Overviews of objects: text for `print`, and a small table for a notebook."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from memkit._charts.text import align
from memkit._core.printable import printable

_CELL = "text-align: left; padding: 0.1em 1em 0.1em 0"


@dataclass(frozen=True, slots=True)
class Overview:
    """A headline, rows of a name and a value, and remarks.

    Attributes:
        headline: The verdict where there is one, otherwise the most important figure.
        rows: Name and value.
        notes: Remarks below the rows.

    Example:
        >>> from memkit._charts.overview import Overview
        >>> print(Overview("fits", [("peak", "1.00 GiB")], ["not measured"]).text())
        fits
          peak  1.00 GiB
        not measured
    """

    headline: str
    rows: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return the overview as lines; texts from outside are escaped."""
        rows = [tuple(map(printable, row)) for row in self.rows]
        lines = align(rows, [False, False]) if rows else []
        return "\n".join([printable(self.headline), *(f"  {line}" for line in lines), *map(printable, self.notes)])

    def as_html(self) -> str:
        """Return the overview as an HTML table, with every text escaped."""
        rows = "".join(
            f'<tr><th scope="row" style="{_CELL}">{_escaped(name)}</th><td style="{_CELL}">{_escaped(value)}</td></tr>'
            for name, value in self.rows
        )
        notes = "".join(f"<p>{_escaped(note)}</p>" for note in self.notes)
        return (
            f'<table><caption style="text-align: left"><b>{_escaped(self.headline)}</b></caption>{rows}</table>{notes}'
        )


class Overviewed(ABC):
    """An object that prints as its `Overview`, and is shown as a table in a notebook."""

    __slots__ = ()

    @abstractmethod
    def _overview(self) -> Overview:
        """Return the overview, without changing anything."""

    def __str__(self) -> str:
        return self._overview().text()

    def _repr_html_(self) -> str:
        return self._overview().as_html()


def _escaped(text: str) -> str:
    return html.escape(printable(text))
