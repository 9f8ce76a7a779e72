"""Interpret each event's memory figures: a stage's own peak, a running peak that is never reset, or memory held."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from memkit._events.log import Event
from memkit._events.reader import EventLog

PEAK_FIELDS = ("peak_total_bytes", "peak_bytes", "allocated_bytes")
"""Fields that report peak bytes in tensors; of equal values, that of the first field counts."""
_STEP = re.compile(r"step[_ -]?(\d{1,18})", re.ASCII)


class Observed(NamedTuple):
    """One event, with conclusions from its position in the log.

    Attributes:
        event: The event.
        track: The run and process it belongs to: figures may be subtracted only within a track.
        before: The last earlier event on its track that reports memory held, or a running peak.
        step: Number of the training step that it ends; None for other events.
        low: Lower bound of its stage's peak: the memory held at its end, and anything seen inside it.
        high: Upper bound of its stage's peak.
    """

    event: Event
    track: int
    before: Event | None
    step: int | None
    low: int | None
    high: int | None


def observe(log: EventLog) -> tuple[list[Observed], int]:
    """Interpret a log's events.

    If some events were measured and others only predicted, the predicted ones are omitted.

    Returns:
        The events, and the number omitted.
    """
    predicted = [
        any(origin.kind == "predicted" for name, origin in header.fields.items() if name in PEAK_FIELDS)
        for header in log.headers
    ]
    measured = [
        event
        for event in log.events
        if event.kind != "predicted" and (event.kind is not None or event.run is None or not predicted[event.run])
    ]
    # A mark without any number does not show how the others were obtained.
    events = measured if any(_device_bytes(event) is not None for event in measured) else list(log.events)
    return list(_observe(events)), len(log.events) - len(events)


class _Inside:
    """Records the memory seen inside steps and phases that are still open: their own line comes at their end.

    Args:
        ended: Paths of the phases that end in the log.
    """

    def __init__(self, ended: Set[str]) -> None:
        self._around = functools.cache(functools.partial(_ended_around, ended))
        self._outside = functools.cache(lambda path: _ended_around(ended, path.rpartition("/")[0]))
        self._steps: dict[int, int] = {}  # per track, since its last step
        self._phases: dict[tuple[int, str], list[tuple[int, int]]] = {}  # time and bytes, by the phase's path

    def raised(self, event: Event, track: int, *, is_step: bool, low: int | None, high: int | None) -> int | None:
        """Return the lower bound of a block's peak, or the largest value seen inside it, if that is a better one."""
        time_ns = event.time_ns
        if time_ns is None:  # without a clock there are no blocks: a log of single events, as in the older format
            return low
        seen, path, around = low, event.phase, self._around
        if is_step:
            seen = larger_known(seen, self._steps.pop(track, None))
        elif path is not None and event.duration_ns is not None:
            begin_ns = time_ns - event.duration_ns
            for time, inner in self._phases.pop((track, path), ()):
                if time > begin_ns and (seen is None or inner > seen):
                    seen = inner
            around = self._outside  # a phase does not contain itself
        if seen is None:
            return None
        if not is_step and seen > self._steps.get(track, -1):
            self._steps[track] = seen
        for outer in around(path) if path is not None else ():
            self._phases.setdefault((track, outer), []).append((time_ns, seen))
        return low if high is not None and seen > high else seen


def _ended_around(ended: Set[str], path: str) -> list[str]:
    """Return the path and those of the phases around it, of those that end."""
    parts = path.split("/")
    paths = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return [each for each in paths if each in ended]


def larger_known(one: int | None, other: int | None) -> int | None:
    """Return the larger of two sizes that may be unknown."""
    return other if one is None or (other is not None and other > one) else one


def _observe(events: Sequence[Event]) -> Iterator[Observed]:
    last: dict[int | None, Event] = {}
    records: dict[int | None, int] = {}
    tracks: dict[int | None, int] = {}
    num_tracks = 0
    inside = _Inside({event.phase for event in events if event.phase is not None and event.duration_ns is not None})
    for event in events:
        run, record = event.run, event.peak_total_bytes
        known = records.get(run)
        if run not in tracks or (record is not None and known is not None and record < known):
            # A peak counter that falls was reset: earlier values do not bound later ones.
            tracks[run] = num_tracks
            num_tracks += 1
            last.pop(run, None)
            known = None
        track, step = tracks[run], step_of(event) if event.event.startswith("step") else None
        low = high = event.peak_bytes
        if low is None:
            low, high = _peak(event, record, known)
        low = inside.raised(event, track, is_step=step is not None, low=low, high=high)
        yield Observed(event, track, last.get(run), step, low, high)
        if record is not None:
            records[run] = record
        if record is not None or event.allocated_bytes is not None:
            last[run] = event


def _peak(event: Event, record: int | None, known: int | None) -> tuple[int | None, int | None]:
    """Return bounds of the peak since the event before, or of the phase, from what is held and the running peak."""
    if record is None:
        return event.allocated_bytes, None
    # A phase's line comes after those of the phases inside it, which may have set the running peak.
    if event.phase is None and event.duration_ns is None and (known is None or record > known):
        return record, record
    return event.allocated_bytes, record


def step_of(event: Event) -> int | None:
    """Return the number of the step that an event ends, from its field or from a name such as ``step_12``."""
    match = _STEP.fullmatch(event.event)
    if match:
        return int(match[1])
    return event.step if event.event == "step" else None


def _device_bytes(event: Event) -> int | None:
    """Return the largest bytes in device tensors that an event reports."""
    sizes = (getattr(event, name) for name in PEAK_FIELDS)
    return max((size for size in sizes if size is not None), default=event.incremental_bytes)
