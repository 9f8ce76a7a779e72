"""What the allocator model says of itself: its segments as plain records, and torch's out-of-memory message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memkit._units import GIB, KIB, MIB
from memkit.planning.card.allocator_blocks import UNMAPPED, Block, Driver


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block of a segment; the attributes are those of `Block`."""

    address: int
    num_bytes: int
    requested_bytes: int
    state: str


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One segment, or one mapped range of an expandable segment.

    Attributes:
        address: Where it begins.
        num_bytes: Its size.
        stream: The stream that it belongs to.
        is_small: Whether it holds requests of up to 1 MiB.
        is_expandable: Whether it lies in an expandable segment.
        blocks: Its blocks by address, without gaps.
    """

    address: int
    num_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockRecord, ...]


def records_of(head: Block, *, is_expandable: bool) -> Iterator[SegmentRecord]:
    """Yield the segment that begins with a block; of an expandable one, each run of blocks that are mapped."""
    run: list[Block] = []
    block: Block | None = head
    while block is not None:
        if block.state != UNMAPPED:
            run.append(block)
        if run and (block.state == UNMAPPED or block.next is None):
            yield _record(run, is_expandable=is_expandable)
            run = []
        block = block.next


def _record(blocks: list[Block], *, is_expandable: bool) -> SegmentRecord:
    first, last = blocks[0], blocks[-1]
    return SegmentRecord(
        address=first.address,
        num_bytes=last.address + last.num_bytes - first.address,
        stream=first.pool.stream,
        is_small=first.pool.is_small,
        is_expandable=is_expandable,
        blocks=tuple(BlockRecord(b.address, b.num_bytes, b.requested_bytes, b.state) for b in blocks),
    )


def no_room(num_bytes: int, driver: Driver, device_index: int, allocated_bytes: int, limit_bytes: int | None) -> str:
    """Torch's own words when no segment of ``num_bytes`` can be had."""
    reserved_bytes = driver.given_bytes
    allowed = "" if limit_bytes is None else f"{_format_size(limit_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {_format_size(num_bytes)}. GPU {device_index} has a total capacity of"
        f" {_format_size(driver.capacity_bytes)} of which {_format_size(driver.free_bytes)} is free. Including"
        f" non-PyTorch memory, this process has {_format_size(driver.other_bytes + reserved_bytes)} memory in use."
        f" {allowed}Of the allocated memory {_format_size(allocated_bytes)} is allocated by PyTorch, and"
        f" {_format_size(reserved_bytes - allocated_bytes)} is reserved by PyTorch but unallocated. If reserved but"
        " unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
        " fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
        "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def _format_size(num_bytes: int) -> str:
    if num_bytes <= KIB:
        return f"{num_bytes} bytes"
    if num_bytes <= MIB:
        return f"{num_bytes / KIB:.2f} KiB"
    if num_bytes <= GIB:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"
