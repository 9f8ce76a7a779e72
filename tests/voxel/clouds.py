"""Real clouds: the two hemispheres of a brain's surface, in nilearn's wheel."""

from __future__ import annotations

import functools

import numpy as np
import torch
from nilearn import datasets, surface


@functools.cache
def hemisphere(side: str) -> torch.Tensor:
    """(10242, 3) float64, in mm."""
    mesh = surface.load_surf_mesh(datasets.fetch_surf_fsaverage("fsaverage5")[f"pial_{side}"])
    return torch.from_numpy(np.asarray(mesh.coordinates, dtype=np.float64))


def two_clouds(num_a: int, num_b: int, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the left hemisphere, and of the right one mirrored onto it: two similar surfaces."""
    mirrored = hemisphere("right") * torch.tensor([-1.0, 1, 1], dtype=torch.float64)
    pick = torch.Generator().manual_seed(0)
    a, b = hemisphere("left"), mirrored
    return (
        a[torch.randperm(len(a), generator=pick)[:num_a]].to(dtype),
        b[torch.randperm(len(b), generator=pick)[:num_b]].to(dtype),
    )


def all_distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The table of all pairs, (N, M), without products of matrices."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
