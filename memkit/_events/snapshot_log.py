"""Convert a CUDA memory snapshot to log records, by replaying its history back and forth from the final state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from memkit._core.pickles import refuse_pickle
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin
from memkit._events.snapshot_file import NO_PLACE, AllocatorAction, Segment, Snapshot, SnapshotBlock

_UNIT_BYTES = 512  # the allocator rounds up to multiples of at least this
_DEVICE_KEYS = ("name", "total_bytes", "backend")
_TOTALS = ("peak_total_bytes", "reserved_peak_bytes", "device_used_bytes")
_NUMBERS = ("allocated_bytes", "requested_bytes", "reserved_bytes", *_TOTALS)
_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Imported(NamedTuple):
    """Contents of another program's file, as log records."""

    headers: list[LogHeader]
    events: list[Event]
    problems: list[str]


def read_snapshot(data: bytes, first_run: int) -> Imported:
    """Read a snapshot: each GPU is a run, each action of its allocator an event, its final state the last event.

    The history gives the requested sizes. The allocator's rounded sizes are known only for blocks in use at the end;
    the others count as the next multiple of 512 bytes, so that the true ``allocated_bytes`` is at least the one given.

    Args:
        data: The file.
        first_run: Number of the first GPU's run.

    Raises:
        InputError: The file is not a snapshot.
        InputTypeError: A field does not have the type that torch writes.
    """
    snapshot = Snapshot(data)
    headers, events, own = list[LogHeader](), list[Event](), snapshot.own()
    origin = Origin(own.get("source"), own.get("kind")) if own else Origin("cuda_allocator", "measured")
    device, totals = (_known(own.get(name), keys) for name, keys in (("device", _DEVICE_KEYS), ("totals", _TOTALS)))
    for card in snapshot.cards():
        segments, entries = snapshot.segments_of(card), snapshot.entries_of(card)
        walls = [entry.seconds for entry in entries if entry.seconds is not None]
        run_id = f"snapshot-{zlib.crc32(data):08x}-{card}"
        headers.append(
            LogHeader(
                run_id=run_id,
                wall_s=min(walls, default=None),
                device=LoggedDevice(**device) if device else None,
                config=snapshot.settings(),
                fields=dict.fromkeys(_NUMBERS, origin),
            )
        )
        run = first_run + len(headers) - 1
        events += _card_events(segments, entries, snapshot.annotations_of(card), totals, run)
    if not headers:
        refuse_pickle("a snapshot without segments or history", "a snapshot of one card or more")
    return Imported(headers, events, [])


def _known(value: object, keys: Iterable[str]) -> dict[str, Any]:
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else {}


def _card_events(
    segments: Sequence[Segment],
    entries: Sequence[AllocatorAction],
    annotations: Sequence[tuple[float, str, str]],
    totals: Mapping[str, Any],
    run: int,
) -> Iterator[Event]:
    final = {address: used for segment in segments for address, used, _ in segment.blocks if used}
    reserved = sum(size for segment in segments for _, _, size in segment.blocks)
    before, sizes = _rewind(final, entries)
    levels = list(_levels(dict(before), entries, sizes))
    start_bytes = sum(block.allocated_bytes for block in before.values())
    best = max(range(len(levels)), key=lambda index: levels[index][0], default=-1)
    if levels and start_bytes > levels[best][0]:
        best = -1
    peak = dict(before)
    for _ in islice(_levels(peak, entries, sizes), best + 1):
        pass
    by_place: dict[str, int] = {}
    for block in peak.values():
        by_place[block.place] = by_place.get(block.place, 0) + block.allocated_bytes
    held = reserved - sum(_GROWS.get(entry.action, 0) * entry.num_bytes for entry in entries)
    is_told = held >= 0  # otherwise actions are missing, and the bytes held meanwhile are unknown
    phases = _phases(annotations)
    if entries and best < 0:  # never again as high as before the first action
        yield Event(
            "history begins",
            wall_s=entries[0].seconds,
            allocated_bytes=start_bytes,
            requested_bytes=sum(block.requested_bytes for block in before.values()),
            reserved_bytes=held if is_told else None,
            note={"peak_by_line": by_place},
            rank=0,
            run=run,
        )
    for index, (entry, (allocated, requested)) in enumerate(zip(entries, levels, strict=True)):
        held += _GROWS.get(entry.action, 0) * entry.num_bytes
        if entry.action == "free_completed" and index != best:
            continue  # already counted when it was requested
        note: dict[str, Any] = {"peak_by_line": by_place} if index == best else {}
        if entry.action == "oom":
            note |= {"oom": {"asked_bytes": entry.num_bytes, "free_bytes": entry.free_bytes}}
        yield Event(
            _name(entry),
            wall_s=entry.seconds,
            phase=phases(entry.seconds),
            allocated_bytes=allocated,
            requested_bytes=requested,
            reserved_bytes=held if is_told else None,
            note=note or None,
            rank=0,
            run=run,
        )
    if segments:
        note = {"segments": [_summary(kind, segments) for kind in ("small", "large")]}
        yield Event(
            "snapshot",
            wall_s=entries[-1].seconds if entries else None,
            allocated_bytes=sum(block.allocated_bytes for block in final.values()),
            requested_bytes=sum(block.requested_bytes for block in final.values()),
            reserved_bytes=reserved,
            note=note | ({"peak_by_line": by_place} if not entries and by_place else {}),
            rank=0,
            run=run,
            **totals,
        )


def _rewind(
    final: dict[int, SnapshotBlock], entries: Sequence[AllocatorAction]
) -> tuple[dict[int, SnapshotBlock], list[int]]:
    """Go back from the final state; return the blocks in use before the first action, and the size of each block."""
    live, sizes = dict(final), [0] * len(entries)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        rounded = -(-entry.num_bytes // _UNIT_BYTES) * _UNIT_BYTES
        if entry.action == "free_requested":
            live[entry.address] = SnapshotBlock(rounded, entry.num_bytes, NO_PLACE)
        elif entry.action == "alloc":
            block = live.pop(entry.address, None)
            sizes[index] = max(rounded, block.allocated_bytes if block else 0)
    return live, sizes


def _levels(
    live: dict[int, SnapshotBlock], entries: Iterable[AllocatorAction], sizes: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Replay the actions: yield bytes in use and bytes requested after each; updates ``live``."""
    allocated = sum(block.allocated_bytes for block in live.values())
    requested = sum(block.requested_bytes for block in live.values())
    for entry, size in zip(entries, sizes, strict=True):
        gone = live.pop(entry.address, None) if entry.action in ("alloc", "free_requested") else None
        if gone:
            allocated -= gone.allocated_bytes
            requested -= gone.requested_bytes
        if entry.action == "alloc":
            live[entry.address] = SnapshotBlock(size, entry.num_bytes, entry.place or NO_PLACE)
            allocated += size
            requested += entry.num_bytes
        yield allocated, requested


def _phases(annotations: Sequence[tuple[float, str, str]]) -> Callable[[float | None], str | None]:
    """Return a function that names the phase at a time; it must be called with times in order."""
    ahead, inside = list(reversed(annotations)), list[str]()

    def phase(seconds: float | None) -> str | None:
        while seconds is not None and ahead and ahead[-1][0] <= seconds:
            _, stage, name = ahead.pop()
            if stage == "START":
                inside.append(name)
            elif name in inside:
                inside.remove(name)
        return "/".join(inside) or None

    return phase


def _name(entry: AllocatorAction) -> str:
    if entry.action in ("alloc", "oom"):
        return entry.place or entry.action
    return "free" if entry.action in ("free_requested", "free_completed") else entry.action


def _summary(kind: Literal["small", "large"], segments: Sequence[Segment]) -> dict[str, Any]:
    """Summarize the segments of one kind, for blocks up to 1 MiB or for larger ones."""
    parts = [segment.blocks for segment in segments if segment.is_small == (kind == "small")]
    used = [used for blocks in parts for _, used, _ in blocks if used]
    return {
        "kind": kind,
        "num_segments": len(parts),
        "num_blocks": len(used),
        "requested_bytes": sum(block.requested_bytes for block in used),
        "allocated_bytes": sum(block.allocated_bytes for block in used),
        "reserved_bytes": sum(size for blocks in parts for _, _, size in blocks),
        "largest_free_bytes": max((size for blocks in parts for _, used, size in blocks if not used), default=0),
    }
