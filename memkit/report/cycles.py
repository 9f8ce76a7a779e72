"""Phases that occur once in many steps, such as epochs, and leave more memory held after each occurrence."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from memkit.report.growth import HeldGrowth, growth_of
from memkit.report.observed import Observed


class Cycle(NamedTuple):
    """A phase that leaves memory held: its path, the growth from one of its ends to the next, the number of ends."""

    path: str
    growth: HeldGrowth
    num_calls: int


def find_cycle(observed: Sequence[Observed], begins: Sequence[int | None]) -> Cycle | None:
    """Find the innermost phase that leaves memory held each time, and occurs less than once in two steps."""
    ends: dict[str, list[tuple[int, int]]] = {}
    for index, each in enumerate(observed):
        event = each.event
        path, held_bytes = event.phase, event.allocated_bytes
        if path is not None and held_bytes is not None and event.duration_ns is not None:
            calls = ends.get(path)
            if calls is None:
                calls = ends[path] = []
            calls.append((index, held_bytes))
    num_steps = sum(each.step is not None for each in observed)
    found = []
    for path, calls in ends.items():
        growth = growth_of([num_bytes for _, num_bytes in calls])
        if growth is not None and growth.every == 1 and not 0 < num_steps < 2 * len(calls):
            own = (_change_in(observed, index, begins[index]) for index, _ in calls[1:])
            changes = [change for change in own if change is not None]
            if changes and 2 * statistics.median(changes) > growth.rise_bytes:
                found.append(Cycle(path, growth, len(calls)))
    return max(found, key=lambda cycle: cycle.path.count("/"), default=None)


def find_begins(observed: Sequence[Observed]) -> list[int | None]:
    """Return for each event the index of the last one on its track before its block began; None if there is none."""
    tracks: dict[int, tuple[list[int], list[int]]] = {}  # times, the latest so far if a clock was set back; indices
    begins: list[int | None] = [None] * len(observed)
    for index, each in enumerate(observed):
        event = each.event
        time_ns, duration_ns = event.time_ns, event.duration_ns
        if time_ns is None:
            continue
        track = tracks.get(each.track)
        if track is None:
            track = tracks[each.track] = [], []
        times, indices = track
        if duration_ns is not None:
            found = bisect.bisect_right(times, time_ns - duration_ns)
            begins[index] = indices[found - 1] if found else None
        times.append(time_ns if not times or time_ns > times[-1] else times[-1])
        indices.append(index)
    return begins


def _change_in(observed: Sequence[Observed], index: int, begin: int | None) -> int | None:
    """Return by how much a phase changed the held memory; None if that is unknown."""
    before = None if begin is None else observed[begin].event.allocated_bytes
    after = observed[index].event.allocated_bytes
    return None if before is None or after is None else after - before
