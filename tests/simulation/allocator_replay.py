"""Replays recorded runs of real GPUs on the allocator model, and counts where the model decides otherwise.

A trace has what the GPU's allocator was asked for and what it did. The model gets only the requests, how much memory
the card has, and the address of each new segment, which is the driver's choice. When it takes a segment, how large,
which ones it gives back, and where in it a block lies, it decides itself. Memory counts as short above the most that
the recorded run ever held; a trace with an out-of-memory error says it to the byte.
"""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memkit._core.units import MIB
from memkit._simulation.cuda.allocator import (
    ACTIVE,
    CACHED,
    AllocatorSettings,
    Block,
    CachingAllocator,
    CudaDriver,
    Pool,
)

FOLDER = Path(__file__).parents[1] / "data" / "allocator_traces"
TRACES: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in json.loads((FOLDER / "index.json").read_text())}
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, OOM, SNAPSHOT, MAP, UNMAP = range(9)
GIVES = {SEGMENT_ALLOC, MAP}
TAKES = {SEGMENT_FREE, UNMAP}


@dataclass
class Replay:
    """What a replay found.

    Attributes:
        num_allocations: Requests.
        num_same_address: Of these, how many the model put where the GPU did.
        num_segment_events: Segments taken and given back, pages mapped and unmapped, on the GPU.
        differences: Where the model did it otherwise: another size or address, at another time, or not at all.
        num_flushes: Times that all cached segments were given back though no request needed room (``empty_cache``).
        num_retries: Times that they were given back for want of room.
        num_ooms: Times that there was no room even so.
    """

    num_allocations: int = 0
    num_same_address: int = 0
    num_segment_events: int = 0
    differences: list[str] = field(default_factory=list)
    num_flushes: int = 0
    num_retries: int = 0
    num_ooms: int = 0
    final_reserved: int = 0
    final_allocated: int = 0

    def is_faithful(self, name: str) -> bool:
        return (
            self.num_same_address == self.num_allocations
            and not self.differences
            and self.final_reserved == TRACES[name]["final_reserved"]
            and self.final_allocated == TRACES[name]["final_allocated"]
        )


class RecordedDriver(CudaDriver):
    """Gives the addresses that the recorded driver gave, and compares each call with the recorded one."""

    def __init__(self, capacity_bytes: int, replay: Replay) -> None:
        super().__init__(capacity_bytes, 0)
        self.expected: list[tuple[int, int, int]] = []  # kind, address, size: what the GPU did for the next request
        self.replay = replay

    def allocate(self, num_bytes: int) -> int | None:
        address = super().allocate(num_bytes)
        return address and (self._matched(SEGMENT_ALLOC, num_bytes) or address)

    def release(self, address: int, num_bytes: int) -> None:
        super().release(address, num_bytes)
        self._matched(SEGMENT_FREE, num_bytes, address)

    def reserve_addresses(self, num_bytes: int) -> int:
        mapped = [address for kind, address, _ in self.expected if kind == MAP]
        return mapped[0] if mapped else super().reserve_addresses(num_bytes)

    def map(self, address: int, num_bytes: int) -> bool:
        is_done = super().map(address, num_bytes)
        if is_done:
            self._matched(MAP, num_bytes, address)
        return is_done

    def unmap(self, address: int, num_bytes: int) -> None:
        super().unmap(address, num_bytes)
        self._matched(UNMAP, num_bytes, address)

    def _matched(self, kind: int, num_bytes: int, address: int | None = None) -> int | None:
        for index, event in enumerate(self.expected):
            if event[0] == kind and event[2] == num_bytes and address in {None, event[1]}:
                return self.expected.pop(index)[1]
        self.replay.differences.append(f"only the model: kind {kind}, {num_bytes} bytes at {address}")
        return None

    def settle(self) -> None:
        """What is left of the expected events did not happen in the model."""
        self.replay.differences += [f"only the GPU: kind {k}, {size} bytes at {at}" for k, at, size in self.expected]
        self.expected.clear()


def replay(name: str, new_allocator: Callable[..., CachingAllocator] = CachingAllocator) -> Replay:
    """Replay one trace of `TRACES`.

    Args:
        name: The trace.
        new_allocator: Makes the allocator; a test puts a wrong one here.
    """
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return replay_events(
            *(arrays[key] for key in ("events", "segments", "active")),
            partial(new_allocator, settings=AllocatorSettings.parse(TRACES[name].get("settings", ""))),
        )


def replay_events(
    events: Any, segments: Any, active: Any, new_allocator: Callable[..., CachingAllocator] = CachingAllocator
) -> Replay:
    """Replay requests.

    Args:
        events: (N, 4) integers: kind, address, bytes, stream.
        segments: (S, 3) of the segments that were there before: address, bytes, stream.
        active: (B, 3) of the blocks that were in use before: address, requested bytes, bytes or 0 if not known.
        new_allocator: As for `replay`.
    """
    found = Replay()
    gpu = new_allocator(0)
    driver = gpu.driver = RecordedDriver(capacity(events, segments), found)
    live = restore(gpu, segments, active, events)
    for kind, address, size, stream in events.tolist():
        if kind in GIVES or kind in TAKES:
            driver.expected.append((kind, address, size))
            found.num_segment_events += 1
            continue
        if driver.expected and not (kind == OOM or (kind == ALLOC and needs_room(gpu, size, stream))):
            flush(gpu)
        if kind == ALLOC:
            block = live[address] = gpu.allocate(size, stream)
            found.num_allocations += 1
            found.num_same_address += block.address == address
        elif kind == OOM:
            with contextlib.suppress(torch.OutOfMemoryError):
                gpu.allocate(size, stream)
                found.differences.append(f"only the GPU: out of memory for {size} bytes")
        elif kind == FREE_REQUESTED:
            gpu.request_free(live[address])
        elif kind == FREE_COMPLETED:
            gpu.complete_free(live.pop(address))
        driver.settle()
    flush(gpu)
    driver.settle()
    found.num_retries, found.num_ooms = gpu.num_retries, gpu.num_ooms
    found.final_reserved, found.final_allocated = gpu.reserved_bytes, gpu.allocated_bytes
    return found


def needs_room(gpu: CachingAllocator, num_bytes: int, stream: int) -> bool:
    """Whether a request would find neither a cached block nor memory on the card."""
    size = gpu.settings.round_up(num_bytes)
    pool = gpu._pool(stream, is_small=size <= MIB)
    taken = sum(event[2] for event in gpu.driver.expected if event[0] in GIVES)
    return pool.best_fit(size) is None and taken > gpu.driver.free_bytes


def flush(gpu: CachingAllocator) -> None:
    """Empty the cache, where the GPU gave segments back and no request needed them."""
    if any(kind in TAKES for kind, _, _ in gpu.driver.expected):
        gpu.driver.replay.num_flushes += 1
        gpu.empty_cache()


def capacity(events: Any, segments: Any) -> int:
    """How much memory the allocator could have had: the most that it ever held, or what an error said."""
    held = most = int(segments[:, 1].sum())
    for kind, address, size, _ in events.tolist():
        if kind == OOM:
            return held + int(address)  # for this kind the field has the bytes that were free
        held += size * ((kind in GIVES) - (kind in TAKES))
        most = max(most, held)
    return most


def restore(gpu: CachingAllocator, segments: Any, active: Any, events: Any) -> dict[int, Block]:
    """Put the allocator into the state at the start of a trace; the blocks in use, by address."""
    starts = sorted(segments[:, 0].tolist())
    inside: dict[int, list[list[int]]] = {start: [] for start in starts}
    for block in sorted(active.tolist()):
        inside[starts[bisect_right(starts, block[0]) - 1]].append(block)
    live: dict[int, Block] = {}
    for start, num_bytes, stream in segments.tolist():
        pool = gpu._pool(stream, is_small=num_bytes == 2 * MIB)
        rest = gpu._heads[start] = Block(start, num_bytes, pool, CACHED, start)
        gpu.driver.given_bytes += num_bytes
        ends = [address for address, _, _ in inside[start][1:]] + [start + num_bytes]
        for (address, requested, known), end in zip(inside[start], ends, strict=False):
            if address > rest.address:
                free, rest = rest, rest.cut(address - rest.address)
                gpu._cache(free)
            size = known if known > 0 else size_at_start(gpu, pool, address, requested, end, events)
            block, rest = rest, rest.cut(size) if size < rest.num_bytes else rest
            block.state, block.requested_bytes = ACTIVE, requested
            gpu.allocated_bytes += size
            gpu.requested_bytes += requested
            live[address] = block
        if rest.state == CACHED:
            gpu._cache(rest)
    gpu.reset_peaks()
    return live


def size_at_start(gpu: CachingAllocator, pool: Pool, address: int, requested: int, end: int, events: Any) -> int:
    """The size of a block that was there before the trace, where the trace does not say it.

    Up to 1 MiB too much is not split off, so this much may belong to the block. Where more is free behind it, the first
    block that the GPU puts there while this one lives shows where it ends.
    """
    size = gpu.settings.round_up(requested)
    if pool.is_small:
        return size
    if end - address - size <= MIB:
        return end - address
    freed = np.flatnonzero((events[:, 0] == FREE_COMPLETED) & (events[:, 1] == address))
    before = events[: freed[0]] if freed.size else events
    behind = before[(before[:, 0] == ALLOC) & (before[:, 1] > address) & (before[:, 1] < end), 1]
    border = int(behind.min()) if behind.size else address + size
    return border - address if border - address - size <= MIB else size
