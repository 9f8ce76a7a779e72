"""What a check gives back: findings, the rules that made them, and where a rule points."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from memkit._core.printable import printable

Level = Literal["error", "warning"]
Code = TypeVar("Code")


@dataclass(frozen=True, slots=True)
class Finding:
    r"""One habit found at one place of a file.

    Attributes:
        rule: The rule's id, as in ``# memkit: ignore[rule]``.
        level: ``"error"``: training is wrong or does not start; ``"warning"``: it costs memory or time, or is unsafe.
        path: The file, as it was given.
        line: Line, from 1; in a notebook, the line in the cell.
        column: Column, from 1.
        message: What was found and why it matters.
        fix: What to write instead.
        figure: What was measured, with its source; None where nothing was.
        cell: The notebook's code cell, from 1; None in other files.

    Example:
        >>> import memkit as mk
        >>> finding, = mk.check.check_source("import torch\ntorch.autograd.set_detect_anomaly(True)\n")
        >>> finding.rule, finding.line, finding.level
        ('anomaly-left-on', 2, 'warning')
    """

    rule: str
    level: Level
    path: str
    line: int
    column: int
    message: str
    fix: str
    figure: str | None = None
    cell: int | None = None

    def __str__(self) -> str:
        path = printable(self.path)
        place = path if self.cell is None else f"{path}[cell {self.cell}]"
        lines = [f"{place}:{self.line}:{self.column}: {self.level}[{self.rule}] {self.message}"]
        if self.figure is not None:
            lines.append(f"    figure: {self.figure}")
        lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain types, for JSON."""
        return dataclasses.asdict(self)


class SourceSpan(NamedTuple):
    """Where a rule points, from 1, and the last line of the code that it points at."""

    line: int
    column: int
    last_line: int

    @classmethod
    def of(cls, node: ast.expr | ast.stmt) -> SourceSpan:
        """The place of a node of the syntax tree."""
        return cls(node.lineno, node.col_offset + 1, node.end_lineno or node.lineno)


@dataclass(frozen=True, slots=True)
class Rule(Generic[Code]):
    """One habit: its texts, an example of each side, and the function that finds it.

    Attributes:
        id: Its name in the output and in ``# memkit: ignore[id]``.
        level: See `Finding`.
        what: What is found, in a few words.
        why: Why it matters, in a sentence.
        fix: What to write instead.
        example: Code that has the habit; the tests and the documentation use it.
        near_miss: Code that looks like it and is right.
        find: From the code to every place that has the habit.
        figure: What was measured, with its source.
    """

    id: str
    level: Level
    what: str
    why: str
    fix: str
    example: str
    near_miss: str
    find: Callable[[Code], Iterable[SourceSpan]]
    figure: str | None = None

    def finding(self, path: str, place: SourceSpan, cell: int | None = None) -> Finding:
        """The finding at a place of a file."""
        message = f"{self.what}: {self.why}"
        return Finding(self.id, self.level, path, place.line, place.column, message, self.fix, self.figure, cell)
