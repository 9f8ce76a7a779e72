"""PYTORCH_ALLOC_CONF is read as torch reads it; torch's own parser, which the CPU wheel has, is the truth."""

import ctypes
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memkit as mk
from memkit._core.errors import ConfigError
from memkit._core.units import GIB, KIB, MIB
from memkit._simulation.cuda.allocator import AllocatorSettings
from tests.helpers import assert_refused
from tests.versions import lacks

parse = AllocatorSettings.parse

megabytes = st.sampled_from([5, 10, 11, 19, 20, 21, 30, 50, 128])
powers = st.sampled_from([0, 1, 2, 3, 4, 8, 32])
intervals = st.tuples(st.sampled_from(["1", "3", "16", "64", "256", "1024", "65536", ">"]), powers)
values = {
    "expandable_segments": st.sampled_from(["True", "False", "true", "1"]),
    "max_split_size_mb": megabytes,
    "max_non_split_rounding_mb": megabytes,
    "large_segment_size_mb": megabytes,
    "garbage_collection_threshold": st.sampled_from(["0", "0.5", "0.99", "1", "1.0"]),
    "roundup_power2_divisions": st.one_of(
        powers, st.lists(intervals, max_size=4).map(lambda rows: f"[{','.join(f'{a}:{b}' for a, b in rows)}]")
    ),
    "pinned_use_background_threads": st.sampled_from(["True", "no"]),
}
texts = st.lists(st.sampled_from(sorted(values)), unique=True).flatmap(
    lambda names: st.tuples(*[values[name].map(f"{name}:{{}}".format) for name in names]).map(",".join)
)


@pytest.fixture(scope="module")
def torch_divisions():
    """Torch's own table of divisions, which no Python name reaches."""
    if sys.platform != "linux":
        pytest.skip("the symbol is that of the Linux wheel")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        divisions = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    except AttributeError:
        pytest.skip(lacks("torch.c10.CachingAllocator.AcceleratorAllocatorConfig", "the parser under test"))
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    except ValueError:
        pytest.skip(lacks("torch.c10.CachingAllocator.AcceleratorAllocatorConfig.large_segment_size_mb", "a setting"))
    divisions.argtypes, divisions.restype = [ctypes.c_size_t], ctypes.c_size_t
    yield divisions
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")


@given(text=texts)
def test_as_torch_reads_it(torch_divisions, text):
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # torch keeps it from call to call
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError):
        assert_refused(lambda: parse(text), ConfigError)
        return
    settings = parse(text)
    assert settings.roundup_power2_divisions == tuple(torch_divisions(MIB << index) for index in range(16))


def test_defaults_are_torchs():
    assert parse("") == AllocatorSettings()
    assert AllocatorSettings().max_split_bytes is None
    assert AllocatorSettings().large_segment_bytes == 20 * MIB


def test_defaults_follow_large_segment_size():
    assert AllocatorSettings(large_segment_bytes=30 * MIB) == parse("large_segment_size_mb:30")
    settings = AllocatorSettings(large_segment_bytes=30 * MIB, max_split_bytes=40 * MIB)
    sizes = [settings.too_large_bytes(size * MIB) / MIB for size in (39, 40, 50)]
    assert sizes == [40, 70, 80]
    assert parse("max_split_size_mb:40,max_non_split_rounding_mb:21").too_large_bytes(50 * MIB) == 71 * MIB
    assert parse("").too_large_bytes(GIB) == float("inf")


def test_all_options_together():
    settings = parse(
        " expandable_segments:True, max_split_size_mb: 128,large_segment_size_mb:32,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,>:4],per_process_memory_fraction:0.5,backend:native,"
        "pinned_num_register_threads:8,release_lock_on_cudamalloc:True,"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=None,
        large_segment_bytes=32 * MIB,
        garbage_collection_threshold=0.8,
        memory_fraction=0.5,
        roundup_power2_divisions=(1,) * 9 + (2,) + (4,) * 6,
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("expandable_segment:True", "the unknown option 'expandable_segment'"),
        ("expandable_segments:true", "parse('expandable_segments'): got true; expected exactly True or False"),
        ("max_split_size_mb=128", "max_split_size_mb=128"),
        ("max_split_size_mb:128;expandable_segments:True", "got 'max_split_size_mb:128;expandable_segments:True'"),
        ("max_split_size_mb:64.5", "64.5"),
        ("max_split_size_mb:10", "at least the large segment: 20"),
        ("max_split_size_mb:50,large_segment_size_mb:100", "at least the large segment: 100"),
        ("max_split_size_mb:50,max_split_size_mb:60", "the option twice"),
        ("large_segment_size_mb:10", "at least 11"),
        ("garbage_collection_threshold:1.0", "above 0 and below 1"),
        ("roundup_power2_divisions:[256:3]", "power of two or 0"),
        ("roundup_power2_divisions:[256:4", "256:4"),
        ("per_process_memory_fraction:2", "from 0 to 1"),
        ("backend:cudaMallocAsync", "memkit models no other value"),
        ("throw_on_cudamalloc_oom:True", "memkit models no other value"),
    ],
)
def test_error_names_invalid_option(text, named):
    assert_refused(lambda: parse(text), ConfigError, named)


@pytest.mark.parametrize(
    ("text", "requested", "size"),
    [
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("", 3 * GIB + 1, 3 * GIB + 512),
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),  # 1, 1.25, 1.5, 1.75 MiB
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB),
        ("roundup_power2_divisions:4", 2048, 2048),
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:4", 1100, 1536),  # too small to be divided
        ("roundup_power2_divisions:1", 1200 * KIB + 1, 1200 * KIB + 512),  # 1 is off
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 600 * MIB, 768 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 100 * MIB + 1, 100 * MIB + 512),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 70 * GIB, 72 * GIB),  # the last interval has no end
    ],
)
def test_rounding(text, requested, size):
    assert parse(text).round_up(requested) == size


@pytest.mark.parametrize(
    "settings",
    [
        {"expandable_segments": "False"},
        {"large_segment_bytes": 0},
        {"max_split_bytes": MIB},
        {"max_split_bytes": 64.5 * MIB},
        {"garbage_collection_threshold": 1},
        {"memory_fraction": 90},
        {"roundup_power2_divisions": (4,)},
        {"roundup_power2_divisions": (3,) * 16},
    ],
)
def test_constructor_rejects_settings_invalid_as_text(settings):
    assert_refused(lambda: AllocatorSettings(**settings), ConfigError, "AllocatorSettings(...): got")


# ------------------------------------------------------------------------------------- those of this process


def growing(model, x):
    """Each layer's result is larger than the one before, so no free segment has room for it."""
    return model(x).square().mean()


def estimate_with(monkeypatch, variable=None, text=""):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, text)
    torch.manual_seed(0)
    widths = (256, 320, 448, 704, 1152)
    model = nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())))
    return mk.estimate_memory_usage(model, torch.zeros(2**15, 256), loss_fn=growing, target="RTX 4090")


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("variable", VARIABLES[:2])
def test_predictions_follow_the_environment(monkeypatch, variable):
    plain = estimate_with(monkeypatch)
    expandable = estimate_with(monkeypatch, variable, "expandable_segments:True")
    rounded = estimate_with(monkeypatch, variable, "roundup_power2_divisions:2")
    assert expandable.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.002)
    assert rounded.peak_bytes > 1.05 * plain.peak_bytes
    assert expandable.reserved_bytes < plain.reserved_bytes - 64 * MIB
    with mk.VirtualGPU("RTX 4090") as gpu:
        torch.empty(2**26 + 1, dtype=torch.uint8, device="cuda")
    assert gpu.peak_bytes == 2**26 + 2**25
    with mk.VirtualGPU("RTX 4090", allocator_settings="") as gpu:
        torch.empty(2**26 + 1, dtype=torch.uint8, device="cuda")
    assert gpu.peak_bytes == 2**26 + 512


def test_settings_that_are_not_simulated_are_said(monkeypatch):
    plain = estimate_with(monkeypatch)
    with pytest.warns(mk.errors.MemkitWarning, match="predicted without PYTORCH_ALLOC_CONF='backend:cudaMallocAsync'"):
        found = estimate_with(monkeypatch, "PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    assert found.reserved_bytes == plain.reserved_bytes
