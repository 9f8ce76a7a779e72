"""What is left to do of a batch: parts in order, and smaller ones where memory did not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of a batch.

    Attributes:
        data: Its tensors.
        size: Its rows, or elements of a packed batch.
    """

    data: Any
    size: int


class Plan(NamedTuple):
    """The parts of a batch in order; those that are through, and those to do."""

    todo: tuple[Part, ...]
    done: tuple[Part, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all parts."""
        return tuple([part.size for part in (*self.done, *self.todo)])

    def advance(self) -> Plan:
        """The plan after the next part is through."""
        return Plan(self.todo[1:], (*self.done, self.todo[0]))

    def restart(self) -> Plan:
        """The plan with all parts to do."""
        return Plan((*self.done, *self.todo))

    def shrink(self, limit: int, cut: Callable[[Part, int], list[Part]]) -> Plan | None:
        """The plan with what is to do in parts of at most ``limit``; None where one cannot be made smaller.

        Args:
            limit: The largest size that is worth a try.
            cut: ``cut(part, n)`` returns about n parts in its place.
        """
        todo: list[Part] = []
        for part in self.todo:
            if part.size <= limit:
                todo.append(part)
                continue
            pieces = [each for each in cut(part, max(2, -(-part.size // limit))) if each.size > 0] if limit else []
            if max((each.size for each in pieces), default=part.size) >= part.size:
                return None
            todo += pieces
        return Plan(tuple(todo), self.done)
