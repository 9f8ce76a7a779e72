"""Point clouds: on a real mesh, from nilearn's wheel, and uniform."""

import functools

import numpy as np
from nilearn import surface
from nilearn.datasets import fetch_surf_fsaverage

_SCANNER = np.array([-120.0, -40.0, 60.0])  # mm, beside the left hemisphere
_CLOSE = np.array([-78.5, -27.0, -14.0])  # 10 mm from its leftmost point


@functools.cache
def _triangles():
    """(20480, 3, 3) float64, mm: the left pial surface of fsaverage5."""
    mesh = surface.load_surf_mesh(fetch_surf_fsaverage("fsaverage5")["pial_left"])
    return np.asarray(mesh.coordinates, np.float64)[mesh.faces]


def on_mesh(num_points, seed=0, scanner=_SCANNER):
    """(N, 3) float32: points on the cortex, as dense as a scanner beside it would measure them."""
    rng = np.random.default_rng(seed)
    corners = _triangles()
    sides = corners[:, 1:] - corners[:, :1]
    area = np.linalg.norm(np.cross(sides[:, 0], sides[:, 1]), axis=1)
    weight = area / np.square(corners.mean(axis=1) - scanner).sum(axis=1)
    which = rng.choice(len(corners), num_points, p=weight / weight.sum())
    at = rng.random((num_points, 2))
    at = np.where(at.sum(axis=1, keepdims=True) > 1, 1 - at, at)
    return (corners[which, 0] + (at[:, :, None] * sides[which]).sum(axis=1)).astype(np.float32)


def close_up(num_points, seed=0):
    """(N, 3) float32, `on_mesh` from so close that some cells have forty times the points of the average one."""
    return on_mesh(num_points, seed, _CLOSE)


def in_cube(num_points, seed=0):
    """(N, 3) float32, uniform in a cube of 100."""
    return np.random.default_rng(seed).random((num_points, 3), dtype=np.float32) * np.float32(100)


def grid_size_for(points, mean):
    """The grid size at which a cell that holds a point holds so many on average."""
    low, high = 1e-2, 100.0
    for _ in range(20):
        size = (low * high) ** 0.5
        num_cells = len(np.unique(np.floor(points / size) @ np.array([1e6, 1e3, 1.0])))
        low, high = (low, size) if len(points) / num_cells > mean else (size, high)
    return size
