"""Assembly of chunk results into a call's result, and of the call's gradients into those of a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Upstream = Callable[[int, int], list[Tensor | None]]


@dataclass(frozen=True, slots=True)
class ChunkResults:
    """A stream of chunk results: iterating runs one chunk after another.

    Attributes:
        results: Index of each chunk's first row, and its tensors without a graph. At least one chunk.
        num_rows: Total rows of all chunks.
        for_backward: Whether a backward pass may follow.
    """

    results: Iterator[tuple[int, list[Tensor]]]
    num_rows: int
    for_backward: bool

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        return self.results


class Assembly(ABC):
    """How chunk results are combined.

    Attributes:
        indices: Tensors that forward and backward both read; they must not change in between.
        num_segments: Rows of the outputs, if several rows are reduced to one.
        built_bytes: Bytes allocated before the first chunk and held during the call.
    """

    indices: tuple[Tensor, ...] = ()
    num_segments: int = 0
    built_bytes: int = 0

    @property
    def kind(self) -> Hashable:
        """Return the key under which the memory of a chunk is remembered."""
        return type(self)

    @abstractmethod
    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        """Consume the chunks' results; return the outputs, and the tensors that `upstream` will need."""

    @abstractmethod
    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        """Return a function of a chunk's start and length that gives the gradients of its tensors.

        Args:
            gradients: Gradients of the outputs; None for an output without one.
            saved: The tensors that `collect` asked to save.
        """

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:  # noqa: ARG002
        """Return bytes held per segment besides the outputs, in the forward and in the backward pass."""
        return 0, 0
