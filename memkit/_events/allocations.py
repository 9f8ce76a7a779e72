"""Every block that a device's allocator handed out: its lifetime, its size, and the code that requested it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class FailedRequest(NamedTuple):
    """A request that failed for lack of memory: its event, the bytes requested, and those free on the device."""

    event: int
    asked_bytes: int
    free_bytes: int | None


class Room(NamedTuple):
    """Segments of an allocator at one moment.

    Attributes:
        event: The last event before that moment.
        segments: For each segment, its size, and start and end of its blocks in use, in order, adjacent ones merged.
    """

    event: int
    segments: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @property
    def reserved_bytes(self) -> int:
        """Bytes in all segments."""
        return sum(size for size, _ in self.segments)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks in use."""
        return sum(end - start for _, blocks in self.segments for start, end in blocks)

    @property
    def empty_bytes(self) -> int:
        """Bytes in segments without a block in use, which the allocator can give back to the device."""
        return sum(size for size, blocks in self.segments if not blocks)

    def gaps(self) -> list[int]:
        """Return the sizes of all free pieces, including whole segments, largest first."""
        found = []
        for size, blocks in self.segments:
            ends = [0, *(end for _, end in blocks)]
            starts = [*(start for start, _ in blocks), size]
            found += [start - end for start, end in zip(starts, ends, strict=True) if start > end]
        return sorted(found, reverse=True)


@dataclass(frozen=True, eq=False)
class Allocations:
    """All blocks of one device. A block is live after event ``births`` and until event ``deaths``, exclusive.

    Attributes:
        num_events: Number of events.
        births: The event at which each block was handed out; -1 if it existed before.
        deaths: The event at which it was freed; ``num_events`` if it never was.
        sizes: Its bytes.
        origins: The code that requested it: a row of ``labels`` and ``stacks``.
        labels: For each label, such as ``"line"``, its number for each origin, and its texts.
        stacks: For each origin, its frames, innermost first, as indices into ``frames``.
        frames: All frames, as text.
        seconds: The wall time of each event; None if there is no clock.
        reserved: Bytes that the allocator held before the first event, and after each one; None if unknown.
        shortages: The requests that failed for lack of memory.
        rooms: The allocator's segments at the peak, and at the last request that failed.
    """

    num_events: int
    births: Int64s
    deaths: Int64s
    sizes: Int64s
    origins: Int64s
    labels: Mapping[str, tuple[Int64s, tuple[str, ...]]]
    stacks: tuple[tuple[int, ...], ...]
    frames: tuple[str, ...]
    seconds: npt.NDArray[np.float64] | None = None
    reserved: Int64s | None = None
    shortages: tuple[FailedRequest, ...] = ()
    rooms: tuple[Room, ...] = ()

    def levels(self) -> Int64s:
        """Return live bytes before the first event, and after each one: int64, shape ``(num_events + 1,)``."""
        return live_bytes_of(self.births, self.deaths, self.sizes, self.num_events)

    def is_live(self, event: int) -> npt.NDArray[np.bool_]:
        """For each block, return whether it is live after an event; -1 for the time before the first one."""
        is_live: npt.NDArray[np.bool_] = (self.births <= event) & (self.deaths > event)
        return is_live


def live_bytes_of(births: Int64s, deaths: Int64s, sizes: Int64s, num_events: int) -> Int64s:
    """Return the sum of the live sizes before the first event, and after each one."""
    change = np.zeros(num_events + 2, dtype=np.int64)
    np.add.at(change, births + 1, sizes)
    np.subtract.at(change, deaths + 1, sizes)
    return np.cumsum(change[:-1])
