"""The section on a device's allocations: an interactive view in HTML, a table of the largest blocks elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memkit.report.nodes import AllocationView, Cell, Node, Paragraph, Section, Share, Size, clean
from memkit.report.words import Words

if TYPE_CHECKING:  # needs NumPy, which most reports do without
    from memkit._events.allocations import Allocations, Room

_MOST_ROWS = 15


def allocation_section(found: Allocations, title: str, words: Words) -> Section:
    """Build the section of one device."""
    return Section(title, tuple(_nodes(found, words)))


def _nodes(found: Allocations, words: Words) -> Iterator[Node]:
    import numpy as np

    from memkit.report.allocation_view import view_of

    data = view_of(found)
    num_left = data["numBlocks"] - data["numShown"]
    counts = {"blocks": f"{data['numBlocks']:,}", "events": f"{data['numEvents']:,}"}
    text = words("alloc_text", size=words.size(Size.of(data["peakBytes"])), **counts)
    if num_left:
        size = words.size(Size.of(data["largestLeft"]))
        text += " " + words("alloc_left", shown=f"{data['numShown']:,}", count=f"{num_left:,}", size=size)
    if found.reserved is not None:
        text += " " + words("alloc_rounded")
    yield Paragraph(text)
    live = np.flatnonzero(found.is_live(data["peak"]))
    rows: list[tuple[Cell, ...]] = []
    codes, names = found.labels["line"]
    for block in live[np.argsort(-found.sizes[live], kind="stable")][:_MOST_ROWS].tolist():
        num_bytes, birth = int(found.sizes[block]), int(found.births[block])
        asked = words("alloc_before") if birth < 0 else f"{birth + 1:,}"
        name = clean(names[int(codes[found.origins[block]])])
        rows.append((name, Size.of(num_bytes), Share(num_bytes / max(data["peakBytes"], 1)), asked))
    columns = ("alloc_line", "col_size", "col_of_peak", "alloc_asked")
    rooms = tuple((_room_name(room, data["peak"], words), room.segments) for room in _different(found.rooms))
    yield AllocationView(data, words.table(columns, rows, words("alloc_largest", count=f"{len(live):,}")), rooms)
    if found.rooms:
        yield from _rooms(found, data["peak"], words)


def _different(rooms: Sequence[Room]) -> Sequence[Room]:
    """Omit the moment of the peak if the segments were the same when memory ran out."""
    return rooms[1:] if len(rooms) > 1 and rooms[0].segments == rooms[1].segments else rooms


def _room_name(room: Room, peak: int, words: Words) -> str:
    return words("alloc_room_peak" if room.event == peak else "alloc_room_oom")


def _rooms(found: Allocations, peak: int, words: Words) -> Iterator[Node]:
    rows: list[tuple[Cell, ...]] = []
    for room in _different(found.rooms):
        name = _room_name(room, peak, words)
        beside = room.reserved_bytes - room.used_bytes - room.empty_bytes
        sizes = (room.reserved_bytes, room.used_bytes, beside, room.empty_bytes, max(room.gaps(), default=0))
        rows.append((name, *map(Size.of, sizes)))
    heads = ("alloc_moment", "col_reserved", "alloc_used", "alloc_beside", "alloc_empty", "col_largest")
    yield words.table(heads, rows, words("alloc_rooms"))
    for asked in found.shortages[-1:]:
        yield from _shortage(asked.asked_bytes, found.rooms[-1], words)


def _shortage(asked_bytes: int, room: Room, words: Words) -> Iterator[Node]:
    free, largest = room.reserved_bytes - room.used_bytes, max(room.gaps(), default=0)
    key = "alloc_fragmented" if largest < asked_bytes <= free else "alloc_short"
    sizes = {"asked": asked_bytes, "free": free, "largest": largest}
    yield Paragraph(words(key, **{name: words.size(Size.of(size)) for name, size in sizes.items()}))
