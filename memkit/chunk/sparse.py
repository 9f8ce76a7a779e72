"""Run a network on the occupied part of a mostly empty volume, with the result of the whole volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import SparseVoxels
from memkit._core.words import guided
from memkit._recovery.attempt import Done, Failed, unless_failed
from memkit._recovery.snapshot import RandomNumbers, held_generators
from memkit._torch.autocast import without_gradients
from memkit._torch.compiler import runs_eagerly
from memkit._torch.dispatch import fake_mode
from memkit._torch.graph import have_tangents, is_transforming
from memkit.chunk.halo import REFUSALS, find_reach, quarters, warn_of_kept_results
from memkit.chunk.probes import undone
from memkit.chunk.sparse_rows import CALL, pointwise, pointwise_everywhere
from memkit.chunk.sparse_tiles import TileChoice, box_piece, cut_blocks, cut_box, occupied_box, run_patches
from memkit.chunk.stand_in import lacks_data
from memkit.chunk.tiles import ExactAxis, Reach
from memkit.chunk.traits import traits_of

SparseMode = Literal["auto", "pointwise", "blocks", "bbox", "dense"]
_DIMS = (-3, -2, -1)
_ALONE = Reach(0, 0)
_FIX = 'pass mode="dense".'


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """How one call was run.

    Attributes:
        mode: The mode that was used.
        occupancy: Fraction of the voxels that are not zero.
        computed: Voxels that the network ran on, as a fraction of the volume; above 1 if parts overlap.
        why: The reason, in words.
    """

    mode: SparseMode
    occupancy: float
    computed: float
    why: str


class _Option(NamedTuple):
    """A mode that gives the network's own result, and the fraction of the volume it computes."""

    mode: SparseMode
    computed: float
    cut: TileChoice | None = None


@guided(
    words={"dense_threshold": "threshold sparsity_threshold density_threshold", "mode='auto'": "sparse"},
    absent={
        "processor(volume)": "apply forward process",
        "processor.last_plan, after a call": "plan",
        "fn.parameters(): a processor holds no parameters of its own": "parameters",
    },
    methods={"__call__": {"write SparsityAwareProcessor(fn, mode=mode)(volume)": "mode"}},
)
class SparsityAwareProcessor:
    """Run a network on a mostly zero volume, skipping the empty part.

    Args:
        fn: Maps a volume (B, C, D, H, W) to another 5-D volume.
        mode: How to run the network.

            * ``"pointwise"``: occupied voxels as rows, and one empty voxel for the whole empty part. For networks that
              treat each voxel independently (1x1x1 convolutions, activations, BatchNorm in evaluation mode).
            * ``"blocks"``: cubes whose receptive field holds an occupied voxel, with the margin that their results
              depend on, and one empty cube.
            * ``"bbox"``: the box around all occupied voxels, with its margin, and one empty cube.
            * ``"dense"``: ``fn(volume)``.
            * ``"auto"``: whichever of these computes the fewest voxels, determined in each call. ``last_plan``
              records the choice and the reason.
        block_size: Side of the cubes in voxels, without the margin.
        dense_threshold: ``"auto"`` runs the whole volume if the best other mode would compute more than this fraction.

    Attributes:
        last_plan: How the last call was run; None before the first call.

    All modes give the result of ``fn(volume)`` with the gradients of its parameters, up to
    rounding. The margin is determined as in `tiled_apply`, at the first call.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from memkit import SparsityAwareProcessor
        >>> volume = torch.zeros(1, 1, 32, 32, 32)
        >>> volume[0, 0, 8:12, 8:12, 8:12] = 1.0
        >>> net = nn.Sequential(nn.Conv3d(1, 4, 1), nn.GELU(), nn.Conv3d(4, 2, 1))
        >>> processor = SparsityAwareProcessor(net)
        >>> y = processor(volume)
        >>> torch.allclose(y, net(volume), atol=1e-6), processor.last_plan.mode
        (True, 'pointwise')
    """

    def __init__(
        self, fn: nn.Module, *, mode: SparseMode = "auto", block_size: int = 8, dense_threshold: float = 0.5
    ) -> None:
        check = Checker("SparsityAwareProcessor(fn, ...)")
        fix = "put the function into the forward of a module that holds its layers."
        if isinstance(fn, Tensor | SparseVoxels):
            fix = "write SparsityAwareProcessor(module)(volume)"
        check.instance(fn, nn.Module, "an nn.Module, whose layers can be inspected", fix)
        modes = "pass mode='auto'; a model of submanifold layers is built from memkit.chunk.submanifold_conv3d."
        check.choice("mode", mode, get_args(SparseMode), fix=modes)
        self._fn, self._mode = fn, mode
        self._block_size = check.whole("block_size", block_size, 1)
        self._threshold = check.number("dense_threshold", dense_threshold, 0, 1)
        self._known: dict[object, tuple[Reach, ...] | str] = {}
        self._sizes: dict[object, tuple[int, ...]] = {}
        self.last_plan: SparsePlan | None = None

    @overload
    def __call__(self, volume: Tensor) -> Tensor: ...
    @overload
    def __call__(self, volume: SparseVoxels) -> SparseVoxels: ...
    @runs_eagerly
    def __call__(self, volume: Tensor | SparseVoxels) -> Tensor | SparseVoxels:
        """Run the network.

        Args:
            volume: (B, C, D, H, W), floating point; or `SparseVoxels`.

        Returns:
            (B, C_out, D_out, H_out, W_out) for a volume. For `SparseVoxels`, the results at the same voxels; gradients
            flow to their features.

        Raises:
            InputError: The mode cannot give the network's result; the message gives the reason (a norm over space,
                dropout, BatchNorm in training mode, a volume that requires a gradient, a transform of ``torch.func``).
                ``"auto"`` runs the whole volume instead.
            InputTypeError: The volume has the wrong type, shape or dtype.
            StateError: In a backward pass with ``create_graph=True``, in modes that compute in parts.

        Memory cost: the result, and the network's memory for the fraction of the volume it runs on.
        """
        is_sparse = isinstance(volume, SparseVoxels)
        if not is_sparse:
            _check_volume(volume)
        if lacks_data(self._fn, _form(volume)):
            return self._without_data(volume)
        occupied = _occupied(volume)
        occupancy = float(occupied.float().mean()) if occupied.numel() else 0.0
        option, why = self._choose(volume, occupied, occupancy)
        self.last_plan = SparsePlan(option.mode, occupancy, option.computed, why)
        if option.mode == "dense":
            dense = volume.to_dense() if isinstance(volume, SparseVoxels) else volume
            return self._as_given(volume, self._fn(dense))
        warn_of_kept_results(self._fn, _form(volume), CALL)
        voxels = volume if isinstance(volume, SparseVoxels) else SparseVoxels.from_dense(volume, mask=occupied)
        if option.cut is not None:
            return self._as_given(volume, run_patches(self._fn, voxels, option.cut, background=not is_sparse))
        return pointwise(self._fn, voxels) if is_sparse else pointwise_everywhere(self._fn, voxels)

    def _without_data(self, volume: Tensor | SparseVoxels) -> Tensor | SparseVoxels:
        """Run the whole volume, because how full it is decides what runs; an estimate is in doubt."""
        guesses = getattr(fake_mode(), "guesses", None)
        if guesses is not None and self._mode != "dense":
            guesses.counts_as_full("a SparsityAwareProcessor")
        return self._as_given(volume, self._fn(volume.to_dense() if isinstance(volume, SparseVoxels) else volume))

    def _as_given(self, volume: Tensor | SparseVoxels, y: Tensor) -> Tensor | SparseVoxels:
        if not isinstance(volume, SparseVoxels):
            return y
        if y.dim() != 5 or y.shape[2:] != volume.shape or len(y) != volume.batch_size:
            raise InputError(
                CALL,
                got=f"a module that gives {tuple(y.shape)} for SparseVoxels of shape {volume.shape}",
                expected="results of the volume's size, because they are read at its voxels",
                fix="pass voxels.to_dense() to get a volume of another size.",
            )
        return volume.with_features(y.movedim(1, -1)[volume.coords.unbind(1)])

    def _choose(self, volume: Tensor | SparseVoxels, occupied: Tensor, occupancy: float) -> tuple[_Option, str]:
        if self._mode == "dense":
            return _Option("dense", 1.0), "as requested"
        if not occupied.numel():
            return _Option("dense", 1.0), "the volume has no voxels"
        form = _form(volume)
        kind = self._kind(form)
        try:
            if is_transforming():
                raise _refusal("a call inside a transform of torch.func", _FIX)
            if not isinstance(volume, SparseVoxels) and _is_differentiated(volume):
                raise _refusal(
                    "a volume that requires a gradient, which covers its empty voxels too",
                    "pass SparseVoxels.from_dense(volume) if gradients of the occupied voxels are enough, or "
                    'mode="dense".',
                )
            options = self._options(volume, form, kind, occupied, occupancy)
        except InputError as error:
            if self._mode != "auto":
                raise
            return _Option("dense", 1.0), f"no other mode has the same result: {error.got}"
        if self._mode != "auto":
            return next(option for option in options if option.mode == self._mode), "as requested"
        best = min(options, key=lambda option: option.computed)
        if best.computed > self._threshold:
            return _Option("dense", 1.0), f"{best.mode} would compute {best.computed:.0%} of the volume"
        return best, f"it computes {best.computed:.2%} of the volume, the least of {_names(options)} and dense"

    def _options(
        self, volume: Tensor | SparseVoxels, form: Tensor, kind: object, occupied: Tensor, occupancy: float
    ) -> list[_Option]:
        """Return the modes that preserve the network's result; refuse a requested one that does not."""
        values = volume.features if isinstance(volume, SparseVoxels) else volume
        reaches = self._reaches(form, kind, values)
        if all(reach == _ALONE for reach in reaches) and self._mode in ("auto", "pointwise"):
            return [_Option("pointwise", occupancy)]
        if self._mode == "pointwise":
            raise _refusal(
                "a module whose receptive field covers "
                + ", ".join(f"{r.before} + {r.after} voxels (stride {r.period})" for r in reaches)
                + " around each voxel along D, H, W",
                'pass mode="blocks", which keeps the margin; memkit.chunk.submanifold_conv3d is a layer of occupied '
                "voxels only, for a different model.",
            )
        sizes, options = occupied.shape[1:], []
        blocks = self._cut(form, kind, sizes, reaches)
        if self._mode in ("auto", "blocks"):
            cut = cut_blocks(occupied, *blocks)
            options.append(_Option("blocks", cut.num_places / occupied.numel(), cut))
        if self._mode in ("auto", "bbox"):
            box = occupied_box(occupied)
            out_sizes = [axis.out_size(size) for axis, size in zip(*blocks, strict=True)]

            def lengths(dim: int, reach: Reach) -> list[int]:
                block = ExactAxis.cut(sizes[dim], self._block_size, reach).length
                return [block, box_piece(box[dim], sizes[dim], out_sizes[dim], reach)[1]]

            try:
                found = find_reach(self._fn, form, _DIMS, lengths, values=values)
            except InputError:
                if self._mode == "bbox":
                    raise
            else:
                cut = cut_box(box, len(occupied), *self._cut(form, kind, sizes, [found[dim] for dim in _DIMS]))
                options.append(_Option("bbox", cut.num_places / occupied.numel(), cut))
        return options

    def _cut(
        self, form: Tensor, kind: object, sizes: Sequence[int], reaches: Sequence[Reach]
    ) -> tuple[tuple[ExactAxis, ...], tuple[int, ...]]:
        """Return how D, H, W are cut into blocks, and the sizes of a block's result."""
        axes = tuple(ExactAxis.cut(size, self._block_size, reach) for size, reach in zip(sizes, reaches, strict=True))
        return axes, self._tile_out_sizes(form, kind, tuple(axis.length for axis in axes))

    def _reaches(self, form: Tensor, kind: object, values: Tensor) -> tuple[Reach, ...]:
        """Return the network's reach along D, H, W, for blocks. A refusal is cached too: the search is slow."""
        key = kind, form.shape[2:]
        if key not in self._known:
            self._known[key] = self._reach_or_reason(form, values)
        known = self._known[key]
        if isinstance(known, str):
            raise _refusal(known, _FIX)
        return known

    def _reach_or_reason(self, form: Tensor, values: Tensor) -> tuple[Reach, ...] | str:
        outcome = unless_failed(REFUSALS, self._find_reach, form, values)
        if isinstance(outcome, Done):
            return outcome.result
        error = outcome.error
        if isinstance(error, InputError):
            return error.got
        return f"a module that does not run on a small volume ({type(error).__name__}: {error})"

    def _find_reach(self, form: Tensor, values: Tensor) -> tuple[Reach, ...] | str:
        if self._draws_random(form):
            return "a module that draws random numbers (dropout): all empty parts would share one draw"

        def lengths(dim: int, reach: Reach) -> list[int]:
            length = ExactAxis.cut(form.shape[dim], self._block_size, reach).length
            return [length] if length < form.shape[dim] else quarters(form, dim, reach)  # for "pointwise"

        found = find_reach(self._fn, form, _DIMS, lengths, values=values)
        return tuple(found[dim] for dim in _DIMS)

    def _draws_random(self, form: Tensor) -> bool:
        with without_gradients(), undone(self._fn):
            before = RandomNumbers(held_generators([self._fn]))
            sizes = [min(16 + size % 16, size) for size in form.shape[2:]]
            if isinstance(unless_failed(REFUSALS, self._on_empty, form, sizes), Failed):  # too small
                self._on_empty(form, form.shape[2:])
            return before.have_moved()

    def _tile_out_sizes(self, form: Tensor, kind: object, lengths: tuple[int, ...]) -> tuple[int, ...]:
        key = kind, lengths
        if key not in self._sizes:
            with without_gradients(), undone(self._fn):
                outcome = unless_failed(REFUSALS, self._on_empty, form, lengths)
            if isinstance(outcome, Failed):
                error = outcome.error
                raise _refusal(f"a module that does not run on a part {lengths} ({error})", _FIX) from error
            self._sizes[key] = tuple(outcome.result.shape[2:])
        return self._sizes[key]

    def _kind(self, form: Tensor) -> tuple[object, ...]:
        """Return the cache key of a call."""
        return traits_of(self._fn), form.shape[1], form.dtype, form.device

    def _on_empty(self, form: Tensor, sizes: Sequence[int]) -> Tensor:
        y: Tensor = self._fn(form.new_zeros(1, form.shape[1], *sizes))
        return y


def _is_differentiated(volume: Tensor) -> bool:
    return (volume.requires_grad and torch.is_grad_enabled()) or have_tangents([volume])


def _occupied(volume: Tensor | SparseVoxels) -> Tensor:
    """Return the mask of occupied voxels, (B, D, H, W) bool."""
    if not isinstance(volume, SparseVoxels):
        return (volume.detach() != 0).any(1)
    occupied = torch.zeros(volume.batch_size, *volume.shape, dtype=torch.bool, device=volume.coords.device)
    occupied[volume.coords.unbind(1)] = True
    return occupied


def _form(volume: Tensor | SparseVoxels) -> Tensor:
    """Return a volume of the same shape, dtype and device that takes no extra memory."""
    if not isinstance(volume, SparseVoxels):
        return volume.detach()
    rows = volume.features.detach()
    return rows.new_zeros(1).expand(volume.batch_size, rows.shape[1], *volume.shape)


def _names(options: list[_Option]) -> str:
    return ", ".join(f"{option.mode} ({option.computed:.0%})" for option in options)


def _refusal(got: str, fix: str) -> InputError:
    return InputError(CALL, got=got, expected="a call that gives the same result when it runs in parts", fix=fix)


def _volume_of(value: object) -> str:
    """Return the way out for a value that is not a volume."""
    if not isinstance(value, Tensor):
        return "pass torch.as_tensor(volume)."
    if value.dim() == 2 and value.shape[1] in (3, 4):
        batched = "coords" if value.shape[1] == 4 else "torch.nn.functional.pad(coords, (1, 0))"
        return f"for points: write processor(SparseVoxels.from_coords({batched}, features, shape=(D, H, W)))"
    missing = {3: "volume[None, None]", 4: "volume[None], or volume[:, None] without channels"}.get(value.dim())
    if missing:
        return f"add the missing dimensions: {missing}."
    return "pass volume.float()." if value.dim() == 5 else "reshape it to (B, C, D, H, W)."


def _check_volume(volume: object) -> None:
    if not isinstance(volume, Tensor) or volume.dim() != 5 or not volume.is_floating_point():
        raise InputTypeError(
            CALL,
            got=described(volume),
            expected="a floating point volume (B, C, D, H, W), or SparseVoxels",
            fix=_volume_of(volume),
        )
