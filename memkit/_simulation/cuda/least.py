"""The least memory in which a run goes through.

Reserved memory is elastic: where the driver has no more, torch's allocator frees the segments that it caches and tries
again. So a run may finish, more slowly, with less than it reserves where memory is plenty. How much less follows from
its requests alone, which are kept here and made again on smaller and smaller cards.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from memkit._core.units import MIB
from memkit._simulation.cuda.allocator import AllocatorSettings, Block, CachingAllocator

_EMPTY_CACHE = 0  # no request is for zero bytes
_FINEST, _FINEST_SHARE = 2 * MIB, 256  # how exactly the least is sought: a segment's rounding, or a share of the whole


class RequestLog:
    """The requests of a run, in order.

    Memory cost:
        8 bytes for each allocation and each free.
    """

    def __init__(self) -> None:
        self._log = array("q")  # bytes of an allocation, or the complement of the position of the one that is freed
        self._streams: dict[int, int] = {}
        self._positions: dict[int, int] = {}  # of live blocks, by address

    def took(self, block: Block, num_bytes: int) -> None:
        """Note an allocation."""
        position = self._positions[block.address] = len(self._log)
        if block.pool.stream:
            self._streams[position] = block.pool.stream
        self._log.append(num_bytes)

    def freed(self, block: Block) -> None:
        """Note that a block was freed."""
        self._log.append(~self._positions.pop(block.address))

    def emptied(self) -> None:
        """Note that the cache was emptied."""
        self._log.append(_EMPTY_CACHE)

    def run_in(self, capacity_bytes: int, settings: AllocatorSettings) -> bool:
        """Return whether the allocator can meet all requests on a card with this much room."""
        allocator = CachingAllocator(capacity_bytes, settings=replace(settings, memory_fraction=1.0))
        blocks: dict[int, Block] = {}
        for position, entry in enumerate(self._log):
            if entry > 0:
                block = allocator.try_allocate(entry, self._streams.get(position, 0))
                if block is None:
                    return False
                blocks[position] = block
            elif entry < 0:
                allocator.free(blocks.pop(~entry))
            else:
                allocator.empty_cache()
        return True

    def least_bytes(self, allocator: CachingAllocator) -> int:
        """Return the least bytes that an allocator with these settings must be able to reserve, rounded up.

        Args:
            allocator: The one that met the requests.
        """
        low, high = allocator.highest_allocated_bytes, allocator.highest_reserved_bytes
        step = max(_FINEST, high // _FINEST_SHARE // _FINEST * _FINEST)
        while high - low > step:
            middle = (low + high) // 2 // _FINEST * _FINEST
            if self.run_in(middle, allocator.settings):
                high = middle
            else:
                low = middle
        return high
