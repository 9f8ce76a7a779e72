"""A model of torch's caching allocator for CUDA: the same decisions on the same requests, without a GPU.

`CachingAllocator` makes the decisions. It builds on blocks, the lists of free blocks and the driver that provides
segments. Its settings, plain records of its segments, and torch's out-of-memory message are also here.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, SupportsIndex

import torch

from memkit._core.errors import ConfigError, InputError, StateError
from memkit._core.records import DeviceMemory
from memkit._core.settings import Checker
from memkit._core.units import GIB, KIB, MIB, parse_bytes

_LARGEST_SMALL = MIB  # requests up to this size share segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_SHARES_LARGE_SEGMENT = 10 * MIB  # requests under this size share segments of 20 MiB
_ROUNDING = 2 * MIB  # for a segment of one request
_SMALLEST_BLOCK = 512
_KEY_BITS = 64  # a free block's key is its size above its address, in one number
_ADDRESS = attrgetter("address")
_LEAST_SEGMENT_MB = 11  # must exceed 10 MiB: requests of that size or more get their own segment
_SMALLEST_INTERVAL_BITS = 20  # roundup_power2_divisions has one number for each power of two from 1 MiB to 32 GiB
_NUM_INTERVALS = 16
_OPTION = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")
_FORM = "key:value,key:value, with a list as key:[a:1,b:2]"

ACTIVE: Final = "active_allocated"
PENDING: Final = "active_pending_free"  # freed, but possibly still in use on another stream
CACHED: Final = "inactive"
UNMAPPED: Final = "unmapped"  # addresses of an expandable segment with no memory behind them
GONE: Final = "gone"  # merged into a neighbor, or returned to the driver


class CachingAllocator:
    """A model of torch 2.13's CUDA caching allocator: which block, which segment, and when memory runs out.

    Not modeled: private pools (CUDA graphs, ``torch.cuda.MemPool``), the ``cudaMallocAsync`` backend, peer access.

    Args:
        capacity_bytes: The GPU's memory, as ``torch.cuda.mem_get_info`` returns it; also as text, ``"24GiB"``.
        other_bytes: Memory that this process uses outside this allocator: the CUDA context, libraries.
        settings: An `AllocatorSettings`, or the text of ``PYTORCH_ALLOC_CONF``; None for torch's defaults.
        device_index: The GPU's index, for the error message.

    Raises:
        ConfigError: ``other_bytes`` is above the capacity, or torch has no such setting.
        InputError: A size is negative, or text without a known unit.

    Attributes:
        driver: Provides and takes back segments. A replay of a recorded run sets its own driver here, which returns the
            recorded addresses.
        allocated_bytes: Bytes of blocks in use, rounded up: ``torch.cuda.memory_allocated``.
        requested_bytes: Bytes of blocks in use, as requested.
        peak_allocated_bytes: Highest ``allocated_bytes`` since the last `reset_peaks`.
        peak_reserved_bytes: Highest ``reserved_bytes`` since the last `reset_peaks`.
        num_retries: How often all cached segments had to be freed to find room: ``num_alloc_retries``.
        num_ooms: How often there was still no room.

    Memory:
        About 300 bytes for each block.

    Source:
        c10/cuda/CUDACachingAllocator.cpp.

    Example:
        >>> import memkit as mk
        >>> gpu = mk.predict.CachingAllocator("24GiB", other_bytes="500MiB")
        >>> block = gpu.allocate(3_000_000)
        >>> block.num_bytes, gpu.allocated_bytes, gpu.reserved_bytes
        (3000320, 3000320, 20971520)
        >>> gpu.free(block)
        >>> gpu.allocated_bytes, gpu.reserved_bytes
        (0, 20971520)
        >>> gpu.empty_cache()
        >>> gpu.reserved_bytes
        0
    """

    def __init__(
        self,
        capacity_bytes: SupportsIndex | str,
        *,
        other_bytes: SupportsIndex | str = 0,
        settings: AllocatorSettings | str | None = None,
        device_index: int = 0,
    ) -> None:
        sizes = {"capacity_bytes": capacity_bytes, "other_bytes": other_bytes}
        self.driver = CudaDriver(
            *(n if type(n) is int and n >= 0 else parse_bytes(n, name=k) for k, n in sizes.items())
        )
        self.settings = AllocatorSettings.of(settings)
        self.device_index = device_index
        self.allocated_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._earlier_peaks = (0, 0)
        self.num_retries = self.num_ooms = 0
        self._limit_bytes: int | None = None
        self.set_memory_fraction(self.settings.memory_fraction)
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._heads: dict[int, Block] = {}  # the first block of every segment
        self._pending: dict[Block, None] = {}
        self._num_searches = 0  # the clock of the garbage collection

    @property
    def reserved_bytes(self) -> int:
        """Bytes in segments, in use or cached: ``torch.cuda.memory_reserved``."""
        return self.driver.given_bytes

    @property
    def highest_allocated_bytes(self) -> int:
        """Highest ``allocated_bytes`` ever, regardless of `reset_peaks`."""
        return max(self.peak_allocated_bytes, self._earlier_peaks[0])

    @property
    def highest_reserved_bytes(self) -> int:
        """Highest ``reserved_bytes`` ever, regardless of `reset_peaks`."""
        return max(self.peak_reserved_bytes, self._earlier_peaks[1])

    def make_another(self) -> CachingAllocator:
        """Return an allocator of the same GPU, settings and limit that has received no request."""
        driver = self.driver
        another = CachingAllocator(driver.capacity_bytes, other_bytes=driver.other_bytes, settings=self.settings)
        another._limit_bytes = self._limit_bytes
        return another

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the process to a fraction of the GPU, as ``torch.cuda.set_per_process_memory_fraction`` does.

        Args:
            fraction: From 0 to 1; 1 for no limit other than the GPU.

        Raises:
            InputError: ``fraction`` is not between 0 and 1.
        """
        if not 0 <= fraction <= 1:
            Checker("set_memory_fraction(fraction)", InputError).number("fraction", fraction, 0, 1)
        self._limit_bytes = int(fraction * self.driver.capacity_bytes) if fraction < 1 else None

    @property
    def memory_fraction(self) -> float:
        """Share of the GPU's memory that the process may have, as ``torch.cuda.get_per_process_memory_fraction``."""
        return 1.0 if self._limit_bytes is None else self._limit_bytes / self.driver.capacity_bytes

    def allocate(self, num_bytes: SupportsIndex | str, stream: int = 0) -> Block:
        """Allocate a block of at least this size.

        Args:
            num_bytes: Requested size, also as text. Above zero: torch allocates no memory for an empty tensor.
            stream: Number of the requesting CUDA stream. Streams do not share free blocks.

        Returns:
            The block; pass it to `free`.

        Raises:
            torch.OutOfMemoryError: There is no room, with torch's own message and figures.
            InputError: ``num_bytes`` is not above zero.
        """
        if type(num_bytes) is not int or num_bytes < 1:  # replays make a million requests with plain ints
            num_bytes = parse_bytes(num_bytes, name="num_bytes")
        if not num_bytes:
            raise InputError("num_bytes=0", got="0", expected="at least one byte", fix="leave out empty tensors.")
        block = self.try_allocate(num_bytes, stream)
        if block is None:
            self.num_ooms += 1
            wanted = self._segment_bytes(self.settings.round_up(num_bytes))
            text = no_room(wanted, self.driver, self.device_index, self.allocated_bytes, self._limit_bytes)
            raise torch.OutOfMemoryError(text)
        return block

    def try_allocate(self, num_bytes: int, stream: int = 0) -> Block | None:
        """Allocate a block of at least this size, above zero; None if there is no room."""
        size = self.settings.round_up(num_bytes)
        pool = self._pool(stream, is_small=size <= _LARGEST_SMALL)
        block = self._take_cached(pool, size) or self._take_new(pool, size)
        if block is None:
            return None
        if self._is_worth_splitting(block, size):
            self._cache(block.cut(size))
        block.state = ACTIVE
        block.requested_bytes = num_bytes
        self.requested_bytes += num_bytes
        self.allocated_bytes += block.num_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache.

        Raises:
            StateError: The block is not in use.
        """
        self.request_free(block)
        self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """Free a block that another stream may still use (``Tensor.record_stream``); it cannot be reused yet.

        Raises:
            StateError: The block is not in use.
        """
        if block.state != ACTIVE:
            raise _wrong_state("free", block, ACTIVE)
        block.state = PENDING
        self._pending[block] = None
        self.allocated_bytes -= block.num_bytes

    def complete_free(self, block: Block) -> None:
        """Return a block from `request_free` to the cache once the other streams are done with it.

        Raises:
            StateError: `request_free` was not called for it, or the block is already in the cache.
        """
        if block.state != PENDING:
            raise _wrong_state("complete_free", block, PENDING)
        del self._pending[block]
        self.requested_bytes -= block.requested_bytes
        block.requested_bytes = 0
        block.state = CACHED
        self._cache(block.pool.merge(block))

    def empty_cache(self) -> None:
        """Wait for all streams and free all cached segments, as ``torch.cuda.empty_cache`` does."""
        for block in tuple(self._pending):
            self.complete_free(block)
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.is_small, pool.stream)):
            for block in tuple(pool.cached()):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current figures."""
        self._earlier_peaks = self.highest_allocated_bytes, self.highest_reserved_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def memory(self) -> DeviceMemory:
        """Return the current figures.

        Returns:
            The same record as for a real GPU. ``inactive_split_bytes`` are cached but cannot be freed because another
            part of their segment is in use; they exclude expandable segments, as in torch.
        """
        split = sum(
            block.num_bytes
            for pool in self._pools.values()
            for block in pool.cached()
            if not block.is_whole and not self.settings.expandable_segments
        )
        return DeviceMemory(
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            peak_bytes=self.peak_allocated_bytes,
            reserved_peak_bytes=self.peak_reserved_bytes,
            inactive_split_bytes=split,
            free_bytes=self.driver.free_bytes,
            total_bytes=self.driver.capacity_bytes,
        )

    def segments(self) -> tuple[SegmentRecord, ...]:
        """Return all segments by address, with their blocks: ``torch.cuda.memory_snapshot``."""
        is_expandable = self.settings.expandable_segments
        heads = (self._heads[address] for address in sorted(self._heads))
        return tuple(record for head in heads for record in records_of(head, is_expandable=is_expandable))

    def _pool(self, stream: int, *, is_small: bool) -> Pool:
        pool = self._pools.get((stream, is_small))
        if pool is None:
            page = _SMALL_SEGMENT if is_small else self.settings.large_segment_bytes
            pool = self._pools[stream, is_small] = Pool(stream, is_small=is_small, page_bytes=page)
        return pool

    def _take_cached(self, pool: Pool, size: int) -> Block | None:
        if not pool.is_small:
            self._num_searches += 1
        expandable = self.settings.expandable_segments
        block = pool.best_expandable_fit(size) if expandable else pool.best_fit(size)
        if block is None or block.num_bytes >= self.settings.too_large_bytes(size):
            return None
        pool.remove(block)
        return block

    def _take_new(self, pool: Pool, size: int) -> Block | None:
        self._collect_garbage()
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._grow(pool, size)
        return block

    def _segment_bytes(self, size: int) -> int:
        if size <= _LARGEST_SMALL:
            return _SMALL_SEGMENT
        if size < _SHARES_LARGE_SEGMENT:
            return self.settings.large_segment_bytes
        return -(-size // _ROUNDING) * _ROUNDING

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Get memory from the driver; None if there is none left, or the process has reached its limit."""
        num_bytes = self._segment_bytes(size)
        if self._limit_bytes is not None and self.reserved_bytes + num_bytes > self._limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        address = self.driver.allocate(num_bytes)
        if address is None:
            return None
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = self._heads[address] = Block(address, num_bytes, pool, CACHED, address)
        return block

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address with enough room, after a cached block if there is one."""
        block = pool.lowest_room(size) or self._new_expandable(pool)
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.num_bytes, size))
            if mapped is None:
                return None
            block = mapped
        while block.num_bytes < size and block.next is not None:
            mapped = self._map(block.next, min(size - block.num_bytes, block.next.num_bytes))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _new_expandable(self, pool: Pool) -> Block:
        most = self.driver.capacity_bytes * 9 // 8  # more than can ever be mapped, because gaps are unavoidable
        num_bytes = -(-most // pool.page_bytes) * pool.page_bytes
        address = self.driver.reserve_addresses(num_bytes)
        block = self._heads[address] = Block(address, num_bytes, pool, UNMAPPED, address)
        pool.put(block)
        return block

    def _map(self, block: Block, num_bytes: int) -> Block | None:
        """Map whole pages from the start of an unmapped block; return the cached block that then contains them."""
        pool = block.pool
        mapped_bytes = -(-num_bytes // pool.page_bytes) * pool.page_bytes
        if not self.driver.map(block.address, mapped_bytes):
            return None
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        pool.remove(block)
        if mapped_bytes < block.num_bytes:
            pool.put(block.cut(mapped_bytes))
        block.state = CACHED
        block = pool.merge(block)
        self._cache(block)
        return block

    def _is_worth_splitting(self, block: Block, size: int) -> bool:
        rest = block.num_bytes - size
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= _SMALLEST_BLOCK
        oversize = self.settings.max_split_bytes
        return rest > _LARGEST_SMALL and (oversize is None or size < oversize)

    def _cache(self, block: Block) -> None:
        block.freed_at = self._num_searches
        block.pool.put(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        block.state = GONE
        del self._heads[block.address]
        self.driver.release(block.address, block.num_bytes)

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a cached block; drop a segment that has no pages left."""
        pool = block.pool
        start, end = pool.whole_pages(block)
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            rest = block.cut(start - block.address)
            self._cache(block)
            block = rest
        if end < block.address + block.num_bytes:
            self._cache(block.cut(end - start))
        block.state = UNMAPPED
        block = pool.merge(block)
        self.driver.unmap(start, end - start)
        if block.is_whole:
            block.state = GONE
            del self._heads[block.address]
        else:
            pool.put(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free just enough of the blocks that are too large to be split; return whether that was enough."""
        oversize = self.settings.max_split_bytes
        if oversize is None or self.settings.expandable_segments:
            return False
        wanted = max(size, oversize)
        enough = pool.best_fit(wanted)
        if enough is not None:
            self._release(enough)
            return True
        released = 0
        for block in reversed(tuple(pool.cached(oversize))):
            if released >= wanted:
                break
            released += block.num_bytes
            self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Free cached segments, the older half first, until usage is below the threshold."""
        threshold = self.settings.garbage_collection_threshold
        if threshold is None or self._limit_bytes is None:
            return
        target = self.reserved_bytes - int(threshold * self._limit_bytes)
        cached = {
            block: self._num_searches - block.freed_at
            for pool in self._pools.values()
            for block in (() if pool.is_small else pool.cached())
            if block.is_whole
        }
        while cached and target > 0:
            average = sum(cached.values()) / len(cached)
            for block in [block for block, age in cached.items() if age >= average]:
                del cached[block]
                target -= block.num_bytes
                self._release(block)


def _wrong_state(call: str, block: Block, expected: str) -> StateError:
    return StateError(
        f"{call}(block)",
        got=f"a block that is {block.state!r}",
        expected=f"a block that is {expected!r}",
        fix="free each block once.",
    )


# ------------------------------------------------------------------------------------------------------------- blocks


class Block:
    """A piece of a segment, linked to the pieces before and after it in the same segment.

    Attributes:
        address: Start address.
        num_bytes: Its size: the rounded request plus any remainder that was not worth splitting off.
        requested_bytes: The requested size.
        state: ``"active_allocated"``, ``"active_pending_free"`` or ``"inactive"``, as in
            ``torch.cuda.memory_snapshot``; within the model also ``"unmapped"`` and ``"gone"``.
    """

    __slots__ = ("address", "freed_at", "next", "num_bytes", "pool", "prev", "requested_bytes", "segment", "state")

    def __init__(self, address: int, num_bytes: int, pool: Pool, state: str, segment: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.pool = pool
        self.state = state
        self.segment = segment  # start address of the segment
        self.requested_bytes = 0
        self.freed_at = 0  # on the clock of the garbage collection
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it covers its whole segment."""
        return self.prev is None and self.next is None

    def cut(self, num_bytes: int) -> Block:
        """Keep the first ``num_bytes``; return the rest as a block of the same state, in no list."""
        rest = Block(self.address + num_bytes, self.num_bytes - num_bytes, self.pool, self.state, self.segment)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.num_bytes = num_bytes
        return rest

    def absorb(self, after: Block) -> None:
        """Merge the next block into this one, so that a segment's first block stays the same object."""
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
        page_bytes: Page size of an expandable segment.
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
        """Add a cached or unmapped block to its list."""
        if block.state == CACHED:
            key = block.num_bytes << _KEY_BITS | block.address
            insort(self._keys, key)
            self._blocks[key] = block
        else:
            insort(self._unmapped, block, key=_ADDRESS)

    def remove(self, block: Block) -> None:
        """Remove a cached or unmapped block from its list."""
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
        """Return the smallest cached block that is large enough; ties go to the lowest address."""
        index = bisect_left(self._keys, num_bytes << _KEY_BITS)
        return self._blocks[self._keys[index]] if index < len(self._keys) else None

    def best_expandable_fit(self, num_bytes: int) -> Block | None:
        """Return the best fit, counting a block before unmapped addresses with the size it can grow to."""
        best: Block | None = None
        for block in self.cached(num_bytes):
            if best is not None and _room(block) >= _room(best):
                break
            best = block
        return best

    def lowest_room(self, num_bytes: int) -> Block | None:
        """Return the first block of the lowest run of cached and unmapped blocks that is long enough.

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
        """Merge a cached or unmapped block, which is in no list, with its neighbors of the same state."""
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
        """Return the first and the last page boundary inside a block."""
        first = -((block.segment - block.address) // self.page_bytes)
        last = (block.address + block.num_bytes - block.segment) // self.page_bytes
        return block.segment + first * self.page_bytes, block.segment + last * self.page_bytes


def _room(block: Block) -> int:
    after = block.next
    return block.num_bytes + (after.num_bytes if after is not None and after.state == UNMAPPED else 0)


def shares_large_segment(num_bytes: int) -> bool:
    """Whether a request of this size shares a segment with others, and is not small."""
    return _LARGEST_SMALL < num_bytes < _SHARES_LARGE_SEGMENT


class CudaDriver:
    """The driver: decides whether there is memory, and where. The allocator knows nothing else about the GPU.

    Args:
        capacity_bytes: The total that ``torch.cuda.mem_get_info`` returns.
        other_bytes: Memory that this process uses outside PyTorch's allocator: the CUDA context, libraries.

    Raises:
        ConfigError: ``other_bytes`` is above the capacity.
    """

    def __init__(self, capacity_bytes: int, other_bytes: int) -> None:
        if other_bytes > capacity_bytes:
            raise ConfigError(
                "CachingAllocator(capacity_bytes, other_bytes=...)",
                got=f"capacity_bytes={capacity_bytes}, other_bytes={other_bytes}",
                expected="other_bytes <= capacity_bytes",
                fix="pass the GPU's memory, and the part of it that PyTorch cannot use, in bytes.",
            )
        self.capacity_bytes = capacity_bytes
        self.other_bytes = other_bytes
        self.given_bytes = 0
        self._next_address = 2**40

    @property
    def free_bytes(self) -> int:
        """Free memory: ``torch.cuda.mem_get_info()[0]``."""
        return self.capacity_bytes - self.other_bytes - self.given_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """Allocate a segment (``cudaMalloc``); return its address, or None if there is no memory."""
        if num_bytes > self.free_bytes:
            return None
        self.given_bytes += num_bytes
        return self.reserve_addresses(num_bytes)

    def release(self, address: int, num_bytes: int) -> None:  # noqa: ARG002 - a replay checks the address
        """Free a segment (``cudaFree``)."""
        self.given_bytes -= num_bytes

    def reserve_addresses(self, num_bytes: int) -> int:
        """Reserve addresses without memory (``cuMemAddressReserve``)."""
        address = self._next_address
        self._next_address += -(-num_bytes // (2 * MIB)) * 2 * MIB
        return address

    def map(self, address: int, num_bytes: int) -> bool:  # noqa: ARG002
        """Map memory to addresses (``cuMemMap``), all of it or none."""
        if num_bytes > self.free_bytes:
            return False
        self.given_bytes += num_bytes
        return True

    def unmap(self, address: int, num_bytes: int) -> None:  # noqa: ARG002
        """Unmap the memory of addresses (``cuMemUnmap``)."""
        self.given_bytes -= num_bytes


# ----------------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the CUDA caching allocator; the defaults are torch's.

    Attributes:
        expandable_segments: Use one growing segment per stream and pool instead of one segment per request.
        max_split_bytes: Blocks of at least this size are never split, and are kept for requests of at least this size.
            None: every block may be split.
        max_non_split_rounding_bytes: How much larger such a block may be than the request that it serves. None: by
            the size of a large segment.
        large_segment_bytes: Segment size for a request of over 1 MiB and under 10 MiB; with expandable segments, the
            page size of the large pool.
        garbage_collection_threshold: Above this fraction of the process's memory limit, old cached segments are freed
            before a new one is requested. It needs a ``memory_fraction`` below 1: torch checks it only if a limit is
            set. None: never.
        memory_fraction: The fraction of the GPU that the process may use. 1.0: no limit other than the GPU.
        roundup_power2_divisions: For requests from 1 MiB, 2 MiB, ... 32 GiB on: the number of steps into which the
            interval up to the next power of two is divided. 0: round to 512 bytes.

    Raises:
        ConfigError: torch would not accept a value.

    Example:
        >>> import memkit as mk
        >>> mk.predict.AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = 20 * MIB
    garbage_collection_threshold: float | None = None
    memory_fraction: float = 1.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * _NUM_INTERVALS

    def __post_init__(self) -> None:
        """Reject values that torch would reject, as `parse` does for text."""
        check = Checker("AllocatorSettings(...)")
        check.flag("expandable_segments", self.expandable_segments)
        segment_bytes = check.whole("large_segment_bytes", self.large_segment_bytes, _LEAST_SEGMENT_MB * MIB)
        for name in ("max_non_split_rounding_bytes", "max_split_bytes"):
            if getattr(self, name) is not None:
                check.whole(name, getattr(self, name), segment_bytes)
        check.number("memory_fraction", self.memory_fraction, 0, 1)
        threshold = self.garbage_collection_threshold
        if threshold is not None:
            fix = "pass garbage_collection_threshold=0.8."
            check.number("garbage_collection_threshold", threshold, above=0, below=1, fix=fix)
        for each in check.items("roundup_power2_divisions", self.roundup_power2_divisions, _NUM_INTERVALS):
            if check.whole("roundup_power2_divisions", each) & (each - 1):
                fix = "pass, for example, 8 where blocks should be rounded up, and 0 elsewhere."
                raise check.refusal("roundup_power2_divisions", each, "0 or a power of two for each size", fix=fix)

    @classmethod
    def of(cls, settings: AllocatorSettings | str | None) -> AllocatorSettings:
        """Make settings from user input: settings, text for `parse`, or None for torch's defaults."""
        if isinstance(settings, AllocatorSettings):
            return settings
        if not settings and (settings is None or isinstance(settings, str)):
            return _DEFAULTS
        if not isinstance(settings, str):
            raise Checker("CachingAllocator(...)").refusal(
                "settings",
                settings,
                "text, an AllocatorSettings, or None",
                fix="pass the value of PYTORCH_ALLOC_CONF, such as 'expandable_segments:True'.",
            )
        return cls.parse(settings)

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the text of ``PYTORCH_ALLOC_CONF``.

        Args:
            text: For example ``"expandable_segments:True,max_split_size_mb:128"``. Spaces are ignored. Options of
                pinned host memory are checked but have no effect here.

        Raises:
            InputTypeError: It is not text.
            ConfigError: An option is unknown, given twice or has an invalid value (torch rejects it too, or silently
                reads something else), or the model does not support it: ``backend:cudaMallocAsync``,
                ``throw_on_cudamalloc_oom:True``.

        Source:
            c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h of torch 2.13.

        Example:
            >>> import memkit as mk
            >>> settings = mk.predict.AllocatorSettings.parse("max_split_size_mb:128,roundup_power2_divisions:4")
            >>> settings.max_split_bytes, settings.round_up(5 * 2**20 + 1)
            (134217728, 6291456)
        """
        expected, fix = "text", "write AllocatorSettings.parse('expandable_segments:True')."
        Checker("AllocatorSettings.parse(text)").instance(text, str, expected, fix)
        options = _options("".join(text.split()))
        segment_mb = options.pop("large_segment_size_mb", 20)  # first: it is the minimum of two others
        sizes = {}
        for name in ("max_non_split_rounding_mb", "max_split_size_mb"):
            megabytes = options.pop(name, None)
            if megabytes is not None and megabytes < segment_mb:
                raise _refusal(name, str(megabytes), f"at least the large segment: {segment_mb}", "raise it")
            sizes[name] = None if megabytes is None else megabytes * MIB
        known = {"expandable_segments", "garbage_collection_threshold", "roundup_power2_divisions"}
        fields = {name: value for name, value in options.items() if name in known}
        return cls(
            max_split_bytes=sizes["max_split_size_mb"],
            max_non_split_rounding_bytes=sizes["max_non_split_rounding_mb"],
            large_segment_bytes=segment_mb * MIB,
            memory_fraction=options.get("per_process_memory_fraction", 1.0),
            **fields,
        )

    def round_up(self, num_bytes: int) -> int:
        """Return the block size for a request of ``num_bytes``, without any unsplit remainder."""
        interval = min(max(num_bytes.bit_length() - 1 - _SMALLEST_INTERVAL_BITS, 0), _NUM_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        step = 512
        if divisions > 1 and num_bytes > step * divisions:
            step = (1 << (num_bytes.bit_length() - 1)) // divisions
        return -(-num_bytes // step) * step

    def too_large_bytes(self, size: int) -> float:
        """Return the size from which on a cached block is too large for a request of ``size`` rounded bytes."""
        if self.max_split_bytes is None:
            return math.inf
        if size < self.max_split_bytes:
            return self.max_split_bytes
        return size + (self.max_non_split_rounding_bytes or self.large_segment_bytes)


_DEFAULTS = AllocatorSettings()


def _options(text: str) -> dict[str, Any]:
    """Split the text into options and read each value."""
    found: dict[str, Any] = {}
    position = 0
    while position < len(text):
        option = _OPTION.match(text, position)
        if option is None:
            raise ConfigError(
                "AllocatorSettings.parse(text)",
                got=f"{text[position:]!r}",
                expected=_FORM,
                fix="write one colon between key and value, and a comma between options.",
            )
        name, value = option.groups()
        if name not in _READERS:
            raise ConfigError(
                "AllocatorSettings.parse(text)",
                got=f"the unknown option {name!r}",
                expected=f"one of {', '.join(sorted(_READERS))}",
                fix="correct its name, or remove it.",
            )
        if name in found:
            raise _refusal(name, "the option twice", "each option once", "remove one")
        found[name] = _READERS[name](name, value)
        position = option.end()
    return found


def _refusal(name: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(f"AllocatorSettings.parse({name!r})", got=got, expected=expected, fix=f"{fix}.")


def _boolean(name: str, value: str) -> bool:
    if value not in {"True", "False"}:
        raise _refusal(name, value, "exactly True or False", "write True or False")
    return value == "True"


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise _refusal(name, value, "a whole number", "write digits only")
    return int(value)


def _whole_from(least: int) -> Callable[[str, str], int]:
    def read(name: str, value: str) -> int:
        if (number := _whole(name, value)) < least:
            raise _refusal(name, value, f"at least {least}", "raise it")
        return number

    return read


def _fraction(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise _refusal(name, value, "a number from 0 to 1", "write a fraction such as 0.8")
    return number


def _threshold(name: str, value: str) -> float:
    number = _fraction(name, value)
    if number in {0, 1}:
        raise _refusal(name, value, "a number above 0 and below 1", "write a fraction such as 0.8")
    return number


def _power_of_two(name: str, value: str, *, or_zero: bool = False) -> int:
    number = _whole(name, value)
    if number & (number - 1) or (number == 0 and not or_zero):
        raise _refusal(name, value, f"a power of two{' or 0' * or_zero}", "write for example 4")
    return number


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """Read ``4``, for all sizes, or ``[256:1,512:2,>:4]``: up to 512 MiB, from 512 MiB on, from 1 GiB on."""
    if not value.startswith("["):
        return (_power_of_two(name, value),) * _NUM_INTERVALS
    divisions = [0] * _NUM_INTERVALS
    last = 0
    is_first = True
    for entry in filter(None, value[1:-1].split(",")):
        start, _, number = entry.partition(":")
        num_divisions = _power_of_two(name, number, or_zero=True)
        if start == ">":
            divisions[last + 1 :] = [num_divisions] * (_NUM_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(name, start).bit_length() - 1, _NUM_INTERVALS - 1)
        if is_first:  # it also applies to all smaller sizes
            divisions[:last] = [num_divisions] * last
            is_first = False
        divisions[last] = num_divisions
    return tuple(divisions)


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        if value not in allowed:
            raise _refusal(name, value, f"{' or '.join(allowed)}: memkit models no other value", "remove the option")
        return value

    return read


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "expandable_segments": _boolean,
    "max_split_size_mb": _whole,
    "max_non_split_rounding_mb": _whole,
    "large_segment_size_mb": _whole_from(_LEAST_SEGMENT_MB),
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _divisions,
    "per_process_memory_fraction": _fraction,
    "backend": _one_of("native"),
    "throw_on_cudamalloc_oom": _one_of("False"),
    # No effect on GPU memory.
    "release_lock_on_cudamalloc": _boolean,
    "release_lock_on_hipmalloc": _boolean,
    "graph_capture_record_stream_reuse": _boolean,
    "pinned_use_cuda_host_register": _boolean,
    "pinned_use_hip_host_register": _boolean,
    "pinned_use_background_threads": _boolean,
    "pinned_free_catch_all": _boolean,
    "pinned_num_register_threads": _power_of_two,
    "pinned_reserve_segment_size_mb": _whole_from(1),
    "pinned_max_round_threshold_mb": _whole,
    "pinned_max_cached_size_mb": _whole,
}


# ------------------------------------------------------------------------------------------------------------ reports


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
        address: Start address.
        num_bytes: Its size.
        stream: The stream that it belongs to.
        is_small: Whether it holds requests of up to 1 MiB.
        is_expandable: Whether it is part of an expandable segment.
        blocks: Its blocks by address, without gaps.
    """

    address: int
    num_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockRecord, ...]


def records_of(head: Block, *, is_expandable: bool) -> Iterator[SegmentRecord]:
    """Yield the segment that begins with a block; for an expandable one, each run of mapped blocks."""
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


def no_room(
    num_bytes: int, driver: CudaDriver, device_index: int, allocated_bytes: int, limit_bytes: int | None
) -> str:
    """Return torch's own message for a failed allocation of a segment of ``num_bytes``."""
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
