"""Run a network on occupied voxels only, laid out as a volume that is N voxels long.

Layers that treat each voxel independently give the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError
from memkit._core.sparse_voxels import SparseVoxels

CALL = "SparsityAwareProcessor(fn)(volume)"


def pointwise(fn: nn.Module, voxels: SparseVoxels) -> SparseVoxels:
    """Run a pointwise network on the occupied voxels."""
    return voxels.with_features(_on_rows(fn, _one_or_more(voxels).features)[: len(voxels.coords)])


def pointwise_everywhere(fn: nn.Module, voxels: SparseVoxels) -> Tensor:
    """Run a pointwise network for the whole volume: a single empty voxel is run too, for all empty voxels.

    A network's output for zero is rarely zero. The shared row receives the gradient of all empty voxels.

    Returns:
        (B, C_out, D, H, W).
    """
    rows = voxels.features
    results = _on_rows(fn, torch.cat([rows, rows.new_zeros(1, rows.shape[1])]))
    volume = results[-1].view(1, -1, 1, 1, 1).repeat(voxels.batch_size, 1, *voxels.shape)
    sample, *places = voxels.coords.unbind(1)
    volume[sample, :, places[0], places[1], places[2]] = results[:-1]
    return volume


def _one_or_more(voxels: SparseVoxels) -> SparseVoxels:
    """Add an empty voxel if there is none: torch's convolutions refuse empty volumes."""
    if len(voxels.coords):
        return voxels
    rows = voxels.features
    coords = voxels.coords.new_zeros(1, 4)
    return SparseVoxels.from_coords(
        coords, rows.new_zeros(1, rows.shape[1]), shape=voxels.shape, batch_size=voxels.batch_size
    )


def _on_rows(fn: Callable[[Tensor], Any], rows: Tensor) -> Tensor:
    y = fn(_as_volume(rows))
    if not isinstance(y, Tensor) or y.dim() != 5 or y.shape[2:] != (1, 1, len(rows)):
        raise InputError(
            CALL,
            got=f"a module that gives {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__} for "
            f"{(1, rows.shape[1], 1, 1, len(rows))}",
            expected="one result for each voxel",
            fix='pool or flatten outside the module, or pass mode="dense".',
        )
    return _as_rows(y)


def _as_volume(rows: Tensor) -> Tensor:
    # Along the last dimension: along the first, the backward of torch's 1x1x1 convolution is 30 times slower.
    return rows.t()[None, :, None, None, :]


def _as_rows(volume: Tensor) -> Tensor:
    return volume[0, :, 0, 0, :].t()
