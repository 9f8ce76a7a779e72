"""Data of several examples: a hemisphere of the human cortex, fsaverage5, which comes with nilearn."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from torch import Tensor


class Hemisphere(NamedTuple):
    """A surface of triangles, the right side mirrored so that it lies as the left one.

    Attributes:
        points: (n, 3) in mm.
        faces: (f, 3), the points of each triangle.
        normals: (n, 3), where the surface faces at each point.
        depth: (n,), of the sulci; positive where the cortex is sunken.
        curvature: (n,).
    """

    points: Tensor
    faces: Tensor
    normals: Tensor
    depth: Tensor
    curvature: Tensor

    def scatter(self, num_points: int) -> tuple[Tensor, Tensor, Tensor]:
        """Points spread evenly over the surface, with normals and depths: (m, 3), (m, 3), (m,); always the same."""
        generator = torch.Generator().manual_seed(0)
        sizes = torch.linalg.cross(*(self.points[self.faces[:, i]] - self.points[self.faces[:, 0]] for i in (1, 2)))
        chosen = self.faces[torch.multinomial(sizes.norm(dim=1), num_points, replacement=True, generator=generator)]
        shares = F.normalize(-torch.rand(num_points, 3, 1, generator=generator).log(), p=1, dim=1)
        points, normals, depth = (
            (each[chosen] * shares).sum(1) for each in (self.points, self.normals, self.depth[:, None])
        )
        return points, F.normalize(normals), depth[:, 0]


def load(side: str, kind: str = "white") -> Hemisphere:
    """Load the ``"left"`` or the ``"right"`` hemisphere, its ``"white"`` surface or the outer one, ``"pial"``."""
    fsaverage = datasets.fetch_surf_fsaverage("fsaverage5")
    mesh = surface.load_surf_mesh(fsaverage[f"{kind}_{side}"])
    points = torch.from_numpy(np.asarray(mesh.coordinates)).float()
    faces = torch.from_numpy(np.asarray(mesh.faces)).long()
    if side == "right":
        points, faces = points * torch.tensor([-1.0, 1.0, 1.0]), faces.flip(1)
    across = torch.linalg.cross(*(points[faces[:, i]] - points[faces[:, 0]] for i in (1, 2)))
    normals = torch.zeros_like(points).index_add(0, faces.flatten(), across.repeat_interleave(3, 0))
    depth, curvature = (
        torch.from_numpy(np.array(surface.load_surf_data(fsaverage[f"{name}_{side}"]), dtype=np.float32))
        for name in ("sulc", "curv")
    )
    return Hemisphere(points, faces, F.normalize(normals), depth, curvature)
