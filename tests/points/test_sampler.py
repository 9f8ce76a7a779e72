"""GridAwareSampler: counts, keys, state, batches, threads and worker processes; the cache."""

import os
import pickle
import queue
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import memkit as mk
from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same_compiled, one_in
from tests.points.backends import same
from tests.points.scenes import in_cube, on_mesh


def scene(num_points=4000, seed=0):
    return GridIndex.from_coords(on_mesh(num_points, seed), 8.0)


@pytest.mark.parametrize("rounding", ["nearest", "floor"])
@pytest.mark.parametrize("ratio", [(0.3, 0.7), 0.5, (1.0, 1.0), (1e-9, 1e-9)])
def test_each_cell_keeps_its_share_and_at_least_one(ratio, rounding):
    index = scene()
    sample = GridAwareSampler(ratio, rounding=rounding).sample_half_density(index)
    rows, counts, sizes = sample.indices, sample.counts.numpy(), index.counts
    assert rows.dtype == sample.counts.dtype == torch.int64
    assert (rows.diff() > 0).all()
    assert 0 <= rows[0] <= rows[-1] < index.num_points
    assert (np.bincount(index.cell_of_point()[rows], minlength=index.num_cells) == counts).all()
    low, high = ratio if isinstance(ratio, tuple) else (ratio, ratio)
    bounds = (np.rint if rounding == "nearest" else np.floor)(np.array([[low], [high]]) * sizes).clip(1)
    assert (bounds[0] <= counts).all()
    assert (counts <= bounds[1]).all()
    assert (sample.cell_sizes == sizes).all()
    assert (sample.ratios.numpy() == counts / sizes).all()
    assert sample.ratio == len(rows) / index.num_points
    assert sample.offsets.tolist() == [len(rows)]


def test_floor_keeps_half_a_point_less_of_a_large_cell():
    index = GridIndex.from_cells(np.repeat(np.arange(5000), 50))
    kept = {
        rounding: GridAwareSampler(rounding=rounding).sample_half_density(index).counts.double().mean().item()
        for rounding in ("nearest", "floor")
    }
    assert kept["nearest"] == pytest.approx(25, abs=0.4)
    assert kept["nearest"] - kept["floor"] == pytest.approx(0.5, abs=0.1)


def test_cells_of_equal_size_draw_their_own_ratio():
    counts = GridAwareSampler().sample_half_density(GridIndex.from_cells(np.repeat(np.arange(5000), 100))).counts
    observed = torch.bincount(counts, minlength=71)[31:70]  # the two ends of the range round to half a bin
    assert 70 < observed.min() <= observed.max() < 180  # 125 each


def test_single_keeps_one_of_each_cell():
    index = scene()
    sample = GridAwareSampler().sample_single_per_grid(index)
    assert sorted(index.cell_of_point()[sample.indices].tolist()) == list(range(index.num_cells))
    assert (sample.indices.diff() > 0).all()
    assert (sample.counts == 1).all()
    assert sample.ratio == index.num_cells / index.num_points


def test_two_calls_differ_and_a_seed_repeats_them():
    index = scene()
    first, second = GridAwareSampler(seed=3), GridAwareSampler(seed=3)
    draws = [first.sample_half_density(index) for _ in range(3)]
    assert not same(draws[0], draws[1])
    assert all(same(each, second.sample_half_density(index)) for each in draws)
    assert not same(draws[0], GridAwareSampler(seed=4).sample_half_density(index))


def test_samples_are_stable_across_versions():
    """If this fails, raise ``_ALGO_VERSION``: states that were saved before would go on with other samples."""
    index = GridIndex.from_cells([5, 5, 5, 5, 5, 5, 9, 9, 9, 9, -1, -1, -1, 2, 2, 7])
    sampler = GridAwareSampler(seed=17)
    assert sampler.sample_half_density(index).indices.tolist() == [0, 1, 3, 5, 7, 12, 13, 15]
    assert sampler.sample_single_per_grid(index).indices.tolist() == [4, 7, 10, 13, 15]
    generator = torch.Generator().manual_seed(1)
    assert sampler.sample_half_density(index, generator).indices.tolist() == [3, 5, 6, 7, 9, 11, 13, 15]


def test_a_resumed_run_continues_bit_by_bit(tmp_path):
    index, sampler = scene(), GridAwareSampler(seed=5)
    sampler.sample_half_density(index)
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    ahead = [sampler.sample_half_density(index), sampler.sample_single_per_grid(index)]
    resumed = GridAwareSampler()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(resumed.sample_half_density(index), ahead[0])
    assert same(resumed.sample_single_per_grid(index), ahead[1])


@pytest.mark.parametrize("change", [{"version": 2}, {"algo_version": 2}, {"algo_version": None}])
def test_rejects_state_of_other_algorithm(change):
    with pytest.raises(FileFormatError, match="expected version 1 and algo_version 3"):
        GridAwareSampler().load_state_dict(GridAwareSampler().state_dict() | change)


def test_a_generator_takes_the_place_of_seed_and_count():
    index = scene()
    draws = [
        GridAwareSampler(seed=seed).sample_half_density(index, torch.Generator().manual_seed(1)) for seed in (0, 1)
    ]
    assert same(*draws)
    sampler, generator = GridAwareSampler(), torch.Generator().manual_seed(1)
    assert same(sampler.sample_half_density(index, generator), draws[0])
    assert not same(sampler.sample_half_density(index, generator), draws[0])  # it went on
    assert sampler.state_dict()["num_draws"] == 0


def test_scenarios_match_their_methods():
    index, together, alone = scene(), GridAwareSampler(), GridAwareSampler()
    drawn = together.sample_scenarios(index)
    assert list(drawn) == ["dense", "half", "single"]
    assert same(drawn["half"], alone.sample_half_density(index))
    alone.load_state_dict(GridAwareSampler().state_dict())
    assert same(drawn["single"], alone.sample_single_per_grid(index))
    assert drawn["dense"].indices.tolist() == list(range(index.num_points))
    assert drawn["dense"].ratio == 1
    assert (drawn["dense"].ratios == 1).all()
    with pytest.raises(InputError, match=r"got scenarios='sparse'; .*one of 'dense', 'half', 'single'"):
        together.sample_scenarios(index, ("half", "sparse"))


def test_a_scene_of_a_batch_is_drawn_as_if_alone():
    first, second, other = on_mesh(3000, 1), on_mesh(2000, 2), in_cube(1000, 3)
    batch = GridIndex.from_coords(np.concatenate([first, second]), 8.0, [3000, 5000])
    for method in ("sample_half_density", "sample_single_per_grid"):
        sample = getattr(GridAwareSampler(), method)(batch)
        end = sample.offsets[0]
        alone = getattr(GridAwareSampler(), method)(GridIndex.from_coords(first, 8.0))
        assert torch.equal(sample.indices[:end], alone.indices)
        assert (sample.indices[end:] >= 3000).all()
        beside = GridIndex.from_coords(np.concatenate([other, second]), 8.0, [1000, 3000])
        elsewhere = getattr(GridAwareSampler(), method)(beside)
        assert torch.equal(sample.indices[end:] - 3000, elsewhere.indices[elsewhere.offsets[0] :] - 1000)
        assert len(sample.counts) == batch.num_cells
    twins = GridIndex.from_coords(np.concatenate([first, first]), 8.0, [3000, 6000])
    sample = GridAwareSampler().sample_half_density(twins)
    half = sample.offsets[0]
    assert sample.indices[:half].tolist() != (sample.indices[half:] - 3000).tolist()  # equal scenes, own draws


@pytest.mark.parametrize("ends", [[0], [0, 0], [], [0, 3, 3]])
def test_scenes_without_points(ends):
    index = GridIndex.from_coords(torch.zeros(sum(ends[-1:]), 2), offsets=torch.tensor(ends, dtype=torch.int64))
    for sample in GridAwareSampler().sample_scenarios(index).values():
        assert len(sample.indices) == sample.counts.sum()
        assert sample.offsets.shape == (len(ends),)


@pytest.mark.parametrize("sizes", [[1], [1] * 300, [255], [256], [510, 3, 1], [4000] * 3 + [1]])
def test_cells_of_all_sizes_keep_their_count(sizes):
    cells = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    index = GridIndex.from_cells(cells)
    for sample in GridAwareSampler((0.01, 1.0)).sample_scenarios(index).values():
        assert (np.bincount(cells[sample.indices.numpy()], minlength=len(sizes)) == sample.counts.numpy()).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio": 0.0},
            "ratio=0.0; expected a fraction such as 0.5, or (low, high) with 0 < low <= high <= 1",
        ),
        ({"ratio": (0.7, 0.3)}, "got ratio=(0.7, 0.3)"),
        ({"ratio": (0.3, 0.5, 0.7)}, "got ratio=(0.3, 0.5, 0.7)"),
        ({"ratio": "0.5"}, "got ratio='0.5'"),
        ({"ratio": float("nan")}, "got ratio=nan"),
        ({"rounding": "up"}, "got rounding='up'; expected one of 'nearest', 'floor'"),
        ({"seed": -1}, "got seed=-1; expected a whole number, 0 or more"),
        ({"seed": 1.5}, "got seed=1.5"),
    ],
)
def test_error_names_invalid_settings(settings, message):
    assert_refused(lambda: GridAwareSampler(**settings), ConfigError, message)


def test_a_ratio_of_numpy_is_one():
    assert GridAwareSampler(np.float32(0.5)).ratio == (0.5, 0.5)
    assert GridAwareSampler([np.float64(0.25), 1]).ratio == (0.25, 1.0)
    assert GridAwareSampler(np.array([0.25, 0.5])).ratio == (0.25, 0.5)


class Draws(Dataset):
    """One draw for each item."""

    def __init__(self, index, sampler):
        self.index, self.sampler = index, sampler

    def __len__(self):
        return 4

    def __getitem__(self, item):
        return self.sampler.sample_half_density(self.index)


def drawn_by_workers(context, *, epochs=2):
    loader = DataLoader(Draws(scene(), GridAwareSampler()), None, num_workers=2, multiprocessing_context=context)
    torch.manual_seed(0)
    draws = [tuple(sample.indices.tolist()) for _ in range(epochs) for sample in loader]
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # the loader closes its queues and does not wait for them
            thread.join(10)
    return draws


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_and_epochs_draw_differently_and_repeatably(context):
    draws = drawn_by_workers(context)
    assert len(set(draws)) == 8
    assert drawn_by_workers("fork") == draws


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_another_thread_holds_the_locks():
    sampler, held, done = GridAwareSampler(), threading.Event(), threading.Event()

    def hold():
        with sampler._lock, sampler.cache._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        sampler.sample_single_per_grid(sampler.index(torch.zeros(3, 2)))
        os._exit(7)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_drawing_ahead_gives_the_same_samples():
    indexes, ahead, direct = [scene(seed=seed) for seed in range(4)], GridAwareSampler(), GridAwareSampler()
    for drawn, index in zip(ahead.draw_ahead(indexes, depth=2), indexes, strict=True):
        expected = direct.sample_scenarios(index)
        assert all(same(drawn[each], expected[each]) for each in expected)
    assert ahead.state_dict() == direct.state_dict()


def test_the_next_draw_is_made_during_the_step():
    sampler, both_drawn, drawn = GridAwareSampler(), threading.Event(), []
    plain = sampler._scenarios

    def noted(*given):
        drawn.append(plain(*given))
        if len(drawn) == 2:
            both_drawn.set()
        return drawn[-1]

    sampler._scenarios = noted
    draws = sampler.draw_ahead([scene(seed=0), scene(seed=1)], ("half",))
    next(draws)
    assert both_drawn.wait(10)  # and the second was not asked for
    assert next(draws) is drawn[1]


def test_a_state_saved_while_draws_wait_continues_with_them():
    index, sampler, resumed = scene(), GridAwareSampler(), GridAwareSampler()
    draws = sampler.draw_ahead([index] * 5, ("half",), depth=2)
    next(draws)
    state = sampler.state_dict()
    expected = next(draws)["half"]
    resumed.load_state_dict(state)
    assert same(next(resumed.draw_ahead([index] * 3, ("half",)))["half"], expected)
    draws.close()  # early: the numbers of draws that waited are used again
    assert sampler.state_dict()["num_draws"] == 2
    follower = GridAwareSampler()
    follower.load_state_dict(sampler.state_dict())
    assert same(sampler.sample_half_density(index), follower.sample_half_density(index))


def test_abandoned_loop_does_not_reuse_draws():
    index, sampler = scene(), GridAwareSampler()
    draws = sampler.draw_ahead([index] * 5, ("half",), depth=2)
    next(draws)
    between = sampler.sample_half_density(index)  # after two that wait
    draws.close()
    assert not same(sampler.sample_half_density(index), between)
    draws = sampler.draw_ahead([index] * 5, ("half",), depth=2)
    next(draws)
    between = sampler.sample_half_density(index)
    next(draws)  # one waits before that draw, one after it
    draws.close()
    assert not same(sampler.sample_half_density(index), between)


def test_an_error_while_drawing_ahead_reaches_the_caller():
    assert_refused(lambda: next(GridAwareSampler().draw_ahead([None], ("half",))), InputTypeError, "GridIndex")


def test_a_state_after_an_error_while_drawing_ahead_goes_on_with_the_next_draw():
    index, direct, ahead = scene(), GridAwareSampler(), GridAwareSampler()
    for _ in range(2):
        direct.sample_scenarios(index, ["half"])
    with pytest.raises(InputTypeError):
        direct.sample_scenarios(None, ["half"])
    with pytest.raises(InputTypeError):
        list(ahead.draw_ahead([index, index, None, index], ["half"]))
    assert ahead.state_dict() == direct.state_dict()
    resumed = GridAwareSampler()
    resumed.load_state_dict(ahead.state_dict())
    drawn = ahead.sample_half_density(index)
    assert same(drawn, resumed.sample_half_density(index))
    assert same(drawn, direct.sample_half_density(index))


def test_drawing_ahead_checks_its_arguments_in_the_call():
    sampler = GridAwareSampler()
    assert_refused(lambda: sampler.draw_ahead([], ("sparse",)), InputError, "draw_ahead")
    assert_refused(lambda: sampler.draw_ahead([], depth="2"), InputError, "pass depth=2")
    assert_refused(lambda: sampler.draw_ahead([], depth=-3), InputError, "pass depth=0")
    assert_refused(lambda: sampler.draw_ahead(scene()), InputTypeError, r"draw_ahead\(\[index\]\)")
    assert sampler.state_dict()["num_draws"] == 0


def test_threads_share_a_sampler():
    index, sampler, alone = scene(), GridAwareSampler(), GridAwareSampler()
    with ThreadPoolExecutor(8) as pool:
        drawn = {
            tuple(each.indices.tolist()) for each in pool.map(lambda _: sampler.sample_half_density(index), [0] * 64)
        }
    assert drawn == {tuple(alone.sample_half_density(index).indices.tolist()) for _ in range(64)}
    assert len(drawn) == 64


def test_a_sample_travels():
    sample = GridAwareSampler().sample_half_density(scene())
    assert same(pickle.loads(pickle.dumps(sample)), sample)
    sampler = pickle.loads(pickle.dumps(GridAwareSampler(seed=8)))
    assert same(sampler.sample_half_density(scene()), GridAwareSampler(seed=8).sample_half_density(scene()))


def test_a_draw_takes_little_memory():
    """10 MB for a million points, samples and workspace included. The block of 0.4 MB weighs more here."""
    index, num_points = GridIndex.from_coords(in_cube(100_000), 5.9), 100_000
    assert numpy_peak(lambda: GridAwareSampler().sample_scenarios(index)) < 13 * num_points
    assert trace_allocations(lambda: GridAwareSampler().sample_scenarios(index)).peak == 0
    assert numpy_peak(lambda: np.random.default_rng(0).random(num_points).argsort()) > 16 * num_points


def numpy_peak(run):
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
@pytest.mark.parametrize(
    "draw",
    one_in(
        3,
        [
            lambda sampler, index, x: sampler.sample_half_density(index),
            lambda sampler, index, x: sampler.sample_single_per_grid(index),
            lambda sampler, index, x: sampler.sample_scenarios(index)["half"],
            lambda sampler, index, x: sampler.sample_half_density(sampler.index(x, 8.0)),
        ],
    ),
    ids=["half", "single", "scenarios", "index"],
)
@pytest.mark.slow
def test_inside_a_compiled_function(draw):
    """Each call draws anew, as without torch.compile, and the ratios stay float64."""
    index, x = scene(), torch.from_numpy(on_mesh(4000, 0)).double()
    compiled, plain = GridAwareSampler(seed=3), GridAwareSampler(seed=3)

    def around(x):
        sample = draw(compiled if torch.compiler.is_compiling() else plain, index, x)
        return sample.take(x) * sample.ratios.mean() / sample.num_kept

    assert_same_compiled(around, x)
    assert compiled.state_dict() == plain.state_dict() == GridAwareSampler(seed=3).state_dict() | {"num_draws": 2}


def test_an_estimate_keeps_as_many_points_as_the_first_steps():
    """The index has data, whatever the model's tensors have."""
    index = GridIndex.from_coords(torch.rand(500, 3, generator=torch.Generator().manual_seed(0)), 0.25)
    kept = queue.SimpleQueue()

    def numbers(call):
        sampler = GridAwareSampler(seed=0)

        def loss_fn(model, x):
            rows = sampler.sample_half_density(index).indices
            kept.put(len(rows))
            return model(x[rows]).square().mean()

        call(torch.nn.Linear(3, 8), torch.rand(500, 3), loss_fn)
        return [kept.get_nowait() for _ in range(2)]

    def two_steps(model, x, loss_fn):
        for _ in range(2):
            loss_fn(model, x)

    estimated = numbers(lambda model, x, loss_fn: mk.estimate_memory_usage(model, x, loss_fn=loss_fn))
    assert estimated == numbers(two_steps)
