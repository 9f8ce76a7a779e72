"""Run a network only near occupied voxels: on tiles that see one, or on one box around all of them.

All empty tiles are identical, so one is run for all. Tiles are cut as in `tiled_apply`, so their results equal those of
the whole volume, including at the borders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memkit._core.sparse_voxels import SparseVoxels
from memkit._gradients.streamed import accumulator_dtype, refuse_second_derivative
from memkit.chunk.sparse_rows import CALL
from memkit.chunk.tiles import ExactAxis, Reach, TileSpan, place_of


class Patch(NamedTuple):
    """A part of the result.

    Attributes:
        sample: Number of the sample.
        pieces: Where it reads and writes, along D, H, W.
    """

    sample: int
    pieces: tuple[TileSpan, ...]

    @property
    def part(self) -> tuple[Any, ...]:
        """Index of the part that it contributes, in its own result."""
        return ..., *(piece.part for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The parts of a volume to run.

    Attributes:
        axes: How D, H, W are cut into tiles.
        tile_out_sizes: Spatial sizes of one tile's result.
        lengths: Spatial sizes that a patch reads.
        patches: The parts, all of the same size.
    """

    axes: tuple[ExactAxis, ...]
    tile_out_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    patches: tuple[Patch, ...]

    @property
    def num_places(self) -> int:
        """Number of voxels that are run, including the empty tile."""
        return math.prod(self.lengths) * len(self.patches) + math.prod(axis.length for axis in self.axes)

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of the whole result."""
        return tuple(axis.out_size(size) for axis, size in zip(self.axes, self.tile_out_sizes, strict=True))

    def places_in_tile(self, device: torch.device) -> list[Tensor]:
        """Return, for D, H, W, each result position's offset within its tile's result."""
        found = []
        for axis, size in zip(self.axes, self.tile_out_sizes, strict=True):
            runs = [torch.arange(size)[piece.part] for piece in axis.pieces(size)]
            found.append(torch.cat(runs).to(device))
        return found


def cut_blocks(occupied: Tensor, axes: tuple[ExactAxis, ...], tile_out_sizes: tuple[int, ...]) -> TileChoice:
    """Choose the tiles that see an occupied voxel.

    Args:
        occupied: (B, D, H, W) bool.
        axes: How D, H, W are cut.
        tile_out_sizes: Spatial sizes of one tile's result.
    """
    pieces = [list(axis.pieces(size)) for axis, size in zip(axes, tile_out_sizes, strict=True)]
    seen = occupied
    for dim, (axis, along) in enumerate(zip(axes, pieces, strict=True), start=1):
        seen = torch.stack([seen.narrow(dim, piece.start, axis.length).any(dim) for piece in along], dim)
    patches = tuple(
        Patch(sample, tuple(along[number] for along, number in zip(pieces, numbers, strict=True)))
        for sample, *numbers in seen.nonzero().tolist()
    )
    return TileChoice(axes, tile_out_sizes, tuple(axis.length for axis in axes), patches)


def cut_box(
    box: Sequence[tuple[int, int]], batch_size: int, axes: tuple[ExactAxis, ...], tile_out_sizes: tuple[int, ...]
) -> TileChoice:
    """Choose the smallest box that covers everything an occupied voxel can change, the same for all samples.

    Args:
        box: See `occupied_box`.
        batch_size: Number of samples.
        axes: How D, H, W are cut for the empty part.
        tile_out_sizes: Spatial sizes of one tile's result.
    """
    pieces, lengths = zip(
        *(
            box_piece(ends, axis.size, axis.out_size(size), axis.reach)
            for ends, axis, size in zip(box, axes, tile_out_sizes, strict=True)
        ),
        strict=True,
    )
    return TileChoice(axes, tile_out_sizes, lengths, tuple(Patch(sample, pieces) for sample in range(batch_size)))


def occupied_box(occupied: Tensor) -> list[tuple[int, int]]:
    """Return the first and the last position along D, H, W that any sample occupies."""
    ends = []
    for dim in range(1, 4):
        others = [other for other in range(4) if other != dim]
        places = occupied.amax(others).nonzero().flatten().tolist() or [0]
        ends.append((places[0], places[-1]))
    return ends


def box_piece(ends: tuple[int, int], size: int, out_size: int, reach: Reach) -> tuple[TileSpan, int]:
    """Return the part of the result that input from ``ends[0]`` to ``ends[1]`` affects, and the length to read."""
    (first, last), period, step = ends, reach.period, reach.step
    begin = max((first - reach.after) // period, 0)
    end = min((last + reach.before) // period + 1, -(-out_size // step))
    start = max((begin - -(-reach.before // period)) * period, 0)
    length = min(end * period + reach.after, size) - start
    length += (size - length) % period  # fits: start is a multiple of the period
    return TileSpan(start, begin * step, min(end * step, out_size), begin * step - start // period * step), length


def run_patches(fn: nn.Module, voxels: SparseVoxels, cut: TileChoice, *, background: bool) -> Tensor:
    """Run the patches, and assemble the result.

    Args:
        fn: A network from (B, C, D, H, W) to (B, C_out, D_out, H_out, W_out).
        voxels: The occupied voxels.
        cut: The parts to run.
        background: Whether to run an empty tile too, for the positions that no patch covers; otherwise these are zero.

    Returns:
        (B, C_out, *out_sizes).

    Memory cost: the result, the memory of `fn` for all patches, and temporarily 4 bytes per voxel of the volume.
    """
    empty = None
    if background or not cut.patches:
        rows = voxels.features
        empty = fn(rows.new_zeros(1, rows.shape[1], *(axis.length for axis in cut.axes)))
    parts = empty[:0] if empty is not None and not cut.patches else fn(_windows(voxels, cut))
    result: Tensor = _Paste.apply(cut, voxels.batch_size, parts, empty)  # type: ignore[no-untyped-call]
    return result


def _windows(voxels: SparseVoxels, cut: TileChoice) -> Tensor:
    """Return the input of the patches, (patches, C, *lengths), gathered from the voxel rows."""
    rows = voxels.features
    number = torch.full((voxels.batch_size, *voxels.shape), len(rows), dtype=torch.int32, device=rows.device)
    number[voxels.coords.unbind(1)] = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    picked = torch.stack([
        number[patch.sample][tuple(slice(p.start, p.start + n) for p, n in zip(patch.pieces, cut.lengths, strict=True))]
        for patch in cut.patches
    ])  # fmt: skip
    with_empty = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return F.embedding(picked, with_empty, padding_idx=len(rows)).movedim(-1, 1)


class _Paste(torch.autograd.Function):
    """Copies parts into a volume; autograd slices would cost a gradient of the whole volume for each part."""

    @staticmethod
    def forward(ctx: Any, cut: TileChoice, batch_size: int, parts: Tensor, empty: Tensor | None) -> Tensor:
        ctx.cut, ctx.parts, ctx.empty = cut, parts.shape, None if empty is None else empty.shape
        out = parts.new_zeros(batch_size, parts.shape[1], *cut.out_sizes)
        if empty is not None:
            depth, height, width = cut.places_in_tile(parts.device)
            slab = empty.index_select(4, width).index_select(3, height)
            for sample in torch.split(out, 1):
                torch.index_select(slab, 2, depth, out=sample)
        for part, patch in zip(parts, cut.patches, strict=True):
            out[patch.sample][place_of(patch.pieces)] = part[patch.part]
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(CALL, 'pass mode="dense" for second derivatives.')
        cut, rest = ctx.cut, upstream[0].clone()
        parts = rest.new_zeros(ctx.parts)
        for part, patch in zip(parts, cut.patches, strict=True):
            place = rest[patch.sample][place_of(patch.pieces)]
            part[patch.part] = place
            place.zero_()
        if ctx.empty is None:
            return None, None, parts, None
        _, channels, *sizes = ctx.empty
        height, width = cut.out_sizes[1:]
        dtype = accumulator_dtype(rest.dtype)
        places = cut.places_in_tile(rest.device)
        slab = rest.new_zeros(1, channels, sizes[0], height, width, dtype=dtype)
        for sample in torch.split(rest, 1):
            slab.index_add_(2, places[0], sample.to(dtype))
        rows = slab.new_zeros(1, channels, *sizes[:2], width).index_add_(3, places[1], slab)
        total = rows.new_zeros(ctx.empty).index_add_(4, places[2], rows)
        return None, None, parts, total.to(rest.dtype)
