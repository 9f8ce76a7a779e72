"""Plan for the remaining parts of a batch, in order, with smaller parts if memory was not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A part of a batch.

    Attributes:
        data: Its tensors.
        size: Its number of rows, or of elements for a packed batch.
    """

    data: Any
    size: int


class Plan(NamedTuple):
    """The parts of a batch in order, of which the first ones are done.

    The count of those moves on, and no tuple is copied for it: a batch in tight memory may have ten thousand parts.
    """

    parts: tuple[Part, ...]
    num_done: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all parts."""
        return tuple([part.size for part in self.parts])

    def advance(self) -> Plan:
        """Return the plan after the next part is done."""
        return Plan(self.parts, self.num_done + 1)

    def restart(self) -> Plan:
        """Return the plan with all parts to do."""
        return Plan(self.parts)

    def shrink(self, limit: int, cut: Callable[[Part, int], list[Part]]) -> Plan | None:
        """Return the plan with the remaining parts at most ``limit`` in size; None if a part cannot be made smaller.

        Args:
            limit: The largest size worth trying.
            cut: ``cut(part, n)`` returns about n parts that replace it.
        """
        parts = list(self.parts[: self.num_done])
        for part in self.parts[self.num_done :]:
            if part.size <= limit:
                parts.append(part)
                continue
            pieces = [each for each in cut(part, max(2, -(-part.size // limit))) if each.size > 0] if limit else []
            if max((each.size for each in pieces), default=part.size) >= part.size:
                return None
            parts += pieces
        return Plan(tuple(parts), self.num_done)
