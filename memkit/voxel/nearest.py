"""Nearest points between two clouds, found once for all metrics, without the full distance matrix."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal, NoReturn, SupportsIndex, get_args

import torch
from torch import Tensor

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.units import parse_bytes
from memkit.voxel.pruned import nearest_pruned, squared_distances

NearestBackend = Literal["auto", "tiled", "pruned", "kdtree"]

_CALL = "nearest_points(a, b)"
_TILE_ROWS = 256
_BYTES_PER_PAIR = 12  # held for each pair of points of a tile
_LARGEST_TABLE = 2**24  # up to this number of pairs, brute force is as fast as any other search
_NUM_SPATIAL = (2, 3)


@dataclass(frozen=True, slots=True, eq=False)
class NearestPoints:
    """Two clouds, and for each point its nearest point in the other; made by `nearest_points`, used by metrics.

    Attributes:
        a: (N, D), as given, in at least float32.
        b: (M, D).
        a_to_b: (N,) int64: the nearest point of ``b``. Ties are resolved arbitrarily.
        b_to_a: (M,) int64.

    If a cloud is empty, the indices of the other's points are 0 and meaningless; their distances are inf.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> pairs = mk.voxel.nearest_points(torch.zeros(2, 3), torch.ones(1, 3))
        >>> pairs.b_to_a.tolist(), [each.tolist() for each in pairs.squared_distances()]
        ([0], [[3.0, 3.0], [3.0]])
    """

    a: Tensor
    b: Tensor
    a_to_b: Tensor
    b_to_a: Tensor

    def squared_distances(self) -> tuple[Tensor, Tensor]:
        """Compute squared distances (N,) of ``a`` and (M,) of ``b`` to their nearest points.

        Recomputed from the pairs, so that autograd keeps N + M pairs instead of N times M.
        """
        return _squared(self.a, self.b, self.a_to_b), _squared(self.b, self.a, self.b_to_a)

    def distances(self) -> tuple[Tensor, Tensor]:
        """Compute distances (N,) and (M,); the gradient of a zero distance is zero."""
        of_a, of_b = self.squared_distances()
        return _safe_root(of_a), _safe_root(of_b)


def nearest_points(
    a: Tensor, b: Tensor, *, backend: NearestBackend = "auto", memory_budget: SupportsIndex | str = "16MiB"
) -> NearestPoints:
    """Find, for each point of two clouds, the nearest point of the other cloud.

    Args:
        a: (N, D), floating point, finite. Half precision is computed in float32: at 50 m the spacing of bfloat16 is 25
            cm.
        b: (M, D), on the same device. Gradients flow into both through the distances of the result.
        backend: ``"tiled"``: all pairs, tile by tile, for any D. ``"pruned"``: only tiles of points that may be near,
            for D = 2 or 3. ``"kdtree"``: SciPy's k-d tree, on the CPU (``pip install scipy``). ``"auto"``:
            the k-d tree if SciPy is installed, the clouds are on the CPU and D is 2 or 3; otherwise pruned for large
            clouds, otherwise tiled.
        memory_budget: Bytes, or text, for the search; the k-d tree ignores it and takes about 100 bytes per point.

    Returns:
        The pairs. All backends give the same distances.

    Raises:
        InputTypeError: A cloud is not a floating-point tensor (N, D).
        InputError: They differ in dimension or device, or contain a coordinate that is not finite or whose square
            overflows.
        ConfigError: The backend is unknown, not installed, or does not support this dimension.

    Memory cost: one int64 per point of both clouds, and the budget during the search.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> a, b = torch.tensor([[0.0, 0, 0], [0, 3, 0]]), torch.tensor([[0.0, 3, 4]])
        >>> pairs = mk.voxel.nearest_points(a, b)
        >>> pairs.a_to_b.tolist(), pairs.distances()[0].tolist()
        ([0, 0], [5.0, 4.0])
    """
    a, b = _checked(a, "a"), _checked(b, "b")
    if a.shape[1] != b.shape[1] or a.device != b.device:
        raise InputError(
            _CALL,
            got=f"{tuple(a.shape)} on {a.device} and {tuple(b.shape)} on {b.device}",
            expected="clouds with the same number of coordinates, on one device",
            fix="pass clouds of equal dimension, and move one to the device of the other: b.to(a.device).",
        )
    work = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(work), b.to(work)
    search, memory_bytes = _resolved(backend, a, b), parse_bytes(memory_budget, name="memory_budget", is_large=True)
    if not len(a) or not len(b):
        return NearestPoints(a, b, *(torch.zeros(len(each), dtype=torch.int64, device=a.device) for each in (a, b)))
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        if search == "tiled":
            found = _tiled(a, b, memory_bytes)
        elif search == "pruned":
            found = nearest_pruned(a, b, memory_bytes), nearest_pruned(b, a, memory_bytes)
        else:
            found = _kdtree(a, b), _kdtree(b, a)
    return NearestPoints(a, b, *found)


def _tiled(a: Tensor, b: Tensor, memory_bytes: int) -> tuple[Tensor, Tensor]:
    columns = max(1, min(len(b), memory_bytes // (_BYTES_PER_PAIR * _TILE_ROWS)))
    best_b = b.new_full((len(b),), torch.inf)
    of_a = torch.empty(len(a), dtype=torch.int64, device=a.device)
    of_b = torch.zeros(len(b), dtype=torch.int64, device=a.device)
    for first in range(0, len(a), _TILE_ROWS):
        rows = a[first : first + _TILE_ROWS]
        best_a, index = rows.new_full((len(rows),), torch.inf), of_a[first : first + _TILE_ROWS]
        for start in range(0, len(b), columns):
            part = slice(start, start + columns)
            squared = squared_distances(rows, b[part])
            _improve(best_a, index, *squared.min(1), start)
            _improve(best_b[part], of_b[part], *squared.min(0), first)
    return of_a, of_b


def _improve(best: Tensor, index: Tensor, squared: Tensor, found: Tensor, offset: int) -> None:
    """Update ``best`` and ``index`` in place where the new distances are smaller."""
    is_better = squared < best
    torch.where(is_better, squared, best, out=best)
    torch.where(is_better, found + offset, index, out=index)


def _kdtree(queries: Tensor, points: Tensor) -> Tensor:
    spatial = importlib.import_module("scipy.spatial")  # imported lazily: it takes a quarter of a second
    index = spatial.cKDTree(points.detach().cpu().numpy()).query(queries.detach().cpu().numpy())[1]
    return torch.from_numpy(index).to(queries.device, torch.int64)


def _resolved(backend: NearestBackend, a: Tensor, b: Tensor) -> NearestBackend:
    if backend not in get_args(NearestBackend):
        _refuse(backend, "", ", ".join(map(repr, get_args(NearestBackend))))
    has_scipy = importlib.util.find_spec("scipy") is not None
    if backend == "kdtree" and not has_scipy:
        _refuse(backend, ", but scipy is not installed", "scipy: pip install scipy")
    if backend == "pruned" and a.shape[1] not in _NUM_SPATIAL:
        _refuse(backend, f", for {a.shape[1]} coordinates", "2 or 3 coordinates")
    if backend != "auto":
        return backend
    if a.device.type == "cpu" and has_scipy and a.shape[1] in _NUM_SPATIAL:
        return "kdtree"
    return "pruned" if a.shape[1] in _NUM_SPATIAL and len(a) * len(b) > _LARGEST_TABLE else "tiled"


def _refuse(backend: str, what: str, expected: str) -> NoReturn:
    raise ConfigError(
        f"nearest_points(..., backend={backend!r})",
        got=f"{backend!r}{what}",
        expected=expected,
        fix="omit backend: all of them give the same distances.",
    )


def _checked(cloud: object, name: str) -> Tensor:
    if not isinstance(cloud, Tensor) or cloud.dim() != 2 or not cloud.is_floating_point() or not cloud.shape[1]:
        raise InputTypeError(
            _CALL,
            got=f"{name}: {described(cloud)}",
            expected="floating-point coordinates (N, D)",
            fix=f"pass {name}.float(); positions in a grid are exact up to 2**24."
            if isinstance(cloud, Tensor) and cloud.dim() == 2 and not cloud.is_floating_point()
            else "pass one row for each point, and one cloud of a batch at a time.",
        )
    cloud = cloud.to(torch.promote_types(cloud.dtype, torch.float32))
    largest = (torch.finfo(cloud.dtype).max / (4 * cloud.shape[1])) ** 0.5  # their squared distance stays finite
    is_usable = (cloud.detach().abs() <= largest).all(1)  # nan is not
    if not bool(is_usable.all()):
        raise InputError(
            _CALL,
            got=f"{name}: {int((~is_usable).sum())} points with a coordinate that is nan or inf, or whose square "
            "overflows",
            expected=f"coordinates of at most {largest:.1e}",
            fix="drop these points, or find where they come from.",
        )
    return cloud


def _squared(points: Tensor, others: Tensor, index: Tensor) -> Tensor:
    if not len(others):
        return points.new_full((len(points),), torch.inf)
    with torch.autocast(points.device.type, enabled=False):
        return (points - others[index]).square().sum(1)


def _safe_root(squared: Tensor) -> Tensor:
    is_apart = squared > 0
    return torch.where(is_apart, squared, 1).sqrt() * is_apart
