"""Every back end gives NumPy's indexes and samples, bit for bit; torch's never waits for its device."""

import importlib
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memkit._core.errors import ConfigError, InputError, MemkitWarning
from memkit.points import passes
from memkit.points.backends import resolved
from memkit.points.bits import Key, WordBlocks, draw_key, redraw_bits, words_at
from memkit.points.grid import GridIndex
from memkit.points.nested import single_within
from memkit.points.sampler import GridAwareSampler
from tests.helpers import assert_not_imported, assert_refused, run_python
from tests.points.backends import are_identical, indexes
from tests.points.scenes import in_cube, on_mesh

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_words_are_those_of_splitmix():
    """Steele's generator with the seed 1234567, as Rosetta Code prints it; by number, in blocks and as tensors."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert words_at(np.arange(4), 1234567).view(np.uint64).tolist() == published
    for seed in (1234567, 0, 2**64 - 1):
        expected, words = words_at(np.arange(40_000), seed), WordBlocks()
        assert (words_at(torch.arange(40_000), seed).numpy() == expected).all()
        words.start(40_000, seed)
        blocks = [words.next(size).copy() for size in (WordBlocks.SIZE, WordBlocks.SIZE, 7000)]
        assert (np.concatenate(blocks).view(np.int64) == expected[: 2 * WordBlocks.SIZE + 7000]).all()
        assert (words.numbers(40_001, seed) == expected.view(np.uint32)[:40_001]).all()


def test_redrawn_bits_are_equal():
    key = draw_key((1, 2))
    numbers = redraw_bits(np.arange(1000), key)
    assert 0 <= numbers.min() <= numbers.max() < 2**55
    others = np.concatenate([words_at(np.arange(100_000), seed) for seed in key])
    assert not np.isin(numbers, others >> 9 & 2**55 - 1).any()
    keys = Key(1, 0), Key(2, 0), draw_key((0,)), draw_key((0, 0))
    assert len({int(redraw_bits(np.arange(1), each)[0]) for each in keys}) == len(keys)


@pytest.mark.parametrize("backend", [pytest.param("numba", marks=needs_numba), "torch"])
def test_samples_are_those_of_numpy(backend):
    assert are_identical(backend)


@pytest.mark.slow
@needs_triton
def test_samples_of_the_kernels_are_those_of_numpy():
    """In Triton's interpreter, which a process must ask for before it imports Triton."""
    code = "from tests.points.backends import are_identical; assert are_identical('triton')"
    run_python(code, TRITON_INTERPRET="1")


@needs_triton
def test_the_kernels_need_an_accelerator_or_the_interpreter():
    code = "import memkit; memkit.GridAwareSampler(backend='triton')"
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    assert "backend='triton' on the CPU" in run.stderr


@pytest.mark.slow
@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_an_h100():
    """The interpreter takes what the compiler may refuse. Triton brings the compiler; it needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from memkit.points import kernels

    seeds = {"seed": "i64", "redraw_seed": "i64", "WORDS": "constexpr"}
    counts = {"num_steps": "i32", "num_pieces": "i32", "PIECES": "constexpr"}
    for kernel, signature, constants in (
        (kernels._draw_below, {"left": "*u8", "below": "*u8", "num": "i32"} | seeds, {(5,): 128}),
        (kernels._keep, {"below": "*u8", "steps": "*i64", "needed": "*u8", "chosen": "*u8"} | counts, {(6,): 128}),
    ):
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_some_numbers_are_drawn_again():
    """Or the comparisons above would not see whether back ends agree on these."""
    bounds, key = next(indexes()).scenes[0].layout.bounds, draw_key((1,))
    left = np.repeat(np.arange(len(bounds) - 1, 0, -1), np.diff(bounds))
    drawn = words_at(np.arange(-(-len(left) // 4)), key.tag).view(np.uint16)[: len(left)]
    assert (drawn // (65535 // left) == left).sum() > 20


class NoWaiting(TorchDispatchMode):
    """Refuses what needs a number from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"), name
        return func(*args, **(kwargs or {}))


def test_torch_operators_do_not_wait_for_the_device():
    index = GridIndex.from_coords(on_mesh(3000), 8.0, [1000, 3000])
    sampler = GridAwareSampler(backend="torch")
    sampler.sample_half_density(index)  # brings the layout
    with NoWaiting():
        sampler.sample_half_density(index)
        with pytest.raises(AssertionError, match="nonzero"):
            torch.ones(3).nonzero()


@needs_numba
@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("float16", "float64", "int64", "uint8"))],
)  # each is compiled on its own
def test_numba_index_matches_numpy(dtype):
    points = (in_cube(20_000) * 2 - 100).clip(0 if dtype == "uint8" else -100).astype(dtype)
    cases = [((points, 7.0), {}), ((points[:, :1], 0.5, [0, 5000, 20_000]), {"origin": 0.25})]
    cases += [((points[:, :2], (3.0, 1e-3)), {"origin": (5.0, -2.0)}), ((points[:0],), {}), ((points[:1], 1.0), {})]
    if dtype == "float64":
        cases += [((points * 1e9, 1e-3), {}), ((points * 1e4, 1.0), {})]  # too many cells to number; to count
        cases += [((np.asfortranarray(points), 7.0), {}), ((points[::-3], 7.0), {})]
    for given, settings in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemkitWarning)  # float16, and 10^11 cells away
            assert_equal_indexes(*(GridIndex.from_coords(*given, **settings, backend=b) for b in ("numpy", "numba")))


@needs_numba
def test_numba_groups_any_ids():
    rng = np.random.default_rng(0)
    for ids in (rng.integers(-5, 5, 1000), rng.integers(-(2**63), 2**63 - 1, 1000), np.zeros(0, np.int64), [7]):
        assert_equal_indexes(*(GridIndex.from_cells(ids, backend=each) for each in ("numpy", "numba")))
    assert_refused(lambda: GridIndex.from_coords([[0.0, 1.0], [np.nan, 2.0]], backend="numba"), InputError, "nan")
    assert_refused(lambda: GridIndex.from_coords([[0.0, 1.0], [0.0, np.inf]], backend="numba"), InputError, "inf")


def assert_equal_indexes(a, b):
    for name in ("cells", "counts", "offsets", "cell_offsets"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)
    for here, there in zip(a.scenes, b.scenes, strict=True):
        layouts = ((*each.groups, *each.layout[:3], *each.layout.big) for each in (here, there))
        for mine, others in zip(*layouts, strict=True):
            np.testing.assert_array_equal(mine, others, strict=True)


@pytest.mark.parametrize("backend", [pytest.param("numba", marks=needs_numba), "torch"])
def test_samplers_travel_and_draw_ahead(backend):
    index, plain = GridIndex.from_coords(on_mesh(3000), 8.0), GridAwareSampler(seed=8)
    sampler = GridAwareSampler(seed=8, backend=backend)
    sampler.sample_half_density(index)
    plain.sample_half_density(index)
    arrived = pickle.loads(pickle.dumps(sampler))
    for drawn in arrived.draw_ahead([index] * 2):
        expected = plain.sample_scenarios(index)
        assert all(torch.equal(drawn[each].indices, expected[each].indices) for each in expected)
    sample = arrived.sample_half_density(index)
    assert torch.equal(sample.indices, plain.sample_half_density(index).indices)
    assert torch.equal(single_within(arrived, index, sample), single_within(plain, index, sample))


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("cupy", "cpu", "got backend='cupy'; expected one of 'auto', 'numpy', 'numba', 'torch', 'triton'"),
        ("numpy", "cuda", "got backend='numpy'; expected one of 'auto', 'torch', 'triton'"),
        ("numba", "mps", "got backend='numba'; expected one of 'auto', 'torch', 'triton'"),
    ],
)
def test_error_names_unsuitable_back_ends(backend, device, message):
    assert_refused(lambda: GridAwareSampler(backend=backend, device=device), ConfigError, message)
    with pytest.raises(ConfigError, match="got backend='torch'; expected one of 'numpy', 'numba'"):
        GridIndex.from_cells([1], backend="torch")


def test_a_device_has_its_back_end(monkeypatch):
    installed = {"numba", "triton"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    chosen = [resolved("auto", torch.device(each), "call") for each in ("cpu", "mps", "cuda")]
    assert chosen == ["numpy", "torch", "triton"]
    installed.clear()
    assert resolved("auto", torch.device("cuda"), "call") == "torch"
    with pytest.raises(ConfigError, match=r"numba is not installed.*pip install numba"):
        resolved("numba", torch.device("cpu"), "call")


@pytest.mark.slow
def test_imports_extras_only_when_chosen():
    code = "import memkit; memkit.GridAwareSampler().sample_half_density(memkit.GridIndex.from_cells([1]))"
    assert_not_imported({"numba", "triton"}, code, PYTHONWARNINGS="error")


@pytest.mark.parametrize("num_points", [1, 63, 1000, 300_000])  # torch sorts from 2^18 on
@pytest.mark.parametrize("most", [1, 2**16, 2**20, 2**31 - 1])
def test_keys_are_sorted_stably(num_points, most):
    keys = np.random.default_rng(0).integers(0, most, num_points, dtype=np.uint32)
    np.testing.assert_array_equal(passes.sort_order(keys), keys.argsort(kind="stable"))


@pytest.mark.parametrize("module", ["passes", pytest.param("compiled", marks=needs_numba)])
@pytest.mark.parametrize("num_points", [1, 64, 65, 5000, 400_000])
def test_rows_are_sorted(module, num_points):
    in_module = importlib.import_module(f"memkit.points.{module}")
    rows = np.random.default_rng(0).permutation(num_points)[: -(-num_points // 3)].astype(np.int32)
    found = in_module.ascending(rows, num_points)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.sort(rows))
