"""Run a module tile by tile, forward and backward, with one tile's graph alive at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import described, list_some
from memkit._gradients.streamed import (
    GradientTotals,
    refuse_reentrant,
    refuse_second_derivative,
    without_hooks,
)
from memkit._machine import random_state
from memkit._recovery.snapshot import HeldState
from memkit._torch.autocast import without_gradients
from memkit._torch.dispatch import fake_mode
from memkit.chunk.branches import Reads, changes_with, extremes, reads_numbers
from memkit.chunk.circumstances import Circumstances
from memkit.chunk.tiles import ExactAxis, TileSpan, place_of, tiles

CALL = "tiled_apply(module, x)"
_REDUCE = "tiled_apply(online_reduce=...)"
_Place = tuple[int, int, Tensor]  # a dimension, where a half of a tile starts in it, and that half's result
_FEW_LABELS = 0.01  # the share that rounding may change


@dataclass(frozen=True, slots=True)
class TileJob:
    """A module to run, and how the volume is cut.

    Attributes:
        module: The module.
        axes: The cut of each spatial dimension; these are the last dimensions of the input and of the result.
        output_device: Device on which the result is assembled; None for the device of the module's output.
        reduce: Applied to each tile's part of the result before it is stored; keeps the spatial dimensions.
    """

    module: nn.Module
    axes: tuple[ExactAxis, ...]
    output_device: torch.device | None = None
    reduce: Callable[[Tensor], Tensor] | None = None

    @property
    def first(self) -> list[TileSpan]:
        """A tile at the origin, for `read`; the size of its result is known only after it ran."""
        return [TileSpan(0, 0, 0, 0)] * len(self.axes)

    def read(self, pieces: Sequence[TileSpan]) -> tuple[Any, ...]:
        """Return the index of the tile in the input."""
        return ..., *(slice(p.start, p.start + axis.length) for p, axis in zip(pieces, self.axes, strict=True))

    def tile_out_sizes(self, y: Tensor) -> tuple[int, ...]:
        """Return the spatial sizes of a tile's result."""
        return tuple(y.shape[-len(self.axes) :])


def apply_tiles(job: TileJob, x: Tensor) -> Tensor:
    """Run the module over all tiles; differentiable if grad mode is on and anything requires a gradient."""
    params = [each for each in job.module.parameters() if each.requires_grad]
    if torch.is_grad_enabled() and (x.requires_grad or params):
        return _Tiled.apply(job, x, *params)  # type: ignore[no-any-return, no-untyped-call]
    return run_module(job, x)


def run_module(job: TileJob, x: Tensor) -> Tensor:
    """Assemble the module's result from the tiles; refuse it if they decide differently: see `TileReads`.

    Raises:
        InputError: They do.
    """
    if not reads_numbers(job.module) or fake_mode() is not None:
        return run_tiles(job, x, job.module)
    watched = TileReads(job)
    y = run_tiles(job, x, watched)
    watched.check(x)
    return y


def run_tiles(job: TileJob, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Assemble the result from the tiles.

    Args:
        job: The job to run.
        x: (B, C, *spatial).
        fn: Called with each tile; the module, or a stand-in for it.

    Memory cost: the result, and the memory of one tile.
    """
    # A copy, because a module may write into its input, and neighboring tiles read the same positions.
    y = fn(x[job.read(job.first)].clone())
    check_form(x, y)
    sizes = job.tile_out_sizes(y)
    total = tuple(axis.out_size(size) for axis, size in zip(job.axes, sizes, strict=True))
    out: Tensor | None = None
    for index, pieces in enumerate(tiles(job.axes, sizes)):
        if index:
            y = fn(x[job.read(pieces)].clone())
        part = _part(y, pieces)
        if job.reduce is not None:
            halves = [] if index else _reduced_halves(part, job.reduce, len(total))
            part = _reduced(part, job.reduce, len(total))
            _check_reduction(part, halves)
            del halves
        if out is None:
            shape = (*part.shape[: part.dim() - len(total)], *total)
            out = torch.zeros(shape, dtype=part.dtype, device=job.output_device or part.device)
        out[place_of(pieces)] = part
        del y, part  # before the next tile runs
    assert out is not None  # noqa: S101 - there is at least one tile
    return out


class TileReads:
    """Runs a module on tiles, and refuses their results if these depend on which numbers Python reads from a tile.

    All tiles that read the same decide as one. If they do not, a tile runs again with the numbers of another one. A sum
    or a count over the volume, which may pass a threshold that those of its tiles do not, is not seen.

    Args:
        job: The module, and how the volume is cut.
    """

    def __init__(self, job: TileJob) -> None:
        self._job = job
        self._read: list[list[Any]] = []
        self._sizes: tuple[int, ...] = ()

    def __call__(self, tile: Tensor) -> Tensor:
        """Run the module on a tile."""
        with Reads(tile) as reads:
            y: Tensor = self._job.module(tile)
        self._read.append(reads.numbers)
        self._sizes = self._sizes or self._job.tile_out_sizes(y)
        return y

    def check(self, x: Tensor) -> None:
        """Refuse two tiles with the least and the largest number if both differ with what the other one has read.

        It is enough that one does not: `if mask.any():` leaves out what would change nothing.
        """
        if (pair := extremes(self._read)) is None:
            return
        pieces = list(tiles(self._job.axes, self._sizes))
        low, high = (x[self._job.read(pieces[each])].detach() for each in pair)
        read = [self._read[each] for each in pair]
        if changes_with(self._job.module, low, read[1]) and changes_with(self._job.module, high, read[0]):
            raise InputError(
                CALL,
                got=f"a module whose Python code decides by values of its input ({list_some(list(map(str, read[0])))} "
                f"in one tile, {list_some(list(map(str, read[1])))} in another), and computes something else then",
                expected="the same computation in each tile as in the whole volume",
                fix="compute the value from the whole volume before the call, and let the module read it from an "
                "attribute: module.is_bright = bool(x.max() > 1).",
            )


class _Tiled(torch.autograd.Function):
    """All tiles as one node: parameters are its inputs, so each gets one gradient per call."""

    @staticmethod
    def forward(ctx: Any, job: TileJob, x: Tensor, *params: Tensor) -> Tensor:
        ctx.job, ctx.replay = job, Circumstances([x], job.module)
        ctx.save_for_backward(x, *params)
        with without_gradients():  # as in any autograd function; older autocast versions need it explicitly
            y = run_module(job, x)
        ctx.replay.over()
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(
            CALL, "for second derivatives call module(x), under torch.utils.checkpoint if memory runs out."
        )
        x, *params = ctx.saved_tensors
        with ctx.replay.again(), without_hooks(params), refuse_reentrant(CALL):
            return None, *_gradients(ctx.job, x, params, ctx.needs_input_grad[1:], upstream[0])


def _gradients(
    job: TileJob, x: Tensor, params: Sequence[Tensor], needs: Sequence[bool], upstream: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of the input and the parameters; None if the result does not depend on one."""
    sources = [x, *params]
    wanted = [index for index, is_needed in enumerate(needs) if is_needed]
    totals = GradientTotals(sources)

    def run(pieces: Sequence[TileSpan]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = x[job.read(pieces)].detach().requires_grad_(needs[0])
            return leaf, job.module(leaf.clone())

    # Every tile runs, in the forward's order: otherwise random numbers would not repeat.
    leaf, y = run(job.first)
    for index, pieces in enumerate(tiles(job.axes, job.tile_out_sizes(y))):
        if index:
            leaf, y = run(pieces)
        with torch.enable_grad():
            part = _part(y, pieces)
        if part.requires_grad:
            above = upstream[place_of(pieces)].to(part.device)
            targets = [leaf, *params]
            found = torch.autograd.grad(part, [targets[each] for each in wanted], above, allow_unused=True)
            for each, gradient in zip(wanted, found, strict=True):
                totals.add(each, gradient, job.read(pieces) if each == 0 else ...)
            del above, targets, found
        del leaf, y, part
    return [None if sum_ is None else sum_.to(x.dtype) for sum_, x in zip(totals.buffers, sources, strict=True)]


def _part(y: Tensor, pieces: Sequence[TileSpan]) -> Tensor:
    """Return the part of a tile's result that it contributes."""
    places: Any = (..., *(piece.part for piece in pieces))
    part = y[places]
    if part.shape[-len(pieces) :] != torch.Size(p.out_stop - p.out_start for p in pieces):
        raise InputError(
            CALL,
            got=f"a tile's result of sizes {tuple(y.shape[-len(pieces) :])}, which lacks positions that it must cover",
            expected="the same sizes for the same input",
            fix="keep the module's sizes from depending on values, or on the number of calls.",
        )
    return part


def _reduced(part: Tensor, reduce: Callable[[Tensor], Tensor], num_spatial: int) -> Tensor:
    reduced: object = reduce(part)
    if not isinstance(reduced, Tensor) or reduced.shape[-num_spatial:] != part.shape[-num_spatial:]:
        raise InputError(
            _REDUCE,
            got=f"a result of {described(reduced)} for a tile of shape {tuple(part.shape)}",
            expected="one tensor with unchanged spatial dimensions, at the end",
            fix="reduce over channels only, for example online_reduce=lambda y: y.argmax(1); put several results into "
            "one tensor, as channels.",
        )
    return reduced


def _reduced_halves(part: Tensor, reduce: Callable[[Tensor], Tensor], num_spatial: int) -> list[_Place]:
    """Reduce halves of a tile by themselves, without a trace; none if results are random.

    A largest value, or an average, is another one in at least one of them.
    """
    dim = max(range(-num_spatial, 0), key=lambda each: part.shape[each])
    half = part.shape[dim] // 2
    if not half:
        return []
    before, held = random_state.capture(), HeldState(reduce, content="counts")
    starts = (0, part.shape[dim] - half)
    found = [(dim, at, _reduced(part.narrow(dim, at, half).clone(), reduce, num_spatial)) for at in starts]
    is_random = not random_state.is_same_state(before, random_state.capture())
    random_state.restore(before)
    held.restore()
    return [] if is_random else found


def _check_reduction(reduced: Tensor, halves: Sequence[_Place]) -> None:
    """Refuse a reduction that compares voxels."""
    if not all(_are_alike(reduced.narrow(dim, at, half.shape[dim]), half) for dim, at, half in halves):
        raise InputError(
            _REDUCE,
            got="a result that is another one where half of a tile is reduced by itself",
            expected="a reduction that treats each voxel by itself, because it sees one tile at a time",
            fix="keep what is computed from channels, such as y.argmax(1), in online_reduce; apply what compares "
            "voxels (a softmax over space, a scaling by the largest value) to the result of tiled_apply.",
        )


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two results are equal up to rounding, which may change a few labels."""
    if one.shape != other.shape:
        return False
    if one.is_floating_point():
        tolerance = torch.finfo(one.dtype).eps ** 0.5
        scale = one.abs().nan_to_num(0.0, 0.0, 0.0).max() if one.numel() else 0.0
        return torch.allclose(one, other, tolerance, float(tolerance * scale), equal_nan=True)
    return int((one != other).sum()) <= max(1, _FEW_LABELS * one.numel())


def check_form(x: Tensor, y: object) -> None:
    """Refuse a result that is not one tensor with the input's number of dimensions."""
    if not isinstance(y, Tensor) or y.dim() != x.dim() or len(y) != len(x):
        # Convolutions take (channels, *spatial) too, so the first of the spatial dimensions was taken for the channels.
        is_unbatched = isinstance(y, Tensor) and y.dim() == x.dim() and y.shape[1:] == x.shape[1:]
        raise InputTypeError(
            CALL,
            got=f"a module that returns {described(y)} for an input of shape {tuple(x.shape)}",
            expected="one tensor (B, channels, *spatial) with as many dimensions as the input",
            fix="pass a batch, of one: tiled_apply(module, x[None], tile)[0]."
            if is_unbatched
            else "wrap the module in one that returns the tensor you need; pool or flatten outside it.",
        )
