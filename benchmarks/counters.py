"""Which figures of a result file are counters, equal in every run, and how they differ from those of another run.

A figure's name is its place in the file: keys and numbers of list items, joined by "/". A pattern is `fnmatch`'s, where
"*" is any text, "/" too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

Figure = str | float | bool | None


def counters_of(figures: Any, patterns: tuple[str, ...]) -> dict[str, Figure]:
    """The figures whose names fit one of the patterns."""
    return {
        name: figure
        for name, figure in named_figures(figures)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def named_figures(figures: Any, place: str = "") -> Iterator[tuple[str, Figure]]:
    match figures:
        case dict():
            items = list(figures.items())
        case list():
            items = list(enumerate(figures))
        case _:
            yield place, figures
            return
    for key, value in items:
        yield from named_figures(value, f"{place}/{key}" if place else str(key))


def differences(committed: dict[str, Figure], found: dict[str, Figure]) -> list[str]:
    """A line for each counter that differs; fractions may differ in their last digits, as sums of another order do."""
    lines = []
    for name in committed | found:
        before, now = committed.get(name, "absent"), found.get(name, "absent")
        if not _are_equal(before, now):
            lines.append(f"{name}: committed {before}, now {now}")
    return lines


def _are_equal(a: Figure, b: Figure) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b
