"""The allocator model decides as real GPUs did, and wrong models are told apart by the same traces."""

from functools import partial

import pytest
import torch

from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._core.units import GIB, MIB
from memkit._recovery.errors import is_out_of_memory
from memkit._simulation.cuda import allocator
from memkit._simulation.cuda.allocator import AllocatorSettings, Block, CachingAllocator, Pool
from tests.helpers import assert_refused
from tests.simulation.allocator_replay import TRACES, Replay, replay

# Torch 2.13 on a GPU, from a public log; the figures are the log's own, so that only the words are compared.
REAL_MESSAGE = (
    "CUDA out of memory. Tried to allocate 130.00 MiB. GPU 2 has a total capacity of 44.39 GiB of which 49.31 MiB is"
    " free. Including non-PyTorch memory, this process has 44.34 GiB memory in use. Of the allocated memory 43.42 GiB"
    " is allocated by PyTorch, and 419.37 MiB is reserved by PyTorch but unallocated. If reserved but unallocated"
    " memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See"
    " documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-"
    "usage-with-pytorch-cuda-alloc-conf)"
)
REAL_FIGURES = ("130.00 MiB", "44.39 GiB", "49.31 MiB", "44.34 GiB", "43.42 GiB", "419.37 MiB")


def new(text="", capacity=GIB, **options):
    return CachingAllocator(capacity, settings=AllocatorSettings.parse(text), **options)


@pytest.mark.parametrize("name", TRACES)
def test_every_decision_of_a_real_gpu(name):
    found = replay(name)
    assert found.differences == []
    assert found.num_same_address == found.num_allocations == TRACES[name]["allocs"]
    assert (found.final_reserved, found.final_allocated) == (
        TRACES[name]["final_reserved"],
        TRACES[name]["final_allocated"],
    )


def test_runs_out_of_memory_at_the_recorded_requests():
    offload = replay("llama_offload_10_streams")
    assert (offload.num_retries, offload.num_ooms, offload.num_flushes) == (39, 0, 0)
    error = replay("expandable_card1_oom")
    assert (error.num_retries, error.num_ooms) == (2, 1)
    emptied = replay("empty_cache_then_forward")
    assert (emptied.num_retries, emptied.num_flushes) == (0, 1)


def is_faithful(name, new_allocator=CachingAllocator):
    try:
        return replay(name, new_allocator).is_faithful(name)
    except Exception:  # noqa: BLE001 - a wrong model may break in any way before the end of the trace
        return False


def first_fit(self, num_bytes):
    return min(self.cached(num_bytes), key=lambda block: block.address, default=None)


def highest_address(self, num_bytes, best_fit=Pool.best_fit):
    best = best_fit(self, num_bytes)
    return best and [block for block in self.cached(num_bytes) if block.num_bytes == best.num_bytes][-1]


class OneFreeListForAllStreams(CachingAllocator):
    def _pool(self, stream, *, is_small):
        return super()._pool(0, is_small=is_small)


class GivesBackOnlyWhatIsNeeded(CachingAllocator):
    def empty_cache(self):
        whole = [block for pool in self._pools.values() for block in pool.cached() if block.is_whole]
        self._release(whole[0])


WRONG = {
    "first fit": ("gpt24_ctx512_amp_train", (Pool, "best_fit", first_fit)),
    "highest address of equals": ("gpt24_ctx512_amp_train", (Pool, "best_fit", highest_address)),
    "no small pool": ("lora_notebook", (allocator, "_LARGEST_SMALL", 0)),
    "no shared large segments": ("gpt_small_clean_start", (allocator, "_SHARES_LARGE_SEGMENT", 0)),
    "segments not rounded": ("lora_notebook", (allocator, "_ROUNDING", 512)),
    "every rest is split off": ("gpt24_ctx512_amp_train", (CachingAllocator, "_is_worth_splitting", lambda *_: True)),
    "nothing is split off": ("cnn_input_optimization", (CachingAllocator, "_is_worth_splitting", lambda *_: False)),
    "nothing is merged": ("cnn_input_optimization", (Pool, "merge", lambda _, block: block)),
    "no rounding": ("cnn_input_optimization", (AllocatorSettings, "round_up", lambda _, num_bytes: num_bytes)),
    "one free list": ("llama_offload_10_streams", OneFreeListForAllStreams),
    "gives back one segment": ("llama_offload_10_streams", GivesBackOnlyWhatIsNeeded),
    "nothing is unmapped": ("expandable_card1_oom", (Pool, "whole_pages", lambda _, b: (b.address, b.address))),
    "expandable best fit": ("expandable_card0", (Pool, "best_expandable_fit", Pool.best_fit)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_detects_wrong_models(wrong, monkeypatch):
    name, change = WRONG[wrong]
    if isinstance(change, tuple):
        monkeypatch.setattr(*change)
        assert not is_faithful(name)
    else:
        assert not is_faithful(name, change)


def test_one_missed_decision_is_unfaithful():
    name = "gpt_small_clean_start"
    found = replay(name)
    assert found.is_faithful(name)
    assert not Replay(**{**vars(found), "differences": ["one"]}).is_faithful(name)
    assert not Replay(**{**vars(found), "num_same_address": 35}).is_faithful(name)


def test_torchs_own_message():
    gpu = new(capacity=int(44.39 * GIB), other_bytes=300 * MIB, device_index=2)
    gpu.allocate(40 * GIB)
    freed, _ = gpu.allocate(8 * MIB), gpu.allocate(4 * MIB)
    gpu.free(freed)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        gpu.allocate(5 * GIB)
    expected = REAL_MESSAGE
    figures = ("5.00 GiB", "44.39 GiB", "4.08 GiB", "40.31 GiB", "40.00 GiB", "16.00 MiB")
    for on_the_gpu, here in zip(REAL_FIGURES, figures, strict=True):
        expected = expected.replace(on_the_gpu, here)
    assert str(caught.value) == expected
    assert is_out_of_memory(caught.value)
    assert gpu.num_ooms == gpu.num_retries == 1


def test_message_sizes_and_limit():
    gpu = new("per_process_memory_fraction:0.25", capacity=100 * MIB)
    assert gpu.allocate(100).num_bytes == 512
    with pytest.raises(
        torch.OutOfMemoryError, match=r"has 2\.00 MiB memory in use\. 25\.00 MiB allowed; Of the allocat"
    ):
        gpu.allocate(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"memory 512 bytes is allocated by PyTorch, and 2\.00 MiB is re"):
        gpu.allocate(30 * MIB)
    gpu.set_memory_fraction(1.0)
    gpu.allocate(30 * MIB)
    assert_refused(lambda: gpu.set_memory_fraction(1.5), InputError, "fraction")


def test_retry_frees_the_cache_except_split_segments():
    gpu = new(capacity=100 * MIB)
    whole, first, second = gpu.allocate(40 * MIB), gpu.allocate(8 * MIB), gpu.allocate(8 * MIB)
    gpu.free(whole)
    gpu.free(first)
    assert gpu.reserved_bytes == 60 * MIB
    gpu.allocate(70 * MIB)
    assert (gpu.num_retries, gpu.num_ooms, gpu.reserved_bytes) == (1, 0, 90 * MIB)
    assert gpu.memory().inactive_split_bytes == 12 * MIB
    assert [block.state for block in gpu.segments()[0].blocks] == ["inactive", "active_allocated", "inactive"]
    gpu.free(second)
    assert gpu.memory().inactive_split_bytes == 0


def test_blocks_in_use_on_another_stream_come_back_late():
    gpu = new(capacity=100 * MIB)
    block = gpu.allocate(40 * MIB)
    gpu.request_free(block)
    assert (gpu.allocated_bytes, gpu.requested_bytes) == (0, 40 * MIB)
    other = gpu.allocate(40 * MIB)
    assert other.address != block.address
    gpu.complete_free(block)
    assert gpu.allocate(40 * MIB).address == block.address
    gpu.request_free(other)
    gpu.allocate(30 * MIB)  # no room: it waits for the other stream
    assert (gpu.num_retries, gpu.reserved_bytes) == (1, 70 * MIB)


def test_oversize_blocks_are_kept_for_oversize_requests():
    gpu = new("max_split_size_mb:20", capacity=100 * MIB)
    gpu.free(gpu.allocate(60 * MIB))
    assert gpu.allocate(10 * MIB).num_bytes == 10 * MIB
    assert gpu.reserved_bytes == 70 * MIB  # not out of the cached 60 MiB
    fits = gpu.allocate(45 * MIB)
    assert fits.num_bytes == 60 * MIB  # not split
    gpu.free(fits)
    gpu.allocate(35 * MIB)  # 60 is too far from it: the oversize block goes, without a retry
    assert (gpu.reserved_bytes, gpu.num_retries) == (46 * MIB, 0)


def test_several_oversize_blocks_go_from_the_largest_on():
    gpu = new("max_split_size_mb:20", capacity=100 * MIB)
    for block in [gpu.allocate(size * MIB) for size in (22, 24, 50)]:
        gpu.free(block)
    gpu.allocate(72 * MIB)
    assert [segment.num_bytes // MIB for segment in gpu.segments()] == [22, 72]
    assert gpu.num_retries == 0


@pytest.mark.parametrize(("limit", "given_back"), [(",per_process_memory_fraction:0.8", 2), ("", 0)])
def test_garbage_collection_gives_back_the_older_half(limit, given_back):
    gpu = new(f"garbage_collection_threshold:0.5{limit}", capacity=200 * MIB)
    blocks = [gpu.allocate(20 * MIB) for _ in range(4)]
    starts = [block.address for block in blocks]
    for block in blocks:
        gpu.free(block)
        gpu.allocate(2 * MIB, stream=1)  # time goes by requests
    gpu.allocate(30 * MIB)  # 100 MiB are reserved, above half of the 160 that are allowed
    left = {segment.address for segment in gpu.segments()}
    assert [start in left for start in starts] == [False] * given_back + [True] * (4 - given_back)
    assert gpu.num_retries == 0


def test_expandable_segments_avoid_fragmentation():
    def batches(gpu):
        for _ in range(3):
            for block in [gpu.allocate(size * MIB) for size in (40, 60)]:
                gpu.free(block)
            gpu.allocate(21 * MIB)  # stays, and splits what was free
        return gpu

    with pytest.raises(torch.OutOfMemoryError):
        batches(new(capacity=200 * MIB))
    gpu = batches(new("expandable_segments:True", capacity=200 * MIB))
    assert gpu.num_retries == 0
    assert gpu.memory().inactive_split_bytes == 0
    gpu.empty_cache()
    assert gpu.reserved_bytes == 80 * MIB  # 63 MiB are in use, in pages of 20 MiB
    (segment,) = gpu.segments()
    assert (segment.num_bytes, segment.is_expandable, segment.is_small) == (80 * MIB, True, False)


def test_wrong_calls():
    gpu = new()
    block = gpu.allocate(1)
    gpu.free(block)
    assert_refused(lambda: gpu.free(block), StateError, "inactive")
    assert_refused(lambda: gpu.complete_free(gpu.allocate(1)), StateError, "complete_free")
    assert_refused(lambda: gpu.allocate(0), InputError, "num_bytes=0")
    assert gpu.allocate("3MiB").requested_bytes == 3 * MIB
    assert_refused(lambda: gpu.allocate(1.5), InputTypeError, "num_bytes=1.5")
    for wrong, error in ((True, InputTypeError), (-1, InputError), ("0B", InputError)):
        assert_refused(partial(gpu.allocate, wrong), error, "num_bytes=")
    assert CachingAllocator("1GiB", settings="expandable_segments:True").settings.expandable_segments
    no_settings = {"expandable_segments": True}
    words = "text, an AllocatorSettings, or None"
    assert_refused(lambda: CachingAllocator("1GiB", settings=no_settings), ConfigError, words)
    assert_refused(lambda: CachingAllocator("1GiB", other_bytes="2GiB"), ConfigError, "other_bytes")
    assert_refused(lambda: CachingAllocator(-1), InputError, "capacity_bytes")
    assert isinstance(block, Block)


def test_peaks():
    gpu = new()
    gpu.free(gpu.allocate(30 * MIB))
    kept = gpu.allocate(1000)
    memory = gpu.memory()
    assert (memory.peak_bytes, memory.reserved_peak_bytes, memory.allocated_bytes) == (30 * MIB, 32 * MIB, 1024)
    assert (memory.free_bytes, memory.total_bytes) == (GIB - 32 * MIB, GIB)
    gpu.empty_cache()
    gpu.reset_peaks()
    assert (gpu.peak_allocated_bytes, gpu.peak_reserved_bytes) == (kept.num_bytes, 2 * MIB)
