"""Every text of a report, in two languages, read from `texts.json` beside this file."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, Literal, get_args

from memkit._core.packaged import packaged_text
from memkit._core.settings import Checker
from memkit._core.units import format_bytes
from memkit.report.nodes import Cell, Share, Size, Table, clean

Language = Literal["en", "zh"]


class Words:
    """The texts of one language.

    Args:
        language: ``"en"`` or ``"zh"``.
        call: The user's call, for the error.

    Raises:
        ConfigError: The language is not supported.

    Example:
        >>> from memkit.report.words import Words
        >>> from memkit.report.nodes import Size
        >>> Words("en").size(Size.of(24_824_987_648)), Words("zh")("not_recorded")
        ('23.12 GiB', '未记录')
    """

    def __init__(self, language: str, call: str = "write_report(...)") -> None:
        fix = "pass 'en' for English or 'zh' for Chinese."
        self.language = Checker(call).choice("language", language, get_args(Language), fix=fix)

    def __call__(self, key: str, **values: object) -> str:
        """Return a text with its placeholders filled in."""
        return texts()[key][self.language].format(**values)

    def raw(self, key: str) -> str:
        """Return a text with its placeholders, for the page's script."""
        return texts()[key][self.language]

    def size(self, size: Size) -> str:
        """Format a size with a suitable unit."""
        low, high = size.low, size.high
        if size.is_known or (low is None) != (high is None):
            text = format_bytes((high if low is None else low) or 0, is_change=size.is_change)
            key = "size_known" if size.is_known else "size_at_most" if low is None else "size_at_least"
            return self(key, size=text)
        if low is None or high is None:
            return self("not_recorded")
        return self("size_range", low=format_bytes(low), high=format_bytes(high))

    def cell(self, cell: Cell) -> str:
        """Format one table cell."""
        if isinstance(cell, Size):
            return self.size(cell)
        if isinstance(cell, Share):
            return self("not_recorded") if cell.value is None else share_text(cell)
        if isinstance(cell, int):
            return f"{cell:,}"
        return self("not_recorded") if cell is None else cell

    def table(
        self, columns: Iterable[str], rows: Iterable[tuple[Cell, ...]], caption: str = "", *, is_folded: bool = False
    ) -> Table:
        """Make a table; its columns are keys of texts, its caption is a text."""
        return Table(tuple(self(column) for column in columns), tuple(rows), caption, is_folded)

    def join(self, parts: Iterable[str]) -> str:
        """Join clauses."""
        return self("separator").join(parts)


@functools.cache
def texts() -> dict[str, dict[str, str]]:
    """Return the whole table: key, language, text."""
    table: dict[str, dict[str, str]] = json.loads(packaged_text("memkit.report", "texts.json"))
    return table


def exact_bytes(size: Size) -> str:
    """Format a size in full: its bytes, or its bounds."""
    ends = dict.fromkeys(each for each in (size.low, size.high) if each is not None)
    return " … ".join(f"{each:+,} B" if size.is_change and each else f"{each:,} B" for each in ends)


def share_text(share: Share) -> str:
    """Format a recorded share."""
    value = share.value or 0.0
    return f"{value:+.1%}" if share.is_change and value else f"{value:.1%}"


def describe(values: dict[str, Any]) -> str:
    """Format a few settings on one line."""
    return ", ".join(f"{clean(str(key))} {clean(str(value))}" for key, value in values.items())
