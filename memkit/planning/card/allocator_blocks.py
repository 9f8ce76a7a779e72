"""Under the allocator model: pieces of memory, the lists of free ones, and the card that gives and takes segments."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from memkit._errors import ConfigError
from memkit._units import MIB

ACTIVE: Final = "active_allocated"
PENDING: Final = "active_pending_free"  # freed, and maybe still in use on another stream
CACHED: Final = "inactive"
UNMAPPED: Final = "unmapped"  # addresses of an expandable segment with no memory behind them
GONE: Final = "gone"  # merged into a neighbour, or given back

_KEY_BITS = 64  # a free block's key is its size above its address, in one number
_ADDRESS = attrgetter("address")


class Block:
    """A piece of a segment, between the pieces before and after it in the same segment.

    Attributes:
        address: Where it begins.
        num_bytes: Its size: the request rounded up, and what was not worth splitting off.
        requested_bytes: What was asked for.
        state: ``"active_allocated"``, ``"active_pending_free"`` or ``"inactive"``, as in
            ``torch.cuda.memory_snapshot``; within the model also ``"unmapped"`` and ``"gone"``.
    """

    __slots__ = ("address", "freed_at", "next", "num_bytes", "pool", "prev", "requested_bytes", "segment", "state")

    def __init__(self, address: int, num_bytes: int, pool: Pool, state: str, segment: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.pool = pool
        self.state = state
        self.segment = segment  # where the segment begins
        self.requested_bytes = 0
        self.freed_at = 0  # on the clock of the garbage collection
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.prev is None and self.next is None

    def cut(self, num_bytes: int) -> Block:
        """Keep the first ``num_bytes``; the rest is a block of the same state, in no list."""
        rest = Block(self.address + num_bytes, self.num_bytes - num_bytes, self.pool, self.state, self.segment)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.num_bytes = num_bytes
        return rest

    def absorb(self, after: Block) -> None:
        """Take over the next block. So the first block of a segment stays the same object as long as the segment."""
        self.num_bytes += after.num_bytes
        self.next = after.next
        if after.next is not None:
            after.next.prev = self
        after.state = GONE


class Pool:
    """The free blocks of one stream and one size class.

    Args:
        stream: Number of the stream.
        is_small: Whether it is for requests of up to 1 MiB.
        page_bytes: What is mapped at once to an expandable segment.
    """

    __slots__ = ("_blocks", "_keys", "_unmapped", "is_small", "page_bytes", "stream")

    def __init__(self, stream: int, *, is_small: bool, page_bytes: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.page_bytes = page_bytes
        self._unmapped: list[Block] = []  # by address
        self._keys: list[int] = []  # sorted
        self._blocks: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        """Take a cached or unmapped block into its list."""
        if block.state == CACHED:
            key = block.num_bytes << _KEY_BITS | block.address
            insort(self._keys, key)
            self._blocks[key] = block
        else:
            insort(self._unmapped, block, key=_ADDRESS)

    def remove(self, block: Block) -> None:
        """Take a cached or unmapped block out of its list."""
        if block.state == CACHED:
            key = block.num_bytes << _KEY_BITS | block.address
            del self._keys[bisect_left(self._keys, key)]
            del self._blocks[key]
        else:
            self._unmapped.remove(block)

    def cached(self, least_bytes: int = 0) -> Iterator[Block]:
        """Yield the cached blocks of at least this size, smallest first; the pool must not change meanwhile."""
        for index in range(bisect_left(self._keys, least_bytes << _KEY_BITS), len(self._keys)):
            yield self._blocks[self._keys[index]]

    def best_fit(self, num_bytes: int) -> Block | None:
        """The smallest cached block that is large enough; of equals the one with the lowest address."""
        index = bisect_left(self._keys, num_bytes << _KEY_BITS)
        return self._blocks[self._keys[index]] if index < len(self._keys) else None

    def best_expandable_fit(self, num_bytes: int) -> Block | None:
        """The best fit, where a block before unmapped addresses counts as large as it can grow."""
        best: Block | None = None
        for block in self.cached(num_bytes):
            if best is not None and _room(block) >= _room(best):
                break
            best = block
        return best

    def lowest_room(self, num_bytes: int) -> Block | None:
        """The first block of a run of cached and unmapped blocks that is long enough for the request.

        The run begins with an unmapped block or with the cached one before it.
        """
        for block in self._unmapped:
            start = block.prev if block.prev is not None and block.prev.state == CACHED else block
            room = 0
            after: Block | None = start
            while after is not None and after.state in {CACHED, UNMAPPED} and room < num_bytes:
                room += after.num_bytes
                after = after.next
            if room >= num_bytes:
                return start
        return None

    def merge(self, block: Block) -> Block:
        """Merge a cached or unmapped block, which is in no list, with its neighbours of the same state."""
        after = block.next
        if after is not None and after.state == block.state:
            self.remove(after)
            block.absorb(after)
        before = block.prev
        if before is not None and before.state == block.state:
            self.remove(before)
            before.absorb(block)
            return before
        return block

    def whole_pages(self, block: Block) -> tuple[int, int]:
        """The first and the last page border inside of a block."""
        first = -((block.segment - block.address) // self.page_bytes)
        last = (block.address + block.num_bytes - block.segment) // self.page_bytes
        return block.segment + first * self.page_bytes, block.segment + last * self.page_bytes


def _room(block: Block) -> int:
    after = block.next
    return block.num_bytes + (after.num_bytes if after is not None and after.state == UNMAPPED else 0)


class Driver:
    """The card: says whether there is memory, and where. What it says is all that the allocator knows of it.

    Args:
        capacity_bytes: What ``torch.cuda.mem_get_info`` gives as the total.
        other_bytes: Used by this process outside of PyTorch's allocator: the CUDA context, libraries.

    Raises:
        ConfigError: ``other_bytes`` is above the capacity.
    """

    def __init__(self, capacity_bytes: int, other_bytes: int) -> None:
        if other_bytes > capacity_bytes:
            raise ConfigError(
                "CachingAllocator(capacity_bytes, other_bytes=...)",
                got=f"capacity_bytes={capacity_bytes}, other_bytes={other_bytes}",
                expected="other_bytes <= capacity_bytes",
                fix="pass the card's memory, and what of it is not for PyTorch, in bytes.",
            )
        self.capacity_bytes = capacity_bytes
        self.other_bytes = other_bytes
        self.given_bytes = 0
        self._next_address = 2**40

    @property
    def free_bytes(self) -> int:
        """What is left: ``torch.cuda.mem_get_info()[0]``."""
        return self.capacity_bytes - self.other_bytes - self.given_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """Give a segment (``cudaMalloc``): its address, or None where there is no memory."""
        if num_bytes > self.free_bytes:
            return None
        self.given_bytes += num_bytes
        return self.reserve_addresses(num_bytes)

    def release(self, address: int, num_bytes: int) -> None:  # noqa: ARG002 - a replay checks the address
        """Take a segment back (``cudaFree``)."""
        self.given_bytes -= num_bytes

    def reserve_addresses(self, num_bytes: int) -> int:
        """Give addresses without memory (``cuMemAddressReserve``)."""
        address = self._next_address
        self._next_address += -(-num_bytes // (2 * MIB)) * 2 * MIB
        return address

    def map(self, address: int, num_bytes: int) -> bool:  # noqa: ARG002
        """Put memory behind addresses (``cuMemMap``), all of it or none."""
        if num_bytes > self.free_bytes:
            return False
        self.given_bytes += num_bytes
        return True

    def unmap(self, address: int, num_bytes: int) -> None:  # noqa: ARG002
        """Take the memory behind addresses back (``cuMemUnmap``)."""
        self.given_bytes -= num_bytes
