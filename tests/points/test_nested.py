"""One point of each cell within a sample: always of the sample, each of its points equally likely."""

import torch

from memkit.points.grid import GridIndex
from memkit.points.nested import single_within
from memkit.points.sampler import GridAwareSampler
from tests.points.scenes import on_mesh


def test_one_point_of_each_cell_of_the_sample():
    coords = on_mesh(5000)
    index = GridIndex.from_coords(coords, 4.0, offsets=[2000, 2000, 5000])  # the second scene is empty
    sampler = GridAwareSampler(seed=0)
    half = sampler.sample_half_density(index)
    single = single_within(sampler, index, half)
    assert (single.diff() > 0).all()
    assert torch.isin(single, half.indices).all()
    assert torch.equal(index.cell_of_point()[single].sort().values, torch.arange(index.num_cells))


def test_every_point_of_the_sample_is_equally_likely():
    size, num_cells = 6, 20_000
    index = GridIndex.from_cells(torch.arange(num_cells).repeat(size))
    sampler = GridAwareSampler(ratio=0.5, seed=0)
    half = sampler.sample_half_density(index)
    single = single_within(sampler, index, half)
    place = single // num_cells  # of the point in its cell
    kept = half.indices
    ranks = torch.zeros(size * num_cells, dtype=torch.int64).index_fill_(0, kept, 1).view(size, num_cells).cumsum(0) - 1
    rank = ranks.flatten()[single]  # of the point among the three that its cell kept
    for found, num in ((place, size), (rank, 3)):
        expected = num_cells / num
        chi_square = (found.bincount(minlength=num) - expected).square().sum() / expected
        assert chi_square < 25  # 5 degrees of freedom: 1 run of 7000 exceeds it by chance


def test_resumes_and_differs():
    index = GridIndex.from_coords(on_mesh(5000), 4.0)
    sampler = GridAwareSampler(seed=0)

    def draw():
        return single_within(sampler, index, sampler.sample_half_density(index))

    draw()
    state = sampler.state_dict()
    second, third = draw(), draw()
    assert not torch.equal(second, third)
    sampler.load_state_dict(state)
    assert torch.equal(draw(), second)
