"""History of a virtual GPU's allocator, with operator, module and line, in the format of PyTorch's snapshots."""

from __future__ import annotations

from typing import Any, NamedTuple

from memkit._recorder.recorder import OperatorPlace
from memkit._simulation.cuda.allocator import PENDING, CachingAllocator, CudaDriver, SegmentRecord

_WAITING = "active_awaiting_free"  # PyTorch's name in snapshots
_POOL = (0, 0)  # the pool of all allocations outside CUDA graphs


class Asker(NamedTuple):
    """Origin of a request for a block: the operator, and where in the code it ran; None if there is no such place."""

    operator: str
    place: OperatorPlace | None


class _Action(NamedTuple):
    kind: str
    address: int
    num_bytes: int
    stream: int
    asker: Asker | None
    free_bytes: int | None = None


class History:
    """Watches an allocator and keeps every action from then on.

    Args:
        allocator: The allocator; its driver is replaced by one that reports its actions.
        card_name: Name of the GPU as its driver reports it.

    Attributes:
        stream: Number of the current stream.

    Memory cost:
        About 0.2 kB for each allocated block.
    """

    def __init__(self, allocator: CachingAllocator, card_name: str) -> None:
        self.stream = 0
        self._card_name = card_name
        self._allocator = allocator
        self._actions: list[_Action] = []
        self._askers: dict[int, Asker] = {}  # for the blocks in use, by address
        allocator.driver = _WatchedDriver(allocator.driver, self)

    def note_alloc(self, address: int, num_bytes: int, asker: Asker) -> None:
        """Note an allocated block; ``num_bytes`` is the requested size."""
        self._askers[address] = asker
        self._note("alloc", address, num_bytes, asker)

    def note_free(self, address: int, num_bytes: int, stream: int) -> None:
        """Note a freed block; it belongs to ``stream``, whichever stream is current."""
        asker = self._askers.pop(address, None)
        for kind in ("free_requested", "free_completed"):
            self._actions.append(_Action(kind, address, num_bytes, stream, asker))

    def note_shortage(self, num_bytes: int, asker: Asker) -> None:
        """Note a request that ran out of memory."""
        free_bytes = self._allocator.driver.free_bytes
        self._actions.append(_Action("oom", 0, num_bytes, self.stream, asker, free_bytes))

    def note_segment(self, kind: str, address: int, num_bytes: int) -> None:
        """Note memory that the driver gave or took back."""
        self._note(kind, address, num_bytes, None)

    def _note(self, kind: str, address: int, num_bytes: int, asker: Asker | None) -> None:
        self._actions.append(_Action(kind, address, num_bytes, self.stream, asker))

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot`` would, without times because no simulated time passes.

        Data that a real snapshot lacks is under one separate key, for `memkit.report.read_memory_events`.
        """
        allocator, settings = self._allocator, self._allocator.settings
        return {
            "memkit": {
                "source": "fake",
                "kind": "predicted",
                "device": {"name": self._card_name, "total_bytes": allocator.driver.capacity_bytes, "backend": "cuda"},
                "totals": {
                    "peak_total_bytes": allocator.peak_allocated_bytes,
                    "reserved_peak_bytes": allocator.peak_reserved_bytes,
                    "device_used_bytes": allocator.peak_reserved_bytes + allocator.driver.other_bytes,
                },
            },
            "segments": [self._segment(each) for each in allocator.segments()],
            "device_traces": [[_entry(action) for action in self._actions]],
            "allocator_settings": {
                "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
                "garbage_collection_threshold": settings.garbage_collection_threshold or 0.0,
                "expandable_segments": settings.expandable_segments,
            },
            "external_annotations": [],
        }

    def _segment(self, record: SegmentRecord) -> dict[str, Any]:
        blocks = [
            {
                "address": block.address,
                "size": block.num_bytes,
                "requested_size": block.requested_bytes,
                "state": _WAITING if block.state == PENDING else block.state,
                "frames": _frames(self._askers.get(block.address)),
            }
            for block in record.blocks
        ]
        used = [block for block in record.blocks if block.requested_bytes]
        return {
            "device": 0,
            "address": record.address,
            "total_size": record.num_bytes,
            "allocated_size": sum(block.num_bytes for block in used if block.state != PENDING),
            "active_size": sum(block.num_bytes for block in used),
            "requested_size": sum(block.requested_bytes for block in used),
            "stream": record.stream,
            "segment_type": "small" if record.is_small else "large",
            "segment_pool_id": _POOL,
            "is_expandable": record.is_expandable,
            "frames": [],
            "blocks": blocks,
        }


class _WatchedDriver(CudaDriver):
    """A driver that reports its actions to the history."""

    def __init__(self, driver: CudaDriver, history: History) -> None:
        super().__init__(driver.capacity_bytes, driver.other_bytes)
        self._history = history

    def allocate(self, num_bytes: int) -> int | None:
        address = super().allocate(num_bytes)
        if address is not None:
            self._history.note_segment("segment_alloc", address, num_bytes)
        return address

    def release(self, address: int, num_bytes: int) -> None:
        super().release(address, num_bytes)
        self._history.note_segment("segment_free", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> bool:
        is_mapped = super().map(address, num_bytes)
        if is_mapped:
            self._history.note_segment("segment_map", address, num_bytes)
        return is_mapped

    def unmap(self, address: int, num_bytes: int) -> None:
        super().unmap(address, num_bytes)
        self._history.note_segment("segment_unmap", address, num_bytes)


def _entry(action: _Action) -> dict[str, Any]:
    entry = {
        "action": action.kind,
        "addr": action.address,
        "size": action.num_bytes,
        "stream": action.stream,
        "frames": _frames(action.asker),
    }
    return entry if action.free_bytes is None else entry | {"device_free": action.free_bytes}


def _frames(asker: Asker | None) -> list[dict[str, Any]]:
    """Return a stack as the viewers show it, innermost first: operator, module with phase, line of code."""
    if asker is None:
        return []
    frames = [{"name": asker.operator, "filename": "operator", "line": 0}] if asker.operator else []
    place = asker.place
    if place is not None:
        if place.module:
            frames.append({"name": f"{place.module} ({place.phase})", "filename": "module", "line": 0})
        if place.line is not None:
            code = place.line.code
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": place.line.number})
    return frames
