"""GridIndex: the cell of each point, checked against a slow oracle; typed errors for everything else."""

import math
import pickle
from collections import defaultdict

import numpy as np
import pytest
import torch

from memkit._core.errors import InputError, InputTypeError, MemkitError, MemkitWarning
from memkit.points.grid import GridIndex
from tests.helpers import assert_refused, assert_same_compiled, one_in
from tests.points.scenes import grid_size_for, in_cube, on_mesh

NUM_DEFAULT, NUM_SLOW = 2_000, 100_000


def oracle(rows, ends):
    """Scene by scene, cells in ascending order with the rows of their points."""
    groups, start = [], 0
    for end in ends:
        cells = defaultdict(list)
        for row in range(start, end):
            cells[rows[row]].append(row)
        groups += sorted(cells.items())
        start = end
    return groups


def assert_is(index, groups, ends):
    assert [tuple(np.atleast_1d(cell).tolist()) for cell in index.cells] == [cell for cell, _ in groups]
    assert index.counts.tolist() == [len(rows) for _, rows in groups]
    assert index.offsets.tolist() == list(ends)
    cell_of_point = index.cell_of_point().tolist()
    assert cell_of_point == [number for _, number in sorted((r, n) for n, (_, rows) in enumerate(groups) for r in rows)]
    for scene in index.scenes:
        cells = np.split(scene.groups.order, scene.groups.starts[1:])
        found = [(each + scene.first_point).tolist() for each in cells if len(each)]
        assert found == [rows for _, rows in groups[scene.first_cell :][: len(found)]]
        assert sorted(scene.layout.slots.tolist()) == list(range(len(scene.groups.order)))


def any_points(rng):
    """Coordinates of all kinds, among them many that must be refused."""
    shape = (int(rng.choice([0, 1, 2, 5, 40])), int(rng.integers(1, 5)))
    scale = 10.0 ** rng.choice([-300, -3, 0, 0, 0, 2, 6, 12, 18, 300])
    points = rng.normal(size=shape) * scale + rng.choice([0, 0, scale * 1000])
    if rng.random() < 0.3:
        points = np.round(points * 4) / 4  # on borders
    if points.size and rng.random() < 0.15:
        points.flat[rng.integers(points.size)] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 5e-324])
    dtype = rng.choice(["f8", "f8", "f4", "f2", "i8", "i4", "u1", "?"])
    with np.errstate(all="ignore"):
        points = np.asfortranarray(points.astype(dtype)) if rng.random() < 0.2 else points.astype(dtype)
    if rng.random() < 0.3:
        points = torch.from_numpy(points)
        points = points.bfloat16() if rng.random() < 0.2 else points
    return points


def any_length(rng, num_axes):
    if rng.random() < 0.05:
        return float(rng.choice([0.0, -1.0, np.nan, np.inf]))
    if rng.random() < 0.2:
        return (10.0 ** rng.integers(-3, 3, num_axes + (rng.random() < 0.1))).tolist()
    return float(10.0 ** rng.choice([-320, -30, -5, -1, 0, 0, 1, 30, 300]))


def any_offsets(rng, num_points):
    if rng.random() < 0.6:
        return None
    ends = np.sort(rng.integers(0, num_points + 1, rng.integers(0, 4)))
    if rng.random() < 0.9:
        ends = np.append(ends, num_points)
    return rng.permutation(ends) if rng.random() < 0.1 else ends


@pytest.mark.filterwarnings("ignore::memkit.errors.MemkitWarning")
@pytest.mark.parametrize(
    "num_inputs", [NUM_DEFAULT, pytest.param(NUM_SLOW, marks=pytest.mark.slow)], ids=["default", "slow"]
)
def test_a_right_index_or_a_typed_error(num_inputs):
    num_right = 0
    for seed in range(num_inputs):
        rng = np.random.default_rng(seed)
        points = any_points(rng)
        size, origin = any_length(rng, points.shape[1]), float(rng.choice([0, 0, 1.5, -1e6]))
        offsets = any_offsets(rng, len(points))
        try:
            index = GridIndex.from_coords(points, size, offsets, origin=origin)
        except MemkitError:
            continue
        num_right += 1
        lengths = np.broadcast_to(size, points.shape[1]).tolist()
        rows = [
            tuple(math.floor((x - origin) / length) for x, length in zip(point, lengths, strict=True))
            for point in points.tolist()
        ]
        ends = [len(points)] if offsets is None else offsets.tolist()
        assert_is(index, oracle(rows, ends), ends)
    assert num_right > num_inputs / 3


@pytest.mark.parametrize(
    "num_inputs", [NUM_DEFAULT // 4, pytest.param(NUM_SLOW // 4, marks=pytest.mark.slow)], ids=["default", "slow"]
)
def test_any_cell_ids(num_inputs):
    for seed in range(num_inputs):
        rng = np.random.default_rng(seed)
        num, few = int(rng.choice([0, 1, 7, 300])), rng.integers(-(2**63), 2**63 - 1, 5, endpoint=True)
        ids = rng.choice(few, num) if rng.random() < 0.5 else rng.integers(-3, 3, num)
        if rng.random() < 0.2:
            ids = np.where(rng.random(num) < 0.5, 2**63 - 1, -(2**63))
        offsets = any_offsets(rng, num)
        try:
            index = GridIndex.from_cells(torch.from_numpy(ids) if rng.random() < 0.5 else ids, offsets)
        except InputError:
            assert offsets is not None
            continue
        ends = [num] if offsets is None else offsets.tolist()
        assert_is(index, oracle([(cell,) for cell in ids.tolist()], ends), ends)


def test_the_partition_of_pointcept():
    """Its GridSample divides, takes the floor and subtracts the least cell; then a row-major key."""
    points = on_mesh(20_000) - np.float32(37.7)  # on both sides of 0
    size = grid_size_for(points, 8)
    grid = np.floor(points / np.array(size)).astype(int)
    grid -= grid.min(0)
    keys = np.ravel_multi_index(tuple(grid.T), grid.max(0) + 1)
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    index = GridIndex.from_coords(points, size)
    assert index.cell_of_point().tolist() == inverse.tolist()
    assert index.counts.tolist() == counts.tolist()

    def num_cells(cells):
        return len(np.unique(cells, axis=0))

    assert num_cells((points / size).astype(int)) < index.num_cells  # cutting merges the cells beside 0
    shifted = GridIndex.from_coords(points, size, origin=points.min(0).tolist())
    assert (shifted.cells.min(0) == 0).all()
    assert shifted.num_cells != index.num_cells  # other borders


def test_far_coordinates_use_float64_and_float32_warns():
    points = (torch.rand(2000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e4).float()
    index = GridIndex.from_coords(points, 0.12)
    assert (index.cells[index.cell_of_point()] == np.floor(points.double().numpy() / 0.12)).all()
    assert (index.cells[index.cell_of_point()] != torch.floor(points / 0.12).numpy()).any()  # in float32
    with pytest.warns(MemkitWarning, match="only above 1% of grid_size") as caught:
        GridIndex.from_coords(points, 0.01)
    assert caught[0].filename == __file__


def test_rejects_extents_beyond_int64():
    points = np.array([[1e10, -1e10, 3.0], [-1e10, 1e10, 3.0], [1e10, -1e10, 3.0005], [0.0, 0.0, 0.0]])
    index = GridIndex.from_coords(points, 0.001)
    assert index.cell_of_point().tolist() == [2, 0, 2, 1]
    assert index.cells[2].tolist() == [10**13, -(10**13), 3000]


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        ([[0.0, 1.0], [0.0, math.nan]], "coordinates [0.0, nan] in row 1; expected finite coordinates"),
        ([[0.0, math.inf], [0.0, 1.0]], "in row 0"),
        ([[0.0, 1.0], [0.0, 1e200]], "in row 1, 2e+201 cells away; expected fewer than 2^53"),
        ([0.0, 1.0], "coords of shape (2,); expected (N, A)"),
    ],
)
def test_error_names_invalid_coordinates(coords, message):
    assert_refused(lambda: GridIndex.from_coords(torch.tensor(coords, dtype=torch.float64)), InputError, message)


def test_error_names_invalid_parameters():
    def refused(coords, error, *words, **settings):
        assert_refused(lambda: GridIndex.from_coords(coords, **settings), error, *words)

    points = torch.zeros(3, 2)
    refused([[0.0], [1.0], [2.0], [math.nan]], InputError, "in row 3; expected finite", offsets=[2, 4])
    refused(points, InputError, "got [1.0, 2.0, 3.0] for points with 2 axes", grid_size=[1.0, 2.0, 3.0])
    refused(points, InputError, "got 'x' for points with 2 axes; expected one finite number above 0", grid_size="x")
    refused(points, InputError, "offsets [2] for 3 points; expected the end of each scene's points", offsets=[2])
    refused(
        [[1.0, 2.0], [3.0]],
        InputTypeError,
        "coords that cannot be converted to an array",
        "expected rows of equal length",
    )
    refused(points.bool(), InputTypeError, "coords of dtype bool")
    no_integers = "cell_ids of dtype float32; expected integers"
    assert_refused(lambda: GridIndex.from_cells(points[:, 0]), InputTypeError, no_integers)


def test_an_index_cannot_be_changed():
    cells = torch.tensor([1, 1, 2])
    index = GridIndex.from_cells(cells)
    scene = index.scenes[0]
    for array in (index.cells, index.counts, index.offsets, index.cell_offsets, *scene.groups, scene.layout.bounds):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    with pytest.raises(AttributeError):
        index.counts = index.cells
    cells[0] = 7  # the index keeps nothing of the caller's
    assert index.cells.tolist() == [1, 2]


def test_reports_its_bytes():
    index = GridIndex.from_coords(on_mesh(30_000), 3.0)
    scene = index.scenes[0]
    arrays = [index.cells, index.counts, index.offsets, index.cell_offsets, scene.groups.order, scene.groups.starts]
    arrays += [scene.layout.slots, scene.layout.bounds, scene.layout.piece_cell, *scene.layout.big]
    assert index.nbytes == sum(each.nbytes for each in arrays)
    assert index.nbytes < 9 * index.num_points + 60 * index.num_cells


def test_an_index_travels():
    index = GridIndex.from_coords(on_mesh(5_000), 3.0, [1000, 1000, 5000])
    arrived = pickle.loads(pickle.dumps(index))
    for name in ("cells", "counts", "offsets", "cell_offsets"):
        assert (getattr(arrived, name) == getattr(index, name)).all()
        assert not getattr(arrived, name).flags.writeable
    for here, there in zip(index.scenes, arrived.scenes, strict=True):
        assert (here.groups.order == there.groups.order).all()
        assert (here.layout.slots == there.layout.slots).all()


@pytest.mark.parametrize("num_values", [1, 300, 2**16 - 1, 2**16 + 1, 150_000, 250_000, 2**40])
def test_grouping_is_a_stable_sort(num_values):
    """Below and above 2^16 cells that occur, and where keys are too far apart to be counted."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, num_values, 120_000)
    ids[: min(num_values, 70_000)] = np.arange(min(num_values, 70_000))
    rng.shuffle(ids)
    index = GridIndex.from_cells(ids)
    assert (index.scenes[0].groups.order == ids.argsort(kind="stable")).all()
    cells, counts = np.unique(ids, return_counts=True)
    assert (index.cells == cells).all()
    assert (index.counts == counts).all()


@pytest.mark.parametrize("num_points", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("place", [0, -1])
def test_the_sides_of_a_scene_are_those_of_all_its_points(num_points, place):
    points = in_cube(num_points)
    points[place] = [-50.0, 400.0, 3.0]
    index = GridIndex.from_coords(points, 10.0)
    assert (index.cells[index.cell_of_point()] == np.floor(points.astype(np.float64) / 10)).all()
    points[place, 1] = np.nan
    assert_refused(lambda: GridIndex.from_coords(points, 10.0), InputError, f"row {place % num_points}")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("offsets", one_in(2, [[50, 100], [0, 50, 100]]), ids=["offsets", "ptr"])
@pytest.mark.slow
def test_inside_a_compiled_function(offsets):
    """An index that a forward makes is made as it is written, and its arrays can be read."""
    x = torch.from_numpy(in_cube(100)).double()
    cells = torch.arange(100) % 7

    def around(x):
        index = GridIndex.from_coords(x, 0.3, torch.tensor(offsets))
        ends = torch.as_tensor(index.offsets).sum() + torch.as_tensor(index.cell_offsets)[-1] + index.num_cells
        known = torch.as_tensor(index.cells).sum() + torch.as_tensor(index.counts).max()
        return x[index.cell_of_point()] * x[GridIndex.from_cells(cells).cell_of_point()] * ends * known

    assert_same_compiled(around, x)
