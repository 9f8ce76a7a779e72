"""Edges per node: at least one, without replacement, unbiased; and the estimate without the right weight is not."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from nilearn import surface
from nilearn.datasets import fetch_surf_fsaverage

from memkit.errors import ConfigError, InputTypeError
from memkit.points.edges import sample_edges
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.helpers import assert_refused, assert_same_compiled

NUM_DRAWS = 400
NUM_NODES = 642  # of the mesh: the first five subdivisions of the icosahedron, degree 5 or 6


def mesh_edges():
    """Edges of a real mesh that lead to its first nodes: (E,) target nodes and lengths in mm."""
    mesh = surface.load_surf_mesh(fetch_surf_fsaverage("fsaverage5")["white_left"])
    faces = torch.from_numpy(np.asarray(mesh.faces)).long()
    pairs = torch.cat([faces[:, [a, b]] for a, b in ((0, 1), (1, 2), (2, 0))])  # each edge has a face on both sides
    pairs = pairs[pairs[:, 1] < NUM_NODES]
    points = torch.from_numpy(np.asarray(mesh.coordinates)).double()
    return pairs[:, 1], (points[pairs[:, 0]] - points[pairs[:, 1]]).norm(dim=1)


def totals(dst, values):
    return torch.zeros(int(dst.max()) + 1, dtype=torch.float64).index_add(0, dst, values)


@given(
    dst=st.lists(st.integers(-3, 8), max_size=60),
    low=st.floats(0.01, 1),
    high=st.floats(0.01, 1),
    seed=st.integers(0, 2**63 - 1),
    rounding=st.sampled_from(["nearest", "floor"]),
)
def test_keeps_at_least_one_edge_per_node_without_repeats(dst, low, high, seed, rounding):
    low, high = min(low, high), max(low, high)
    dst = torch.tensor(dst, dtype=torch.int64)
    keep, weight = sample_edges(dst, (low, high), seed, rounding=rounding, return_weight=True)
    assert keep.dtype == torch.int64
    assert (keep.diff() > 0).all()  # ascending, none twice
    assert set(dst[keep].tolist()) == set(dst.tolist())
    for node in set(dst.tolist()):
        degree, kept = int((dst == node).sum()), int((dst[keep] == node).sum())
        assert kept <= max(1, round(high * degree))
        torch.testing.assert_close(weight[dst[keep] == node], torch.full((kept,), degree / kept))
    assert torch.equal(keep, sample_edges(dst, (low, high), seed, rounding=rounding))


def test_weighted_sums_are_unbiased_and_nominal_ones_are_not():
    """Over many seeds a node's weighted sum is its sum; weights 1 / (mean ratio) are off: one edge always stays."""
    dst, length = mesh_edges()
    exact = totals(dst, length)
    draws, nominal = [], []
    for seed in range(NUM_DRAWS):
        keep, weight = sample_edges(dst, (0.05, 0.4), seed, return_weight=True)
        draws.append(totals(dst[keep], weight.double() * length[keep]))
        nominal.append(totals(dst[keep], length[keep] / 0.225))
    draws, nominal = torch.stack(draws), torch.stack(nominal)
    standard_error = draws.std(0) / NUM_DRAWS**0.5
    z = (draws.mean(0) - exact) / standard_error
    assert z.abs().max() < 4.8  # of all nodes; chance passes this in 1 of 1000 runs
    assert 0.9 < z.std() < 1.1
    drift = (nominal.mean(0) - exact) / (nominal.std(0) / NUM_DRAWS**0.5)
    assert drift.mean() > 1  # chance: 0.04


def test_plain_means_are_unbiased():
    dst, length = mesh_edges()
    exact = totals(dst, length) / dst.bincount()
    means = []
    for seed in range(NUM_DRAWS):
        keep = sample_edges(dst, (0.3, 0.7), seed)
        means.append(totals(dst[keep], length[keep]) / dst[keep].bincount())
    means = torch.stack(means)
    assert ((means.mean(0) - exact) / (means.std(0) / NUM_DRAWS**0.5)).abs().max() < 4.8


def test_is_the_drawing_of_the_grid_sampler():
    dst, _ = mesh_edges()
    sampler = GridAwareSampler((0.2, 0.4), seed=7)
    assert torch.equal(sample_edges(dst, (0.2, 0.4), 7), sampler.sample_half_density(GridIndex.from_cells(dst)).indices)
    first, second = (torch.Generator().manual_seed(seed) for seed in (5, 5))
    assert torch.equal(sample_edges(dst, generator=first), sample_edges(dst, generator=second))
    assert not torch.equal(sample_edges(dst, generator=first), sample_edges(dst, seed=1))


def test_accepts_numpy_and_rejects_invalid_nodes():
    assert sample_edges(np.array([4, 4, 9]), 1.0).tolist() == [0, 1, 2]
    assert sample_edges(torch.zeros(0, dtype=torch.int64)).tolist() == []
    assert_refused(lambda: sample_edges(torch.rand(4)), InputTypeError, "integers")
    refused = assert_refused(lambda: sample_edges(torch.zeros(4, dtype=torch.int64), (0.0, 0.5)), ConfigError, "ratio")
    assert refused.call == "sample_edges(dst, ...)"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
@pytest.mark.slow
def test_inside_a_compiled_function():
    dst, lengths = mesh_edges()

    def around(x):
        keep, weight = sample_edges(dst, 0.5, seed=1, return_weight=True)
        return x[keep] * weight

    assert_same_compiled(around, lengths)
