"""Occupied cells at all levels from one sort, against `torch.unique` at each level.

Points are the vertices of fsaverage5's pial surface, from nilearn's wheel, repeated with noise of 1 mm, in 1024 cells
along the longest side. Times are processor time on one thread, the ways in turns, the least of the rounds.

Run: python -m benchmarks.cases.resolution_levels
"""

from __future__ import annotations

import torch

from benchmarks.result import write_result
from benchmarks.timing import least_seconds
from memkit.chunk.resolution import DynamicResolutionProcessor
from tests.chunk.scenes import vertices

NUM_POINTS, LEVELS, ROUNDS = 300_000, 10, 7


def main() -> None:
    torch.set_num_threads(1)
    surface = vertices()
    points = surface[torch.arange(NUM_POINTS) % len(surface)]
    points = points + torch.randn(points.shape, generator=torch.Generator().manual_seed(0), dtype=points.dtype)
    low, high = points.amin(0), points.amax(0)
    cells = ((points - low) / (high - low).max() * 2**LEVELS).long().clamp(max=2**LEVELS - 1)
    processor = DynamicResolutionProcessor(NUM_POINTS, levels=LEVELS)
    by_unique = [len((cells >> level).unique(dim=0)) for level in range(LEVELS + 1)]
    assert list(processor.choose(cells).num_active_by_level) == by_unique
    ways = {
        "one sort": lambda: processor.choose(cells),
        "unique": lambda: [(cells >> level).unique(dim=0) for level in range(LEVELS + 1)],
    }
    figures = {
        "num_points": NUM_POINTS,
        "num_active_by_level": by_unique,
        "ms": {name: 1000 * least for name, least in least_seconds(ways, ROUNDS).items()},
    }
    print(figures)
    print(write_result("resolution_levels", figures, peers=("nilearn",)))


if __name__ == "__main__":
    main()
