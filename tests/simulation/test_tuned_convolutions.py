"""`cudnn.benchmark`: the workspace of the algorithm that it finds is taken from the virtual GPU."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import memkit as mk
from benchmarks.gpu.observe import events_of
from memkit._simulation.cuda import memory
from memkit._simulation.cuda.memory import Convolution, Processors, tuned_workspaces, workspaces
from tests.simulation.allocator_replay import ALLOC, FREE_COMPLETED, replay_events


def peak_of_convolution(
    gpu, benchmark, *, dtype=torch.float32, layout=torch.contiguous_format, backward=True, size=3, **options
):
    """The most that is allocated in a convolution of 2 images of 32 x 32 pixels; benchmark None: no workspaces."""
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=bool(benchmark))
    with pytest.MonkeyPatch.context() as patch, flags, mk.VirtualGPU(gpu):
        if benchmark is None:
            patch.setattr(memory, "workspaces", lambda *_: ())
        conv = torch.nn.Conv2d(8, 16, size, padding=size // 2, bias=False, **options).to(
            "cuda", dtype, memory_format=layout
        )
        x = torch.zeros(2, 8, 32, 32, dtype=dtype, device="cuda").to(memory_format=layout).requires_grad_()
        y = conv(x)
        if backward:
            grad = torch.empty_like(y)
            torch.cuda.reset_peak_memory_stats()
            tensors = grad, x.detach(), conv.weight.detach(), None
            sizes = [1, 1], [size // 2] * 2, [1, 1], False, [0, 0], conv.groups
            torch.ops.aten.convolution_backward(*tensors, *sizes, [True, True, False])
        return torch.cuda.max_memory_allocated()


X, W, Y = 2 * 8 * 32 * 32, 16 * 8 * 3 * 3, 2 * 16 * 32 * 32


# ------------------------------------------------------------------------------- without cudnn.benchmark, on an H100


def convolution(x, weight, stride=1, *, passes, dtype=torch.float32, groups=1, is_transposed=False):
    x, weight = torch.empty(x, dtype=dtype, device="meta"), torch.empty(weight, dtype=dtype, device="meta")
    dims = x.dim() - 2
    pad = [side // 2 - is_transposed for side in weight.shape[2:]]
    y = torch.ops.aten.convolution(x, weight, None, [stride] * dims, pad, [1] * dims, is_transposed, [0] * dims, groups)
    return Convolution(x, weight, y, (stride,) * dims, (1,) * dims, is_transposed, groups, passes)


H100 = Processors(132, 2048)
FORWARD, BACKWARD = ("output",), ("input gradient", "weight gradient")
MIB = 2**20
HALF = {"dtype": torch.float16}
RECORDED = [  # input, weight, stride, options, passes, MiB that an H100 recorded
    ((16, 128, 56, 56), (128, 128, 3, 3), 2, {}, FORWARD, 31.19),
    ((16, 256, 28, 28), (256, 256, 3, 3), 1, {}, FORWARD, 26.75),
    ((16, 64, 56, 56), (64, 64, 3, 3), 1, {}, FORWARD, 12.39),  # the result is written in order
    ((16, 64, 56, 56), (64, 64, 3, 3), 1, HALF, FORWARD, 12.32),
    ((4, 64, 256, 256), (64, 64, 3, 3), 1, {}, FORWARD, 128.14),
    ((16, 64, 65536), (64, 64, 9), 2, {}, FORWARD, 256.14),
    ((16, 64, 65536), (64, 64, 9), 2, {}, BACKWARD, 386.11),
    ((16, 3, 224, 224), (64, 3, 7, 7), 2, {}, FORWARD, 58.22),
    ((16, 3, 224, 224), (64, 3, 3, 3), 1, {}, FORWARD, 0),
    ((16, 3, 224, 224), (64, 3, 3, 3), 1, {}, BACKWARD[1:], 0),
    ((64, 128, 56, 56), (128, 128, 1, 1), 1, {}, FORWARD, 0),
    ((64, 128, 56, 56), (128, 128, 1, 1), 1, {}, BACKWARD, 4),
    ((16, 512, 7, 7), (2048, 512, 1, 1), 1, {}, FORWARD, 7.66),  # 49 positions: rows are not aligned
    ((16, 512, 7, 7), (2048, 512, 1, 1), 1, {}, BACKWARD, 7.66),
    ((32, 128, 56, 56), (256, 128, 1, 1), 2, {}, FORWARD, 73.5),
    ((64, 128, 56, 56), (128, 1, 3, 3), 1, {"groups": 128}, BACKWARD, 0),
    ((16, 128, 56, 56), (128, 32, 3, 3), 1, {"groups": 4}, FORWARD, 49.14),
    ((16, 128, 64, 64), (128, 64, 4, 4), 2, {"is_transposed": True}, FORWARD, 96.5),
    ((16, 64, 128, 128), (128, 64, 4, 4), 2, {}, BACKWARD, 101.54),
    ((16, 128, 56, 56), (256, 128, 3, 3), 1, {}, BACKWARD, 82.5),
    ((1, 16, 64, 64, 64), (16, 16, 3, 3, 3), 1, {}, FORWARD, 32.03),
]


@pytest.mark.parametrize(("x", "weight", "stride", "options", "passes", "recorded"), RECORDED)
def test_the_heuristics_take_what_an_h100_recorded(x, weight, stride, options, passes, recorded):
    found = workspaces(convolution(x, weight, stride, passes=passes, **options), (9, 0), H100)
    assert max(found, default=0) / MIB == pytest.approx(recorded, rel=0.005)


@pytest.mark.parametrize(
    ("capability", "dtype", "layout", "is_taken"),
    [
        ((9, 0), torch.float32, torch.contiguous_format, True),
        ((9, 0), torch.float16, torch.contiguous_format, True),
        ((12, 0), torch.float16, torch.contiguous_format, False),
        ((8, 6), torch.float32, torch.contiguous_format, False),  # no recorded run has any
        ((9, 0), torch.float32, torch.channels_last, False),
        ((9, 0), torch.float64, torch.contiguous_format, False),
    ],
)
def test_only_hoppers_tensor_cores_are_known_to_need_another_order(capability, dtype, layout, is_taken):
    given = convolution((2, 32, 32, 32), (32, 32, 3, 3), passes=FORWARD, dtype=dtype)
    given = given._replace(x=given.x.to(memory_format=layout))
    assert any(workspaces(given, capability, H100)) is is_taken
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert any(workspaces(given, capability, H100)) is (is_taken and dtype is not torch.float32)


def test_a_step_takes_and_frees_the_workspace_of_its_heuristics():
    taken = peak_of_convolution("H100 80GB", benchmark=False, backward=False)
    plain = peak_of_convolution("H100 80GB", benchmark=False, backward=False, layout=torch.channels_last)
    assert taken - plain == (X + W + Y) * 4


# ---------------------------------------------------------------------------------------------------- cudnn.benchmark


@pytest.mark.parametrize(
    ("gpu", "options", "numbers"),
    [
        ("RTX 3090", {}, X + W + Y),  # tensor cores: copies into channels-last order
        ("A100 40GB", {}, X + W + Y),
        ("V100 32GB", {"dtype": torch.float16}, X + W + Y),
        ("RTX 3090", {"layout": torch.channels_last}, 0),  # they lie so already
        ("RTX 3090", {"backward": False}, 0),
        ("RTX 3090", {"size": 1}, 0),  # a plain matrix product
        ("RTX 3090", {"groups": 8}, 0),
        ("V100 32GB", {}, 36 * (2 * 8 * 8 * (8 + 16) + 8 * 16)),  # Winograd: tiles of 4 x 4
        ("V100 32GB", {"backward": False}, 36 * (2 * 8 * 8 * (8 + 16) + 8 * 16)),
        ("V100 32GB", {"groups": 8}, 0),
    ],
)
def test_cudnn_benchmark_takes_workspace_of_fastest_algorithm(gpu, options, numbers):
    taken = peak_of_convolution(gpu, benchmark=True, **options) - peak_of_convolution(gpu, None, **options)
    size = options.get("dtype", torch.float32).itemsize
    assert taken == math.ceil(numbers * size / 512) * 512  # blocks are multiples of 512 bytes


def test_without_tf32_there_are_no_tensor_cores_for_float32():
    convolution = Convolution(
        x=torch.empty(2, 8, 32, 32),
        weight=torch.empty(16, 8, 3, 3),
        y=torch.empty(2, 16, 32, 32),
        stride=(1, 1),
        dilation=(1, 1),
        is_transposed=False,
        groups=1,
        passes=("output", "input gradient"),
    )
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, benchmark=True):
        assert tuned_workspaces(convolution, (8, 6), H100) == (36 * (2 * 64 * 24 + 128) * 4,) * 2


def test_on_hopper_the_fastest_is_what_the_heuristics_choose():
    forward = convolution((32, 128, 56, 56), (128, 128, 3, 3), passes=FORWARD)
    assert tuned_workspaces(forward, (9, 0), H100) == workspaces(forward, (9, 0), H100) != ()
    assert tuned_workspaces(forward, (8, 0), H100) == ()


def test_cudnn_takes_less_if_memory_is_short():
    card = replace(mk.find_gpu("V100 32GB"), total_interval=(600 * 2**20, 600 * 2**20), context_interval=(0, 0))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), mk.VirtualGPU(card) as gpu:
        conv = torch.nn.Conv2d(256, 256, 3, padding=1, device="cuda")
        conv(torch.zeros(8, 256, 128, 128, device="cuda"))  # 256 MiB for input and output, Winograd asks for 578 more
    assert gpu.reserved_peak_bytes < 600 * 2**20
    assert gpu.record().figures.find_least() < 300 * 2**20  # what can be left out is not needed


def cached_after_convolutions(*, benchmark=True, tuned_before=True, dtype=torch.float32, **options):
    """MiB that the allocator caches after a convolution, where 64 MiB were cached before it."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark), mk.VirtualGPU("RTX 3090"):
        conv = torch.nn.Conv2d(8, 8, 3, bias=False, dtype=dtype, device="cuda", **options)
        x = torch.zeros(2, 8, 32, 32, dtype=dtype, device="cuda")
        if tuned_before:
            conv(x)
        torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")  # dies at once
        conv(x)
        return (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) >> 20


def test_cudnn_benchmark_empties_cache_at_new_convolution():
    assert cached_after_convolutions(tuned_before=False) < 64
    assert cached_after_convolutions(tuned_before=True) >= 64
    assert cached_after_convolutions(tuned_before=False, benchmark=False) >= 64


@pytest.mark.parametrize(("dtype", "is_tuned"), [(torch.float32, False), (torch.float16, True)])
def test_depthwise_convolutions_of_pytorch_itself_are_not_tuned(dtype, is_tuned):
    assert (cached_after_convolutions(tuned_before=False, dtype=dtype, groups=8) < 64) is is_tuned


def test_a_convolution_in_another_size_or_order_is_tuned_anew():
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), mk.VirtualGPU("RTX 3090") as gpu:
        conv = torch.nn.Conv2d(8, 8, 3, bias=False, device="cuda")
        for rows, layout, is_new in (
            (2, torch.contiguous_format, True),
            (2, torch.contiguous_format, False),
            (4, torch.contiguous_format, True),
            (4, torch.channels_last, True),
            (2, torch.contiguous_format, False),
        ):
            x = torch.zeros(rows, 8, 32, 32, device="cuda").to(memory_format=layout)
            before = len(gpu.memory.tuned)
            conv(x)
            assert (len(gpu.memory.tuned) > before) is is_new


def test_snapshot_includes_workspace():
    """What is lent is among the requests, so that the allocator's model explains every segment from them."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), mk.VirtualGPU("V100 32GB"):
        torch.cuda.memory._record_memory_history(context=None)
        conv = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda")
        conv(torch.zeros(8, 64, 64, 64, device="cuda")).sum().backward()
        events = events_of(torch.cuda.memory._snapshot())
        peak = torch.cuda.max_memory_allocated()
    found = replay_events(events, *np.zeros((2, 0, 3), np.int64))
    assert found.differences == []
    assert found.num_same_address == found.num_allocations
    kinds, blocks = events[:, 0], -(-events[:, 2] // 512) * 512
    assert np.cumsum(blocks * ((kinds == ALLOC) * 1 - (kinds == FREE_COMPLETED))).max() == peak
