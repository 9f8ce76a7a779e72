"""The least memory in which a run finishes: with slightly less it does not."""

import pickle

import pytest
import torch
from torch import nn

import memkit as mk

MIB = 2**20


def train(settings=""):
    """Steps whose batches grow, so that the segments of one step do not serve the next."""
    with mk.VirtualGPU("RTX 3060", allocator_settings=settings) as gpu:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for num_rows in (20_000, 23_000, 27_000, 31_000):
            model(torch.randn(num_rows, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return gpu


def within(num_bytes):
    gpu = mk.find_gpu("RTX 3060")
    return f"per_process_memory_fraction:{num_bytes / gpu.total_bytes:.6f}"


def test_the_least_is_enough_and_little_less_is_not():
    gpu = train()
    figures = gpu.record().figures
    least, reserved = figures.find_least(), figures.reserved_bytes
    assert gpu.peak_bytes <= least < 0.8 * reserved  # else the steps show nothing
    assert train(within(least + MIB)).reserved_peak_bytes <= least + MIB
    with pytest.raises(torch.OutOfMemoryError):
        train(within(least - reserved // 128))


def test_expandable_segments_cache_little():
    figures = train("expandable_segments:True").record().figures
    assert figures.find_least() > 0.9 * figures.reserved_bytes


def test_freed_memory_is_not_required():
    def held(*, empties):
        with mk.VirtualGPU("RTX 3060") as gpu:
            for size in (512, 640, 768):
                block = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
                del block
                if empties:
                    torch.cuda.empty_cache()
        return gpu.record().figures

    cached = held(empties=False)
    assert cached.reserved_bytes == (512 + 640 + 768) * MIB
    assert 768 * MIB <= cached.find_least() <= 768 * MIB + cached.reserved_bytes // 256
    emptied = held(empties=True)
    assert emptied.find_least() == emptied.reserved_bytes == 768 * MIB


def test_blocks_of_another_stream_do_not_serve():
    with mk.VirtualGPU("RTX 3060") as gpu:
        first = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            second = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        del first, second
    assert gpu.record().figures.find_least() == 1024 * MIB


def test_least_covers_the_past_also_in_a_copy():
    with mk.VirtualGPU("RTX 3060") as gpu:
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        early = gpu.estimate()
        torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
        late = gpu.estimate()
    assert early.least_reserved_bytes == 512 * MIB
    assert 1024 * MIB <= late.least_reserved_bytes <= 1024 * MIB + late.reserved_bytes // 256
    copied = pickle.loads(pickle.dumps(late))
    assert copied == late
    assert copied.least_reserved_bytes == mk.predict.MemoryEstimate.from_dict(late.as_dict()).least_reserved_bytes
    assert copied.least_reserved_bytes == late.least_reserved_bytes


def blocks_of(*sizes_mib, keeps=()):
    """Blocks are taken in order, and freed at once unless they are to be kept."""
    with mk.VirtualGPU("RTX 3060") as gpu:
        kept = []
        for position, size in enumerate(sizes_mib):
            block = torch.empty(int(size * MIB), dtype=torch.uint8, device="cuda")
            if position in keeps:
                kept.append(block)
            del block
    return gpu


def test_initial_bytes_shift_large_blocks():
    # 17 of the 20 MiB of a segment are taken, so that the next 5 MiB lie in what 400 MiB left; then 400 MiB need more.
    sizes = (9, 8, 400, 5, 400)
    figures = blocks_of(*sizes, keeps=(0, 1, 3)).record().figures
    assert figures.reserved_bytes == 820 * MIB
    assert figures.find_range() == (440 * MIB, 820 * MIB)
    # The range is what such a run reserves.
    held = {size: blocks_of(size, *sizes, keeps=(0, 1, 2, 4)).reserved_peak_bytes for size in (2, 4, 6, 8)}
    assert {min(held.values()), max(*held.values(), figures.reserved_bytes)} == set(figures.find_range())
    # Where the segment has room for all small blocks, there is one way only.
    stable = blocks_of(4, 3, 400, 5, 400, keeps=(0, 1, 3)).record().figures
    assert stable.find_range() == (stable.reserved_bytes,) * 2 == (420 * MIB,) * 2


def test_separate_segments_do_not_interact():
    figures = blocks_of(0.5, 12, 400, 30, 400, keeps=(0, 1, 3)).record().figures
    assert figures.find_range() == (figures.reserved_bytes,) * 2


def test_the_range_is_part_of_the_estimate():
    estimate = blocks_of(9, 8, 400, 5, 400, keeps=(0, 1, 3)).estimate()
    assert estimate.reserved_bytes == 820 * MIB  # what a run does for which all is known
    assert estimate.reserved_range == (440 * MIB, 820 * MIB)
    low, high = estimate.reserved_interval
    assert low < 440 * MIB < 820 * MIB < high  # where blocks lie is not all that is unknown
    for copied in (pickle.loads(pickle.dumps(estimate)), mk.predict.MemoryEstimate.from_dict(estimate.as_dict())):
        assert copied.reserved_range == estimate.reserved_range
        assert copied.required_bytes == estimate.required_bytes


def test_range_starts_at_the_peak():
    with mk.VirtualGPU("RTX 3060") as gpu:
        for size in (5, 600, 40):
            block = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
            del block
            if size == 600:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    estimate = gpu.estimate()
    assert estimate.reserved_bytes == 40 * MIB
    low, high = estimate.reserved_range
    assert low == 40 * MIB
    assert high < 80 * MIB
