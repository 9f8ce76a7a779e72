"""Real scenes of different sizes: patches of the cortex of fsaverage5, from nilearn's wheel."""

import functools

import numpy as np
import torch
from nilearn import surface
from nilearn.datasets import fetch_surf_fsaverage


@functools.cache
def patches(cube=45.0):
    """Patches of both hemispheres of fsaverage5 by cubes of so many mm: vertices, depth of the folds, triangles."""
    files = fetch_surf_fsaverage("fsaverage5")
    found = []
    for side in ("left", "right"):
        mesh = surface.load_surf_mesh(files[f"pial_{side}"])
        coord, faces = np.asarray(mesh.coordinates, np.float64), np.asarray(mesh.faces, np.int64)
        depth = np.asarray(surface.load_surf_data(files[f"sulc_{side}"]), np.float64)
        cells = np.unique(np.floor(coord / cube), axis=0, return_inverse=True)[1].reshape(-1)
        for cell in range(cells.max() + 1):
            inside = np.flatnonzero(cells == cell)
            number = np.full(len(coord), -1)
            number[inside] = np.arange(len(inside))
            own = number[faces]
            patch = {"coord": coord[inside] / cube, "depth": depth[inside], "faces": own[(own >= 0).all(axis=1)]}
            found.append({name: torch.from_numpy(value) for name, value in patch.items()} | {"side": side})
    return tuple(found)


def scene_of(patch, number):
    """What Pointcept's Collect gives: fold or ridge for each point, -1 where that is not clear."""
    segment = (patch["depth"] > 0).long()
    segment[patch["depth"].abs() < 1] = -1
    return {
        "coord": patch["coord"],
        "feat": torch.cat([patch["coord"] - patch["coord"].mean(0), patch["depth"][:, None].sin()], dim=1),
        "segment": segment,
        "offset": torch.tensor([len(segment)]),
        "condition": patch["side"],
        "name": f"patch{number}",
        "grid_size": torch.tensor([0.02]),
    }


def collate(scenes):
    """As Pointcept's collate_fn: tensors concatenated, offsets added up, texts in a list."""
    batch = {}
    for key in scenes[0]:
        values = [scene[key] for scene in scenes]
        batch[key] = torch.cat(values) if isinstance(values[0], torch.Tensor) else values
        if "offset" in key:
            batch[key] = batch[key].cumsum(0)
    return batch
