"""Totals and events of a run's phases and steps: the part of the manager that is always on.

Between two blocks of a training step, none of this code is in the CPU caches: code that takes 5 microseconds in a tight
loop takes 40 there. So a block only records the counters at its ends. Computing the totals and the events waits until
they are read; for half a second at most with a log, otherwise for at most a second or a thousand blocks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from threading import get_ident
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from memkit._core.errors import InputError, InputTypeError, StateError, of_call
from memkit._core.records import DeviceMemory
from memkit._events.log import Event, with_text_for_nan
from memkit._events.phase_names import is_evaluation
from memkit._events.writer import text_of_first
from memkit._machine import devices
from memkit._torch.graph import next_sequence_number
from memkit.memory.journal import EventJournal
from memkit.memory.phases import IntervalPeak, PhaseTotals, RestartedPeaks, larger, peak_by_record
from memkit.memory.track import Tracker

_WRITTEN_NS, _KEPT_NS = 500_000_000, 1_000_000_000  # longest wait of events for a log, and of events only in memory
_MOST_ENDED = 1000  # blocks that wait; more are settled earlier
_CHILDREN_NS, _CHILDREN_SHARE = 500_000_000, 200  # child processes: a reading each 500 ms, in at most 1/200 of the time
_FIRST_SEARCH = _NEXT_SEARCH = 4  # a tracked block is searched for kept tensors after 4 steps, 16, 64 and so on
# Within it, a thread touches a few hundred kilobytes of new memory at most. The kernel's count lags behind by as much:
# it is kept for each processor, and summed up some pages at a time.
_FRESH_NS = 50_000
_STEADY_CALLS, _SHORT_NS = 16, 100_000_000  # a phase of 0.1 s or more is read each time
_NO_COUNTERS = DeviceMemory()
_P = ParamSpec("_P")
_R = TypeVar("_R")
_now = time.monotonic_ns  # looked up once: between two blocks, each lookup is a cache miss


class _NotOpen(list["Interval"]):
    """In place of the open phases, for a phase that is none of them."""

    def remove(self, phase: Interval) -> NoReturn:
        raise StateError(
            f"phase({phase.name!r}).__exit__(...)",
            got="a phase that is not open",
            expected="a phase that was entered, and that has not ended yet",
            fix=f"write `with memory.phase({phase.name!r}):`, which does both.",
        )


_NOT_OPEN = _NotOpen()


class Interval:
    """A stretch of a run: a phase or a step. It records the counters at its ends; `Ledger.settle` evaluates them.

    Args:
        ledger: The ledger that it belongs to.
        name: Its name.

    Attributes:
        name: Its name.
        neighbors: For an open phase, the open phases of the thread in which it began; for a step None.
        trackers: The open trackers of that thread.
        first: The device's counters at the beginning.
        last: The device's counters at the end.
        host_first: The process's peak of resident bytes at the beginning, in units of `devices.USAGE_UNIT`.
        host_last: The same at the end.
        is_steady: Whether neither is read for it: see `Ledger.steady`.
        start_ns: Time at the beginning, by the monotonic clock.
        end_ns: The same at the end.
        path: Path of the phases that it belongs to.
        step: Its number, if it is a step.
        error: Type of the error that left it.
        note: Additional values of its event.
        tracker: The innermost tracker when it began, with that moment as ``mark``.
        live_bytes: Live bytes counted by the tracker at the end, if there was one.
        first_node: Number of the next autograd node of the thread in which it began; None if it does not evaluate.
        num_nodes: Number of autograd nodes that its thread created in it; 0 if it does not evaluate.
        peak: Its peak, if known other than from the counter at both ends.
        host_peak: The same for the process's resident bytes.
    """

    __slots__ = (
        "_ledger",
        "end_ns",
        "error",
        "first",
        "first_node",
        "host_first",
        "host_last",
        "host_peak",
        "is_steady",
        "last",
        "live_bytes",
        "mark",
        "name",
        "neighbors",
        "note",
        "num_nodes",
        "path",
        "peak",
        "start_ns",
        "step",
        "tracker",
        "trackers",
    )
    name: str
    neighbors: list[Interval] | None
    trackers: list[Tracker]
    first: DeviceMemory
    last: DeviceMemory
    host_first: int
    host_last: int
    is_steady: bool
    start_ns: int
    end_ns: int
    path: str | None
    step: int | None
    error: str | None
    note: dict[str, Any] | None
    tracker: Tracker | None
    mark: int
    live_bytes: int | None
    first_node: int | None
    num_nodes: int
    peak: IntervalPeak | None
    host_peak: IntervalPeak | None

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self.name = name
        self.first = self.last = _NO_COUNTERS
        self.neighbors = _NOT_OPEN
        self.path = self.step = self.error = self.note = None
        self.tracker = self.live_bytes = self.first_node = self.peak = self.host_peak = None
        self.num_nodes = 0
        self.is_steady = False

    def end(
        self,
        kind: type[BaseException] | None = None,  # noqa: ARG002 - a phase's `__exit__` is this function
        error: BaseException | None = None,
        trace: TracebackType | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """Record the counters at the end, and queue the block for `Ledger.settle`.

        One function, and not several: between two blocks, each function called takes 2 microseconds more.
        """
        ledger = self._ledger
        if error is not None:
            ledger.here.note_error(error)
            self.error = type(error).__name__
        if self.neighbors is not None:
            self.neighbors.remove(self)  # usually the last, unless generators close in another order or thread
            self.neighbors = _NOT_OPEN
        try:
            self.end_ns = end_ns = _now()
            if self.first_node is not None:
                self.num_nodes = next_sequence_number() - self.first_node
            if ledger.read_device is not None:
                self.last = ledger.read_device()
            if (end_ns - ledger.read_ns > _FRESH_NS and not self.is_steady) or ledger.reset_peaks:
                ledger.usage = ledger.read_usage().ru_maxrss
                ledger.read_ns = end_ns
            self.host_last = ledger.usage
            if ledger.reset_peaks or self.trackers:
                self._find_peak()
            ended = ledger.ended
            ended.append(self)
            # After an error, the process may end.
            if end_ns >= ledger.due_ns or len(ended) >= _MOST_ENDED or error is not None:
                ledger.settle()
        except MemoryError:  # not enough memory to read the counters: the block's own error takes precedence
            if error is None:
                raise

    def _find_peak(self) -> None:
        if self._ledger.reset_peaks:
            self._ledger.end_peaks(self)
        if not self.trackers:
            return
        tracker = self.trackers[-1]
        self.live_bytes = tracker.live_bytes
        if self.tracker is tracker and self.last.peak_bytes is None:
            watched = tracker.peak_since(self.mark)  # no counter, but a tracker counted
            self.peak = IntervalPeak(watched, watched)


class Phase(Interval):
    """A block measured by `MemoryManager.phase`; single use, nested in the innermost open phase of its thread.

    As a decorator it measures each call of a function.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        ledger = self._ledger
        here = ledger.of_main if get_ident() == ledger.main_ident else ledger.here
        if self.path is not None:
            raise StateError(
                f"with phase({self.name!r})",
                got="a phase that was already entered",
                expected="a new phase for each `with` block",
                fix="write `with memory.phase(...)`, which creates a new phase on each call.",
            )
        here.failure = None  # another error may have the same id
        self.neighbors = neighbors = here.phases
        self.path = path = f"{neighbors[-1].path}/{self.name}" if neighbors else self.name
        if path not in ledger.phases:
            ledger.phases[path] = PhaseTotals()  # an outer block's row comes before those of inner blocks
            if is_evaluation(path):
                ledger.evaluations.add(path)
        self.trackers = trackers = here.trackers
        if trackers:
            self.tracker = tracker = trackers[-1]
            self.mark = tracker.mark()
        neighbors.append(self)
        if ledger.read_device is not None:
            self.first = ledger.read_device()
        if ledger.evaluations and path in ledger.evaluations:
            self.first_node = next_sequence_number()
        self.is_steady = is_steady = path in ledger.steady
        start_ns = _now()
        if (start_ns - ledger.read_ns > _FRESH_NS and not is_steady) or ledger.reset_peaks:
            ledger.usage = ledger.read_usage().ru_maxrss
            ledger.read_ns = start_ns
            start_ns = _now()
        self.host_first = ledger.usage
        if ledger.reset_peaks:
            ledger.begin_peaks(self)
            start_ns = _now()
        self.start_ns = start_ns

    __exit__ = Interval.end

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return the function with each of its calls as a phase: ``@memory.phase("augment")``.

        Raises:
            InputTypeError: It is no function, or its call returns before its code has run (a generator, a coroutine).
        """
        _check_function(function, self.name)
        ledger, name = self._ledger, self.name

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with Phase(ledger, name):
                return function(*args, **kwargs)

        return call


def _check_function(function: object, phase: str) -> None:
    returns_before = (
        inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.iscoroutinefunction(function)
    )
    if returns_before or not callable(function):
        name = getattr(function, "__qualname__", repr(function))
        raise InputTypeError(
            f"phase({phase!r})(function)",
            got=f"{name}, a generator or coroutine function, whose code runs after its call"
            if returns_before
            else repr(function),
            expected="a function whose code has run when its call returns",
            fix=f"write `with memory.phase({phase!r}):` around the code.",
        )


class OpenBlocks:
    """Open phases and trackers of a thread, and the origin of its last error.

    Attributes:
        phases: Open phases, the innermost last.
        trackers: Open trackers, the innermost last.
        failure: An error's id, with the path and the tracker where it was first seen. The error itself is not kept
            alive.
    """

    __slots__ = ("failure", "phases", "trackers")

    def __init__(self) -> None:
        self.phases: list[Interval] = []
        self.trackers: list[Tracker] = []
        self.failure: tuple[int, str | None, Tracker | None] | None = None

    @property
    def path(self) -> str | None:
        """Path of the innermost phase, such as ``"step/forward"``; None outside all phases."""
        return self.phases[-1].path if self.phases else None

    @property
    def tracker(self) -> Tracker | None:
        """The innermost tracker; None outside all trackers."""
        return self.trackers[-1] if self.trackers else None

    def note_error(self, error: BaseException) -> None:
        """Record the place of an error the first time it is seen."""
        if not self._has_seen(error):
            self.failure = (id(error), self.path, self.tracker)

    def origin_of(self, error: BaseException) -> tuple[str | None, Tracker | None]:
        """Return path and tracker where an error was first seen, and forget it; otherwise the current ones."""
        is_known = self._has_seen(error)
        failure, self.failure = self.failure, None
        return failure[1:] if failure is not None and is_known else (self.path, self.tracker)

    def _has_seen(self, error: BaseException) -> bool:
        """Whether this error, or its cause, has already passed through a phase."""
        links: list[BaseException] = [error]
        while links[-1].__cause__ is not None and links[-1].__cause__ not in links:
            links.append(links[-1].__cause__)
        return self.failure is not None and self.failure[0] in map(id, links)


class _OtherThread(threading.local):
    """The open blocks of a thread that is not the main one."""

    def __init__(self) -> None:
        self.blocks = OpenBlocks()


class Ledger:
    """Records phases, steps and marks.

    Args:
        device: The device.
        journal: Journal that receives the events.
        reset_peaks: Whether each block resets the peak counters.

    Attributes:
        of_main: Open phases and trackers of the main thread: between two blocks of a training step, ``threading.local``
            takes 3 microseconds more.
        main_ident: The main thread's ident.
        ended: Blocks that wait for `settle`.
        due_ns: Time of the next `settle`, by the monotonic clock.
        interval_ns: Time between two `settle`.
        phases: Totals of all phases, by path such as ``"step/forward"``, in order of first appearance.
        evaluations: Paths of those that evaluate, by their names: a report looks for graphs in them.
        steady: Paths of short phases that have not raised the process's peak in many calls. Reading it takes a third of
            a phase's time: for these phases, the next reading after them, at the end of the step or in `settle`, bounds
            the peak. As soon as one is higher than before, all are read again.
        reset_peaks: Whether each block resets the peak counters.
        peak_bytes: Largest allocated bytes of the device in the run; None if it has no counter.
        reserved_peak_bytes: Largest reserved bytes; None if it has no counter.
        host_peak_bytes: Largest resident bytes of this process in the run.
        watched_bytes: Largest bytes of tensors that a `MemoryManager.track` has seen; None before the first one ends.
        read_device: Reads the device's counters; None if it has none.
        usage: What that read last, at most 50 microseconds before it is used.
        read_ns: When, by the monotonic clock.
        read_usage: Reads the peak of resident bytes since the counter was restarted, as `devices.ResidentPeak` does.
    """

    def __init__(self, device: torch.device, journal: EventJournal, *, reset_peaks: bool) -> None:
        # First what each block uses, so that it is together in memory.
        self.main_ident = threading.main_thread().ident
        self.of_main = OpenBlocks()
        self.phases: dict[str, PhaseTotals] = {}
        self.evaluations: set[str] = set()
        self.steady: set[str] = set()
        self.read_device = devices.allocator_counter(device)
        self._host_peak = devices.ResidentPeak()
        self._host_peak.read()
        self.read_usage = self._host_peak.read_usage
        self.read_ns = self.usage = 0
        self.reset_peaks = reset_peaks
        self.ended: deque[Interval] = deque()
        self.due_ns = 0
        self.interval_ns = _WRITTEN_NS if journal.is_written else _KEPT_NS
        self.peak_bytes: int | None = None
        self.reserved_peak_bytes: int | None = None
        self.host_peak_bytes = 0
        self.watched_bytes: int | None = None
        self._of_others = _OtherThread()
        self._device = device
        self._journal = journal
        self._peaks = RestartedPeaks(self._restart_peak)
        self._host_peaks = (
            RestartedPeaks(self._restart_host_peak) if reset_peaks and self._host_peak.restart() else None
        )
        self.read_usage = self._host_peak.read_usage
        self._num_steady = Counter[str]()  # calls of each phase since the process's peak rose
        self._children_due_ns = 0
        self._firsts: dict[tuple[str, str], str] = {}  # the beginning of the text of events by name and path
        self._num_steps = 0
        self._step = self._begin_step(None, self.here.trackers)

    @property
    def here(self) -> OpenBlocks:
        """The open phases and trackers of this thread."""
        return self.of_main if get_ident() == self.main_ident else self._of_others.blocks

    def step(self, note: dict[str, Any] | None = None) -> int:
        """End a step, begin the next one, and return the number of steps so far.

        Args:
            note: Additional values of the step's event, as plain JSON values, which are not checked.
        """
        here, step = self.of_main if get_ident() == self.main_ident else self.here, self._step
        step.note, step.trackers = note, here.trackers
        if here.phases:
            step.path = here.phases[-1].path
        step.end()
        if here.trackers:
            self._search_kept(here.trackers[-1], here.path)
        self._step = self._begin_step(step, here.trackers)
        return self._num_steps - 1

    def _search_kept(self, tracker: Tracker, path: str | None) -> None:
        """Search now and then for tensors that every step keeps: after the block, its function's variables are gone."""
        tracker.num_steps += 1
        if tracker.num_steps == _NEXT_SEARCH ** round(math.log(tracker.num_steps, _NEXT_SEARCH)) > 1:
            note = tracker.note_of_kept()
            if note:
                self.mark("kept", path, note={"num_steps": tracker.num_steps, **note})

    def _begin_step(self, last: Interval | None, trackers: list[Tracker]) -> Interval:
        self._num_steps += 1
        step = Interval(self, f"step_{self._num_steps}")
        step.step, step.neighbors = self._num_steps, None
        if trackers:
            step.tracker, step.mark = trackers[-1], trackers[-1].mark()
        if last is not None and not self.reset_peaks:  # it begins with the counters with which the last one ended
            step.first, step.host_first = last.last, last.host_last
            return step
        if self.read_device is not None:
            step.first = self.read_device()
        self.usage = step.host_first = self.read_usage().ru_maxrss
        if self.reset_peaks:
            self.begin_peaks(step)
        return step

    def kept_in(self, tracker: Tracker) -> dict[str, Any]:
        """Return the note on tensors that a block of several steps leaves behind; call it inside the block."""
        return tracker.note_of_kept() if tracker.num_steps >= _FIRST_SEARCH else {}

    def note_watched(self, tracker: Tracker, path: str | None, kept: Mapping[str, Any], *, is_whole: bool) -> None:
        """Record the peak of a tracker whose block has ended, also as an event: it may be the only peak in the log.

        The event of a new peak, or of a block of several steps, also splits the peak. After several steps, it also
        lists the tensors that the block left behind.

        Args:
            tracker: The tracker.
            path: Path of the phases around it.
            kept: What `kept_in` returned.
            is_whole: Whether the block finished. An error that leaves it may be an out-of-memory error, so the event
                then has neither the split nor the list.
        """
        peak_bytes = tracker.peak_bytes if tracker.counts_workspace else tracker.peak_since(0)
        is_new = self.watched_bytes is None or peak_bytes > self.watched_bytes
        self.watched_bytes = larger(self.watched_bytes, peak_bytes)
        counters = self.read()
        values: dict[str, Any] = {"event": "track", "phase": path}
        note: dict[str, Any] = {}
        if is_whole and (is_new or tracker.num_steps >= _FIRST_SEARCH):
            note = {"num_steps": tracker.num_steps, **tracker.note_of_peak(), **kept}
        if counters.peak_bytes is None:
            values["peak_bytes"] = peak_bytes
        else:  # the counter sees more than this block
            note["tracked_peak_bytes"] = peak_bytes
        values["note"] = note or None
        text = text_of_first(values)
        self._journal.add(
            [self._text(text, time.monotonic_ns(), counters, tracker.live_bytes, devices.resident_bytes())]
        )

    def begin_peaks(self, block: Interval) -> None:
        """Reset the peak counters for a block."""
        self._peaks.begin(block, block.first.peak_bytes)
        if self._host_peaks is not None:
            self._host_peaks.begin(block, block.host_first * devices.USAGE_UNIT)

    def end_peaks(self, block: Interval) -> None:
        """Record the peak counters at the end of a block."""
        block.peak = self._peaks.end(block, block.last.peak_bytes)
        if self._host_peaks is not None:
            block.host_peak = self._host_peaks.end(block, block.host_last * devices.USAGE_UNIT)

    def settle(self) -> None:
        """Compute totals and events of the blocks that have ended, and write the events."""
        now_ns = time.monotonic_ns()
        self.due_ns = now_ns + self.interval_ns
        self.read_usage = self._host_peak.read_usage  # by now perhaps the quick one
        self._wall_minus_monotonic_s = time.time() - now_ns / 1e9
        texts, blocks = [], self._take_ended()
        for block in blocks:
            if block.first is not _NO_COUNTERS:
                self._keep(block.first, 0)
            host_first, host_last = block.host_first * devices.USAGE_UNIT, block.host_last * devices.USAGE_UNIT
            has_risen = max(host_first, host_last) > self.host_peak_bytes
            self._keep(block.last, max(host_first, host_last))
            peak = block.peak or peak_by_record(block.first.peak_bytes, block.last.peak_bytes)
            note = block.note if block.error is None else {"error": block.error}
            if block.step is None:
                host_peak = block.host_peak or peak_by_record(host_first, host_last)
                first = self._add_phase(block, peak, host_peak, has_risen=has_risen)
                if note is None and block.num_nodes > 0:  # less if the block ended in another thread
                    first = f'{first},"note":{{"graph_nodes":{block.num_nodes}}}'
            else:
                first = text_of_first({"event": block.name, "phase": block.path, "step": block.step})
            if note is not None:
                first = f"{first},{text_of_first({'note': note})[1:]}"
            if peak.known is not None:
                first = f'{first},"peak_bytes":{peak.known}'
            resident_bytes = devices.resident_bytes() if block is blocks[-1] else None  # it ended just now
            texts.append(self._text(first, block.end_ns, block.last, block.live_bytes, resident_bytes))
        if texts:
            self._journal.add(texts)

    def _add_phase(self, block: Interval, peak: IntervalPeak, host_peak: IntervalPeak, *, has_risen: bool) -> str:
        """Add a phase to the totals of its path, and return the beginning of its event's text."""
        path, duration_ns = str(block.path), block.end_ns - block.start_ns
        self.phases[path].add(duration_ns, peak, host_peak)
        if not has_risen and duration_ns < _SHORT_NS and not self.reset_peaks:
            self._num_steady[path] += 1
            if self._num_steady[path] == _STEADY_CALLS:
                self.steady.add(path)
        first = self._firsts.get((block.name, path))
        if first is None:
            first = text_of_first({"event": block.name, "phase": path})
            self._firsts[block.name, path] = first
        return f'{first},"duration_ns":{duration_ns}'

    def _take_ended(self) -> list[Interval]:
        """Take the blocks that wait, and give those that were not read the next reading after them."""
        blocks: list[Interval] = []
        with contextlib.suppress(IndexError):  # not checked beforehand, since another thread may take the last one
            while True:
                blocks.append(self.ended.popleft())
        usage: int | None = None
        for block in reversed(blocks):
            if not block.is_steady:
                usage = block.host_last
                continue
            if usage is None:
                usage = self.read_usage().ru_maxrss
            block.host_first = block.host_last = usage
        return blocks

    def read(self) -> DeviceMemory:
        """Update the run's peaks, and return the device's counters."""
        self.settle()
        counters = _NO_COUNTERS if self.read_device is None else self.read_device()
        self._keep(counters, self._host_peak.read())
        return counters

    def mark(
        self, name: str, path: str | None, *, component: str | None = None, note: dict[str, Any] | None = None
    ) -> None:
        """Record an event with the current counters, and write it.

        Raises:
            InputError: The name is empty, or the note is not plain JSON (also as InputTypeError).
        """
        counters, tracker = self.read(), self.here.tracker
        plain = with_text_for_nan(note)  # the step that diverged must not end the training that writes it down
        values: dict[str, Any] = {"event": name, "phase": path, "component": component, "note": plain}
        try:
            Event(**values)
        except (InputError, InputTypeError) as error:
            raise of_call("memory.mark(...)", error) from None
        live_bytes = None if tracker is None else tracker.live_bytes
        resident_bytes = devices.resident_bytes()
        text = text_of_first(values)
        self._journal.add([self._text(text, time.monotonic_ns(), counters, live_bytes, resident_bytes)])

    def _text(
        self,
        first: str,
        time_ns: int,
        counters: DeviceMemory,
        live_bytes: int | None,
        resident_bytes: int | None,
    ) -> str:
        """Complete an event's text, of which the first values are given."""
        if resident_bytes is not None and resident_bytes > self.host_peak_bytes:  # the kernel counts in batches
            self.host_peak_bytes = resident_bytes
        text = f'{first},"time_ns":{time_ns},"wall_s":{time_ns / 1e9 + self._wall_minus_monotonic_s}'
        text = f'{text},"host_peak_bytes":{self.host_peak_bytes}'
        others: dict[str, int | None] = {}
        if live_bytes is not None:
            others["allocated_bytes"] = live_bytes
        if resident_bytes is not None:
            others["host_rss_bytes"] = resident_bytes
        if time_ns >= self._children_due_ns:
            others["children_bytes"] = self._read_children()
        if counters is not _NO_COUNTERS:
            if counters.allocated_bytes is not None:
                others["allocated_bytes"] = counters.allocated_bytes
            others["peak_total_bytes"] = self.peak_bytes
            others["reserved_bytes"] = counters.reserved_bytes
            others["reserved_peak_bytes"] = self.reserved_peak_bytes
        if not others:
            return f"{text}}}"
        return "".join([text, *[f',"{name}":{value}' for name, value in others.items() if value is not None], "}"])

    def _read_children(self) -> int | None:
        """Read the bytes of child processes; it sets when next, as many or large processes take long to read."""
        start_ns = time.monotonic_ns()
        num_bytes = devices.children_bytes()
        end_ns = time.monotonic_ns()
        self._children_due_ns = end_ns + max(_CHILDREN_NS, _CHILDREN_SHARE * (end_ns - start_ns))
        return num_bytes

    def _keep(self, counters: DeviceMemory, host_peak: int) -> None:
        """Merge a reading into the run's peaks, which stay correct even if other code resets a counter later."""
        if counters.peak_bytes is not None:
            self.peak_bytes = larger(self.peak_bytes, counters.peak_bytes)
            self.reserved_peak_bytes = larger(self.reserved_peak_bytes, counters.reserved_peak_bytes)
        if host_peak > self.host_peak_bytes:
            self.host_peak_bytes = host_peak
            self.steady.clear()
            self._num_steady.clear()

    def _restart_peak(self) -> int | None:
        devices.reset_peak(self._device)
        return devices.peak_bytes(self._device)

    def _restart_host_peak(self) -> int:
        self._host_peak.restart()
        return self._host_peak.read()
