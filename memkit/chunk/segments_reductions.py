"""Chunked segment reductions: sum, mean, max, min and softmax, with closed-form gradients.

A segment may span many chunks, in any order: sums and extrema are carried from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from memkit._gradients.streamed import accumulator_dtype
from memkit.chunk.assembly import Assembly, ChunkResults, Upstream
from memkit.chunk.segments_index import Segments

Reduce = Literal["sum", "mean", "max", "min", "softmax", "add", "amax", "amin"]
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
        for start, (message,) in chunks:
            if total is None:
                dtype = message.dtype
                total = self._new(message, 0, accumulator_dtype(dtype))
            total.index_add_(0, self._segments.of(start, len(message)), message.to(total.dtype))
            del message  # before the next chunk runs
        assert total is not None  # noqa: S101 - there is always a chunk
        if self._divisors is not None:
            total.div_(like_rows(self._divisors, total))
        return [total.to(dtype)], []

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:  # noqa: ARG002
        (gradient,) = gradients

        def of(start: int, length: int) -> list[Tensor | None]:
            if gradient is None:
                return [None]
            ids = self._segments.of(start, length)
            rows = gradient.index_select(0, ids)
            return [rows if self._divisors is None else rows.div_(like_rows(self._divisors[ids], rows))]

        return of


class _Extreme(_OverSegments):
    """The largest or smallest message; its gradient goes to the first edge that attains it."""

    def __init__(self, segments: Segments, reduce: Literal["max", "min"]) -> None:
        super().__init__(segments)
        self._how: Literal["amax", "amin"] = "amax" if reduce == "max" else "amin"
        # An edge number is stored per output element: four bytes if they suffice.
        self._dtype = torch.int32 if segments.num_edges < torch.iinfo(torch.int32).max else torch.int64
        self._are_empty = segments.are_empty()
        self.built_bytes = self._are_empty.nbytes

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:
        winners = _row_bytes(outputs[0], self._dtype) if for_backward else 0
        return winners, winners

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        best = winners = None
        for start, (message,) in chunks:
            if best is None:
                best = self._new(message, float("-inf") if self._how == "amax" else float("inf"), message.dtype)
                winners = self._new(message, self._segments.num_edges, self._dtype) if chunks.for_backward else None
            self._take(best, winners, start, message)
            del message  # before the next chunk runs
        assert best is not None  # noqa: S101 - there is always a chunk
        best.masked_fill_(like_rows(self._are_empty, best), 0)
        return [best], [] if winners is None else [winners]

    def _take(self, best: Tensor, winners: Tensor | None, start: int, message: Tensor) -> None:
        """Merge a chunk's messages. Vectorized over all edges, without synchronizing with the device."""
        ids = self._segments.of(start, len(message))
        rows = like_rows(ids, message).expand_as(message)
        before = best.index_select(0, ids)
        best.scatter_reduce_(0, rows, message, self._how)
        if winners is None:
            return
        after, none = best.index_select(0, ids), self._segments.num_edges
        earlier = winners.index_select(0, ids)
        is_open = (after != before) | (earlier == none)  # no winner yet, or the previous winner has lost
        winners.scatter_(0, rows, earlier.masked_fill_(is_open, none))
        edges = like_rows(torch.arange(start, start + len(message), dtype=self._dtype, device=ids.device), message)
        candidates = torch.where(is_open & (message == after), edges, none)
        winners.scatter_reduce_(0, rows, candidates, "amin")

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        (gradient,), (winners,) = gradients, saved

        def of(start: int, length: int) -> list[Tensor | None]:
            if gradient is None:
                return [None]
            ids = self._segments.of(start, length)
            rows = gradient.index_select(0, ids)
            edges = like_rows(torch.arange(start, start + length, device=ids.device), rows)
            return [rows.masked_fill_(winners.index_select(0, ids) != edges, 0)]

        return of


class _Softmax(_OverSegments):
    """Each message's share of its segment: (num_edges, ...), in the order of the edges."""

    def __init__(self, segments: Segments) -> None:
        super().__init__(segments)
        self._spans: list[tuple[int, int]] = []  # of the last collected call

    def segment_bytes(self, outputs: Sequence[Tensor], *, for_backward: bool) -> tuple[int, int]:  # noqa: ARG002
        mean = _row_bytes(outputs[0], accumulator_dtype(outputs[0].dtype))
        return _row_bytes(outputs[0], outputs[0].dtype) + mean, mean

    def collect(self, chunks: ChunkResults) -> tuple[list[Tensor], list[Tensor]]:
        output = top = None
        self._spans = []
        for start, (message,) in chunks:
            self._spans.append((start, len(message)))
            if output is None or top is None:
                output = message.new_empty((chunks.num_rows, *message.shape[1:]))
                top = self._new(message, float("-inf"), message.dtype)
            ids = self._segments.of(start, len(message))
            output.narrow(0, start, len(message)).copy_(message)
            top.scatter_reduce_(0, like_rows(ids, message).expand_as(message), message, "amax")
            del message  # before the next chunk runs
        assert output is not None  # noqa: S101 - there is always a chunk
        assert top is not None  # noqa: S101
        total = self._new(output, 0, accumulator_dtype(output.dtype))
        for start, length in self._spans:
            ids = self._segments.of(start, length)
            total.index_add_(0, ids, self._powers(output.narrow(0, start, length), top, ids))
        for start, length in self._spans:
            ids, rows = self._segments.of(start, length), output.narrow(0, start, length)
            rows.copy_(self._powers(rows, top, ids).div_(total.index_select(0, ids)))
        return [output], [output] if chunks.for_backward else []

    @staticmethod
    def _powers(rows: Tensor, top: Tensor, ids: Tensor) -> Tensor:
        return rows.to(accumulator_dtype(rows.dtype)).sub(top.index_select(0, ids)).exp_()

    def upstream(self, gradients: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Upstream:
        (gradient,), (output,) = gradients, saved
        mean = self._new(output, 0, accumulator_dtype(output.dtype))
        if gradient is not None:
            for start, length in self._spans:
                shares = output.narrow(0, start, length).to(mean.dtype)
                mean.index_add_(0, self._segments.of(start, length), shares * gradient.narrow(0, start, length))

        def of(start: int, length: int) -> list[Tensor | None]:
            if gradient is None:
                return [None]
            rows = gradient.narrow(0, start, length) - mean.index_select(0, self._segments.of(start, length))
            return [rows.mul_(output.narrow(0, start, length)).to(output.dtype)]

        return of


def like_rows(column: Tensor, rows: Tensor) -> Tensor:
    """Reshape one number per row so that it broadcasts over the row."""
    return column.view(-1, *[1] * (rows.dim() - 1))


def _row_bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of one row of a tensor in another dtype."""
    return tensor[0].numel() * dtype.itemsize if len(tensor) else 0
