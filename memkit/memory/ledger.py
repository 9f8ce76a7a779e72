"""What a run's phases and steps took, and their events: the part of the manager that is on all the time.

Between two blocks of a training step nothing of this is in the processor's caches: code that takes 5 microseconds in a
loop of its own takes 40 there. So a block only notes the counters at its ends. What is made of them, the totals and the
events, waits until somebody looks, or a tenth of a second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from memkit._core.errors import InputError, StateError
from memkit._core.records import DeviceMemory
from memkit._events.log import Event
from memkit._events.writer import event_text
from memkit._machine import devices
from memkit.memory.journal import EventJournal
from memkit.memory.phases import IntervalPeak, PhaseTotals, RestartedPeaks, larger, peak_by_record
from memkit.memory.track import Tracker

_INTERVAL_NS = 100_000_000
_NO_COUNTERS = DeviceMemory()


class Interval:
    """A stretch of a run: a phase or a step. It notes the counters at its ends; `Ledger.settle` makes sense of them.

    Args:
        ledger: Who keeps it.
        name: What it is.

    Attributes:
        first: The device's counters at the beginning.
        last: The same at the end.
        path: Path of the phases that it belongs to.
        step: Its number, if it is a step.
        error: Type of the error that left it.
        trackers: The open ones of the thread in which it began.
        tracker: Who watched when it began, with the moment as ``mark``.
        live_bytes: What the tracker counted at the end, if there was one.
        peak: Its peak, where that is known by other means than by the counter at both ends.
        host_peak: The same for the process.
    """

    trackers: list[Tracker]
    mark: int
    # Most blocks never set these.
    first = last = _NO_COUNTERS
    path: str | None = None
    step: int | None = None
    error: str | None = None
    tracker: Tracker | None = None
    live_bytes: int | None = None
    peak: IntervalPeak | None = None
    host_peak: IntervalPeak | None = None

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self.name = name

    def begin(self) -> None:
        """Note the counters at the beginning."""
        ledger = self._ledger
        if ledger.read_device is not None:
            self.first = ledger.read_device()
        self.host_first = ledger.read_host()
        if ledger.reset_peaks:
            ledger.begin_peaks(self)
        self.start_ns = time.monotonic_ns()

    def end(self) -> None:
        """Note the counters at the end, and hand the block in."""
        ledger = self._ledger
        self.end_ns = end_ns = time.monotonic_ns()
        if ledger.read_device is not None:
            self.last = ledger.read_device()
        self.host_last = ledger.read_host()
        if ledger.reset_peaks:
            ledger.end_peaks(self)
        if self.trackers:
            tracker = self.trackers[-1]
            self.live_bytes = tracker.live_bytes
            if self.tracker is tracker and self.last.peak_bytes is None:
                watched = tracker.peak_since(self.mark)  # no counter, but somebody counted
                self.peak = IntervalPeak(watched, watched)
        ledger.ended.append(self)
        if end_ns - ledger.settled_ns >= _INTERVAL_NS or self.error is not None:  # after an error all may be over
            ledger.settle()


class Phase(Interval):
    """The block that `MemoryManager.phase` measures, once; inside the innermost open one of its thread."""

    def __enter__(self) -> None:
        ledger = self._ledger
        here = ledger.here
        if self.path is not None:
            raise StateError(
                f"with phase({self.name!r})",
                got="a phase that was entered before",
                expected="a new one for each block",
                fix="write `with memory.phase(...)`: each call makes a new one.",
            )
        here.failure = None  # another error may come with the same id
        self.neighbours = neighbours = here.phases
        self.path = path = f"{neighbours[-1].path}/{self.name}" if neighbours else self.name
        if path not in ledger.phases:
            ledger.phases[path] = PhaseTotals()  # a block's own line comes before those inside it
        self.trackers = here.trackers
        if self.trackers:
            self.tracker = tracker = self.trackers[-1]
            self.mark = tracker.mark()
        neighbours.append(self)
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._ledger.here.note_error(error)
            self.error = type(error).__name__
        self.neighbours.remove(self)  # mostly the last; not where generators are closed in another order, or elsewhere
        try:
            self.end()
        except MemoryError:  # there is no room to read counters: the block's own error is the one to pass
            if error is None:
                raise


class OpenBlocks(threading.local):
    """Phases and trackers that are open in a thread, and where its last error came from.

    Attributes:
        phases: Open phases, the innermost last.
        trackers: Open trackers, the innermost last.
        failure: An error's id, with the path and the tracker where it was seen first. The error itself is not kept, nor
            what it keeps.
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.trackers: list[Tracker] = []
        self.failure: tuple[int, str | None, Tracker | None] | None = None

    @property
    def path(self) -> str | None:
        """Path of the innermost phase, such as ``"step/forward"``; None outside of all."""
        return self.phases[-1].path if self.phases else None

    @property
    def tracker(self) -> Tracker | None:
        """The innermost tracker; None outside of all."""
        return self.trackers[-1] if self.trackers else None

    def note_error(self, error: BaseException) -> None:
        """Remember where an error is, the first time that it is seen."""
        if not self._has_seen(error):
            self.failure = (id(error), self.path, self.tracker)

    def origin_of(self, error: BaseException) -> tuple[str | None, Tracker | None]:
        """Return path and tracker of where an error was seen first, and forget it; else those of here."""
        is_known = self._has_seen(error)
        failure, self.failure = self.failure, None
        return failure[1:] if failure is not None and is_known else (self.path, self.tracker)

    def _has_seen(self, error: BaseException) -> bool:
        """Whether this error, or the one that it was raised from, came through a phase before."""
        links: list[BaseException] = [error]
        while links[-1].__cause__ is not None and links[-1].__cause__ not in links:
            links.append(links[-1].__cause__)
        return self.failure is not None and self.failure[0] in map(id, links)


class Ledger:
    """Books phases, steps and marks.

    Args:
        device: The device.
        journal: Where the events go.
        reset_peaks: Whether each block restarts the counters of largest values.

    Attributes:
        here: Where each thread is.
        ended: Blocks that wait for `settle`.
        settled_ns: When that was last, by the monotonic clock.
        phases: Totals of all phases, by path such as ``"step/forward"``, in order of first appearance.
        reset_peaks: Whether each block restarts the counters of largest values.
        peak_bytes: Largest allocated bytes of the device in the run; None where it keeps no count.
        reserved_peak_bytes: Largest reserved bytes; None where it keeps no count.
        host_peak_bytes: Largest resident bytes of this process in the run.
        watched_bytes: Largest bytes of tensors that a `MemoryManager.track` has seen; None before the first one ends.
        read_device: Reads the device's counters; None where it has none.
        read_host: Reads the largest resident bytes since their count was restarted.
    """

    def __init__(self, device: torch.device, journal: EventJournal, *, reset_peaks: bool) -> None:
        self.here = OpenBlocks()
        self.ended: deque[Interval] = deque()
        self.settled_ns = 0
        self.phases: dict[str, PhaseTotals] = {}
        self._host_peak = devices.ResidentPeak()
        self.peak_bytes: int | None = None
        self.reserved_peak_bytes: int | None = None
        self.host_peak_bytes = 0
        self.watched_bytes: int | None = None
        self.read_device = devices.allocator_counter(device)
        self.read_host = self._host_peak.read
        self._device = device
        self._journal = journal
        self.reset_peaks = reset_peaks
        self._peaks = RestartedPeaks(self._restart_peak)
        self._host_peaks = (
            RestartedPeaks(self._restart_host_peak) if reset_peaks and self._host_peak.restart() else None
        )
        self._num_steps = 0
        self._step = self._begin_step()

    def phase(self, name: str) -> Phase:
        """Make a phase."""
        if type(name) is not str or not name:
            raise InputError(f"phase({name!r})", got=repr(name), expected="a name", fix="pass text such as 'forward'.")
        return Phase(self, name)

    def step(self) -> int:
        """End a step, begin the next one, and return how many there were."""
        here = self.here
        self._step.path, self._step.trackers = here.path, here.trackers
        self._step.end()
        self._step = self._begin_step()
        return self._num_steps - 1

    def _begin_step(self) -> Interval:
        self._num_steps += 1
        step = Interval(self, f"step_{self._num_steps}")
        step.step = self._num_steps
        if self.here.trackers:
            step.tracker = self.here.trackers[-1]
            step.mark = step.tracker.mark()
        step.begin()
        return step

    def note_watched(self, peak_bytes: int) -> None:
        """Keep the largest bytes of a tracker that has ended."""
        self.watched_bytes = larger(self.watched_bytes, peak_bytes)

    def begin_peaks(self, block: Interval) -> None:
        """Restart the counters of largest values for a block."""
        self._peaks.begin(block, block.first.peak_bytes)
        if self._host_peaks is not None:
            self._host_peaks.begin(block, block.host_first)

    def end_peaks(self, block: Interval) -> None:
        """Note what they say at the block's end."""
        block.peak = self._peaks.end(block, block.last.peak_bytes)
        if self._host_peaks is not None:
            block.host_peak = self._host_peaks.end(block, block.host_last)

    def settle(self) -> None:
        """Make totals and events of what has ended, and write them."""
        self.settled_ns = time.monotonic_ns()
        self._wall_minus_monotonic_s = time.time() - self.settled_ns / 1e9
        texts = []
        for block in self._take_ended():
            self._keep(block.first, block.host_first)
            self._keep(block.last, block.host_last)
            peak = block.peak or peak_by_record(block.first.peak_bytes, block.last.peak_bytes)
            values: dict[str, Any] = {"event": block.name, "phase": block.path}
            if block.step is None:
                values["duration_ns"] = duration_ns = block.end_ns - block.start_ns
                host_peak = block.host_peak or peak_by_record(block.host_first, block.host_last)
                self.phases[str(block.path)].add(duration_ns, peak, host_peak)
            else:
                values["step"] = block.step
            if block.error is not None:
                values["note"] = {"error": block.error}
            if peak.known is not None:
                values["peak_bytes"] = peak.known
            resident_bytes = None if self.ended else devices.resident_bytes()  # the last one ended just now
            texts.append(self._text(values, block.end_ns, block.last, block.live_bytes, resident_bytes))
        if texts:
            self._journal.add(texts)

    def _take_ended(self) -> Iterator[Interval]:
        while True:
            try:
                block = self.ended.popleft()
            except IndexError:  # asked for, since another thread may take the last one
                return
            yield block

    def read(self) -> DeviceMemory:
        """Bring the run's largest values up to now, and return the device's counters."""
        self.settle()
        counters = _NO_COUNTERS if self.read_device is None else self.read_device()
        self._keep(counters, self.read_host())
        return counters

    def mark(
        self, name: str, path: str | None, *, component: str | None = None, note: dict[str, Any] | None = None
    ) -> None:
        """Note an event with the counters as they are, and write it.

        Raises:
            InputError: The name is empty, or the note holds no plain JSON (also as InputTypeError).
        """
        counters, tracker = self.read(), self.here.tracker
        values: dict[str, Any] = {"event": name, "phase": path, "component": component, "note": note}
        Event(**values)  # refuses here what is no event
        live_bytes = None if tracker is None else tracker.live_bytes
        resident_bytes = devices.resident_bytes()
        self._journal.add([self._text(values, time.monotonic_ns(), counters, live_bytes, resident_bytes)])

    def _text(
        self,
        values: dict[str, Any],
        time_ns: int,
        counters: DeviceMemory,
        live_bytes: int | None,
        resident_bytes: int | None,
    ) -> str:
        """Complete an event's values, and return its text."""
        if resident_bytes is not None and resident_bytes > self.host_peak_bytes:  # the kernel counts in batches
            self.host_peak_bytes = resident_bytes
        values["time_ns"] = time_ns
        values["wall_s"] = time_ns / 1e9 + self._wall_minus_monotonic_s
        values["allocated_bytes"] = live_bytes if counters.allocated_bytes is None else counters.allocated_bytes
        values["host_rss_bytes"] = resident_bytes
        values["host_peak_bytes"] = self.host_peak_bytes
        if counters is not _NO_COUNTERS:
            values["peak_total_bytes"] = self.peak_bytes
            values["reserved_bytes"] = counters.reserved_bytes
            values["reserved_peak_bytes"] = self.reserved_peak_bytes
        return event_text(values)

    def _keep(self, counters: DeviceMemory, host_peak: int) -> None:
        """Take what was read into the run's largest values: they stay true, whoever restarts a counter afterwards."""
        if counters.peak_bytes is not None:
            self.peak_bytes = larger(self.peak_bytes, counters.peak_bytes)
            self.reserved_peak_bytes = larger(self.reserved_peak_bytes, counters.reserved_peak_bytes)
        if host_peak > self.host_peak_bytes:
            self.host_peak_bytes = host_peak

    def _restart_peak(self) -> int | None:
        devices.reset_peak(self._device)
        return devices.peak_bytes(self._device)

    def _restart_host_peak(self) -> int:
        self._host_peak.restart()
        return self._host_peak.read()
