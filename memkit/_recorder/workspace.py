"""Workspace: memory that an operator allocates and frees internally, visible only in the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, count
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from memkit._core.errors import StateError
from memkit._recorder.recorder import RecorderMark
from memkit._recorder.recording import Label, Recording, encoded, lifetimes
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

_MARK = "memkit-operator:"
_Memory = Literal["cpu", "accelerator"]


class _Call(NamedTuple):
    """One call of an operator."""

    end: RecorderMark
    operator: Any
    accelerator: torch.device | None  # the current accelerator, if any

    def device(self, memory: _Memory) -> str:
        return "cpu" if memory == "cpu" else str(self.accelerator)


class _Workspace(NamedTuple):
    """Rise of live bytes within one call above both its start and its end."""

    call: _Call
    device: str
    nbytes: int


class WorkspaceMarks:
    """Marks for a Recorder that also sees memory used internally by operators, as category ``"workspace"``.

    Use it as ``Recorder(marks=WorkspaceMarks())``. It puts a mark around each operator. torch's profiler writes the
    marks and the allocations of a thread into one list, in order: no clocks have to be aligned, no running totals
    trusted, and nothing outside the operators counts.

    The profiler is the one behind `torch.autograd.profiler_legacy`. Unlike Kineto's, it prints nothing and stays in
    its own thread (and those of autograd), so that it does not disturb a profiler in another thread. torch calls it
    deprecated; Kineto's would give the same events at a higher cost.
    """

    def __init__(self) -> None:
        self.accelerator: torch.device | None = None
        self._calls: dict[int, _Call] = {}
        self._numbers = count()
        self._workspaces: list[_Workspace] | None = None  # None until the block ends

    def begin(self) -> None:
        """Start the profiler.

        Raises:
            StateError: A profiler is already running in this thread.
        """
        if running_profiler() != ActiveProfilerType.NONE:
            raise StateError(
                "track(workspace=True)",
                got="a thread in which a profiler is running",
                expected="no other profiler: workspace is read from a profiler's events, and torch runs one at a time",
                fix="leave that profiler (or the outer track(workspace=True)) first, or use track().",
            )
        shapes, memory, stack, flops, modules = False, True, False, False, False
        start_profiler(ProfilerConfig(ProfilerState.CPU, shapes, memory, stack, flops, modules, ExperimentalConfig()))
        record_functions(False)  # noqa: FBT003 - record only the marks, not each operator

    def end(self) -> None:
        """Stop the profiler and read its events."""
        record_functions(True)  # noqa: FBT003
        threads = stop_profiler()
        risen = sorted(found for events in threads for found in _risen(events))
        self._workspaces = [
            _Workspace(self._calls[number], self._calls[number].device(memory), nbytes)
            for number, memory, nbytes in risen
        ]

    def around(self, func: Any, run: Callable[[], Any], moment: Callable[[], RecorderMark]) -> Any:
        """Run an operator between two marks."""
        number = next(self._numbers)
        try:
            record_functions(True)  # noqa: FBT003 - C++ takes no keyword
            with Mark(f"{_MARK}{number}"):
                record_functions(False)  # noqa: FBT003
                return run()
        finally:  # a failed operator counts too: its workspace may be the allocation that did not fit
            self._calls[number] = _Call(moment(), func, self.accelerator)

    def added_to(self, recording: Recording) -> Recording:
        """Return the recording with workspaces added, each as a storage that lives only within its operator.

        Raises:
            StateError: The block has not ended.
        """
        if self._workspaces is None:
            raise StateError(
                "track(workspace=True)",
                got="a query inside the block",
                expected="queries after the block: the profiler returns its events when it ends",
                fix="read the tracker after the block, or use track().",
            )
        return _with_workspaces(recording, self._workspaces)


def _risen(events: Sequence[ProfilerEvent]) -> Iterator[tuple[int, _Memory, int]]:
    """Yield (number of the call, memory, bytes) for each marked call that rose above both its start and its end.

    Args:
        events: Events of one thread.
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
    """Insert each workspace as a storage that is born after its operator's outputs and freed at once."""
    num_old, num_new = recording.num_storages, len(workspaces)
    births, _ = lifetimes(recording.event_storage, recording.event_bytes, num_old)
    was_before = recording.is_older
    # A call counts the events that the recorder saw happen, not those that add storages from before the block.
    num_events = len(recording.event_bytes)
    happened = np.delete(np.arange(num_events), births[was_before])
    after = np.concatenate([happened[:1] if len(happened) else [num_events], happened + 1])
    positions = np.repeat(after[[found.call.end.num_events for found in workspaces]], 2)
    ids = np.repeat(np.arange(num_old, num_old + num_new), 2)
    changes = np.outer([found.nbytes for found in workspaces], [1, -1]).ravel()
    phases_before = np.sort([found.call.end.num_phases for found in workspaces])
    texts: dict[Label, list[str]] = {
        "category": ["workspace"] * num_new,
        "device": [found.device for found in workspaces],
        "module": [found.call.end.place.module for found in workspaces],
        "operator": [str(found.call.operator) for found in workspaces],
        "phase": [found.call.end.place.phase for found in workspaces],
        "source": [str(found.call.end.place.line or "") for found in workspaces],
    }
    tables = {label: encoded(new, recording.names[label]) for label, new in texts.items()}
    codes = {label: np.append(recording.codes[label], code) for label, (code, _) in tables.items()}
    names = {label: table for label, (_, table) in tables.items()}
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
