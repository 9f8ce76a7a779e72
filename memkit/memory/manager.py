"""`MemoryManager`: device and host memory per phase and step, cheap enough to leave on."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memkit._advice.suggest import Facts, Tip, suggest
from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import ConfigError, InputError, MemkitWarning, warn_user
from memkit._core.foreign import PEAK, START, SUMMARY
from memkit._core.printable import counted
from memkit._core.protocols import Closing, Uncopied
from memkit._core.records import MemorySnapshot
from memkit._core.settings import Checker
from memkit._core.units import format_bytes, parse_budget
from memkit._core.words import guided
from memkit._machine import devices
from memkit._recovery.attempt import ReportingErrors
from memkit._recovery.errors import describe_error
from memkit.memory.advice import find_tips
from memkit.memory.batch_shapes import batch_shapes
from memkit.memory.journal import EventJournal, header_of
from memkit.memory.leaks import Leaks, LeakWatch
from memkit.memory.ledger import Ledger, Phase
from memkit.memory.notes import noted_leak
from memkit.memory.phases import PhaseTotals
from memkit.memory.postmortem import evidence_path, write_post_mortem
from memkit.memory.sharing import DeviceClaim
from memkit.memory.summary import memory_figures, snapshot_rows, summarize, summarize_line
from memkit.memory.track import Tracker

_LOGGER = logging.getLogger("memkit")
_RELEASE_INTERVAL_S = 10.0
_MOST_NOTED = 3  # leaks listed in one event of the log
_RESERVE_BYTES = 2**20  # held in reserve for writing a post-mortem, and freed first


_SNAPSHOT = (
    "memory.snapshot().{0} (None on a device that does not count it, such as a CPU; print(memory) shows what is known)"
)
_ABSENT = {
    _SNAPSHOT.format("allocated_bytes"): "allocated allocated_bytes memory_allocated used used_bytes current",
    _SNAPSHOT.format("reserved_bytes"): "reserved reserved_bytes memory_reserved cached",
    _SNAPSHOT.format("peak_bytes"): f"{PEAK} peak_bytes",
    "memory.snapshot().free_bytes": "free free_bytes",
    "memory.snapshot().total_bytes": "total total_bytes",
    "memory.available_bytes()": "available get_available_memory",
    "memory.release()": "empty_cache clear_cache clear cleanup clean free_memory optimize_memory collect",
    "MemoryManager(reset_peaks=True), which makes the peak of every phase exact": (
        "reset_peak_memory_stats reset_peak reset_peaks reset"
    ),
    "memory.summary()": f"{SUMMARY} memory_summary memory_stats get_memory_info get_memory_stats print stats",
    "memory.mark('name')": "log log_memory log_memory_usage record checkpoint",
    "with memory.track() as tracker: ...": "profile profiler monitor trace",
    "with memory.phase('name'): ...": START,
    "memory.leaks()": "check_leaks find_leaks detect_leaks",
    "memory.events.save('memory_events.jsonl')": "save export dump",
    "memory.budget_bytes": "limit",
    "with memory.recorded_step('evidence', batch): ...": "flight_recorder record_step recorder",
}


@guided(
    words={"device": "target", "log": "path output"},
    absent=_ABSENT,
    methods=(
        "phase",
        "mark",
        "track",
        "release",
        "step",
        "post_mortem",
        "recorded_step",
        "leaks",
        "summary",
        "snapshot",
    ),
)
class MemoryManager(Uncopied, Closing, Overviewed):
    """Report device and host memory (now, per phase, per step), find leaks and write the event log.

    It reads counters that exist anyway, and starts no thread. Each thread has its own phases. A forked process, such
    as a DataLoader worker, writes nothing to the log.

    Memory cost: about 0.2 kB of host memory for each event, up to ``max_events``. Time cost: 20 to 50 microseconds for
    a phase or a step during training on the CPU (``docs/memory-manager.md``); no cost between calls.

    Args:
        device: ``"auto"`` (the accelerator if there is one, otherwise the CPU), a name, or a device.
        budget: Limit on the memory to use: bytes, text such as ``"22GiB"``, or a fraction as a float in (0, 1].
        reset_peaks: False leaves torch's peak counter alone, so that ``max_memory_allocated()`` stays correct for all
            other code; a phase's own peak is then known only if it sets a new record. True makes every phase's peak
            exact, by resetting the counters (on the CPU under Linux, the kernel's count for the process) at each phase.
        log: A file to which every event is appended, readable even after the process is killed: marks are written
            immediately, ends of phases and steps are batched if several come within half a second. With several
            ranks, each writes its own file:
            ``"memory_events.jsonl"`` becomes ``"memory_events.rank3.jsonl"``.
        line_every: Log a line at level INFO to the logger ``"memkit"`` every this many steps; None disables it.
        max_events: Maximum number of events to keep in memory.
        allocator_history: On CUDA, how many of the allocator's last actions torch keeps for a post-mortem's snapshot,
            each with the lines that requested it: several kB of host memory each. It is recorded for the whole process,
            until `close`. 0 leaves torch's own setting alone.

    Attributes:
        device: The device.
        budget_bytes: The budget in bytes; None if no budget was given.
        num_steps: Number of calls to `step`.

    Raises:
        ConfigError: This machine has no such device, the device holds no memory (``"meta"``), or another argument is
            invalid.
        InputError: The budget is negative, or text that is not a size; or the log's directory does not exist.
        OSError: The log file cannot be opened.
        StateError: Another manager, in this process or another one, is writing to this log.

    Example:
        >>> import memkit as mk
        >>> memory = mk.MemoryManager("cpu")
        >>> with memory.phase("epoch"):
        ...     with memory.phase("forward"):
        ...         pass
        >>> list(memory.phases), memory.phases["epoch/forward"].num_calls
        (['epoch', 'epoch/forward'], 1)
    """

    instead = "make another MemoryManager; its log, if any, needs another path."

    def __init__(
        self,
        device: str | torch.device = "auto",
        budget: int | str | float | None = None,
        *,
        reset_peaks: bool = False,
        log: str | os.PathLike[str] | None = None,
        line_every: int | None = None,
        max_events: int = 10_000,
        allocator_history: int = 0,
    ) -> None:
        Checker("MemoryManager(...)").whole("allocator_history", allocator_history)
        self.device = devices.resolve_device(device)
        if self.device.type == "meta":
            raise ConfigError(
                "MemoryManager('meta')",
                got="meta",
                expected="a device that holds memory",
                fix="use mk.memory.Tracker instead.",
            )
        if line_every is not None:
            Checker("MemoryManager(...)").whole("line_every", line_every, 1)
        total_bytes = self._total_bytes()
        self.budget_bytes = None if budget is None else parse_budget(budget, total_bytes)
        self.num_steps = 0
        self._line_every = line_every
        self._released_at = float("-inf")
        self._reserve: bytearray | None = None
        self._leak_watch = LeakWatch()
        self._journal = EventJournal(header_of(self.device, total_bytes), path=log, max_events=max_events)
        self._ledger = Ledger(self.device, self._journal, reset_peaks=reset_peaks)
        weakref.finalize(self, _finish, self._ledger, self._journal)  # also at the end of the program
        self._stop_history: weakref.finalize[[torch.device, int], MemoryManager] | None = None
        if allocator_history:
            devices.record_allocator_history(self.device, allocator_history)
            self._stop_history = weakref.finalize(self, devices.record_allocator_history, self.device, 0)
            self._stop_history.atexit = False
        identity = devices.device_identity(self.device)
        self._claim = None if identity is None else DeviceClaim(identity)
        self._warn_of_sharing()

    # ------------------------------------------------------------------------------------------------- now

    def snapshot(self) -> MemorySnapshot:
        """Read all counters, including the driver's. A counter that the backend does not have is None."""
        device, host = devices.device_memory(self.device), devices.host_memory()
        on_cpu, tracker, allocated = (
            self.device.type == "cpu",
            self._ledger.here.tracker,
            device.allocated_bytes,
        )
        self._ledger.read()
        if allocated is None and tracker is not None:
            allocated = tracker.live_bytes
        return MemorySnapshot(
            allocated_bytes=allocated,
            reserved_bytes=device.reserved_bytes,
            peak_bytes=self._ledger.peak_bytes,
            free_bytes=host.available_bytes if on_cpu else device.free_bytes,
            total_bytes=host.total_bytes if on_cpu else device.total_bytes,
            host_rss_bytes=host.rss_bytes,
            host_peak_bytes=max(host.rss_bytes, self._ledger.host_peak_bytes),
            host_available_bytes=host.available_bytes,
            host_total_bytes=host.total_bytes,
            host_limited_by=host.limited_by,
        )

    def available_bytes(self) -> int:
        """Return the bytes still available to tensors: free on the device or cached by torch, within the budget.

        On the CPU, the tightest of machine, container and resource limits applies, and the budget covers the whole
        process, by its resident bytes; on an accelerator the budget covers this process's tensors.
        """
        if self.device.type == "cpu":
            host = devices.host_memory()
            available, used = host.available_bytes, host.rss_bytes
        else:
            device = devices.device_memory(self.device)
            used, reserved = device.allocated_bytes or 0, device.reserved_bytes or 0
            free = device.free_bytes
            if free is None:  # MPS: relative to the driver's recommended maximum
                free = max(0, (device.total_bytes or 0) - reserved)
            available = free + reserved - used
        return available if self.budget_bytes is None else max(0, min(available, self.budget_bytes - used))

    def _overview(self) -> Overview:
        snapshot, available = self.snapshot(), format_bytes(self.available_bytes())
        headline = f"{self.device}: {available} available"
        if self.budget_bytes is not None:
            headline += f" within a budget of {format_bytes(self.budget_bytes)}"
        rows = snapshot_rows(snapshot, self._ledger.watched_bytes, is_cpu=self.device.type == "cpu")
        phases = [(f"phase {path}", _phase_cell(totals)) for path, totals in self.phases.items() if totals.num_calls]
        return Overview(headline, [*rows, ("steps", str(self.num_steps)), *phases], [str(tip) for tip in self.advice()])

    def figures(self) -> dict[str, int]:
        """Return the bytes held now as scalars for a logger: TensorBoard, Weights & Biases, MLflow or any other.

        Returns:
            Bytes by name, such as ``"memory/allocated_bytes"``, ``"memory/reserved_bytes"``, ``"memory/peak_bytes"``
            (of the run) and ``"memory/host_resident_bytes"``. Figures that the device does not count are left out.

        Example:
            >>> import memkit as mk
            >>> memory = mk.MemoryManager("cpu")
            >>> list(memory.figures())
            ['memory/host_resident_bytes']
        """
        tracker = self._ledger.here.tracker
        counters = replace(self._ledger.read(), peak_bytes=self._ledger.peak_bytes)
        if counters.allocated_bytes is None and tracker is not None:
            counters = replace(counters, allocated_bytes=tracker.live_bytes)
        return {f"memory/{name}": value for name, value in memory_figures(counters).items()}

    def line(self) -> str:
        """Return a human-readable line: device and host memory now."""
        return summarize_line(self.snapshot(), str(self.device), self._ledger.watched_bytes)

    def summary(self) -> str:
        """Return a human-readable report: the line from `line`, a table of all phases, and advice."""
        watched_bytes = self._ledger.watched_bytes
        return summarize(self.snapshot(), str(self.device), self.phases, self.advice(), watched_bytes)

    def advice(self) -> list[Tip]:
        """Return suggested changes to the environment, with the figures behind them. Nothing is changed."""
        counters = replace(
            self._ledger.read(),
            peak_bytes=self._ledger.peak_bytes,
            reserved_peak_bytes=self._ledger.reserved_peak_bytes,
        )
        others = self._claim.others() if self._claim else ()
        return find_tips(counters, devices.host_memory(), devices.allocator_settings(), others)

    # ------------------------------------------------------------------------------------ phases and steps

    @property
    def phases(self) -> dict[str, PhaseTotals]:
        """Totals of each phase so far, by path such as ``"step/forward"``."""
        self._ledger.settle()
        return self._ledger.phases

    @property
    def events(self) -> EventJournal:
        """The events so far; ``events.save(path)`` writes them to a file."""
        self._ledger.settle()
        return self._journal

    def phase(self, name: str) -> Phase:
        """Return a context that measures its block (time and peak) and records an event at its end. Phases nest.

        As a decorator, ``@memory.phase("augment")``, it does so for each call of the function.

        Args:
            name: Name of the phase, such as ``"forward"``.

        Raises:
            InputError: The name is empty, or not text.
        """
        if type(name) is not str or not name:  # here, because each phase would enter another function
            raise _unnamed("phase", name, "forward")
        return Phase(self._ledger, name)

    def mark(self, name: str, *, component: str | None = None, note: dict[str, Any] | None = None) -> None:
        """Record an event with the current counters: ``memory.mark("vae_loaded")``.

        Args:
            name: The event's name.
            component: The part of the model that the event is about.
            note: Anything else, as plain JSON values; NaN and infinity are written as texts.

        Raises:
            InputError: The name is empty, or the note is not plain JSON (also as InputTypeError).
        """
        if type(name) is not str or not name:
            raise _unnamed("mark", name, "vae_loaded")
        self._ledger.mark(name, self._ledger.here.path, component=component, note=note)

    def step(self) -> None:
        """Record the end of an optimizer step; every ``line_every`` steps, log a line."""
        self._end_step(None)

    def recorded_step(self, directory: str | os.PathLike[str], batch: Any = None) -> AbstractContextManager[None]:
        """Return a context that records a training step, and keeps the evidence if it runs out of memory.

        This is a flight recorder. A block that ends without an error is a `step`.

        The last ``max_events`` events (steps with the shapes of their batches, phases, marks) are in memory; nothing is
        written unless the block runs out of memory. Then `post_mortem` writes its files.

        Args:
            directory: Output directory for the evidence, created if missing.
            batch: The batch, whose shapes are recorded; None records no shapes.

        Example:
            >>> import tempfile
            >>> import memkit as mk
            >>> memory = mk.MemoryManager("cpu")
            >>> for batch in torch.ones(3, 8, 16):
            ...     with memory.recorded_step(tempfile.gettempdir(), batch):
            ...         pass  # forward, backward, optimizer.step()
            >>> [event.note["batch"] for event in memory.events][-1]
            ['float32[8, 16]']
        """
        note = None if batch is None else {"batch": batch_shapes(batch)}
        return self._evidence(directory, note, done=partial(self._end_step, note))

    def _end_step(self, note: dict[str, Any] | None) -> None:
        self.num_steps = self._ledger.step(note)
        is_due = self._line_every is not None and self.num_steps % self._line_every == 0
        if is_due and _LOGGER.isEnabledFor(logging.INFO):
            _LOGGER.info("step %d, %s", self.num_steps, self.line())

    # ------------------------------------------------------------------------------------------ looking deeper

    @contextlib.contextmanager
    def track(self, *, workspace: bool = False) -> Iterator[Tracker]:
        """Track a block exactly: live bytes by category, module, operator and line (``docs/track.md``).

        Args:
            workspace: Also count memory that operators allocate and free internally.
        """
        here = self._ledger.here
        here.failure = None  # another error may come with the same id
        tracker, is_whole, kept = Tracker(device=self.device, workspace=workspace), False, None
        try:
            with tracker:
                here.trackers.append(tracker)
                try:
                    yield tracker
                    is_whole = True
                except BaseException as error:
                    here.note_error(error)
                    raise
                finally:
                    here.trackers.remove(tracker)
                    kept = self._ledger.kept_in(tracker) if is_whole else {}
        finally:
            if kept is not None:  # its workspace is known from here on
                self._ledger.note_watched(tracker, here.path, kept, is_whole=is_whole)

    def leaks(self) -> Leaks:
        """Return what has grown since the last call and what holds it; call it every step, or every few steps.

        The first call takes the baseline and compares nothing; most leaks need three calls
        (``docs/memory-manager.md``). The returned list says so when printed, and through ``is_baseline`` and
        ``is_certain``.
        """
        leaks = self._leak_watch.check()
        if leaks:
            self.mark("leaks", note={"kept": [noted_leak(leak) for leak in leaks[:_MOST_NOTED]]})
        return leaks

    def release(self, *, min_interval_s: float = _RELEASE_INTERVAL_S) -> int:
        """Free unused memory: reference cycles, torch's cached blocks, the C library's free heap.

        It also clears the local variables of the last uncaught error, which a notebook keeps for its debugger, along
        with all their tensors. This pays off between phases of different sizes and after an out-of-memory error; at
        every step it only costs time, so calls that come too soon do nothing.

        Args:
            min_interval_s: Minimum time since the last release, in seconds; an earlier call does nothing.

        Returns:
            Bytes returned to the device, or on the CPU to the system; 0 if the call came too soon.

        Raises:
            ConfigError: ``min_interval_s`` is not a finite number of 0 or more.
        """
        Checker("release(...)").number("min_interval_s", min_interval_s, 0)
        now = time.monotonic()
        if now - self._released_at < min_interval_s:
            return 0
        self._released_at = now
        before = self._held_bytes()
        _clear_last_error()
        devices.release_cached_memory()
        given_back = max(0, before - self._held_bytes())
        self.mark("release", note={"given_back_bytes": given_back})
        return given_back

    def post_mortem(self, directory: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a context that writes files about an out-of-memory error that leaves its block, and re-raises it.

        A failure while writing is only a warning: the error that propagates is always the block's own.

        Args:
            directory: Output directory, created if missing. Each rank writes ``out-of-memory.json``, with the phase,
                live bytes by category, the largest storages and what holds them, and the last events;
                ``out-of-memory.jsonl``, a log of all events in memory, for ``memkit report``; and on CUDA
                ``out-of-memory.pickle``, the allocator's snapshot. They replace those of an earlier error.
        """
        return self._evidence(directory, None)

    def _evidence(
        self, directory: str | os.PathLike[str], note: dict[str, Any] | None, done: Callable[[], None] | None = None
    ) -> AbstractContextManager[None]:
        if self._reserve is None:
            self._reserve = bytearray(_RESERVE_BYTES)

        def tell(error: Exception, is_out_of_memory: bool) -> None:  # noqa: FBT001 - as the kernel calls it
            if is_out_of_memory:
                self._reserve = None
                self._write_post_mortem(directory, error, note or {})

        return ReportingErrors(tell, done)

    def close(self) -> None:
        """Close the log file and release the claim on the GPU. Later events are kept in memory only."""
        _finish(self._ledger, self._journal)
        if self._claim is not None:
            self._claim.close()
        if self._stop_history is not None:
            self._stop_history()

    # ---------------------------------------------------------------------------------------------- inside

    def _held_bytes(self) -> int:
        reserved = devices.allocator_counters(self.device).reserved_bytes
        return devices.resident_bytes() if reserved is None else reserved

    def _total_bytes(self) -> int | None:
        if self.device.type == "cpu":
            return devices.host_memory().total_bytes
        return devices.device_memory(self.device).total_bytes

    def _write_post_mortem(self, directory: str | os.PathLike[str], error: Exception, note: dict[str, Any]) -> None:
        phase, tracker = self._ledger.here.origin_of(error)
        try:
            what = {"error": type(error).__name__, "message": describe_error(error)}
            self._ledger.mark("out_of_memory", phase, note={**what, **note})
            path = evidence_path(directory)
            self.events.save(path.with_suffix(".jsonl"))  # first: it takes next to no memory
            write_post_mortem(
                path,
                error,
                device=self.device,
                phase=phase,
                snapshot=self.snapshot(),
                events=self.events,
                tracker=tracker,
            )
            _LOGGER.error("out of memory: see %s", path)
        except Exception as problem:  # noqa: BLE001 - nothing may hide the error being raised
            with contextlib.suppress(MemkitWarning):  # if warnings are errors
                warn_user(f"The post-mortem could not be written: {problem!r}")

    def _warn_of_sharing(self) -> None:
        others = self._claim.others() if self._claim else ()
        for tip in suggest(Facts(others=others)):
            warn_user(f"MemoryManager({str(self.device)!r}): {tip}")


def _unnamed(method: str, name: object, example: str) -> InputError:
    fix = f"pass a string such as {example!r}."
    return InputError(f"{method}({name!r})", got=repr(name), expected="a non-empty name", fix=fix)


def _phase_cell(totals: PhaseTotals) -> str:
    peak = totals.peak_bytes if totals.peak_bytes is not None else totals.host_peak_bytes
    whose = "tensors" if totals.peak_bytes is not None else "process"
    times = counted(totals.num_calls, "time")
    return times if peak is None else f"{times}, peak of {whose} {format_bytes(peak)}"


def _finish(ledger: Ledger, journal: EventJournal) -> None:
    """Write pending events and close the log file."""
    ledger.settle()
    journal.close()


def _clear_last_error() -> None:
    """Clear the locals of the last uncaught error and of the errors that caused it."""
    error = getattr(sys, "last_value", None)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
