"""What each event says about memory, told apart: a stage's own peak, a record that nobody restarts, what was held."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memkit._eventlog import EventLog
from memkit._events import Event

_STEP = re.compile(r"step[_ -]?(\d{1,18})", re.ASCII)


class Observed(NamedTuple):
    """One event, with what can be concluded from its place.

    Attributes:
        event: The event.
        track: Which run of which process it belongs to: only there are differences of figures true.
        before: The last event before it on its track that knows what was held, or a record.
        step: Number of the training step that it ends; None for other events.
        low: Its stage's peak is at least this.
        high: Its stage's peak is at most this.
    """

    event: Event
    track: int
    before: Event | None
    step: int | None
    low: int | None
    high: int | None


def observe(log: EventLog) -> tuple[list[Observed], int]:
    """Take a log's events apart.

    Where some events were measured and others only predicted, the predicted ones are left out.

    Returns:
        The events, and how many were left out.
    """
    predicted = [
        any(origin.kind == "predicted" for name, origin in header.fields.items() if name in _DEVICE_FIELDS)
        for header in log.headers
    ]
    measured = [
        event
        for event in log.events
        if event.kind != "predicted" and (event.kind is not None or event.run is None or not predicted[event.run])
    ]
    # A mark without any number says nothing about how the others came about.
    events = measured if any(_device_bytes(event) is not None for event in measured) else list(log.events)
    return list(_observe(events)), len(log.events) - len(events)


_DEVICE_FIELDS = ("allocated_bytes", "peak_bytes", "peak_total_bytes")


def _observe(events: Iterable[Event]) -> Iterator[Observed]:
    last: dict[int | None, Event] = {}
    records: dict[int | None, int] = {}
    tracks: dict[int | None, int] = {}
    num_tracks = 0
    for event in events:
        run, record = event.run, event.peak_total_bytes
        known = records.get(run)
        if run not in tracks or (record is not None and known is not None and record < known):
            # A counter of largest values that falls was restarted: what came before tells nothing about what follows.
            tracks[run] = num_tracks
            num_tracks += 1
            last.pop(run, None)
            known = None
        low, high = _peak(event, record, known)
        yield Observed(event, tracks[run], last.get(run), step_of(event), low, high)
        if record is not None:
            records[run] = record
        if record is not None or event.allocated_bytes is not None:
            last[run] = event


def _peak(event: Event, record: int | None, known: int | None) -> tuple[int | None, int | None]:
    """Bound the peak since the event before, or of the phase: below and above."""
    if event.peak_bytes is not None:
        return event.peak_bytes, event.peak_bytes
    if record is None:
        return event.allocated_bytes, None
    # A phase's line comes after those of the phases inside it, which may have set the record.
    if event.phase is None and event.duration_ns is None and (known is None or record > known):
        return record, record
    return event.allocated_bytes, record


def step_of(event: Event) -> int | None:
    """Return the number of the step that an event ends, by its field or by a name such as ``step_12``."""
    match = _STEP.fullmatch(event.event) if event.event.startswith("step") else None
    if match:
        return int(match[1])
    return event.step if event.event == "step" else None


def _device_bytes(event: Event) -> int | None:
    """Return the largest bytes of the device's tensors that an event knows of."""
    sizes = (event.allocated_bytes, event.peak_bytes, event.peak_total_bytes)
    return max((size for size in sizes if size is not None), default=event.incremental_bytes)
