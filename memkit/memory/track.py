"""`Tracker`: live bytes of a block of code, broken down by category, module, operator, line and phase."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch

from memkit._charts.overview import Overview, Overviewed
from memkit._core.errors import InputError, StateError
from memkit._core.foreign import PEAK, START, SUMMARY
from memkit._core.protocols import Uncopied
from memkit._core.settings import Checker
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit._machine.devices import resolve_device
from memkit._recorder.recorder import Recorder
from memkit._recorder.recording import IntArray, Label, Moment, Recording, StepPhase, StorageRecord
from memkit.memory.notes import note_of_kept, note_of_peak

_ROWS = 8  # per table of a summary
_SHOWN = 8  # parts of each split, when printed


class PeakPlace(NamedTuple):
    """Place where the peak was reached; unknown fields are empty, as for storages that existed before the block.

    Attributes:
        operator: The operator that allocated, or needed, the last bytes.
        module: Dotted name of the operator's module.
        source: The line of your code that called it, as ``"file:line in function"``.
        phase: The part of the step it ran in.
    """

    operator: str
    module: str
    source: str
    phase: str

    def __str__(self) -> str:
        parts = (self.operator, self.module and f"in {self.module}", self.phase, self.source and f"at {self.source}")
        return ", ".join(part for part in parts if part)


_ABSENT = {
    "tracker.peak_bytes": f"{PEAK} peak_memory_bytes",
    "tracker.live_bytes": "allocated current allocated_bytes live",
    "tracker.peak_by_category": "by_category categories breakdown",
    "tracker.peak_by_module": "by_module modules layers",
    "tracker.summary()": f"{SUMMARY} key_averages explain",
    "with memory.track() as tracker: ...": START,
    "tracker.timeline": "events history",
}


LABELS: dict[str, Label] = {
    "category": "category", "line": "source", "module": "module", "operator": "operator", "phase": "phase"
}  # fmt: skip
"""The labels of a recording, by the names that the properties ``peak_by_...`` give them."""


@guided(absent=_ABSENT, methods=("peak_since", "live_by", "top"))
class Tracker(Uncopied, Overviewed):
    """Track a block of code: its peak of live bytes and the breakdown of that peak.

    It sees every tensor that an operator creates or touches in this thread and in the threads that run autograd's
    backward. It changes no result and keeps no tensor alive. Trackers nest. One tracker tracks one block; exceptions
    propagate, and the live bytes at that moment can be read afterwards.

    Memory cost: about 0.3 kB of host memory for each storage that the block creates; with ``workspace``, 0.7 kB for
    each operator, and the profiler's events until the block ends.

    Args:
        device: The device to count bytes on: a device, ``"auto"`` for the accelerator (otherwise the CPU), or None for
            all devices together.
        workspace: Also count memory that operators allocate and free internally, from the allocator's own events (CPU,
            CUDA, ROCm). It appears as category ``"workspace"``, under the operator that allocated it.

    Raises:
        ConfigError: This machine has no such device.
        StateError: On entry: the tracker was used before, or ``workspace`` was requested while a profiler runs.
            On reading: the tracker has not been entered yet.

    Source:
        `docs/track.md`; checked against torch.profiler on 34 models, ``benchmarks/results/track_vs_profiler.json``.

    Example:
        >>> import torch
        >>> from memkit import Tracker
        >>> with Tracker(device="cpu") as tracker:
        ...     x = torch.ones(1024)
        ...     y = x * 2
        >>> tracker.peak_bytes, tracker.timeline.tolist(), tracker.peak_where.operator
        (8192, [4096, 8192], 'aten.mul.Tensor')
    """

    instead = "keep its results, such as peak_by_category, which are plain values."
    num_steps = 0
    """Number of steps that a `MemoryManager` has counted in the block."""

    def __init__(self, *, device: str | torch.device | None = "auto", workspace: bool = False) -> None:
        self._device = None if device is None else str(resolve_device(device))
        self._workspace = workspace
        self._recorder: Recorder | None = None
        self._is_over = False
        self._recording: Recording | None = None  # cached once the block has ended

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise StateError(
                "with tracker",
                got="a tracker that was already used",
                expected="one `with` block for each tracker",
                fix="create a new one: with memory.track() as tracker.",
            )
        self._recorder = self._make_recorder().__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(exc_type, exc, traceback)
        self._is_over = True

    def _make_recorder(self) -> Recorder:
        if not self._workspace:
            return Recorder()
        from memkit._recorder.workspace import (
            WorkspaceMarks,
        )  # needs a part of torch that may be removed: import only on demand

        return Recorder(marks=WorkspaceMarks())

    @property
    def _entered(self) -> Recorder:
        if self._recorder is None:
            raise StateError(
                "tracker",
                got="a tracker that has not been entered",
                expected="a block of code",
                fix="write `with memory.track() as tracker:`, and read the tracker inside the block or after it.",
            )
        return self._recorder

    @property
    def recording(self) -> Recording:
        """Every event and storage so far, on all devices; all other results are computed from it."""
        recording = self._recording or self._entered.recording()
        if self._is_over:
            self._recording = recording
        return recording

    @property
    def _asked(self) -> tuple[Recording, str | None]:
        """The recording and the device to query; an empty recording if nothing was live on that device."""
        return self._on_device(self.recording)

    def _on_device(self, recording: Recording) -> tuple[Recording, str | None]:
        if self._device is None or self._device in recording.devices:
            return recording, self._device
        return Recorder().recording(), None

    # ------------------------------------------------------------------------------------------------ answers

    @property
    def device(self) -> str | None:
        """The device whose bytes are counted; None for all devices together."""
        return self._device

    @property
    def counts_workspace(self) -> bool:
        """Whether memory that operators allocate and free internally is counted: ``workspace=True``."""
        return self._workspace

    @property
    def live_bytes(self) -> int:
        """Live bytes now; after the block, at its end."""
        return self._entered.live_bytes(self._device)

    def mark(self) -> int:
        """Return a marker of this moment, for `peak_since`."""
        return self._entered.num_events()

    def peak_since(self, mark: int) -> int:
        """Return the peak of live bytes since a moment inside the block, without workspace."""
        return self._entered.peak_since(mark, self._device)

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes so far."""
        recording, device = self._asked
        return recording.peak_bytes(device)

    @property
    def peak_by_category(self) -> dict[str, int]:
        """The peak by category; like every split, largest first and adding up to ``peak_bytes``.

        Categories: parameter, buffer, gradient, optimizer, input, activation, temporary, workspace.
        """
        return self._peak_by("category")

    @property
    def peak_by_module(self) -> dict[str, int]:
        """The peak by the module whose forward or backward allocated the bytes; ``""`` outside modules."""
        return self._peak_by("module")

    @property
    def peak_by_operator(self) -> dict[str, int]:
        """The peak by the operator that allocated the bytes; ``""`` for storages from before the block."""
        return self._peak_by("operator")

    @property
    def peak_by_line(self) -> dict[str, int]:
        """The peak by the line of your code that allocated the bytes; ``""`` for storages from before the block."""
        return self._peak_by("source")

    @property
    def peak_by_phase(self) -> dict[str, int]:
        """The peak by the part of the step that allocated the bytes: forward, backward, optimizer, other."""
        return self._peak_by("phase")

    @property
    def peak_where(self) -> PeakPlace | None:
        """Place where the peak was first reached; None if nothing was live."""
        recording, device = self._asked
        last = recording.peak_storage(device)
        return None if last is None else PeakPlace(last.operator, last.module, last.source, last.phase)

    @property
    def timeline(self) -> IntArray:
        """Live bytes after each event, in order: int64, shape ``(num_events,)``.

        `phases` gives the part of the step that an event belongs to, ``recording.event_storage`` the storage that it
        is about, and ``recording.storages()`` the operator that created that storage.
        """
        recording, device = self._asked
        return recording.timeline(device)

    @property
    def phases(self) -> tuple[tuple[int, StepPhase], ...]:
        """``(index into timeline, phase)`` at each change of phase."""
        return self._asked[0].phases

    def live_by(self, label: Literal["category", "module", "operator", "line", "phase", "device"]) -> dict[str, int]:
        """Split `live_bytes` as the properties split the peak, for example after an out-of-memory error.

        Args:
            label: ``"category"``, ``"module"``, ``"operator"``, ``"line"``, ``"phase"`` or ``"device"``.

        Raises:
            InputError: The label is unknown.
        """
        known = Checker("tracker.live_by(label)", InputError).choice("label", label, (*LABELS, "device"))
        recording, device = self._asked
        return recording.live_by(LABELS.get(known, "device"), device)

    def top(self, count: int = 10, *, at: Moment = "peak") -> tuple[StorageRecord, ...]:
        """Return the largest storages that were live at the peak, or at the end, largest first."""
        recording, device = self._asked
        return recording.top(count, device, at=at)

    def note_of_peak(self) -> dict[str, Any]:
        """Return a log's note on the peak so far, as plain JSON values: the peak split three ways."""
        recording, device = self._asked
        return note_of_peak(recording, device)

    def note_of_kept(self) -> dict[str, Any]:
        """Return a log's note on tensors that one line keeps making and that are still alive, as plain JSON values.

        Call it inside the block: it names the variable that holds them. The note is empty if there are none. With
        170,000 Python objects, the search takes 0.1 s; if it finds any, 0.4 s, since it collects reference cycles
        first.
        """
        recording, device = self._on_device(self._entered.live_recording())
        return note_of_kept(recording, device, self._entered.number_of)

    def _overview(self) -> Overview:
        where = self._device or "all devices"
        if self._recorder is None:
            return Overview(f"tracks {where} once its `with` block has begun")
        peak_bytes = self.peak_bytes
        rows = [("reached by", str(self.peak_where or "nothing"))]
        rows += [(f"live {'at the end' if self._is_over else 'now'}", format_bytes(self.live_bytes))]
        for title, split in (("", self.peak_by_category), ("module ", self.peak_by_module)):
            shown = [each for each in split.items() if each[1]][:_SHOWN]
            rows += [(f"{title}{name or '(none)'}", f"{format_bytes(n)}, {n / peak_bytes:.0%}") for name, n in shown]
        return Overview(f"peak {format_bytes(peak_bytes)} of live tensors on {where}", rows)

    def summary(self) -> str:
        """Return a human-readable table: the peak, and its split by category, module and line."""
        splits = {"category": self.peak_by_category, "module": self.peak_by_module, "line": self.peak_by_line}
        lines = [
            f"peak {format_bytes(self.peak_bytes)} of live tensors on {self._device or 'all devices'}",
            f"reached by {self.peak_where or 'nothing'}",
            f"live {'at the end' if self._is_over else 'now'} {format_bytes(self.live_bytes)}",
        ]
        for title, split in splits.items():
            lines += ["", f"{title:<14} at the peak", *_rows(split, self.peak_bytes)]
        if not self._workspace:
            lines += [
                "",
                "Not counted: memory that operators allocate and free internally; track(workspace=True) counts it.",
            ]
        lines += [f"Not seen: {name}" for name in self.recording.untracked]
        return "\n".join(lines)

    def _peak_by(self, label: Label) -> dict[str, int]:
        recording, device = self._asked
        return recording.peak_by(label, device)


def _rows(split: dict[str, int], total: int) -> list[str]:
    """Return the largest parts and one row for the rest, so that the rows add up."""
    shown = list(split.items())[:_ROWS]
    rest = sum(split.values()) - sum(nbytes for _, nbytes in shown)
    rows = shown + [(f"({len(split) - _ROWS} more)", rest)] * (rest > 0)
    return [f"{format_bytes(nbytes):>14}  {nbytes / total:>5.1%}  {name or '(none)'}" for name, nbytes in rows]
