"""Whatever is asked of the allocator model: blocks tile their segments, and the figures are sums of the blocks."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from memkit._core.units import MIB
from memkit._simulation.cuda.allocator import AllocatorSettings, CachingAllocator
from tests.helpers import one_in

CARD = 160 * MIB
OTHER = 10 * MIB
SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:30,expandable_segments:True",
    "roundup_power2_divisions:4,large_segment_size_mb:12",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
)
sizes = st.one_of(
    st.integers(1, 4 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 30 * MIB, 55 * MIB, 90 * MIB, CARD]),
)
steps = st.one_of(
    st.tuples(st.just("allocate"), sizes, st.integers(0, 1)),
    st.tuples(st.sampled_from(["free", "request_free"]), st.integers(0, 10**6)),
    st.tuples(st.sampled_from(["complete_free", "empty_cache"]), st.integers(0, 10**6)),
)


def check(gpu, live, pending):
    segments = gpu.segments()
    blocks = [block for segment in segments for block in segment.blocks]
    for segment in segments:
        end = segment.address
        for block in segment.blocks:
            assert block.address == end  # no gap, no overlap
            assert block.num_bytes > 0
            end += block.num_bytes
        assert end == segment.address + segment.num_bytes
        states = [block.state for block in segment.blocks]
        assert ("inactive", "inactive") not in itertools.pairwise(states)
    for before, after in itertools.pairwise(segments):
        assert before.address + before.num_bytes <= after.address
    used = [block for block in blocks if block.state == "active_allocated"]
    held = [block for block in blocks if block.state != "inactive"]
    assert sorted(block.address for block in used) == sorted(block.address for block in live)
    assert len(held) == len(used) + len(pending)
    assert gpu.allocated_bytes == sum(block.num_bytes for block in used)
    assert gpu.requested_bytes == sum(block.requested_bytes for block in held)
    assert gpu.reserved_bytes == sum(segment.num_bytes for segment in segments)
    assert gpu.peak_allocated_bytes >= gpu.allocated_bytes
    assert gpu.peak_reserved_bytes >= gpu.reserved_bytes
    assert 0 <= gpu.memory().free_bytes == CARD - OTHER - gpu.reserved_bytes


def fits_in_cache(gpu, size, stream):
    oversize = gpu.settings.max_split_bytes or 2**63
    return any(
        block.state == "inactive" and block.num_bytes >= size and max(size, block.num_bytes) < oversize
        for segment in gpu.segments()
        for block in segment.blocks
        if segment.stream == stream and segment.is_small == (size <= MIB)
    )


def allocate(gpu, num_bytes, stream):
    """One request; an error counts as right only where there truly was no room."""
    size = gpu.settings.round_up(num_bytes)
    fitted = fits_in_cache(gpu, size, stream)
    num_ooms = gpu.num_ooms
    try:
        block = gpu.allocate(num_bytes, stream)
    except torch.OutOfMemoryError:
        assert gpu.num_ooms == num_ooms + 1
        assert not fitted
        is_shared = MIB < size < 10 * MIB or (size > MIB and gpu.settings.expandable_segments)
        unit = gpu.settings.large_segment_bytes if is_shared else 2 * MIB
        wanted = -(-size // unit) * unit
        limit = int(gpu.settings.memory_fraction * CARD) - gpu.reserved_bytes
        assert min(gpu.memory().free_bytes, limit) < wanted
        if not gpu.settings.expandable_segments:
            assert all(len(segment.blocks) > 1 or segment.blocks[0].state != "inactive" for segment in gpu.segments())
        return None
    assert block.num_bytes >= size >= num_bytes
    return block


@pytest.mark.parametrize("text", one_in(2, SETTINGS))
@settings(max_examples=150)
@given(script=st.lists(steps, max_size=30))
def test_any_requests(text, script):
    gpu = CachingAllocator(CARD, other_bytes=OTHER, settings=AllocatorSettings.parse(text))
    live, pending = [], []
    for step, *numbers in script:
        if step == "allocate":
            block = allocate(gpu, *numbers)
            live += [block] if block else []
            pending = [block for block in pending if block.state == "active_pending_free"]  # a retry waits for them
        elif step == "empty_cache":
            gpu.empty_cache()
            pending.clear()
        elif step == "complete_free" and pending:
            gpu.complete_free(pending.pop(numbers[0] % len(pending)))
        elif step != "complete_free" and live:
            block = live.pop(numbers[0] % len(live))
            getattr(gpu, step)(block)
            pending += [block] if step == "request_free" else []
        check(gpu, live, pending)
    for block in live:
        gpu.free(block)
    gpu.empty_cache()
    assert (gpu.allocated_bytes, gpu.requested_bytes, gpu.reserved_bytes, gpu.segments()) == (0, 0, 0, ())
    assert gpu.driver.free_bytes == CARD - OTHER
