"""A call whose chunk size is to be chosen: trial runs of its first rows show the memory of a chunk of each size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memkit._gradients.streamed import (
    accumulator_dtype,
    refuse_reentrant,
    without_hooks,
)
from memkit.chunk.assembly import Assembly, ChunkResults, Upstream
from memkit.chunk.circumstances import Circumstances
from memkit.chunk.measured import HEAD, cast_bytes, kind_of, sum_bytes, watched
from memkit.chunk.probes import undone, unpacked
from memkit.chunk.sizing import Measurement
from memkit.chunk.volumes import spatial_call


class CallTensors(NamedTuple):
    """The tensors of a call.

    Attributes:
        inputs: Tensors that are cut into rows.
        params: Other tensors that the function uses.
        needs: Whether each input and parameter needs a gradient.
    """

    inputs: Sequence[Tensor]
    params: Sequence[Tensor]
    needs: Sequence[bool]


class TriedCall(Protocol):
    """The part of a `memkit.chunk.engine.ChunkedCall` that a trial uses."""

    @property
    def name(self) -> str:
        """The user's call, for messages."""

    @property
    def fn(self) -> Callable[..., Any]:
        """The user's function."""

    @property
    def assembly(self) -> Assembly:
        """How chunk results are combined."""

    @property
    def count(self) -> int:
        """Rows of the call."""

    @property
    def layout(self) -> list[Any]:
        """Whether each input's rows are gathered, followed by all arguments that are not cut."""

    def first_rows(self, num_rows: int, chunk_size: int, head: int) -> TriedCall:
        """Return the call on its first rows only."""

    def results(self, tensors: CallTensors, replay: Circumstances | None) -> ChunkResults:
        """Run the forward."""

    def product_bytes(self, tensors: CallTensors, num_rows: int) -> int:
        """Run the first rows; return the bytes of their results of matrix products and convolutions."""

    def gradients(
        self, tensors: CallTensors, upstream: Upstream, replay: Circumstances, totals: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward."""


class _Gradient(NamedTuple):
    """A gradient that the call creates: those of rows are written once each, all others are summed over the chunks."""

    tensor: Tensor
    is_written_once: bool


class TrialCall:
    """A `memkit.chunk.sizing.Problem`: a call whose chunk size is to be chosen."""

    def __init__(self, call: TriedCall, tensors: CallTensors) -> None:
        self._call, self._tensors = call, tensors
        self.name, self.num_rows = call.name, call.count
        where = spatial_call(call.fn, tensors.inputs)
        self.elsewhere = f"cut space, with the same result: {where}; or " if where else ""
        self.is_on_cpu = all(tensor.is_cpu for tensor in (*tensors.inputs, *tensors.params))

    def kind(self) -> Hashable:
        """See `memkit.chunk.sizing.Problem`."""
        call, tensors = self._call, self._tensors
        return call.assembly.kind, tuple(tensors.needs), kind_of(call.fn, tensors.inputs, call.layout)

    def held_bytes(self, found: Measurement) -> tuple[int, int]:
        """See `memkit.chunk.sizing.Problem`."""
        assembly = self._call.assembly
        in_forward, in_backward = (assembly.built_bytes + assembly.num_segments * each for each in found.segment_bytes)
        # The forward's random state, and in the backward the caller's too: no operator allocates them, so trials miss
        # them.
        random = torch.get_rng_state().nbytes if any(self._tensors.needs) else 0
        cast = cast_bytes(self._tensors.params)
        return in_forward + random + cast, in_backward + 2 * random + cast + self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return sum(
            each.tensor.nbytes if each.is_written_once else sum_bytes(each.tensor) for each in self._gradients() if each
        )

    def measure(self, num_rows: int) -> Measurement:
        """See `memkit.chunk.sizing.Problem`."""
        length = min(num_rows, self.num_rows)
        head = min(HEAD, self.num_rows - length)
        trial = self._call.first_rows(head + length, max(length, 1), head)
        with unpacked(), undone(trial.fn, trial.layout), without_hooks(self._tensors.params):
            return self._measure(trial, num_rows)

    def _measure(self, trial: TriedCall, num_rows: int) -> Measurement:
        tensors, assembly = self._tensors, trial.assembly
        for_backward = any(tensors.needs)

        def forward() -> tuple[Circumstances | None, list[Tensor], list[Tensor]]:
            replay = Circumstances(tensors.inputs, trial.fn, tensors.params) if for_backward else None
            return replay, *assembly.collect(trial.results(tensors, replay))

        (replay, outputs, saved), forward_peak, forward_end = watched(forward)
        output_bytes = sum(output.nbytes for output in outputs)
        segment_bytes = assembly.segment_bytes(outputs, for_backward=for_backward)
        in_forward, in_backward = (assembly.num_segments * each for each in segment_bytes)
        forward_bytes = forward_peak - output_bytes - in_forward
        if replay is None:
            return Measurement(num_rows, forward_bytes, segment_bytes=segment_bytes)
        kept_bytes = forward_end - sum({id(each): each.nbytes for each in (*outputs, *saved)}.values())
        # Expanded, as in `sum().backward()`: a chunk's rows of it must be copied.
        ones = [
            output.new_ones(()).expand_as(output) if output.is_floating_point() or output.is_complex() else None
            for output in outputs
        ]

        def backward() -> None:
            with replay.again(), refuse_reentrant(trial.name):
                trial.gradients(tensors, assembly.upstream(ones, saved), replay, self._totals())

        _, backward_peak, _ = watched(backward)
        held = output_bytes + in_backward + self._gradient_bytes()
        # A recomputed chunk takes its forward memory in the backward too, before its own backward begins.
        backward_bytes = max(forward_bytes, forward_end + backward_peak - held)
        # Measured on a few rows: held during a whole chunk's trial, they would add to its peak. Zero rows have none.
        few = min(HEAD, trial.count)
        product_bytes = trial.product_bytes(tensors, few) * num_rows // max(few, 1)
        return Measurement(num_rows, forward_bytes, backward_bytes, kept_bytes, segment_bytes, product_bytes)

    def _totals(self) -> list[Tensor | None]:
        """Return gradient buffers as they exist from the second chunk of a backward on."""
        totals: list[Tensor | None] = []
        for each in self._gradients():
            if each is None:
                totals.append(None)
                continue
            tensor = each.tensor
            dtype = tensor.dtype if each.is_written_once else accumulator_dtype(tensor.dtype)
            totals.append(torch.zeros_like(tensor, dtype=dtype))
        return totals

    def _gradients(self) -> list[_Gradient | None]:
        """Describe the gradient of each input and parameter; None if it needs no gradient."""
        inputs, params = self._tensors.inputs, self._tensors.params
        are_gathered = self._call.layout[: len(inputs)]
        found = [_Gradient(tensor, not is_gathered) for tensor, is_gathered in zip(inputs, are_gathered, strict=True)]
        found += [_Gradient(tensor, is_written_once=False) for tensor in params]
        return [each if need else None for each, need in zip(found, self._tensors.needs, strict=True)]
