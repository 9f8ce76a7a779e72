"""Chunked segment reductions: sum, mean, max, min and softmax, with closed-form gradients.

A segment may span many chunks, in any order: sums and extrema are carried from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from memkit._gradients.streamed import accumulator_dtype, spans
from memkit.chunk.assembly import Assembly, ChunkResults, ChunkRows, Upstream
from memkit.chunk.segments_index import Segments

Reduce = Literal["sum", "mean", "max", "min", "softmax", "add", "amax", "amin"]
_HOPELESS = 2  # winners per edge: distributed at random, they leave out one edge in eight
SYNONYMS: Mapping[Reduce, Reduce] = {"add": "sum", "amax": "max", "amin": "min"}  # words of PyG and torch


def reduction(reduce: Reduce, segments: Segments) -> Assembly:
    """Return the assembly that reduces messages over segments."""
    match reduce:
        case "softmax":
            return _Softmax(segments)
        case "max" | "min":
            return _Extreme(segments, reduce)
        case _:
            return _Sum(segments, is_mean=reduce == "mean")


class _OverSegments(Assembly):
    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.indices = (segments.tensor,)
        self.num_segments = segments.num_segments

    def _new(self, message: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
        """Allocate one row per segment."""
        return message.new_full((self._segments.num_segments, *message.shape[1:]), fill, dtype=dtype)


class _Sum(_OverSegments):
    def __init__(self, segments: Segments, *, is_mean: bool) -> None:
        super().__init__(segments)
        self._divisors = segments.counts().clamp_(min=1) if is_mean else None
        self.built_bytes = 0 if self._divisors is None else self._divisors.nbytes

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:  # noqa: ARG002
        wide, (output,) = accumulator_dtype(outputs[0].dtype), outputs
        return (0 if wide == output.dtype else _row_bytes(output, wide)), 0

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        total = None
        for edges, (message,) in chunks:
            if total is None:
                dtype = message.dtype
                total = self._new(message, 0, accumulator_dtype(dtype))
            total.index_add_(0, self._segments.of(edges), message.to(total.dtype))
            del message  # before the next chunk runs
        assert total is not None  # noqa: S101 - there is always a chunk
        if self._divisors is not None:
            total.div_(like_rows(self._divisors, total))
        return [total.to(dtype)], []

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:  # noqa: ARG002
        (gradient,) = gradients

        def of(chunk: ChunkRows) -> list[Tensor | None]:
            if gradient is None:
                return [None]
            ids = self._segments.of(chunk)
            rows = gradient.index_select(0, ids)
            return [rows if self._divisors is None else rows.div_(like_rows(self._divisors[ids], rows))]

        return of


class _Extreme(_OverSegments):
    """The largest or smallest message; its gradient goes to the first edge that attains it.

    The winning edge of each element is stored as its rank. A later chunk ranks above an earlier one, since its edges
    win only if they beat the earlier winner; within a chunk the first edge ranks highest. So the highest rank wins.
    Edges that have won nothing get no gradient; in large segments, most edges have not.
    """

    def __init__(self, segments: Segments, reduce: Literal["max", "min"]) -> None:
        super().__init__(segments)
        self._how: Literal["amax", "amin"] = "amax" if reduce == "max" else "amin"
        # A rank is stored per output element: four bytes if they suffice. Ranks are compared as floats, whose kernels
        # are seven times as fast. Positive floats are ordered as their bits are; the least rank is the least normal
        # float, because torch.set_flush_denormal makes smaller ones equal to zero.
        is_short = segments.num_edges < 2**31 - 2**24  # the bits of infinity, less the least rank
        self._dtype, self._floats = (torch.int32, torch.float32) if is_short else (torch.int64, torch.float64)
        self._least = 1 << 23 if is_short else 1 << 52
        self.built_bytes = segments.num_segments
        self._chunk_size = 1  # of the last collected call

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:
        winners = _row_bytes(outputs[0], self._dtype) if for_backward else 0
        return winners, winners

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        are_empty = self._segments.tensor.new_ones(self.num_segments, dtype=torch.bool)
        best = winners = None
        self._chunk_size = 1
        for edges, (message,) in chunks:
            self._chunk_size = max(self._chunk_size, edges.length)
            if best is None:
                best = self._new(message, float("-inf") if self._how == "amax" else float("inf"), message.dtype)
                winners = self._new(message, 0, self._dtype) if chunks.for_backward else None
            self._take(best, winners, are_empty, edges, message)
            del message  # before the next chunk runs
        assert best is not None  # noqa: S101 - there is always a chunk
        best.masked_fill_(like_rows(are_empty, best), 0)
        self.passes_few = best.numel() <= _HOPELESS * self._segments.num_edges
        return [best], [] if winners is None else [winners]

    def _take(self, best: Tensor, winners: Tensor | None, are_empty: Tensor, edges: ChunkRows, message: Tensor) -> None:
        """Merge a chunk's messages. Vectorized over all edges, without synchronizing with the device."""
        ids = self._segments.of(edges)
        rows = like_rows(ids, message).expand_as(message)
        if winners is None:
            best.scatter_reduce_(0, rows, message, self._how)
        else:
            before = best.index_select(0, ids)
            best.scatter_reduce_(0, rows, message, self._how)
            after = best.index_select(0, ids)
            # Comparisons in place write zeros and ones of the messages' dtype: they are vectorized, unlike those that
            # make booleans. In an empty segment an infinite message wins too, although it equals the initial value.
            is_new = before.ne_(after).clamp_(min=like_rows(are_empty.index_select(0, ids), message).to(message.dtype))
            is_new.mul_(after.eq_(message))
            del before, after
            ranks = is_new.to(self._floats).mul_(self._ranks(edges, message))
            winners.view(self._floats).scatter_reduce_(0, rows, ranks, "amax")
        are_empty.index_fill_(0, ids, value=False)

    def _ranks(self, edges: ChunkRows, rows: Tensor) -> Tensor:
        """Return the rank of each of a chunk's edges, as a float."""
        if edges.numbers is None:
            end = self._least + edges.start
            ranks = torch.arange(end + edges.length, end, -1, dtype=self._dtype, device=rows.device)
        else:
            ranks = self._mirrored(edges.numbers, edges.numbers).add_(self._least).to(self._dtype)
        return like_rows(ranks.view(self._floats), rows)

    def _mirrored(self, numbers: Tensor, edges: Tensor) -> Tensor:
        """Return ranks, less the least one, for the numbers of edges, or the reverse.

        Args:
            numbers: Numbers of edges, or ranks less the least one.
            edges: Edges of the same chunks.
        """
        begins = edges - edges.remainder(self._chunk_size)
        return begins.add(self._chunk_size).clamp_(max=self._segments.num_edges).add_(begins).sub_(numbers)

    def rows_with_gradient(self, saved: Sequence[Tensor]) -> Tensor | None:
        (winners,), num_edges = saved, self._segments.num_edges
        found = winners.new_zeros(num_edges + 1, dtype=torch.bool)  # the last one is for segments without a winner
        for start, length in spans(self.num_segments, max(1, self._chunk_size // 4)):
            ranks = winners.narrow(0, start, length).flatten().long().sub_(self._least)
            edges = self._mirrored(ranks, ranks - 1)
            found.index_fill_(0, edges.masked_fill_(ranks <= 0, num_edges), value=True)
        return found.narrow(0, 0, num_edges)

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        (gradient,), (winners,) = gradients, saved

        def of(chunk: ChunkRows) -> list[Tensor | None]:
            if gradient is None:
                return [None]
            ids = self._segments.of(chunk)
            rows = gradient.index_select(0, ids)
            return [rows.mul_(winners.view(self._floats).index_select(0, ids).eq_(self._ranks(chunk, rows)))]

        return of


class _Softmax(_OverSegments):
    """Each message's share of its segment: (num_edges, ...), in the order of the edges."""

    def __init__(self, segments: Segments) -> None:
        super().__init__(segments)
        self._chunks: list[ChunkRows] = []  # of the last collected call

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:  # noqa: ARG002
        mean = _row_bytes(outputs[0], accumulator_dtype(outputs[0].dtype))
        return _row_bytes(outputs[0], outputs[0].dtype) + mean, mean

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        output = top = None
        self._chunks = []
        for edges, (message,) in chunks:
            self._chunks.append(edges)
            if output is None or top is None:
                output = message.new_empty((chunks.num_rows, *message.shape[1:]))
                top = self._new(message, float("-inf"), message.dtype)
            ids = self._segments.of(edges)
            edges.of(output).copy_(message)
            top.scatter_reduce_(0, like_rows(ids, message).expand_as(message), message, "amax")
            del message  # before the next chunk runs
        assert output is not None  # noqa: S101 - there is always a chunk
        assert top is not None  # noqa: S101
        total = self._new(output, 0, accumulator_dtype(output.dtype))
        for edges in self._chunks:
            ids = self._segments.of(edges)
            total.index_add_(0, ids, self._powers(edges.of(output), top, ids))
        for edges in self._chunks:
            ids, rows = self._segments.of(edges), edges.of(output)
            rows.copy_(self._powers(rows, top, ids).div_(total.index_select(0, ids)))
        return [output], [output] if chunks.for_backward else []

    @staticmethod
    def _powers(rows: Tensor, top: Tensor, ids: Tensor) -> Tensor:
        return rows.to(accumulator_dtype(rows.dtype)).sub(top.index_select(0, ids)).exp_()

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        (gradient,), (output,) = gradients, saved
        mean = self._new(output, 0, accumulator_dtype(output.dtype))
        if gradient is not None:
            for edges in self._chunks:
                shares = edges.of(output).to(mean.dtype)
                mean.index_add_(0, self._segments.of(edges), shares * edges.of(gradient))

        def of(chunk: ChunkRows) -> list[Tensor | None]:
            if gradient is None:
                return [None]
            rows = chunk.of(gradient) - mean.index_select(0, self._segments.of(chunk))
            return [rows.mul_(chunk.of(output)).to(output.dtype)]

        return of


def like_rows(column: Tensor, rows: Tensor) -> Tensor:
    """Reshape one number per row so that it broadcasts over the row."""
    return column.view(-1, *[1] * (rows.dim() - 1))


def _row_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of one row of a tensor in another dtype."""
    return tensor[0].numel() * dtype.itemsize if len(tensor) else 0
