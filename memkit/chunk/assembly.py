"""Assembly of chunk results into a call's result, and of the call's gradients into those of a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows of one chunk.

    Attributes:
        start: First row of the range that they are in.
        length: Their number.
        numbers: Numbers of the rows, int64 (length,), ascending; None for a whole range.
    """

    start: int
    length: int
    numbers: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor: a view of a whole range."""
        if self.numbers is None:
            return tensor.narrow(0, self.start, self.length)
        return tensor.index_select(0, self.numbers)


Upstream = Callable[[ChunkRows], list[Tensor | None]]
"""Gives the gradients of a chunk's tensors."""


@dataclass(frozen=True, slots=True)
class ChunkResults:
    """A stream of chunk results: iterating runs one chunk after another.

    Attributes:
        results: Each chunk's rows, and its tensors without a graph. At least one chunk.
        num_rows: Total rows of all chunks.
        for_backward: Whether a backward pass may follow.
    """

    results: Iterator[tuple[ChunkRows, list[Tensor]]]
    num_rows: int
    for_backward: bool

    def __iter__(self) -> Iterator[tuple[ChunkRows, list[Tensor]]]:
        return self.results


class Assembly(ABC):
    """How chunk results are combined.

    Attributes:
        indices: Tensors that forward and backward both read; they must not change in between.
        num_segments: Rows of the outputs, if several rows are reduced to one.
        built_bytes: Bytes allocated before the first chunk and held during the call.
        passes_few: Whether many rows of the last collected call may get no gradient, even if the outputs' is dense.
    """

    indices: tuple[Tensor, ...] = ()
    num_segments: int = 0
    built_bytes: int = 0
    passes_few: bool = False

    @property
    def kind(self) -> Hashable:
        """Return the key under which the memory of a chunk is remembered."""
        return type(self)

    @abstractmethod
    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        """Consume the chunks' results; return the outputs, and the tensors that `upstream` will need."""

    @abstractmethod
    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        """Return a function of a chunk's rows that gives the gradients of its tensors.

        Args:
            gradients: Gradients of the outputs; None for an output without one.
            saved: The tensors that `collect` asked to save.
        """

    def rows_with_gradient(self, saved: Sequence[Tensor]) -> Tensor | None:  # noqa: ARG002
        """Return a mask (num_rows,) of the rows that get a gradient, if these may be few; None for all."""
        return None

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:  # noqa: ARG002
        """Return bytes held per segment besides the outputs, in the forward and in the backward pass."""
        return 0, 0
