"""Exact nearest neighbors by pruning tiles with distant bounding boxes, in plain torch, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memkit._core.voxel_keys import MORTON_BITS, morton_encode

_TILE = 64  # points; the fastest of 16, 32, 64, 128 for 200,000 points, uniform and lidar-like
_CELLS_LOG2 = 16  # cells along each axis of the Morton curve
_BYTES_PER_BOX = 40  # held for each pair of tiles: gap, its order, intermediate results
_BYTES_PER_PAIR = 20  # held for each pair of points


def nearest_pruned(x: Tensor, y: Tensor, memory_bytes: int) -> Tensor:
    """Find, for each point of ``x``, the row of its nearest point in ``y``.

    Both clouds are sorted along a Morton curve and cut into tiles. A tile of ``x`` visits the tiles of ``y`` in the
    order of the gap between their boxes, until the gap exceeds the largest nearest-neighbor distance of its points so
    far.

    Args:
        x: (N, D) float32 or float64, N and M at least 1, D 2 or 3.
        y: (M, D), the same dtype and device.
        memory_bytes: Working memory; the minimum is one tile against all boxes.

    Returns:
        (N,) int64.
    """
    low = torch.minimum(x.amin(0), y.amin(0))
    extent = (torch.maximum(x.amax(0), y.amax(0)) - low).max()
    ours, theirs = _Tiles.cut(x, low, extent), _Tiles.cut(y, low, extent)
    num_at_once = max(1, memory_bytes // (_BYTES_PER_BOX * len(theirs.low) + _BYTES_PER_PAIR * _TILE**2))
    found = torch.empty(len(ours.low), _TILE, dtype=torch.int64, device=x.device)
    for start in range(0, len(found), num_at_once):
        part = slice(start, start + num_at_once)
        found[part] = _search(ours.points[part], ours.low[part], ours.high[part], theirs)
    index = torch.empty(len(x), dtype=torch.int64, device=x.device)
    index[ours.rows.flatten()] = theirs.rows.flatten()[found.flatten()]  # padded rows are written twice, equally
    return index


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A sorted cloud: points (T, tile, D), their rows (T, tile), and corners of the tiles' boxes (T, D)."""

    points: Tensor
    rows: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def cut(cls, points: Tensor, low: Tensor, extent: Tensor) -> _Tiles:
        side = min(_CELLS_LOG2, MORTON_BITS[points.shape[1]])
        cells = (points - low) * ((2**side - 1) / extent.clamp_min(torch.finfo(points.dtype).tiny))
        rows = morton_encode(cells.long().clamp_(0, 2**side - 1)).argsort()
        rows = torch.cat([rows, rows[-1:].expand(-len(rows) % _TILE)]).reshape(-1, _TILE)
        tiled = points[rows]
        return cls(tiled, rows, tiled.amin(1), tiled.amax(1))


def _search(points: Tensor, low: Tensor, high: Tensor, others: _Tiles) -> Tensor:
    """Find, for each point of some tiles, the number of its nearest among the others' sorted points."""
    gaps = points.new_zeros(len(points), len(others.low))
    for axis in range(points.shape[2]):
        below = others.low[:, axis] - high[:, axis, None]
        above = low[:, axis, None] - others.high[:, axis]
        gaps += torch.maximum(below, above).clamp_(min=0).square_()
    gaps, order = gaps.sort(1)
    best = points.new_full(points.shape[:2], torch.inf)
    found = torch.zeros(best.shape, dtype=torch.int64, device=points.device)
    active = torch.arange(len(points), device=points.device)
    for turn in range(order.shape[1]):
        # Gaps and distances are rounded independently, so a small tolerance is added.
        active = active[gaps[active, turn] * (1 - 2e-6) <= best[active].amax(1)]
        if not len(active):
            break
        tile = order[active, turn]
        squared, nearest = squared_distances(points[active], others.points[tile]).min(2)
        is_better = squared < best[active]
        best[active] = torch.where(is_better, squared, best[active])
        found[active] = torch.where(is_better, tile[:, None] * _TILE + nearest, found[active])
    return found


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Compute squared distances of all pairs: (..., N, D) and (..., M, D) to (..., N, M).

    Uses differences along each axis: with matrix products, as in `torch.cdist`, the distances of points that are close
    together and far from the origin would cancel.
    """
    total = (x[..., :, None, 0] - y[..., None, :, 0]).square_()
    for axis in range(1, x.shape[-1]):
        total += (x[..., :, None, axis] - y[..., None, :, axis]).square_()
    return total
