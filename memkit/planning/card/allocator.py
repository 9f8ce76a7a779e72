"""A model of torch's caching allocator for CUDA: the same decisions on the same requests, without a GPU."""

from __future__ import annotations

from typing import SupportsIndex

import torch

from memkit._errors import InputError, StateError
from memkit._records import DeviceMemory
from memkit._units import MIB, parse_bytes
from memkit.planning.card.allocator_blocks import ACTIVE, CACHED, GONE, PENDING, UNMAPPED, Block, Driver, Pool
from memkit.planning.card.allocator_report import SegmentRecord, no_room, records_of
from memkit.planning.card.allocator_settings import AllocatorSettings

_LARGEST_SMALL = MIB  # requests up to this size share segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_SHARES_LARGE_SEGMENT = 10 * MIB  # requests under this size share segments of 20 MiB
_ROUNDING = 2 * MIB  # of a segment for one request
_SMALLEST_BLOCK = 512


class CachingAllocator:
    """The CUDA caching allocator of torch 2.13, as a model: which block, which segment, and when memory runs out.

    Not modelled: private pools (CUDA graphs, ``torch.cuda.MemPool``), the ``cudaMallocAsync`` backend, peer access.

    Args:
        capacity_bytes: The memory of the card, as ``torch.cuda.mem_get_info`` gives it; also as text, ``"24GiB"``.
        other_bytes: What this process takes outside of this allocator: the CUDA context, libraries.
        settings: An `AllocatorSettings`, or the text of ``PYTORCH_ALLOC_CONF``; None for torch's defaults.
        device_index: The card's number, for the error message.

    Raises:
        ConfigError: ``other_bytes`` is above the capacity, or a setting is none of torch's.
        InputError: A size is negative, or text without a known unit.

    Attributes:
        driver: Gives and takes segments. A replay of a recorded run puts its own here, to give the recorded addresses.
        allocated_bytes: In blocks in use, rounded up: ``torch.cuda.memory_allocated``.
        requested_bytes: In blocks in use, as asked for.
        peak_allocated_bytes: Highest ``allocated_bytes`` since the last `reset_peaks`.
        peak_reserved_bytes: Highest ``reserved_bytes`` since the last `reset_peaks`.
        num_retries: How often all cached segments had to be given back to find room: ``num_alloc_retries``.
        num_ooms: How often there was no room even so.

    Memory:
        About 300 bytes for each block.

    Source:
        c10/cuda/CUDACachingAllocator.cpp.

    Example:
        >>> import memkit as mk
        >>> gpu = mk.CachingAllocator("24GiB", other_bytes="500MiB")
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
        self.driver = Driver(
            parse_bytes(capacity_bytes, name="capacity_bytes"), parse_bytes(other_bytes, name="other_bytes")
        )
        self.settings = AllocatorSettings.of(settings)
        self.device_index = device_index
        self.allocated_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
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

    def set_memory_fraction(self, fraction: float) -> None:
        """Allow the process a part of the card, as ``torch.cuda.set_per_process_memory_fraction`` does.

        Args:
            fraction: From 0 to 1; 1 for no limit but the card.

        Raises:
            InputError: It is outside of 0 to 1.
        """
        if not 0 <= fraction <= 1:
            got, rule = f"fraction={fraction}", "a fraction from 0 to 1"
            raise InputError("set_memory_fraction(fraction)", got=got, expected=rule, fix="pass for example 0.5.")
        self._limit_bytes = int(fraction * self.driver.capacity_bytes) if fraction < 1 else None

    def allocate(self, num_bytes: SupportsIndex | str, stream: int = 0) -> Block:
        """Take a block of at least this size.

        Args:
            num_bytes: What is asked for, also as text. Above zero: torch takes no memory for an empty tensor.
            stream: Number of the CUDA stream that asks. Streams do not share free blocks.

        Returns:
            The block; give it to `free`.

        Raises:
            torch.OutOfMemoryError: There is no room, with torch's own message and figures.
            InputError: ``num_bytes`` is not above zero.
        """
        if type(num_bytes) is not int or num_bytes < 1:  # a replay asks a million times, with plain numbers
            num_bytes = parse_bytes(num_bytes, name="num_bytes")
        if not num_bytes:
            raise InputError("num_bytes=0", got="0", expected="at least one byte", fix="leave out empty tensors.")
        size = self.settings.round_up(num_bytes)
        pool = self._pool(stream, is_small=size <= _LARGEST_SMALL)
        block = self._take_cached(pool, size) or self._take_new(pool, size)
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
        """Give a block back to the cache.

        Raises:
            StateError: The block is not in use.
        """
        self.request_free(block)
        self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """Give back a block that another stream may still use (``Tensor.record_stream``): it cannot be used yet.

        Raises:
            StateError: The block is not in use.
        """
        if block.state != ACTIVE:
            raise _wrong_state("free", block, ACTIVE)
        block.state = PENDING
        self._pending[block] = None
        self.allocated_bytes -= block.num_bytes

    def complete_free(self, block: Block) -> None:
        """The other streams are done with a block of `request_free`: put it into the cache.

        Raises:
            StateError: `request_free` was not called for it, or the block is in the cache already.
        """
        if block.state != PENDING:
            raise _wrong_state("complete_free", block, PENDING)
        del self._pending[block]
        self.requested_bytes -= block.requested_bytes
        block.requested_bytes = 0
        block.state = CACHED
        self._cache(block.pool.merge(block))

    def empty_cache(self) -> None:
        """Wait for all streams, and give all cached segments back, as ``torch.cuda.empty_cache`` does."""
        for block in tuple(self._pending):
            self.complete_free(block)
        for pool in sorted(self._pools.values(), key=lambda pool: (pool.is_small, pool.stream)):
            for block in tuple(pool.cached()):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is there now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def memory(self) -> DeviceMemory:
        """The figures of now.

        Returns:
            The record that a real card gives too. ``inactive_split_bytes`` are cached and cannot be given back,
            since another part of their segment is in use; expandable segments are left out of it, as in torch.
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
        """All segments by address, with their blocks: ``torch.cuda.memory_snapshot``."""
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

    def _take_new(self, pool: Pool, size: int) -> Block:
        self._collect_garbage()
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._grow(pool, size)
        if block is None:
            self.num_ooms += 1
            wanted = self._segment_bytes(size)
            text = no_room(wanted, self.driver, self.device_index, self.allocated_bytes, self._limit_bytes)
            raise torch.OutOfMemoryError(text)
        return block

    def _segment_bytes(self, size: int) -> int:
        if size <= _LARGEST_SMALL:
            return _SMALL_SEGMENT
        if size < _SHARES_LARGE_SEGMENT:
            return self.settings.large_segment_bytes
        return -(-size // _ROUNDING) * _ROUNDING

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Take memory from the card; None where it has none, or the process is not allowed it."""
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
        """Map pages at the lowest address where there is room, behind a cached block if there is one."""
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
        most = self.driver.capacity_bytes * 9 // 8  # more than can ever be mapped: gaps are unavoidable
        num_bytes = -(-most // pool.page_bytes) * pool.page_bytes
        address = self.driver.reserve_addresses(num_bytes)
        block = self._heads[address] = Block(address, num_bytes, pool, UNMAPPED, address)
        pool.put(block)
        return block

    def _map(self, block: Block, num_bytes: int) -> Block | None:
        """Map whole pages from the start of an unmapped block; the cached block that they are part of then."""
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
        """Unmap the whole pages of a cached block; a segment without any page is given up."""
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
        """Give back just enough of the blocks that are too large to be split; say whether that was enough."""
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
        """Give back cached segments, the older half first, until the use is below the threshold."""
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
        expected=f"one that is {expected!r}",
        fix="free each block once.",
    )
