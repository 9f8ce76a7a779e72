"""Workspace: what an operator takes and gives back inside of itself, which only the allocator's own events show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch

from memkit._errors import StateError
from memkit._recorder import Recorder
from memkit._recording import IntArray, Label, Recording, lifetimes
from memkit._torch.profiler import (
    ActiveProfilerType,
    ExperimentalConfig,
    Mark,
    ProfilerConfig,
    ProfilerEvent,
    ProfilerState,
    record_functions,
    running_profiler,
    start_profiler,
    stop_profiler,
)
from memkit._whereabouts import Place

_MARK = "memkit-operator:"
_Memory = Literal["cpu", "accelerator"]


class _Call(NamedTuple):
    """One call of an operator."""

    num_events: int  # of the recorder's events, those up to the call's end
    num_phases: int  # of the recorder's phases likewise
    operator: Any
    place: Place
    accelerator: torch.device | None  # the one that was in use, if any

    def device(self, memory: _Memory) -> str:
        return "cpu" if memory == "cpu" else str(self.accelerator)


class _Workspace(NamedTuple):
    """How far one call rose above both of its ends."""

    call: _Call
    device: str
    nbytes: int


class WorkspaceRecorder(Recorder):  # type: ignore[no-untyped-call]  # torch's own class hook
    """A Recorder that also sees what an operator takes and gives back inside of itself, as category ``"workspace"``.

    It puts a mark around each operator. torch's profiler writes the marks and the allocations of a thread into one
    list, in the order in which they came: no clocks have to be aligned, no running totals trusted, and nothing outside
    of the operators counts.

    The profiler is the one beneath `torch.autograd.profiler_legacy`. Unlike Kineto's it prints nothing, and stays in
    its own thread (with those of autograd), so that a profiler in another thread is not disturbed. torch calls it
    deprecated; Kineto's would give the same events at a higher price.
    """

    def __init__(self) -> None:
        super().__init__()
        self._accelerator: torch.device | None = None
        self._calls: dict[int, _Call] = {}
        self._numbers = count()
        self._workspaces: list[_Workspace] | None = None  # None until the block is over

    def __enter__(self) -> Self:
        if running_profiler() != ActiveProfilerType.NONE:
            raise StateError(
                "track(workspace=True)",
                got="a thread in which a profiler is running",
                expected="none: workspace is read from a profiler's events, and torch runs one at a time",
                fix="leave that profiler (or the outer track(workspace=True)) first, or use track().",
            )
        super().__enter__()
        shapes, memory, stack, flops, modules = False, True, False, False, False
        start_profiler(ProfilerConfig(ProfilerState.CPU, shapes, memory, stack, flops, modules, ExperimentalConfig()))
        record_functions(False)  # noqa: FBT003 - only the marks are wanted, not each operator's own record
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record_functions(True)  # noqa: FBT003
        threads = stop_profiler()
        super().__exit__(exc_type, exc, traceback)
        risen = sorted(found for events in threads for found in _risen(events))
        self._workspaces = [
            _Workspace(self._calls[number], self._calls[number].device(memory), nbytes)
            for number, memory, nbytes in risen
        ]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        number = next(self._numbers)
        try:
            record_functions(True)  # noqa: FBT003 - C++ takes no keyword
            with Mark(f"{_MARK}{number}"):
                record_functions(False)  # noqa: FBT003
                return super().__torch_dispatch__(func, types, args, kwargs)
        finally:  # an operator that failed counts too: its workspace may be what did not fit
            place = self._where.place()
            self._calls[number] = _Call(len(self._event_bytes), len(self._phases), func, place, self._accelerator)

    def _note(self, tensor: torch.Tensor, operator: Any) -> int | None:
        if not tensor.is_cpu:
            self._accelerator = tensor.device
        return super()._note(tensor, operator)

    def recording(self) -> Recording:
        """Everything seen, as plain data: a workspace is a storage that comes and goes within its operator."""
        if self._workspaces is None:
            raise StateError(
                "track(workspace=True)",
                got="a question inside the block",
                expected="questions after the block: the profiler hands out its events when it ends",
                fix="read the tracker after the block, or use track().",
            )
        return _with_workspaces(super().recording(), self._workspaces)


def _risen(events: Sequence[ProfilerEvent]) -> Iterator[tuple[int, _Memory, int]]:
    """Yield (number of the call, which memory, bytes) for each marked call that rose above both of its ends.

    Args:
        events: One thread's.
    """
    number, depth = None, 0
    changes: Mapping[_Memory, list[int]] = {}
    for event in events:
        kind = str(event.kind())
        if number is None:
            if kind == "push" and event.name().startswith(_MARK):
                number, depth = int(event.name().removeprefix(_MARK)), 0
                changes = {"cpu": [], "accelerator": []}
        elif kind == "memory_alloc":
            changes["cpu"].append(event.cpu_memory_usage())
            changes["accelerator"].append(event.cuda_memory_usage())  # CUDA and ROCm
        elif kind == "push":
            depth += 1
        elif kind == "pop" and depth:
            depth -= 1
        elif kind == "pop":
            for memory, sizes in changes.items():
                levels = [0, *accumulate(sizes)]
                if max(levels) > max(0, levels[-1]):
                    yield number, memory, max(levels) - max(0, levels[-1])
            number = None


def _with_workspaces(recording: Recording, workspaces: Sequence[_Workspace]) -> Recording:
    """Insert each workspace as a storage that is born after its operator's outputs, and dies at once."""
    num_old, num_new = recording.num_storages, len(workspaces)
    births, _ = lifetimes(recording.event_storage, recording.event_bytes, num_old)
    was_before = np.asarray(recording.names["operator"], dtype=str)[recording.codes["operator"]] == ""
    # A call counts the events that the recorder saw happen, and not those that bring in what was there before.
    num_events = len(recording.event_bytes)
    happened = np.delete(np.arange(num_events), births[was_before])
    after = np.concatenate([happened[:1] if len(happened) else [num_events], happened + 1])
    positions = np.repeat(after[[found.call.num_events for found in workspaces]], 2)
    ids = np.repeat(np.arange(num_old, num_old + num_new), 2)
    changes = np.outer([found.nbytes for found in workspaces], [1, -1]).ravel()
    phases_before = np.sort([found.call.num_phases for found in workspaces])
    texts: dict[Label, list[str]] = {
        "category": ["workspace"] * num_new,
        "device": [found.device for found in workspaces],
        "module": [found.call.place.module for found in workspaces],
        "operator": [str(found.call.operator) for found in workspaces],
        "phase": [found.call.place.phase for found in workspaces],
        "source": [str(found.call.place.line or "") for found in workspaces],
    }
    names = {label: tuple(dict.fromkeys([*recording.names[label], *new])) for label, new in texts.items()}
    codes: dict[Label, IntArray] = {}
    for label, new in texts.items():
        table = {text: code for code, text in enumerate(names[label])}
        codes[label] = np.append(recording.codes[label], np.asarray([table[text] for text in new], dtype=np.int64))
    return Recording(
        np.insert(recording.event_storage, positions, ids),
        np.insert(recording.event_bytes, positions, changes),
        codes,
        names,
        tuple(
            (index + 2 * int(np.searchsorted(phases_before, number, side="right")), phase)
            for number, (index, phase) in enumerate(recording.phases)
        ),
        recording.untracked,
    )
