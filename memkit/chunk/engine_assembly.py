"""How the results of the pieces become the result of a call, and gradients of the call those of a piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Upstream = Callable[[int, int], list[Tensor | None]]


def spans(num_rows: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Start and length of each chunk, the last one short; one empty chunk where there are no rows."""
    for start in range(0, max(num_rows, 1), chunk_size):
        yield start, min(chunk_size, num_rows - start)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Results on their way: iterate to run one chunk after another.

    Attributes:
        results: The number of a chunk's first row, and its tensors without a graph. At least one chunk.
        num_rows: Rows of all chunks.
        for_backward: Whether a backward may follow.
    """

    results: Iterator[tuple[int, list[Tensor]]]
    num_rows: int
    for_backward: bool

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        return self.results


class Assembly(ABC):
    """What becomes of the results.

    Attributes:
        indices: Tensors that forward and backward both read; nobody may change them in between.
    """

    indices: tuple[Tensor, ...] = ()

    @abstractmethod
    def collect(self, pieces: Pieces) -> tuple[list[Tensor], list[Tensor]]:
        """Take the pieces in; return the outputs, and the tensors that `upstream` will need."""

    @abstractmethod
    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        """Return a function of a chunk's start and length that gives the gradients of its tensors.

        Args:
            gradients: Of the outputs; None where there is none.
            saved: What `collect` wanted to be saved.
        """

    @abstractmethod
    def whole(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs from the results of all rows at once, by operators that autograd sees."""
