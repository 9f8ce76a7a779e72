"""Parse CUDA memory snapshots written by ``torch.cuda.memory._dump_snapshot``. No torch.

A snapshot is a pickle of lists, tuples, dicts, strings and numbers; any other pickle is rejected before it is loaded.
No field is required: torch has added fields over the years, and old files are supported too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from memkit._core.pickles import load_plain, refuse_pickle
from memkit._core.printable import short
from memkit._events.log import require_count

NO_PLACE = "not recorded"
_MOST_CARDS = 1024
_IN_USE = "active_allocated"
_PYTHON = re.compile(r"\.pyw?$|^<(ipython|stdin|string)")
_LIBRARY = re.compile(r"(site|dist)-packages|(^|[/\\])torch[/\\]|[/\\]lib[/\\]python3|^<frozen")
_OPERATOR = re.compile(r"at::_ops::(\w+)::")


class SnapshotBlock(NamedTuple):
    """A block in use at one address, and the place in the code that requested it."""

    allocated_bytes: int
    requested_bytes: int
    place: str


class Segment(NamedTuple):
    """Memory that the allocator took from the GPU in one piece.

    Attributes:
        is_small: Whether it is for blocks of up to 1 MiB.
        blocks: For each block, its start address, its contents if in use, and its size.
    """

    is_small: bool
    blocks: list[tuple[int, SnapshotBlock | None, int]]


class AllocatorAction(NamedTuple):
    """One action of the allocator."""

    action: str
    address: int
    num_bytes: int
    seconds: float | None
    place: str | None
    free_bytes: int | None


class Snapshot:
    """Parts of a snapshot, with place names instead of stacks.

    Args:
        data: The file.

    Raises:
        InputError: The file is not a snapshot; also raised by the methods.
        InputTypeError: A field does not have the type that torch writes; also raised by the methods.
    """

    def __init__(self, data: bytes) -> None:
        value = load_plain(data, "snapshot")
        snapshot = {"segments": value} if isinstance(value, list) else value  # torch.cuda.memory_snapshot()
        if not isinstance(snapshot, dict) or not {"segments", "device_traces"} & snapshot.keys():
            refuse_pickle(f"a pickle of {short(value)}", "the segments or device_traces of a CUDA memory snapshot")
        self._snapshot = snapshot
        self._num_left = len(data)  # limit on the parts inspected, since a part may occur in many places
        self._places: dict[int, str | None] = {}
        self._segments = list(self._records(snapshot.get("segments", []), "segments"))
        self._notes = list(self._records(snapshot.get("external_annotations", []), "external_annotations"))
        self._traces = self._list(snapshot.get("device_traces", []), "device_traces")

    def cards(self) -> list[int]:
        """Return the indices of the GPUs in the snapshot."""
        cards = {self._number(segment, "device", 0) for segment in self._segments}
        cards |= {card for card, trace in enumerate(self._traces) if trace}
        if len(cards) > _MOST_CARDS:
            refuse_pickle(f"{len(cards)} cards", f"at most {_MOST_CARDS}")
        return sorted(cards)

    def segments_of(self, card: int) -> list[Segment]:
        """Return the segments of a GPU."""
        segments = [each for each in self._segments if self._number(each, "device", 0) == card]
        return [Segment(each.get("segment_type") == "small", list(self._blocks(each))) for each in segments]

    def _blocks(self, segment: dict[str, Any]) -> Iterator[tuple[int, SnapshotBlock | None, int]]:
        address = self._number(segment, "address", 0)
        for block in self._records(segment.get("blocks", []), "blocks"):
            size = self._number(block, "size", 0)
            address = self._number(block, "address", address)
            used = None
            if block.get("state") == _IN_USE:
                requested = self._number(block, "requested_size", size)
                used = SnapshotBlock(size, min(requested, size), self._place(_frames(block)) or NO_PLACE)
            yield address, used, size
            address += size

    def entries_of(self, card: int) -> list[AllocatorAction]:
        """Return the allocator's actions on a GPU, in order."""
        trace = self._traces[card] if card < len(self._traces) else []
        return [
            AllocatorAction(
                action=_text(entry, "action"),
                address=self._number(entry, "addr", 0),
                num_bytes=self._number(entry, "size", 0),
                seconds=self._seconds(entry),
                place=self._place(_frames(entry)),
                free_bytes=self._number(entry, "device_free", None),
            )
            for entry in self._records(trace, f"device_traces[{card}]")
        ]

    def annotations_of(self, card: int) -> list[tuple[float, str, str]]:
        """Return the program's annotations on a GPU: time, ``"START"`` or ``"END"``, and name."""
        found = [
            (seconds, _text(note, "stage"), _text(note, "name"))
            for note in self._notes
            if self._number(note, "device", 0) == card and (seconds := self._seconds(note)) is not None
        ]
        return sorted(found, key=lambda each: each[0])

    def own(self) -> dict[str, Any]:
        """Return the data that memkit adds to its own snapshots; empty for other snapshots."""
        own = self._snapshot.get("memkit", {})
        if not isinstance(own, dict):
            refuse_pickle(f"memkit={short(own)}", "a dict")
        return own

    def settings(self) -> dict[str, Any] | None:
        """Return the allocator's settings that are single values."""
        settings = self._snapshot.get("allocator_settings")
        if not isinstance(settings, dict):
            return None
        return {name: value for name, value in settings.items() if isinstance(value, (str, int, float))}

    def _records(self, value: object, name: str) -> Iterator[dict[str, Any]]:
        for index, each in enumerate(self._list(value, name)):
            if not isinstance(each, dict):
                refuse_pickle(f"{name}[{index}]: {short(each)}", "a dict")
            yield each

    def _list(self, value: object, name: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            refuse_pickle(f"{name}={short(value)}", "a list")
        self._num_left -= len(value)
        if self._num_left < 0:
            refuse_pickle("more parts than the file has bytes: the same over and over", "each block and action once")
        return list(value)

    def _number(self, record: dict[str, Any], name: str, default: Any) -> Any:
        value = record.get(name)
        if value is None:
            return default
        require_count("", name, value)
        return value

    def _seconds(self, record: dict[str, Any]) -> float | None:
        microseconds = self._number(record, "time_us", None)
        return None if microseconds is None else microseconds / 1e6

    def _place(self, frames: object) -> str | None:
        """Return the name of the deepest frame of user code; stacks are shared by records, and inspected once."""
        if id(frames) not in self._places:
            self._places[id(frames)] = _place(frames if isinstance(frames, list) else [])
        return self._places[id(frames)]


def _frames(record: dict[str, Any]) -> object:
    """Return the stack of a block or an action; old versions stored it in a block's history."""
    history = record.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return record.get("frames")


def _place(frames: Iterable[object]) -> str | None:
    """Return the deepest line of user code, else of library code, else the operator, as in a backward."""
    line_of_library = operator = None
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        if not isinstance(file, str) or not isinstance(name, str):
            continue
        if _PYTHON.search(file):
            if not is_library(file):
                return place_name(file, line, name)
            line_of_library = line_of_library or place_name(file, line, name)
        elif operator is None and (found := _OPERATOR.search(name)):
            operator = f"aten::{found[1]}"
    return line_of_library or operator


def is_library(file: str) -> bool:
    """Return whether a file is not the user's own code."""
    return _LIBRARY.search(file) is not None


def place_name(file: str, line: object, function: str) -> str:
    """Return a short name of a place in code: the last two parts of the path distinguish files."""
    return f"{'/'.join(PurePosixPath(file.replace(chr(92), '/')).parts[-2:])}:{line} {function}"


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        refuse_pickle(f"{name}={short(value)}", "text that is not empty")
    return value
