"""Results of a check: findings, the rules that produce them, and source locations."""

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
    r"""One problem found at one place in a file.

    Attributes:
        rule: The rule's id, as in ``# memkit: ignore[rule]``.
        level: ``"error"``: training is wrong or does not start; ``"warning"``: it wastes memory or time, or is unsafe.
        path: The file, as given.
        line: Line, from 1; in a notebook, the line in the cell.
        column: Column, from 1.
        message: What was found and why it matters.
        fix: What to write instead.
        figure: A measured cost, with its source; None if nothing was measured.
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
        """Return the fields as plain types, for JSON."""
        return dataclasses.asdict(self)


class SourceSpan(NamedTuple):
    """Source location of a finding: line and column, from 1, and the last line of the code."""

    line: int
    column: int
    last_line: int

    @classmethod
    def of(cls, node: ast.expr | ast.stmt) -> SourceSpan:
        """Return the location of a syntax tree node."""
        return cls(node.lineno, node.col_offset + 1, node.end_lineno or node.lineno)


@dataclass(frozen=True, slots=True)
class Rule(Generic[Code]):
    """One rule: its texts, a positive and a negative example, and the function that finds matches.

    Attributes:
        id: Its name in the output and in ``# memkit: ignore[id]``.
        level: See `Finding`.
        what: The problem, in a few words.
        why: Why it matters, in a sentence.
        fix: What to write instead.
        example: Code with the problem; used by the tests and the documentation.
        near_miss: Similar code that is correct.
        find: Yields every place in the code with the problem.
        figure: A measured cost, with its source.
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
        """Make the finding at a place in a file."""
        message = f"{self.what}: {self.why}"
        return Finding(self.id, self.level, path, place.line, place.column, message, self.fix, self.figure, cell)
