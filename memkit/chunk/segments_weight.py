"""Weights of edges that need no gradient: they multiply messages outside of the function that runs again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from memkit.chunk.assembly import Assembly, ChunkResults, ChunkRows, Upstream
from memkit.chunk.segments_reductions import like_rows


def takes_no_gradient(weight: object, num_edges: int) -> TypeGuard[Tensor]:
    """Return whether this is a weight of one number per edge, and needs no gradient."""
    if not isinstance(weight, Tensor) or weight.shape != (num_edges,):
        return False  # the function's arguments are checked, and refused in the user's words
    return not (weight.requires_grad and torch.is_grad_enabled())


def weighted(assembly: Assembly, weight: Tensor) -> Assembly:
    """Return the assembly that multiplies messages by a constant weight (num_edges,) before it combines them."""
    return _Weighted(assembly, weight)


class _Weighted(Assembly):
    """Multiplies each message by its edge's weight, and then combines them.

    Within the function, the product would be one more operator to run again, and after a last linear layer the reason
    to run that again.
    """

    def __init__(self, assembly: Assembly, weight: Tensor) -> None:
        self._assembly, self._weight = assembly, weight
        self._dtype = weight.dtype  # of the messages, once the first is there
        self.indices = (*assembly.indices, weight)
        self.num_segments, self.built_bytes = assembly.num_segments, assembly.built_bytes

    @property
    def kind(self) -> Hashable:
        return type(self), self._assembly.kind, self._weight.dtype

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        def products() -> Iterator[tuple[ChunkRows, list[Tensor]]]:
            for edges, messages in chunks:
                yield edges, [self._weigh(edges, messages.pop())]

        return self._assembly.collect(ChunkResults(products(), chunks.num_rows, chunks.for_backward))

    def _weigh(self, edges: ChunkRows, message: Tensor) -> Tensor:
        self._dtype = message.dtype
        return message * like_rows(edges.of(self._weight), message)

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        of_weighted = self._assembly.upstream(gradients, saved)

        def of(chunk: ChunkRows) -> list[Tensor | None]:
            (rows,) = of_weighted(chunk)
            if rows is None:
                return [None]
            return [rows.mul_(like_rows(chunk.of(self._weight), rows)).to(self._dtype)]

        return of

    def rows_with_gradient(self, saved: Sequence[Tensor]) -> Tensor | None:
        return self._assembly.rows_with_gradient(saved)

    @property
    def passes_few(self) -> bool:  # type: ignore[override]  # it is known once the call is collected
        return self._assembly.passes_few

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:
        return self._assembly.segment_bytes(outputs, for_backward=for_backward)
