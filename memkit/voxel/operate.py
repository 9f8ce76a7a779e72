"""Run operations on dense volumes, sparse voxels and points, block by block, with the same bits for each form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from memkit._core.sparse_voxels import SparseVoxels, Triple
from memkit.voxel.augment_base import BLOCK, blocks_of, each_sample, filled, numbers_of, with_rows
from memkit.voxel.augment_moves import Move
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import VoxelDraw, VoxelParams
from memkit.voxel.placed_noise import PlacedNoise
from memkit.voxel.samples import VoxelPoints


class ValueChange(Protocol):
    """The part of `VoxelOperation` that is needed here."""

    kinds: ClassVar[tuple[str, ...]]

    def is_active(self, draw: VoxelDraw) -> bool:
        """Return whether values change."""

    def change(self, values: Tensor, noise: PlacedNoise, channel: int, draw: VoxelDraw) -> Tensor:
        """Return the changed values."""


ValueChanges = Sequence[ValueChange]


def run_on_volume(
    x: Tensor, params: VoxelParams, layout: VoxelLayout, operations: ValueChanges, *, inplace: bool
) -> Tensor:
    """Return the changed and moved volume: (C, D, H, W) or (B, C, D, H, W)."""
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    samples = (each_sample(each, batched=params.batched) for each in (x, out))
    for source, target, draw in zip(*samples, params.draws, strict=True):
        own = source.clone() if inplace and Move.of(draw) else source
        _run_on_sample(own, target, draw, params.shape, layout, operations)
    return out


def _run_on_sample(
    source: Tensor, target: Tensor, draw: VoxelDraw, shape: Triple, layout: VoxelLayout, operations: ValueChanges
) -> None:
    """Write a moved sample (C, D, H, W) into the result, block by block."""
    move = Move.of(draw)
    dims = [1 + dim for dim in move.dims(layout)]
    is_changed = source.is_floating_point() and _changes(draw, move, layout, operations)
    aligned = move.aligned(target, layout)
    whole = [(slice(0, shape[0]), slice(0, shape[1]))]
    for block in blocks_of(shape) if dims or is_changed else whole:
        part = source[:, *block]
        if is_changed:
            first = (block[0].start * shape[1] + block[1].start) * shape[2]
            part = _change_block(part, first, draw, move, layout, operations)
        place = [
            slice(size - each.stop, size - each.start) if dim in dims else each
            for dim, each, size in zip((1, 2), block, shape, strict=False)
        ]
        aligned[:, *place] = _flipped(part, dims) if dims else part


def _flipped(part: Tensor, dims: list[int]) -> Tensor:
    """Return a flipped tensor; of some unsigned integers torch flips only the bits."""
    signed = _SIGNED.get(part.dtype)
    return part.flip(dims) if signed is None else part.view(signed).flip(dims).view(part.dtype)


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _change_block(
    part: Tensor, first: int, draw: VoxelDraw, move: Move, layout: VoxelLayout, operations: ValueChanges
) -> Tensor:
    """Change the occupied voxels of a block (C, d, h, W) whose first voxel is number ``first``."""
    place = layout.occupied(part).flatten().nonzero().squeeze(1)
    changed = part.clone(memory_format=torch.contiguous_format)
    flat = changed.view(len(part), -1)
    noise = _noise(place + first, draw, layout)
    rows = _change(flat[:, place], noise, draw, move, layout, operations)
    if draw.dropout_prob:
        rows = torch.where(noise.is_kept(draw.dropout_prob), rows, filled(layout.empties, rows)[:, None])
    flat[:, place] = rows
    return changed


def run_on_sparse(
    voxels: SparseVoxels, params: VoxelParams, layout: VoxelLayout, operations: ValueChanges
) -> SparseVoxels:
    """Return new sparse voxels with the same bits as the dense volume."""
    kept = None
    if any(draw.dropout_prob for draw in params.draws):
        kept = torch.ones(len(voxels.coords), dtype=torch.bool, device=voxels.coords.device)
        for rows, draw in _rows_of(voxels.coords[:, 0], params.draws):
            noise = _noise(numbers_of(voxels.coords[rows, 1:], params.shape), draw, layout)
            kept[rows] = noise.is_kept(draw.dropout_prob)
    coords, features = (each.clone() if kept is None else each[kept] for each in (voxels.coords, voxels.features))
    for rows, draw in _rows_of(coords[:, 0], params.draws):
        move, places = Move.of(draw), coords[rows, 1:]
        if _changes(draw, move, layout, operations):
            noise = _noise(numbers_of(places, params.shape), draw, layout)
            features[rows] = _change(features[rows].T, noise, draw, move, layout, operations).T
        coords[rows, 1:] = move.places(places, params.shape, layout)
    return with_rows(voxels, coords, features)


def _rows_of(samples: Tensor, draws: Sequence[VoxelDraw]) -> Iterator[tuple[Tensor, VoxelDraw]]:
    """Yield the rows of each sample with its draw, block by block, from (N,) int64 sample numbers."""
    for first in range(0, len(samples), BLOCK):
        part = samples[first : first + BLOCK]
        for number, draw in enumerate(draws):
            rows = (part == number).nonzero().squeeze(1)
            if len(rows):
                yield rows + first, draw


def run_on_points(
    points: VoxelPoints, draw: VoxelDraw, shape: Triple, layout: VoxelLayout, operations: ValueChanges
) -> VoxelPoints:
    """Return the changed and moved points."""
    move = Move.of(draw)
    rows = torch.arange(len(points.coords), device=points.coords.device)  # a point's number is its row
    if draw.dropout_prob:
        rows = rows[_noise(rows, draw, layout).is_kept(draw.dropout_prob)]
    coords, features = points.coords[rows], points.features[rows]
    for block in torch.split(torch.arange(len(rows), device=rows.device), BLOCK):
        noise = _noise(rows[block], draw, layout)
        features[block] = _change(features[block].T, noise, draw, move, layout, operations).T
    return VoxelPoints(move.points(coords, shape, layout) if move else coords, features)


def _noise(numbers: Tensor, draw: VoxelDraw, layout: VoxelLayout) -> PlacedNoise:
    return PlacedNoise(numbers, draw.seed, len(layout.channels))


def _active(kind: str, draw: VoxelDraw, operations: ValueChanges) -> list[ValueChange]:
    return [each for each in operations if kind in each.kinds and each.is_active(draw)]


def _changes(draw: VoxelDraw, move: Move, layout: VoxelLayout, operations: ValueChanges) -> bool:
    """Return whether values change, not only positions."""
    is_valued = any(_active(kind, draw, operations) for kind in layout.channels)
    return is_valued or draw.dropout_prob > 0 or bool(move and layout.vectors)


def _change(
    rows: Tensor, noise: PlacedNoise, draw: VoxelDraw, move: Move, layout: VoxelLayout, operations: ValueChanges
) -> Tensor:
    """Change the values of occupied voxels, identically for every form of a volume.

    Args:
        rows: (C, N) values, which may be overwritten.
        noise: The random numbers of these voxels.
        draw: The drawn parameters.
        move: The move of the draw.
        layout: The layout of the channels.
        operations: The operations, in order.
    """
    dtype = rows.dtype
    values = rows if dtype in (torch.float32, torch.float64) else rows.float()
    move.turn_vectors(values, layout)
    for channel, kind in enumerate(layout.channels):
        active = _active(kind, draw, operations)
        for each in active:
            row = values[channel]
            changed = each.change(row, noise, channel, draw)
            if changed is not row:
                row.copy_(changed)
        ends = cast("Sequence[Any]", layout.value_range)[channel]
        if active and ends is not None:
            values[channel] = values[channel].clamp(*ends)
    return values.to(dtype)
