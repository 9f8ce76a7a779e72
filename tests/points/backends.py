"""Scenes on which the sampler's back ends are compared with NumPy."""

import numpy as np
import torch

from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler
from tests.points.scenes import on_mesh


def indexes():
    """Cells of all sizes, cut ones too; a batch with an empty scene; one point; none. 170,000 points.

    Of the 16-bit numbers of so many points some 50 do not decide, so that this case is in it.
    """
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.poisson(20, 3000) + 1, [300, 255, 256, 1000, 70_000, 1, 2]])
    yield GridIndex.from_cells(rng.permutation(np.repeat(np.arange(len(sizes)), sizes)))
    yield GridIndex.from_coords(on_mesh(35_000), 6.0, [15_000, 15_000, 20_000, 35_000])
    yield GridIndex.from_cells([3])
    yield GridIndex.from_cells(np.zeros(0, np.int64))


def are_identical(backend, device="cpu"):
    """Whether a back end gives NumPy's samples, bit for bit: in each scenario, with each rounding, draw after draw."""
    return all(
        same(expected[scenario], sample)
        for index in indexes()
        for rounding in ("nearest", "floor")
        for expected, samples in zip(
            _draws(index, rounding, "numpy"), _draws(index, rounding, backend, device), strict=True
        )
        for scenario, sample in samples.items()
    )


def _draws(index, rounding, backend, device="cpu"):
    sampler = GridAwareSampler(seed=3, rounding=rounding, backend=backend, device=device)
    return [sampler.sample_scenarios(index) for _ in range(2)]


def same(a, b):
    pairs = (a.indices, b.indices), (a.counts, b.counts), (a.offsets, b.offsets)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)
