"""What a chunk of a call takes: a part of it is run as the call would run it, and nothing that lasts is changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from memkit._gradients.streamed import accumulator_dtype, without_hooks
from memkit._recorder.recorder import Recorder
from memkit._recorder.workspace import WorkspaceMarks
from memkit._torch.profiler import ActiveProfilerType, running_profiler
from memkit.chunk.engine_replay import Circumstances
from memkit.chunk.independence import modes_of, modules_of, undone, unpacked
from memkit.chunk.sizing import Measurement

if TYPE_CHECKING:
    from memkit.chunk.engine import ChunkedCall

_T = TypeVar("_T")
HEAD = 2  # rows of a first chunk, after which the call holds what it holds from chunk to chunk


class Tensors(NamedTuple):
    """What a call computes on.

    Attributes:
        inputs: What rows are taken of.
        params: What the function uses besides.
        needs: For each of both whether it needs a gradient.
    """

    inputs: Sequence[Tensor]
    params: Sequence[Tensor]
    needs: Sequence[bool]


class CallProblem:
    """A call whose chunk size is to be chosen: a `memkit.chunk.sizing.Problem`."""

    def __init__(self, call: ChunkedCall, tensors: Tensors) -> None:
        self._call, self._tensors = call, tensors
        self.name, self.num_rows = call.name, call.count
        self.is_on_cpu = all(tensor.is_cpu for tensor in (*tensors.inputs, *tensors.params))

    def kind(self) -> Hashable:
        """See `memkit.chunk.sizing.Problem`."""
        call, tensors = self._call, self._tensors
        return type(call.assembly), tuple(tensors.needs), kind_of(call.fn, tensors.inputs, call.layout)

    def held_bytes(self, found: Measurement) -> tuple[int, int]:
        """See `memkit.chunk.sizing.Problem`."""
        assembly = self._call.assembly
        in_forward, in_backward = (assembly.built_bytes + assembly.num_segments * each for each in found.segment_bytes)
        # The forward's random state, and in the backward the caller's: no operator makes them, so no trial sees them.
        random = torch.get_rng_state().nbytes if self._call.preserve_rng_state and any(self._tensors.needs) else 0
        cast = cast_bytes(self._tensors.params)
        return in_forward + random + cast, in_backward + 2 * random + cast + self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        tensors, picked = self._tensors, self._call.layout
        num_inputs = len(tensors.inputs)
        return sum(
            sum_bytes(tensor) if number >= num_inputs or picked[number] else tensor.nbytes
            for number, (tensor, need) in enumerate(zip((*tensors.inputs, *tensors.params), tensors.needs, strict=True))
            if need
        )

    def measure(self, num_rows: int) -> Measurement:
        """See `memkit.chunk.sizing.Problem`."""
        length = min(num_rows, self.num_rows)
        head = min(HEAD, self.num_rows - length)
        part = self._call.first_rows(head + length, max(length, 1), head)
        with unpacked(), undone(modules_of(part.fn)), without_hooks(self._tensors.params):
            return self._measure(part, num_rows)

    def _measure(self, part: ChunkedCall, num_rows: int) -> Measurement:
        tensors, assembly = self._tensors, part.assembly
        for_backward = any(tensors.needs)

        def forward() -> tuple[Circumstances | None, list[Tensor], list[Tensor]]:
            replay = (
                Circumstances(tensors.inputs, part.fn if part.preserve_rng_state else None) if for_backward else None
            )
            return replay, *assembly.collect(part.pieces(tensors, replay))

        (replay, outputs, saved), forward_peak, forward_end = watched(forward)
        output_bytes = sum(output.nbytes for output in outputs)
        segment_bytes = assembly.segment_bytes(outputs, for_backward=for_backward)
        in_forward, in_backward = (assembly.num_segments * each for each in segment_bytes)
        forward_bytes = forward_peak - output_bytes - in_forward
        if replay is None:
            return Measurement(num_rows, forward_bytes, segment_bytes=segment_bytes)
        kept_bytes = forward_end - sum({id(each): each.nbytes for each in (*outputs, *saved)}.values())
        # Expanded, as `sum().backward()` gives it: a chunk's rows of it have to be copied.
        ones = [
            output.new_ones(()).expand_as(output) if output.is_floating_point() or output.is_complex() else None
            for output in outputs
        ]

        def backward() -> None:
            with replay.again() as pieces:
                part.gradients(tensors, assembly.upstream(ones, saved), pieces, self._totals())

        _, backward_peak, _ = watched(backward)
        held = output_bytes + in_backward + self._gradient_bytes()
        # A chunk that is run again takes in the backward what it took in the forward, before its own backward begins.
        backward_bytes = max(forward_bytes, forward_end + backward_peak - held)
        return Measurement(num_rows, forward_bytes, backward_bytes, kept_bytes, segment_bytes)

    def _totals(self) -> list[Tensor | None]:
        """Gradients as they are there from the second chunk of a backward on."""
        tensors, picked = self._tensors, self._call.layout
        return [
            torch.zeros_like(
                tensor, dtype=tensor.dtype if number < len(tensors.inputs) and not picked[number] else wide
            )
            if need
            else None
            for number, (tensor, need) in enumerate(zip((*tensors.inputs, *tensors.params), tensors.needs, strict=True))
            for wide in [accumulator_dtype(tensor.dtype)]
        ]


def kind_of(fn: Callable[..., object], inputs: Sequence[Tensor], others: Iterable[object]) -> Hashable:
    """What a call's memory depends on besides the number of rows: shapes, modes, autocast, and other arguments."""
    shapes = tuple((tuple(tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in inputs)
    modes = tuple(modes_of(modules_of(fn)))
    kinds = sorted({"cpu", *(tensor.device.type for tensor in inputs)})
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    plain = tuple(each if isinstance(each, bool | int | float | str) else type(each) for each in others)
    return shapes, modes, autocast, plain


def sum_bytes(tensor: Tensor) -> int:
    """What a gradient takes that is added up over chunks, until it is handed over."""
    wide = accumulator_dtype(tensor.dtype)
    return tensor.numel() * wide.itemsize + (tensor.nbytes if wide != tensor.dtype else 0)


def cast_bytes(params: Iterable[Tensor]) -> int:
    """What autocast keeps: each weight converted once, for all chunks, so that the next trial finds it there."""
    return sum(
        each.numel() * torch.get_autocast_dtype(each.device.type).itemsize
        for each in params
        if each.dtype == torch.float32 and torch.is_autocast_enabled(each.device.type)
    )


def watched(run: Callable[[], _T]) -> tuple[_T, int, int]:
    """Run something; return its result, the highest bytes above the start, and the bytes above the start at the end.

    Bytes of storages on all devices, and of what operators take and give back inside. Where a profiler is running the
    latter is not seen: torch runs one at a time.
    """
    is_free = running_profiler() == ActiveProfilerType.NONE
    recorder = Recorder(marks=WorkspaceMarks() if is_free else None)
    with recorder:
        result = run()
    recording = recorder.recording()
    was_before = np.asarray(recording.names["operator"], dtype=str)[recording.codes["operator"]] == ""
    of_before = recording.event_bytes[was_before[recording.event_storage]]
    live = recording.timeline() - int(of_before.clip(min=0).sum())
    return result, int(live.max(initial=0)), int(live[-1]) if len(live) else 0
