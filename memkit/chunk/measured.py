"""Memory of a chunk in bytes, measured while it runs or derived from its tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from memkit._gradients.streamed import accumulator_dtype
from memkit._recorder.recorder import Recorder
from memkit._recorder.workspace import WorkspaceMarks
from memkit._torch.profiler import ActiveProfilerType, running_profiler
from memkit.chunk.traits import traits_of

_T = TypeVar("_T")
HEAD = 2  # rows of a first chunk, after which the call has allocated everything it keeps between chunks


def kind_of(fn: Callable[..., object], inputs: Sequence[Tensor], others: Iterable[object]) -> Hashable:
    """Return the key of a call's memory besides its number of rows: shapes, autocast, and the function's traits."""
    shapes = tuple((tuple(tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in inputs)
    kinds = sorted({"cpu", *(tensor.device.type for tensor in inputs)})
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return shapes, autocast, traits_of(fn, others, with_counting=True)


def sum_bytes(tensor: Tensor) -> int:
    """Return the bytes of a gradient accumulated over chunks, including its final cast."""
    wide = accumulator_dtype(tensor.dtype)
    return tensor.numel() * wide.itemsize + (tensor.nbytes if wide != tensor.dtype else 0)


def cast_bytes(params: Iterable[Tensor]) -> int:
    """Return the bytes of autocast's weight cache: weights are cast once for all chunks, so later trials reuse them."""
    return sum(
        each.numel() * torch.get_autocast_dtype(each.device.type).itemsize
        for each in params
        if each.dtype == torch.float32 and torch.is_autocast_enabled(each.device.type)
    )


def watched(run: Callable[[], _T]) -> tuple[_T, int, int]:
    """Run a function; return its result, the highest bytes above the start, and the bytes above the start at the end.

    Counts storages on all devices and the temporary workspace of operators. The workspace is not counted while a
    profiler is running: torch allows only one at a time.
    """
    is_free = running_profiler() == ActiveProfilerType.NONE
    recorder = Recorder(marks=WorkspaceMarks() if is_free else None)
    with recorder:
        result = run()
    recording = recorder.recording()
    of_before = recording.event_bytes[recording.is_older[recording.event_storage]]
    live = recording.timeline() - int(of_before.clip(min=0).sum())
    return result, int(live.max(initial=0)), int(live[-1]) if len(live) else 0
