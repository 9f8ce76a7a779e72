"""How the results of the pieces become the result of a call, and gradients of the call those of a piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Upstream = Callable[[int, int], list[Tensor | None]]


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
        num_segments: Rows of the outputs, where several rows make one.
        built_bytes: What was made before the first chunk and is held.
    """

    indices: tuple[Tensor, ...] = ()
    num_segments: int = 0
    built_bytes: int = 0

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

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:  # noqa: ARG002
        """What is held for each segment besides the outputs, in the forward and in the backward."""
        return 0, 0

    @abstractmethod
    def whole(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs from the results of all rows at once, by operators that autograd sees."""
