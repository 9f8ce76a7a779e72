"""A real volume of four channels, from what nilearn's wheel ships."""

import functools

import torch
from nilearn import datasets


@functools.cache
def brain():
    """(4, 48, 48, 48): occupied, T1, gray and white matter of the MNI152 head at 4 mm; all zero around the brain."""
    names = ("brain_mask", "template", "gm_template", "wm_template")
    volumes = [getattr(datasets, f"load_mni152_{name}")(resolution=4).get_fdata() for name in names]
    whole = torch.stack([torch.from_numpy(each[:48, 5:53, :48]).float() for each in volumes])
    return whole * (whole[:1] > 0)


def crops(num_crops, size):
    """(B, 4, size, size, size), each from another place."""
    starts = torch.linspace(4, 44 - size, num_crops).long().tolist()
    return torch.stack([brain()[:, at : at + size, at : at + size, 8 : 8 + size] for at in starts])


def damaged(volume):
    """What a network might predict: real structure, shifted by a voxel and blurred, with noise where it is occupied."""
    generator = torch.Generator().manual_seed(1)
    blurred = (volume + volume.roll(1, dims=2) + volume.roll(1, dims=4)) / 3
    return blurred + 0.1 * torch.randn(volume.shape, generator=generator) * (volume[:, :1] > 0)
