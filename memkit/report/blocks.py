"""A log's memory curve as blocks, in the format of a CUDA memory snapshot, for PyTorch's memory viewer."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from memkit._core.errors import InputError
from memkit._events.log import Event
from memkit._events.reader import EventLog


def snapshot_of(log: EventLog) -> bytes:
    """Return a pickled snapshot: each run is a card, each growth of ``allocated_bytes`` a block.

    The source of the count is stored under a key of memkit's own. A log has totals but no blocks: a fall frees the
    youngest blocks; if it ends within one, the rest is allocated again under the block's name. A peak above both ends
    of its stage is a block that is allocated and freed.

    Raises:
        InputError: No event has ``allocated_bytes`` above zero.
    """
    runs: dict[int | None, list[Event]] = {}
    for event in log.events:
        if event.allocated_bytes is not None:
            runs.setdefault(event.run, []).append(event)
    if not any(event.allocated_bytes for events in runs.values() for event in events):
        raise InputError(
            "export_log(path='....pickle')",
            got="a log in which no event has allocated_bytes above zero",
            expected="events with allocated_bytes, from which the curve of tensor memory is drawn",
            fix="export it as .json, .csv or .jsonl.",
        )
    first = next(iter(runs.values()))[0]
    cards = [_Card(number, events) for number, events in enumerate(runs.values())]
    snapshot = {
        "memkit": asdict(log.origin(first, "allocated_bytes")),
        "segments": [segment for card in cards for segment in card.segments()],
        "device_traces": [card.entries for card in cards],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=4)


class _Card:
    """The blocks of one run, contiguous from address zero: the youngest at the end.

    Attributes:
        entries: The allocator's simulated actions.
    """

    def __init__(self, number: int, events: Iterable[Event]) -> None:
        self.entries: list[dict[str, Any]] = []
        self._number = number
        self._live: list[tuple[int, list[dict[str, Any]]]] = []
        self._held = 0
        for event in events:
            frames = [{"name": event.event, "filename": event.phase or "log", "line": event.step or 0}]
            level = event.allocated_bytes or 0
            if event.peak_bytes is not None:
                self._reach(max(event.peak_bytes, level), frames, event.wall_s)
            self._reach(level, frames, event.wall_s)

    def _reach(self, level: int, frames: list[dict[str, Any]], wall_s: float | None) -> None:
        """Allocate or free blocks until ``level`` bytes are held."""
        while self._held > level:
            size, old = self._live.pop()
            self._held -= size
            self._note(("free_requested", "free_completed"), size, old, wall_s)
            frames = old
        if self._held < level:
            size = level - self._held
            self._note(("alloc",), size, frames, wall_s)
            self._live.append((size, frames))
            self._held = level

    def _note(self, actions: Iterable[str], size: int, frames: list[dict[str, Any]], wall_s: float | None) -> None:
        time = {} if wall_s is None else {"time_us": round(1e6 * wall_s)}
        for action in actions:
            entry = {"action": action, "addr": self._held, "size": size, "stream": 0, "frames": frames}
            self.entries.append(entry | time)

    def segments(self) -> Iterator[dict[str, Any]]:
        """Yield one segment with the blocks held at the end."""
        address = 0
        blocks = []
        for size, frames in self._live:
            sizes = {"address": address, "size": size, "requested_size": size}
            blocks.append({**sizes, "state": "active_allocated", "frames": frames})
            address += size
        if blocks:
            yield {
                "device": self._number,
                "address": 0,
                "total_size": address,
                "allocated_size": address,
                "active_size": address,
                "requested_size": address,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
