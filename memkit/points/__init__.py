"""Point selection: grid cells, and samples that keep a fraction of every cell."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.points.batches import BudgetBatchSampler as BudgetBatchSampler
    from memkit.points.edges import sample_edges as sample_edges
    from memkit.points.grid import GridIndex as GridIndex
    from memkit.points.packed import split_packed as split_packed
    from memkit.points.sample import GridSample as GridSample
    from memkit.points.sampler import GridAwareSampler as GridAwareSampler
    from memkit.points.voxels import (
        first_points as first_points,
        fragments as fragments,
        voxel_mean as voxel_mean,
    )
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "BudgetBatchSampler": "memkit.points.batches",
        "GridAwareSampler": "memkit.points.sampler",
        "GridIndex": "memkit.points.grid",
        "GridSample": "memkit.points.sample",
        "first_points": "memkit.points.voxels",
        "fragments": "memkit.points.voxels",
        "sample_edges": "memkit.points.edges",
        "split_packed": "memkit.points.packed",
        "voxel_mean": "memkit.points.voxels",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
