"""Volumes for augmentations: real ones from nilearn's wheel, and a scene whose velocities are known everywhere."""

import functools

import torch
from nilearn.datasets import load_mni152_template

from memkit._core.sparse_voxels import SparseVoxels
from tests.voxel.clouds import hemisphere

RADAR = ("occupancy", "intensity", "doppler", "vector:x", "vector:y", "vector:z")


@functools.cache
def brain():
    """(1, 50, 59, 48) float32: the MNI152 template at 4 mm; X, Y, Z along D, H, W; zero outside of the brain."""
    return torch.from_numpy(load_mni152_template(resolution=4).get_fdata()).float()[None]


@functools.cache
def cortex(size=48):
    """(2, S, S, S) float32: occupancy, and height in m, of a brain's surface in a cube of 256 mm."""
    places = ((hemisphere("left") + 128) * size / 256).floor().long()
    volume = torch.zeros(2, size, size, size)
    volume[0][places.unbind(1)] = 1.0
    volume[1][places.unbind(1)] = (hemisphere("left")[:, 2] / 1000).float()
    return volume


def sparse(volume, layout):
    """The occupied voxels of (B, C, D, H, W)."""
    return SparseVoxels.from_dense(volume, mask=torch.stack([layout.occupied(each) for each in volume]))


def velocity(places):
    """(N, 3) m/s: a rigid body that moves and turns; known at every place (N, 3)."""
    turn = torch.tensor([[0.0, -0.3, 0.1], [0.3, 0.0, -0.2], [-0.1, 0.2, 0.0]], dtype=places.dtype)
    return places @ turn.T + torch.tensor([8.0, -3.0, 0.5], dtype=places.dtype)


def radial(places, velocities, sensor):
    """(N,) m/s: how fast each place moves away from the sensor."""
    rays = places - sensor
    return (rays * velocities).sum(1) / rays.norm(dim=1)


def centers(voxels, layout):
    """(N, 3) meters along X, Y, Z: the middles of voxels (N, 3) along D, H, W."""
    order = [layout.axes.index(axis) for axis in "XYZ"]
    size, origin = (torch.tensor(each, dtype=torch.float64) for each in (layout.voxel_size, layout.origin))
    return (voxels[:, order] + 0.5) * size + origin


def radar_scene(layout, shape, num=300):
    """(6, D, H, W) float64: voxels of a moving body, with radial velocity and velocity, as the sensor sees them."""
    chosen = torch.randperm(shape[0] * shape[1] * shape[2], generator=torch.Generator().manual_seed(1))[:num]
    voxels = torch.stack(torch.unravel_index(chosen, shape), 1)
    places = centers(voxels, layout)
    moving = velocity(places)
    seen = radial(places, moving, torch.tensor(layout.sensor_origin, dtype=torch.float64))
    values = torch.cat([torch.ones(num, 1), torch.rand(num, 1), seen[:, None], moving], 1).double()
    volume = torch.zeros(6, *shape, dtype=torch.float64)
    volume[:, voxels[:, 0], voxels[:, 1], voxels[:, 2]] = values.T
    return volume
