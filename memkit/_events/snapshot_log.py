"""Convert a CUDA memory snapshot to log records and allocations, by replaying its history from the final state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from memkit._core.pickles import refuse_pickle
from memkit._events.allocations import Allocations, FailedRequest, Int64s, live_bytes_of
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin
from memkit._events.places import NO_PLACE, Labels, labels_of
from memkit._events.snapshot_file import Segment, Snapshot, SnapshotBlock
from memkit._events.snapshot_rooms import find_room
from memkit._events.snapshot_rows import NO_STACK

_UNIT_BYTES = 512  # the allocator rounds up to multiples of at least this
_DEVICE_KEYS = ("name", "total_bytes", "backend")
_TOTALS = ("peak_total_bytes", "reserved_peak_bytes", "device_used_bytes")
_NUMBERS = ("allocated_bytes", "requested_bytes", "reserved_bytes", *_TOTALS)
_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_MOST_EVENTS, _NUM_BUCKETS = 20_000, 4_000


class Imported(NamedTuple):
    """Contents of another program's file, as log records."""

    headers: list[LogHeader]
    events: list[Event]
    problems: list[str]
    allocations: list[Allocations]


def read_snapshot(chunks: Iterable[bytes], first_run: int) -> Imported:
    """Read a snapshot: each GPU is a run, each action of its allocator an event, its final state the last event.

    The history gives the requested sizes. The allocator's rounded sizes are known only for blocks in use at the end;
    the others count as the next multiple of 512 bytes, so that the true ``allocated_bytes`` is at least the one given.
    In a history of more than 20,000 actions, each group of consecutive actions becomes two events: those with the most
    and the least bytes held. The allocations contain all actions.

    Args:
        chunks: The file, in chunks of any length.
        first_run: Number of the first GPU's run.

    Raises:
        InputError: The file is not a snapshot.
        InputTypeError: A field does not have the type that torch writes.
    """
    chunks = iter(chunks)
    start = next(chunks, b"")
    snapshot = Snapshot(chain([start], chunks))
    labels = labels_of(snapshot.stacks)
    found, own = Imported([], [], [], []), snapshot.own()
    origin = Origin(own.get("source"), own.get("kind")) if own else Origin("cuda_allocator", "measured")
    device, totals = (_known(own.get(name), keys) for name, keys in (("device", _DEVICE_KEYS), ("totals", _TOTALS)))
    for card in snapshot.cards():
        history = _History(snapshot, card, labels)
        header = LogHeader(
            run_id=f"snapshot-{zlib.crc32(start):08x}-{card}",
            wall_s=history.start_s,
            device=LoggedDevice(**device) if device else None,
            config=snapshot.settings(),
            fields=dict.fromkeys(_NUMBERS, origin),
        )
        found.headers.append(header)
        events = list(history.events(snapshot.annotations_of(card), totals, first_run + len(found.headers) - 1))
        found.events.extend(events)
        found.allocations.append(history.allocations)
        if history.num_actions > _MOST_EVENTS:
            found.problems.append(
                f"the {history.num_actions:,} actions of GPU {card} became {len(events):,} events: those with the most "
                f"and the least bytes held in each group of {-(-history.num_actions // _NUM_BUCKETS):,}"
            )
    if not found.headers:
        refuse_pickle("a snapshot without segments or history", "a snapshot of at least one GPU")
    return found


def _known(value: object, keys: Iterable[str]) -> dict[str, Any]:
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else {}


class _Blocks(NamedTuple):
    """All blocks of a history; each array has one entry for each block."""

    births: Int64s
    deaths: Int64s
    addresses: Int64s
    sizes: Int64s
    requested: Int64s
    stacks: Int64s


class _History:
    """The replayed history of one GPU.

    Attributes:
        num_actions: Number of actions of the allocator.
        start_s: Time of the first action; None if there is no clock.
        allocations: All blocks.
    """

    def __init__(self, snapshot: Snapshot, card: int, labels: Sequence[Labels]) -> None:
        self._labels = labels
        self._segments = snapshot.segments_of(card)
        self._trace = trace = snapshot.trace_of(card)
        self._kinds, addresses, self._sizes, times, self._stacks = trace.columns()
        self.num_actions = num = len(trace)
        final = {address: used for segment in self._segments for address, used, _ in segment.blocks if used}
        asked, freed = self._rows("alloc"), self._rows("free_requested")
        blocks = _replay(asked, freed, addresses, self._sizes, self._stacks, final, num)
        self._blocks = blocks
        self._allocated = live_bytes_of(blocks.births, blocks.deaths, blocks.sizes, num)
        self._requested = live_bytes_of(blocks.births, blocks.deaths, blocks.requested, num)
        self._best = int(np.argmax(self._allocated)) - 1  # -1: never again as high as before the first action
        self._final = final
        self._seconds = np.where(times < 0, np.nan, times / 1e6)
        self._has_times = times >= 0
        self.start_s = float(times[self._has_times].min() / 1e6) if self._has_times.any() else None
        self._reserved = self._held()
        shortages = [
            FailedRequest(row, int(self._sizes[row]), trace.free_bytes.get(row))
            for row in np.flatnonzero(self._rows("oom")).tolist()
        ]
        moments = dict.fromkeys([self._best, *(each.event for each in shortages[-1:])])
        changes = [
            (row, int(addresses[row]), int(self._sizes[row]), _GROWS[trace.kinds[self._kinds[row]]])
            for row in np.flatnonzero(self._rows(*_GROWS)).tolist()
        ]
        self.allocations = Allocations(
            num_events=num,
            births=blocks.births,
            deaths=blocks.deaths,
            sizes=blocks.sizes,
            origins=blocks.stacks,
            labels={key: _coded(texts) for key, texts in zip(Labels._fields, zip(*labels, strict=True), strict=True)},
            stacks=tuple(snapshot.stacks.stacks),
            frames=tuple(each.text for each in snapshot.stacks.frames),
            seconds=self._seconds if self._has_times.all() and num else None,
            reserved=self._reserved,
            shortages=tuple(shortages),
            rooms=tuple(
                room
                for event in moments
                if (room := find_room(event, self._segments, changes, *self._live_at(event))) is not None
            ),
        )

    def _rows(self, *kinds: str) -> np.ndarray:
        """Return which actions are of these kinds."""
        return np.isin(self._kinds, [code for code, kind in enumerate(self._trace.kinds) if kind in kinds])

    def _live_at(self, event: int) -> tuple[Int64s, Int64s]:
        """Return addresses and sizes of the blocks in use after an event."""
        is_live = (self._blocks.births <= event) & (self._blocks.deaths > event)
        return self._blocks.addresses[is_live], self._blocks.sizes[is_live]

    def _held(self) -> Int64s | None:
        """Return the bytes held before the first action and after each one; None if actions are missing."""
        signs = np.asarray([0, *(_GROWS.get(kind, 0) for kind in self._trace.kinds)], dtype=np.int64)
        changes = np.cumsum(np.append(0, signs[self._kinds + 1] * self._sizes))
        start = sum(segment.num_bytes for segment in self._segments) - int(changes[-1])
        return None if start < 0 else start + changes

    def _by_place(self, event: int) -> dict[str, int]:
        """Return the bytes in use after an event by line of code, the line of the oldest block first."""
        is_live = np.flatnonzero((self._blocks.births <= event) & (self._blocks.deaths > event))
        found: dict[str, int] = {}
        stacks, first, inverse = np.unique(self._blocks.stacks[is_live], return_index=True, return_inverse=True)
        sums = np.zeros(len(stacks), dtype=np.int64)
        np.add.at(sums, inverse, self._blocks.sizes[is_live])
        for index in np.argsort(first, kind="stable").tolist():
            line = self._labels[int(stacks[index])].line
            found[line] = found.get(line, 0) + int(sums[index])
        return found

    def _shown(self, phases: Sequence[str | None]) -> Iterable[int]:
        """Return the actions that become events."""
        best, levels = self._best, self._allocated[1:]
        if self.num_actions <= _MOST_EVENTS:  # a block is counted as freed when that was requested
            return np.flatnonzero(~self._rows("free_completed") | (np.arange(self.num_actions) == best)).tolist()
        shown = {0, self.num_actions - 1, *np.flatnonzero(self._rows("oom")).tolist()} | ({best} - {-1})
        edges = np.linspace(0, self.num_actions, _NUM_BUCKETS + 1, dtype=np.int64).tolist()
        edges += [row for row in range(1, self.num_actions) if phases[row] != phases[row - 1]] if phases else []
        edges = sorted(set(edges))
        for start, end in pairwise(edges):
            shown |= {start + int(np.argmax(levels[start:end])), start + int(np.argmin(levels[start:end]))}
        return sorted(shown)

    def events(
        self, annotations: Sequence[tuple[float, str, str]], totals: Mapping[str, Any], run: int
    ) -> Iterator[Event]:
        """Yield the events, the final state last."""
        trace, reserved = self._trace, self._reserved
        by_place = self._by_place(self._best)
        if self.num_actions and self._best < 0:
            yield Event(
                "history begins",
                wall_s=self._second(0),
                allocated_bytes=int(self._allocated[0]),
                requested_bytes=int(self._requested[0]),
                reserved_bytes=None if reserved is None else int(reserved[0]),
                note={"peak_by_line": by_place},
                rank=0,
                run=run,
            )
        phase_at = _phases(annotations)
        phases = [phase_at(self._second(row)) for row in range(self.num_actions)] if annotations else []
        for row in self._shown(phases):
            kind, line = trace.kinds[int(self._kinds[row])], self._labels[int(self._stacks[row])].line
            note: dict[str, Any] = {"peak_by_line": by_place} if row == self._best else {}
            if kind == "oom":
                note |= {"oom": {"asked_bytes": int(self._sizes[row]), "free_bytes": trace.free_bytes.get(row)}}
            yield Event(
                _name(kind, line),
                wall_s=self._second(row),
                phase=phases[row] if phases else None,
                allocated_bytes=int(self._allocated[row + 1]),
                requested_bytes=int(self._requested[row + 1]),
                reserved_bytes=None if reserved is None else int(reserved[row + 1]),
                note=note or None,
                rank=0,
                run=run,
            )
        if self._segments:
            note = {"segments": [_summary(kind, self._segments) for kind in ("small", "large")]}
            yield Event(
                "snapshot",
                wall_s=self._second(self.num_actions - 1) if self.num_actions else None,
                allocated_bytes=sum(block.allocated_bytes for block in self._final.values()),
                requested_bytes=sum(block.requested_bytes for block in self._final.values()),
                reserved_bytes=sum(segment.num_bytes for segment in self._segments),
                note=note | ({"peak_by_line": by_place} if not self.num_actions and by_place else {}),
                rank=0,
                run=run,
                **totals,
            )

    def _second(self, row: int) -> float | None:
        return float(self._seconds[row]) if self._has_times[row] else None


def _replay(
    is_alloc: np.ndarray,
    is_free: np.ndarray,
    addresses: Int64s,
    sizes: Int64s,
    stacks: Int64s,
    final: Mapping[int, SnapshotBlock],
    num_actions: int,
) -> _Blocks:
    """Pair each request with the action that ended its block: the next one at its address, if any.

    A block that was freed but never requested existed before the history. So did a block of the final state at an
    address that no action mentions. The rounded size of a block is known if it is in use at the end.
    """
    rows = np.flatnonzero(is_alloc | is_free)
    rows = rows[np.argsort(addresses[rows], kind="stable")]
    here = addresses[rows]
    rounded = -(-sizes[rows] // _UNIT_BYTES) * _UNIT_BYTES
    is_first = np.append(True, here[1:] != here[:-1])[: len(rows)]
    is_last = np.append(here[1:] != here[:-1], True)[: len(rows)]
    starts = is_alloc[rows]
    following = np.append(rows[1:], num_actions)[: len(rows)]
    following_free = np.append(np.where(starts, 0, rounded)[1:], 0)[: len(rows)]
    deaths = np.where(is_last, num_actions, following)
    known = [final[address].allocated_bytes if address in final else 0 for address in here[starts & is_last].tolist()]
    whole = np.maximum(rounded, np.where(is_last, 0, following_free))
    whole[starts & is_last] = np.maximum(whole[starts & is_last], np.asarray(known, dtype=np.int64))
    older = ~starts & is_first
    named = set(here[is_first].tolist())
    left = [(address, *block) for address, block in final.items() if address not in named]
    kept = np.asarray(left, dtype=np.int64).reshape(-1, 4)
    before, never = np.full(older.sum() + len(kept), -1), np.full(len(kept), num_actions)
    return _Blocks(
        births=np.concatenate([before, rows[starts]]),
        deaths=np.concatenate([rows[older], never, deaths[starts]]),
        addresses=np.concatenate([here[older], kept[:, 0], here[starts]]),
        sizes=np.concatenate([rounded[older], kept[:, 1], whole[starts]]),
        requested=np.concatenate([sizes[rows[older]], kept[:, 2], sizes[rows[starts]]]),
        stacks=np.concatenate([np.full(older.sum(), NO_STACK), kept[:, 3], stacks[rows[starts]]]),
    )


def _coded(texts: Sequence[str]) -> tuple[Int64s, tuple[str, ...]]:
    """Return a number for each text, and the distinct texts by number."""
    table = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    return np.asarray([table[text] for text in texts], dtype=np.int64), tuple(table)


def _phases(annotations: Sequence[tuple[float, str, str]]) -> Callable[[float | None], str | None]:
    """Return a function that returns the phase at a time; it must be called with ascending times."""
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


def _name(kind: str, line: str) -> str:
    if kind in ("alloc", "oom"):
        return kind if line == NO_PLACE else line
    return "free" if kind in ("free_requested", "free_completed") else kind


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
