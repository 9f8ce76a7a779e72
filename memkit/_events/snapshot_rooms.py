"""The segments of a GPU's allocator at one moment of a snapshot's history, and the blocks in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memkit._events.allocations import Int64s, Room
from memkit._events.snapshot_file import Segment

Change = tuple[int, int, int, int]
"""Index of an action, its address, its bytes, and 1 if they were taken from the device, -1 if returned."""


def find_room(
    event: int, segments: Sequence[Segment], changes: Sequence[Change], addresses: Int64s, sizes: Int64s
) -> Room | None:
    """Return the segments after an event, found backward from the final ones.

    Args:
        event: The last event before the moment.
        segments: The segments at the end.
        changes: Memory taken from the device and returned to it, in order.
        addresses: Addresses of the blocks in use at the moment.
        sizes: Their sizes.

    Returns:
        None if the history lacks actions, so that a block would lie outside all segments.
    """
    pieces = _pieces([(segment.address, segment.num_bytes) for segment in segments], event, changes)
    starts = np.asarray([start for start, _ in pieces], dtype=np.int64)
    ends = np.asarray([start + size for start, size in pieces], dtype=np.int64)
    order = np.argsort(addresses, kind="stable")
    addresses, sizes = addresses[order], sizes[order]
    owners = np.searchsorted(starts, addresses, side="right") - 1
    if not len(pieces) or (owners < 0).any() or (addresses + sizes > ends[owners]).any():
        return None
    found: list[list[tuple[int, int]]] = [[] for _ in pieces]
    for owner, address, size in zip(owners.tolist(), addresses.tolist(), sizes.tolist(), strict=True):
        blocks, start = found[owner], address - pieces[owner][0]
        if blocks and blocks[-1][1] > start:
            return None
        if blocks and blocks[-1][1] == start:
            blocks[-1] = blocks[-1][0], start + size
        else:
            blocks.append((start, start + size))
    return Room(event, tuple((size, tuple(blocks)) for (_, size), blocks in zip(pieces, found, strict=True)))


def _pieces(final: Sequence[tuple[int, int]], event: int, changes: Sequence[Change]) -> list[tuple[int, int]]:
    """Return address and size of each segment after an event."""
    later = [each for each in reversed(changes) if each[0] > event]
    known = dict(final)
    for _, address, size, sign in later:
        if sign > 0 and known.pop(address, None) != size:
            break
        if sign < 0:
            known[address] = size
    else:
        return sorted(known.items())
    return _covered(final, later)


def _covered(final: Sequence[tuple[int, int]], later: Sequence[Change]) -> list[tuple[int, int]]:
    """Return the pieces where segments grow and shrink by pages: the ranges left once all later changes are undone."""
    steps: dict[int, int] = {}
    for address, size, sign in [(*each, 1) for each in final] + [(each[1], each[2], -each[3]) for each in later]:
        steps[address] = steps.get(address, 0) + sign
        steps[address + size] = steps.get(address + size, 0) - sign
    pieces, depth, start = [], 0, 0
    for address, step in sorted(steps.items()):
        before, depth = depth, depth + step
        if before <= 0 < depth:
            start = address
        elif depth <= 0 < before:
            pieces.append((start, address - start))
    return pieces
