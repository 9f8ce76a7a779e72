"""What the CPU allocator really did, as torch.profiler saw it: the truth that memory tests compare with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memkit._recorder.recorder import Recorder

MARK = "memkit-mark:"


@dataclass
class Trace:
    """Allocation events in order, and the marks around parts of the run; bytes count from the start of the run."""

    times: np.ndarray  # int64 ns
    live: np.ndarray  # int64 bytes after each event; the first is 0
    marks: list[tuple[str, int, int]]  # name, start and end in ns

    def at(self, time: int) -> int:
        """Live bytes at a moment."""
        return int(self.live[np.searchsorted(self.times, time, side="right")])

    def highest(self, start: int, end: int) -> int:
        """Most live bytes between two moments."""
        first, last = np.searchsorted(self.times, [start, end], side="right")
        return int(self.live[first : last + 1].max())

    @property
    def peak(self) -> int:
        return int(self.live.max())


def mark(name: str) -> _RecordFunctionFast:
    """Name a part of the run that `trace_allocations` profiles. Unlike `record_function` it is no operator itself."""
    return _RecordFunctionFast(MARK + name)


def trace_allocations(run: Callable[[], object]) -> Trace:
    """Run under the profiler. The profiler's own running total leaks from one profile into the next: sum the events."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    times, sizes, marks = [], [], []
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            times.append(event.start_ns())
            sizes.append(event.nbytes())
        elif event.name().startswith(MARK):
            marks.append((event.name()[len(MARK) :], event.start_ns(), event.start_ns() + event.duration_ns()))
    order = np.argsort(times, kind="stable")
    live = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64)[order])])
    return Trace(np.asarray(times, dtype=np.int64)[order], live, sorted(marks, key=lambda m: m[2]))


class _Flops(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does, whose hooks refuse `torch.autograd.grad` for a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(run: Callable[[], object]) -> int:
    """Multiplications and additions of a run's matrix products and convolutions."""
    with _Flops() as flops:
        run()
    return flops.total


@dataclass
class Operator:
    """One operator of a run that was recorded and profiled at once; bytes count from the start of the run."""

    name: str
    recorded: int  # the recorder's live bytes after it, before anything else happens
    allocated: int  # the allocator's at the same moment, without the numbers in flight
    hidden: int  # how far the allocator rose above both ends of the operator: workspace that came and went inside
    num_numbers: int  # Python numbers that C++ wrapped in a tensor of 8 bytes to call it


class _Marks(TorchDispatchMode):
    """Marks every operator for the profiler; it lies outside of the recorder, so it runs inside its call."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder._is_probing:
            return func(*args, **(kwargs or {}))
        wrapped = sum(
            isinstance(value, (int, float)) and str(argument.type) == "Tensor"
            for value, argument in zip(args, func._schema.arguments, strict=False)
        )
        self.calls.append((str(func), len(self.recorder._event_bytes), wrapped))
        with mark("operator"):
            return func(*args, **(kwargs or {}))


def observe_operators(run: Callable[[], object], *, as_without_recorder: bool) -> tuple[list[Operator], Recorder]:
    """Record and profile the same run, and compare the two after every operator."""
    recorder = Recorder(as_without_recorder=as_without_recorder)
    marks = _Marks(recorder)

    def recorded_run() -> None:
        with recorder:
            with mark("start"):
                pass
            run()

    with marks:
        trace = trace_allocations(recorded_run)
    start = next(end for name, _, end in trace.marks if name == "start")
    base = trace.at(start)  # what the recorder's own probe left behind
    live = np.concatenate([[0], np.cumsum(np.asarray(recorder._event_bytes, dtype=np.int64))])
    next_events = [event for _, event, _ in marks.calls[1:]] + [len(live) - 1]
    spans = [(begin, end) for name, begin, end in trace.marks if name == "operator"]
    operators = []
    for (name, event, num_numbers), next_event, (begin, end) in zip(marks.calls, next_events, spans, strict=True):
        # Births come first among the events of an operator, then the deaths up to the next one.
        recorded = int(live[event : next_event + 1].max())
        # A number is wrapped for each of the two modes that pass the call on, and unwrapped on the way back.
        allocated = trace.at(end) - base - 2 * 8 * num_numbers
        hidden = max(0, trace.highest(begin, end) - max(trace.at(begin), trace.at(end)))
        operators.append(Operator(name, recorded, allocated, hidden, num_numbers))
    return operators, recorder
