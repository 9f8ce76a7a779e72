"""What a run's phases and steps took, and their events: the part of the manager that is on all the time.

Between two blocks of a training step nothing of this is in the processor's caches: code that takes 5 microseconds in a
loop of its own takes 40 there. So a block only notes the counters at its ends. What is made of them, the totals and the
events, waits until somebody looks, or a tenth of a second.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Any

import torch

from memkit import _device
from memkit._errors import InputError, StateError
from memkit._events import Event
from memkit._records import DeviceMemory
from memkit.memory.journal import Journal
from memkit.memory.phases import Peak, PhaseTotals, RestartedPeaks, Whereabouts, larger, peak_by_record
from memkit.memory.track import Tracker

_INTERVAL_NS = 100_000_000


class Block:
    """A stretch of a run: a phase or a step. It notes the counters at its ends; `Ledger.settle` makes sense of them.

    Args:
        ledger: Who keeps it.
        name: What it is.

    Attributes:
        path: Path of the phases that it belongs to.
        step: Its number, if it is a step.
        error: Type of the error that left it.
        tracker: Who watched when it began, with the moment as ``mark``.
        live_bytes: What the tracker counted at the end, if there was one.
        peak: Its peak, where that is known by other means than by the counter at both ends.
        host_peak: The same for the process.
    """

    __slots__ = (
        "_ledger", "end_ns", "error", "first", "host_first", "host_last", "host_peak", "last", "live_bytes", "mark",
        "name", "path", "peak", "start_ns", "step", "tracker",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self.name = name
        self.path: str | None = None
        self.step: int | None = None
        self.error: str | None = None
        self.tracker: Tracker | None = None
        self.mark = 0
        self.live_bytes: int | None = None
        self.peak: Peak | None = None
        self.host_peak: Peak | None = None

    def begin(self) -> None:
        """Note the counters at the beginning."""
        ledger = self._ledger
        self.first = ledger.read_device()
        self.host_first = ledger.read_host()
        if ledger.peaks is not None:
            ledger.peaks.begin(self, self.first.peak_bytes)
        if ledger.host_peaks is not None:
            ledger.host_peaks.begin(self, self.host_first)
        self.start_ns = time.monotonic_ns()

    def end(self) -> None:
        """Note the counters at the end, and hand the block in."""
        self.end_ns = end_ns = time.monotonic_ns()
        ledger = self._ledger
        self.last = ledger.read_device()
        self.host_last = ledger.read_host()
        if ledger.peaks is not None:
            self.peak = ledger.peaks.end(self, self.last.peak_bytes)
        if ledger.host_peaks is not None:
            self.host_peak = ledger.host_peaks.end(self, self.host_last)
        trackers = ledger.here.trackers
        if trackers:
            self.live_bytes = trackers[-1].live_bytes
            if trackers[-1] is self.tracker and self.last.peak_bytes is None:
                watched = trackers[-1].peak_since(self.mark)  # no counter, but somebody counted
                self.peak = Peak(watched, watched)
        self.tracker = None
        ledger.ended.append(self)
        if end_ns - ledger.settled_ns >= _INTERVAL_NS or self.error is not None:  # after an error all may be over
            ledger.settle()


class Phase(Block):
    """The block that `MemoryManager.phase` measures, once; inside the innermost open one of its thread."""

    __slots__ = ("neighbours",)

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
        if here.trackers:
            self.tracker = here.trackers[-1]
            self.mark = self.tracker.mark()
        neighbours.append(self)
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._ledger.here.note_error(error)
            self.error = type(error).__name__
        self.neighbours.remove(self)  # mostly the last; not where generators are closed in another order, or elsewhere
        self.end()


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
        peaks: Who restarts the device's counter; None where nobody does.
        host_peaks: The same for the process.
        peak_bytes: Largest allocated bytes of the device in the run; None where it keeps no count.
        reserved_peak_bytes: Largest reserved bytes; None where it keeps no count.
        host_peak_bytes: Largest resident bytes of this process in the run.
        read_device: Reads the device's counters.
        read_host: Reads the largest resident bytes since their count was restarted.
    """

    def __init__(self, device: torch.device, journal: Journal, *, reset_peaks: bool) -> None:
        self.here = Whereabouts()
        self.ended: deque[Block] = deque()
        self.settled_ns = 0
        self.phases: dict[str, PhaseTotals] = {}
        self.peak_bytes: int | None = None
        self.reserved_peak_bytes: int | None = None
        self.host_peak_bytes = 0
        self.read_device = _device.allocator_counter(device)
        self.read_host = _device.resident_peak_counter()
        self._device = device
        self._journal = journal
        self.peaks = RestartedPeaks(self._restart_peak) if reset_peaks else None
        can_restart = reset_peaks and _device.restart_resident_peak()
        self.host_peaks = RestartedPeaks(self._restart_host_peak) if can_restart else None
        self._num_steps = 0
        self._step = self._begin_step()

    def phase(self, name: str) -> Phase:
        """Make a phase."""
        if type(name) is not str or not name:
            raise InputError(f"phase({name!r})", got=repr(name), expected="a name", fix="pass text such as 'forward'.")
        return Phase(self, name)

    def step(self) -> int:
        """End a step, begin the next one, and return how many there were."""
        self._step.path = self.here.path
        self._step.end()
        self._step = self._begin_step()
        return self._num_steps - 1

    def _begin_step(self) -> Block:
        self._num_steps += 1
        step = Block(self, f"step_{self._num_steps}")
        step.step = self._num_steps
        step.begin()
        return step

    def settle(self) -> None:
        """Make totals and events of what has ended, and write them."""
        self.settled_ns = time.monotonic_ns()
        while self.ended:
            block = self.ended.popleft()
            self._keep(block.first, block.host_first)
            self._keep(block.last, block.host_last)
            peak = block.peak or peak_by_record(block.first.peak_bytes, block.last.peak_bytes)
            values = {
                "event": block.name,
                "time_ns": block.end_ns,
                "phase": block.path,
                "step": block.step,
                "peak_bytes": peak.known,
                "host_rss_bytes": None if self.ended else _device.resident_bytes(),  # the last one ended just now
            }
            if isinstance(block, Phase):
                host_peak = block.host_peak or peak_by_record(block.host_first, block.host_last)
                values["duration_ns"] = block.end_ns - block.start_ns
                values["note"] = None if block.error is None else {"error": block.error}
                self.phases[str(block.path)].add(block.end_ns - block.start_ns, peak, host_peak)
            self._add(values, block.last, block.live_bytes)

    def read(self) -> DeviceMemory:
        """Bring the run's largest values up to now, and return the device's counters."""
        self.settle()
        counters = self.read_device()
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
        values: dict[str, Any] = {
            "event": name,
            "time_ns": time.monotonic_ns(),
            "phase": path,
            "component": component,
            "host_rss_bytes": _device.resident_bytes(),
            "note": note,
        }
        Event(**values)  # refuses here what is no event, not where it is written
        self._add(values, counters, None if tracker is None else tracker.live_bytes)

    def _add(self, values: dict[str, Any], counters: DeviceMemory, live_bytes: int | None) -> None:
        """Complete an event's values and hand them on."""
        values["wall_s"] = time.time() - (time.monotonic_ns() - values["time_ns"]) / 1e9
        values["allocated_bytes"] = live_bytes if counters.allocated_bytes is None else counters.allocated_bytes
        values["peak_total_bytes"] = self.peak_bytes
        values["reserved_bytes"] = counters.reserved_bytes
        values["reserved_peak_bytes"] = self.reserved_peak_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, values["host_rss_bytes"] or 0)  # the kernel counts in batches
        values["host_peak_bytes"] = self.host_peak_bytes
        self._journal.add(values)

    def _keep(self, counters: DeviceMemory, host_peak: int) -> None:
        """Take what was read into the run's largest values: they stay true, whoever restarts a counter afterwards."""
        if counters.peak_bytes is not None:
            self.peak_bytes = larger(self.peak_bytes, counters.peak_bytes)
            self.reserved_peak_bytes = larger(self.reserved_peak_bytes, counters.reserved_peak_bytes)
        self.host_peak_bytes = max(self.host_peak_bytes, host_peak)

    def _restart_peak(self) -> int | None:
        _device.reset_peak(self._device)
        return _device.peak_bytes(self._device)

    def _restart_host_peak(self) -> int:
        _device.restart_resident_peak()
        self.read_host = _device.resident_peak_counter()
        return self.read_host()
