"""Values of cells, and rounds of one point for each cell."""

import numpy as np
import pytest
import torch

from memkit._core.errors import InputError
from memkit.points.grid import GridIndex
from memkit.points.voxels import first_points, fragments, voxel_mean
from tests.helpers import assert_refused, assert_same_compiled
from tests.points.scenes import in_cube, on_mesh

POINTS = np.concatenate([on_mesh(3000), in_cube(500)])
INDEX = GridIndex.from_coords(POINTS, 6.0, [3000, 3000, 3500])
SMALL = GridIndex.from_cells(torch.tensor([4, 1, 4, 4]))


def test_means_of_cells_and_their_gradient():
    values = torch.from_numpy(POINTS).double().requires_grad_()
    means, cell = voxel_mean(values, INDEX), INDEX.cell_of_point()
    for number in (0, 7, INDEX.num_cells - 1):
        torch.testing.assert_close(means[number], values[cell == number].mean(0))
    inside = torch.floor(means / 6.0).long().numpy()
    assert (inside == INDEX.cells).mean() > 0.999  # a mean lies in its cell, up to rounding at the border
    upstream = torch.randn_like(means)
    (found,) = torch.autograd.grad(means, values, upstream)
    torch.testing.assert_close(found, (upstream / torch.tensor(INDEX.counts)[:, None])[cell])
    assert_refused(lambda: voxel_mean(torch.zeros(3), INDEX), InputError, "got 3 rows for an index of 3500 points")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up(dtype):
    """In bfloat16 itself a sum of ones stops at 256, in float16 at 2048."""
    index = GridIndex.from_cells(np.zeros(3000, np.int64))
    means = voxel_mean(torch.ones(3000, dtype=dtype), index)
    assert means.dtype == dtype
    assert means.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_do_not_wrap(dtype):
    """Colours are bytes, and a cell may have more points than a byte can count."""
    limit = 1 if dtype == torch.bool else min(torch.iinfo(dtype).max // 2, 2**40)
    values = torch.full((300, 3), limit).to(dtype)
    values[-1] = 0
    means = voxel_mean(values, GridIndex.from_cells(torch.tensor([0] * 299 + [5])))
    torch.testing.assert_close(means, torch.tensor([[limit] * 3, [0] * 3], dtype=torch.float32))


def test_first_points_are_in_their_cells():
    rows, cell = first_points(INDEX), INDEX.cell_of_point()
    assert cell[rows].tolist() == list(range(INDEX.num_cells))
    first = np.unique(cell.numpy(), return_index=True)[1]
    assert rows.tolist() == first.tolist()


def test_fragments_hold_each_point_once_and_no_cell_twice():
    parts, cell = list(fragments(INDEX)), INDEX.cell_of_point()
    assert sorted(torch.cat(parts).tolist()) == list(range(len(POINTS)))
    for part in parts:
        assert len(cell[part].unique()) == len(part)
        assert (part.diff() > 0).all()
    assert [len(part) for part in parts] == [(INDEX.counts > place).sum() for place in range(INDEX.counts.max())]
    assert list(fragments(GridIndex.from_cells(torch.zeros(0, dtype=torch.int64)))) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
@pytest.mark.slow
def test_inside_a_compiled_function():
    x = torch.from_numpy(POINTS).double()
    rows = INDEX.cell_of_point()
    for fn in (lambda x: voxel_mean(x, INDEX)[rows], lambda x: x[first_points(INDEX)]):
        assert_same_compiled(fn, x)
    assert_same_compiled(lambda x: torch.cat([x[rows] for rows in fragments(SMALL)]), x[:4])
