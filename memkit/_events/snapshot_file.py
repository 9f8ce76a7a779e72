"""Parse CUDA memory snapshots written by ``torch.cuda.memory._dump_snapshot``. No torch.

No field is required: torch has added fields over the years, and old files are supported too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memkit._core.pickles import refuse_pickle
from memkit._core.printable import short
from memkit._events.snapshot_rows import ActionTrace, Stacks, frames_of, number_of, text_of
from memkit._events.snapshot_stream import SnapshotStream

_MOST_CARDS = 1024
_IN_USE = "active_allocated"


class SnapshotBlock(NamedTuple):
    """A block in use, and the number of the stack that requested it."""

    allocated_bytes: int
    requested_bytes: int
    stack: int


class Segment(NamedTuple):
    """Memory that the allocator took from the GPU in one piece.

    Attributes:
        address: Its start.
        num_bytes: Its size.
        is_small: Whether it is for blocks of up to 1 MiB.
        blocks: For each block, its start address, its contents if in use, and its size.
    """

    address: int
    num_bytes: int
    is_small: bool
    blocks: list[tuple[int, SnapshotBlock | None, int]]


class Snapshot:
    """Parts of a snapshot.

    Args:
        chunks: The file, in chunks of any length.

    Attributes:
        stacks: All stacks, by number.

    Raises:
        InputError: The file is not a snapshot; also raised by the methods.
        InputTypeError: A field does not have the type that torch writes; also raised by the methods.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        stream = SnapshotStream(chunks)
        value = stream.load()
        snapshot = {"segments": value} if isinstance(value, list) else value  # torch.cuda.memory_snapshot()
        if not isinstance(snapshot, dict) or not {"segments", "device_traces"} & snapshot.keys():
            refuse_pickle(f"a pickle of {short(value)}", "the segments or device_traces of a CUDA memory snapshot")
        self.stacks: Stacks = stream.stacks
        self._snapshot = snapshot
        self._num_left = stream.num_bytes  # limit on the parts inspected, since a part may occur in many places
        self._segments: dict[int, list[Segment]] = {}
        for each in self._records(snapshot.get("segments", []), "segments"):
            self._segments.setdefault(number_of(each, "device", 0), []).append(self._segment(each))
        self._notes = list(self._records(snapshot.get("external_annotations", []), "external_annotations"))
        traces = self._list(snapshot.get("device_traces", []), "device_traces")
        self._traces = [self._trace(each, card) for card, each in enumerate(traces)]

    def cards(self) -> list[int]:
        """Return the indices of the GPUs in the snapshot."""
        cards = self._segments.keys() | {card for card, trace in enumerate(self._traces) if len(trace)}
        if len(cards) > _MOST_CARDS:
            refuse_pickle(f"{len(cards)} GPUs", f"at most {_MOST_CARDS}")
        return sorted(cards)

    def segments_of(self, card: int) -> list[Segment]:
        """Return the segments of a GPU."""
        return self._segments.get(card, [])

    def _segment(self, segment: dict[str, Any]) -> Segment:
        blocks = list(self._blocks(segment))
        num_bytes = sum(size for _, _, size in blocks)
        return Segment(number_of(segment, "address", 0), num_bytes, segment.get("segment_type") == "small", blocks)

    def _blocks(self, segment: dict[str, Any]) -> Iterator[tuple[int, SnapshotBlock | None, int]]:
        address = number_of(segment, "address", 0)
        for block in self._records(segment.get("blocks", []), "blocks"):
            size = number_of(block, "size", 0)
            address = number_of(block, "address", address)
            used = None
            if block.get("state") == _IN_USE:
                requested = number_of(block, "requested_size", size)
                used = SnapshotBlock(size, min(requested, size), self.stacks.number(frames_of(block)))
            yield address, used, size
            address += size

    def trace_of(self, card: int) -> ActionTrace:
        """Return the allocator's actions on a GPU, in order."""
        return self._traces[card] if card < len(self._traces) else ActionTrace(self.stacks)

    def _trace(self, value: object, card: int) -> ActionTrace:
        if not isinstance(value, ActionTrace):
            trace = ActionTrace(self.stacks)
            for each in self._records(value, f"device_traces[{card}]"):
                trace.add(each)
            return trace
        return value

    def annotations_of(self, card: int) -> list[tuple[float, str, str]]:
        """Return the program's annotations on a GPU: time, ``"START"`` or ``"END"``, and name."""
        found = [
            (microseconds / 1e6, text_of(note, "stage"), text_of(note, "name"))
            for note in self._notes
            if number_of(note, "device", 0) == card and (microseconds := number_of(note, "time_us", None)) is not None
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
            refuse_pickle("more parts than the file has bytes: repeated ones", "each block and action once")
        return list(value)
