"""Real sparse volumes, from what nilearn's wheel ships."""

import functools

import numpy as np
import torch
from nilearn import surface
from nilearn.datasets import fetch_surf_fsaverage, load_mni152_brain_mask


@functools.cache
def vertices(name="pial_left"):
    """(10242, 3) float64, mm: a surface of fsaverage5."""
    return torch.from_numpy(np.array(surface.load_surf_mesh(fetch_surf_fsaverage("fsaverage5")[name]).coordinates))


@functools.cache
def cortex(size=64, name="pial_left"):
    """Coordinates (N, 3) of the voxels that hold a vertex of it, in FreeSurfer's cube of 256 mm."""
    return torch.unique(((vertices(name).double() + 128) * size / 256).floor().long(), dim=0)


@functools.cache
def brain_mask(resolution=4):
    """(D, H, W) bool, the MNI152 brain mask."""
    return torch.from_numpy(load_mni152_brain_mask(resolution=resolution).get_fdata()) > 0
