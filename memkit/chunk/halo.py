"""A module's receptive field and stride, found by tracing NaN through a small volume.

NaN in the input shows up in every result that depends on it, regardless of the weights: zeros and dead ReLUs do not
hide it. One half of a small volume is set to NaN, up to or from a cut position. The first and the last position that
NaN reaches, in the result and in every intermediate tensor, are step functions of the cut position; their step width is
the stride.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from memkit._core.errors import InputError, NotSimulatedError, warn_user
from memkit._recovery.attempt import Done, Failed, unless_failed
from memkit._torch import pytree
from memkit._torch.autocast import without_gradients
from memkit._torch.dispatch import LeanDispatchMode, below_modes
from memkit._torch.fake import FakeTensor
from memkit._torch.graph import have_tangents, is_transforming
from memkit.chunk.probes import Probes, forward_hooks, undone
from memkit.chunk.tileloop import CALL, TileJob, check_form, run_tiles
from memkit.chunk.tiles import ExactAxis, Reach
from memkit.chunk.traits import traits_of
from memkit.chunk.volumes import is_batched

_SIZES = (8, 16, 32, 64, 128)  # sizes of the small volume; the strides of most networks divide one of them
_LONGEST = 512
_PERIODS = (2, 8, 32)  # longest period to search for, cheap search first
_VOXELS = 2**13  # per run of the probe, if its rows can be split
REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)  # of a size or dtype, by modules
_APART = (
    "apply the part of the module before that layer in tiles, and that layer to the whole volume; "
    "monai.inferers.sliding_window_inference approximates the result."
)

_Key = tuple[Any, ...]
_LOOKED: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()  # traits with which results were looked for
_CACHE: WeakKeyDictionary[nn.Module, dict[_Key, dict[int, Reach]]] = WeakKeyDictionary()


def find_reach(module: nn.Module, x: Tensor, dims: Sequence[int], *, values: Tensor | None = None) -> dict[int, Reach]:
    """Find a module's reach along the given dimensions.

    The module runs without gradients on small volumes with noise and NaN. What it changes is put back, whatever holds
    it. The reach is verified: small volumes, of noise and of values like the caller's, are run whole and in tiles, in
    float64 and in evaluation mode. It is kept as long as what decides how the module works stays the same, whatever the
    values of later volumes: see `traits_of`.

    Args:
        module: A module that is equivariant to shifts, as convolutions are.
        x: (B, C, *spatial); only its shape, dtype and device matter, and its values if there are no others.
        dims: Dimensions to examine, counted from the end.
        values: The values of the volume, (rows, C, ...), if ``x`` does not have them.

    Returns:
        The reach along each dimension. If it covers the whole volume, its exact size is not determined.

    Raises:
        NotSimulatedError: ``x`` has no data, and the reach is not known yet.
        InputError: The module depends on the whole input, changes its buffers or parameters, depends on absolute
            position, or stops NaN.

    Memory cost: a run without gradients over a few thousand voxels, more for a large receptive field; a copy of what
    the module writes to, and one of its state in float64.
    """
    form = (x.shape[1], x.dtype, x.device, tuple(size % (2 * _PERIODS[-1]) for size in x.shape[2:]))
    key: _Key = (traits_of(module), form, tuple(dims))
    known = _CACHE.setdefault(module, {})
    found = known.get(key) or known.get((*key, tuple(x.shape)))
    if found is None:
        if isinstance(x, FakeTensor):
            raise NotSimulatedError(
                f"{CALL} on tensors without data",
                got=f"a {type(module).__name__} whose reach is not known yet: it is found by running it on noise",
                expected="a module that has been applied to a volume of this size before",
                fix="call tiled_apply(module, volume, tile) once with data, before the estimate: the answer is kept.",
            )
        with without_gradients(), undone(module) as probes:
            probe = _Probe(module, x, probes, x if values is None else values)
            found = {dim: probe.reach(dim) for dim in dims}
        key = (traits_of(module), *key[1:])  # the search has seen which of them calls change
        covers = any(found[dim].covers(x.shape[dim]) for dim in dims)
        # The key has the remainders of the sizes by powers of two.
        has_remainder = any(2 * _PERIODS[-1] % found[dim].period for dim in dims)
        # A reach as large as this volume may fit into a larger one.
        known[(*key, tuple(x.shape)) if covers or has_remainder else key] = found
    return found


def warn_of_kept_results(module: nn.Module, x: Tensor, call: str) -> None:
    """Warn, once while its traits stay the same, of a module that leaves a result with a graph in an attribute.

    Args:
        module: A module that will run on parts of the volume, because its reach is known.
        x: See `find_reach`.
        call: The user's call.
    """
    if not torch.is_grad_enabled() or isinstance(x, FakeTensor):
        return
    looked, traits = _LOOKED.setdefault(module, set()), traits_of(module)
    if traits in looked:
        return
    looked.add(traits)
    with undone(module) as probes:
        kept = _Probe(module, x, probes, x).kept_results()
    if kept:
        warn_user(
            f"{call}: the module keeps a result in the attribute {kept[0]!r} when it is called, with a graph. After "
            "the call, it is that of a part of the volume, and its gradient is that of a part or none. Way out: "
            "compute it from the result, outside of the call; or keep it detached if no loss reads it: "
            f"self.{kept[0].rpartition('.')[2]} = result.detach()."
        )


class _Probe:
    """Traces NaN through small volumes for one module."""

    def __init__(self, module: nn.Module, x: Tensor, probes: Probes, values: Tensor) -> None:
        self._module, self._like, self._probes, self._values = module, x, probes, values.detach()
        self._generator = torch.Generator(x.device)
        self._sizes, self._step = self._working_sizes()

    def kept_results(self) -> list[str]:
        """Return the attributes in which the module leaves a result with a graph."""
        with torch.enable_grad():
            self._module(self._noise(1, self._sizes))
            return self._probes.kept_results()

    def reach(self, dim: int) -> Reach:
        """Find the reach along one dimension, and verify it."""
        sizes = list(self._sizes)
        for length in self._lengths(dim):
            sizes[dim] = length
            found = unless_failed(REFUSALS, self._settle, dim, sizes)
            if isinstance(found, Failed):
                if isinstance(found.error, InputError):
                    raise found.error
                continue
            if (reach := found.result) is not None:
                if not reach.covers(self._like.shape[dim]):  # otherwise the module will run whole
                    self._check(dim, sizes, reach)
                return reach
            if length >= _LONGEST // 2 and self._culprit(dim, sizes):
                break  # a longer volume would not help
        raise self._unsettled(dim, sizes)

    def _working_sizes(self) -> tuple[list[int], int]:
        """Return small spatial sizes that the module accepts, with the same remainders as the real ones."""
        spatial = self._like.shape[2:]
        options = [([step + size % step for size in spatial], step) for step in _SIZES]
        reason: BaseException | None = None
        for sizes, step in [*options, (list(spatial), max(spatial))]:
            noise = self._noise(1, sizes)
            outcome = unless_failed(REFUSALS, self._module, noise)
            if isinstance(outcome, Failed):
                reason = outcome.error
                continue
            check_form(noise, outcome.result)
            self._refuse_changed()
            return sizes, step
        raise InputError(
            CALL,
            got=f"a module that does not accept an input of shape {(1, *self._like.shape[1:])}: {reason}",
            expected="a module that runs on the input, even with a batch of 1",
            fix="write tiled_apply(module, x[None], tile_size=32), with a batch dimension."
            if not is_batched(self._module, self._like)
            else "make sure that module(x[:1]) runs.",
        ) from reason

    def _lengths(self, dim: int) -> Iterator[int]:
        step, size = 2 * self._step, self._like.shape[dim]
        while step <= _LONGEST:
            yield step + size % step
            step *= 2

    def _noise(self, rows: int, sizes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        like = self._like
        self._generator.manual_seed(0)
        noise = torch.randn(
            like.shape[1], *sizes, generator=self._generator, dtype=dtype or like.dtype, device=like.device
        )
        return noise.expand(rows, *noise.shape).contiguous()

    def _noise_like_values(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return a small volume that passes the thresholds which the caller's values pass, as that of a foreground.

        Half of its values are some of these, and half lie between the least and the largest, which may be rare. None if
        they are all the same, not finite, or cannot be read.
        """
        given, generator = self._values, self._generator
        if not given.numel() or is_transforming() or have_tangents([given]):
            return None
        low, high = given.aminmax()
        if not (low < high and (high - low).isfinite()):
            return None
        generator.manual_seed(0)
        draw: dict[str, Any] = {"generator": generator, "device": given.device}
        shape = given.shape[1], *sizes
        places = [torch.randint(size, (math.prod(sizes),), **draw) for size in (len(given), *given.shape[2:])]
        index: tuple[Any, ...] = (places[0], slice(None), *places[1:])
        some = given[index].T.reshape(shape).to(dtype)
        between = low + (high - low) * torch.rand(shape, dtype=dtype, **draw)
        return torch.where(torch.rand(shape, **draw) < 0.5, some, between)[None]

    def _refuse_changed(self) -> None:
        for each in self._probes.changed_buffers(with_counters=True):
            raise InputError(
                CALL,
                got=f"a module that changes its buffer `{each.path}` ({type(each.owner).__name__}) in every forward",
                expected="the same function for every tile",
                fix="call eval() on that layer: the statistics of a tile differ from those of the volume.",
            )
        for each in self._probes.changed_parameters():
            raise InputError(
                CALL,
                got=f"a module that changes its parameter `{each.path}` ({type(each.owner).__name__}) in its forward",
                expected="the same function for every tile",
                fix="if it initializes the parameter from its first input, call module(x) once before: a tile is only "
                "a part of that input.",
            )

    def _settle(self, dim: int, sizes: Sequence[int]) -> Reach | None:
        """Return the reach, if NaN in the middle does not reach either end and a period is found.

        Once it is clear that the reach covers the whole volume, it is not searched further.
        """
        middle, size = sizes[dim] // 2, self._like.shape[dim]
        *inside, result = self._stairs(dim, sizes, [middle])
        if _least_reach(inside, result, middle, sizes[dim]) >= size:
            if self._culprit(dim, sizes):
                raise self._unsettled(dim, sizes)
            return Reach(size, size)
        if not _is_inside(result):
            return None
        for longest in _PERIODS:
            if not longest < middle < sizes[dim] - longest - 1:
                return None
            positions = list(range(middle - longest, middle + longest + 1))
            stairs = self._stairs(dim, sizes, positions)
            if not _is_inside(stairs[-1]):
                return None
            period = _period(stairs, longest)
            if period is not None:
                return _reach(stairs[-1], positions, period, sizes[dim])
        return None

    def _stairs(self, dim: int, sizes: Sequence[int], positions: Sequence[int]) -> list[_Stairs]:
        """Return the step functions of all tensors in the forward; the last is the result's."""
        at_once = max(_VOXELS // math.prod(sizes) // 2, 1)
        parts = [self._footprints(dim, sizes, positions[i : i + at_once]) for i in range(0, len(positions), at_once)]
        if len({len(part) for part in parts}) > 1:
            raise InputError(
                CALL,
                got="a module whose operators depend on the values of its input",
                expected="the same operators for every tile",
                fix="apply that part of the module to the whole volume.",
            )
        return [_Stairs.join(each) for each in zip(*parts, strict=True)]

    def _footprints(self, dim: int, sizes: Sequence[int], positions: Sequence[int]) -> list[_Stairs]:
        rows = self._noise(2 * len(positions) + 1, sizes)
        for index, position in enumerate(positions):
            rows[2 * index + 1].narrow(dim, position, sizes[dim] - position).fill_(math.nan)
            rows[2 * index + 2].narrow(dim, 0, position + 1).fill_(math.nan)
        with _Footprints(dim, rows) as seen:
            y = self._module(rows)
        result = _Stairs.of(y, dim)
        if bool(torch.isnan(y[0]).any()):  # NaN in the clean row: rows are mixed
            raise self._unsettled(dim, sizes)
        return [*seen.stairs, result]

    def _unsettled(self, dim: int, sizes: Sequence[int]) -> InputError:
        """Return the error for a reach not found: a module that depends on the whole input, or too large a reach."""
        culprit = self._culprit(dim, sizes)
        if culprit is None:
            return InputError(
                CALL,
                got=f"a module for which no halo up to {_LONGEST // 2} and no stride up to {_PERIODS[-1]} was found "
                f"in dimension {dim}",
                expected="a module that is equivariant to shifts, as convolutions are, and propagates NaN",
                fix="apply only those parts of the module in tiles that have a smaller receptive field.",
            )
        return InputError(
            CALL,
            got=f"a module whose result depends on the whole of dimension {dim}, first in {culprit}",
            expected="convolutions and other local operations: a tile cannot see the whole volume (a norm over "
            "space, attention, global pooling, circular padding)",
            fix=_APART,
        )

    def _culprit(self, dim: int, sizes: Sequence[int]) -> str | None:
        """Return the first module that carries NaN from the far end to the near end."""
        names = {each: name for name, each in self._module.named_modules()}
        found: list[str] = []

        def watch(child: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            before, after = (
                any(_is_at_start(each, dim, self._like.dim()) for each in pytree.tree_leaves(values))
                for values in (inputs, output)
            )
            if after and not before:
                found.append(f"`{names[child]}` ({type(child).__name__})" if names[child] else type(child).__name__)

        rows = self._noise(1, sizes)
        rows.narrow(dim, sizes[dim] - 1, 1).fill_(math.nan)
        with forward_hooks(names, watch):
            outcome = unless_failed(REFUSALS, self._module, rows)
        return found[0] if found and isinstance(outcome, Done) else None

    def _check(self, dim: int, sizes: Sequence[int], reach: Reach) -> None:
        """Compare whole and tiled runs on a small volume; this catches modules that stop NaN or use positions.

        What a module does with the remainder of its size by its period (pooling, then resizing to the size before)
        depends on that remainder: the small volume has that of the real one, and is cut into several tiles.
        """
        axes = [ExactAxis.cut(size, size, Reach(0, 0)) for size in sizes]
        size, sizes = self._like.shape[dim], list(sizes)
        for length in (*range(sizes[dim], size, self._step), size):
            axis = ExactAxis.cut(length, max((length - reach.before - reach.after) // 4, 1), reach)
            if (size - length) % reach.period == 0 and axis.length < length:
                break
        sizes[dim], axes[dim + len(sizes)] = length, axis
        modes = [(each, each.training) for each in self._module.modules()]
        try:
            for each, _ in modes:
                each.training = False  # not eval(), which modules may override; dropout would differ by chance
            error, dtype = self._difference(tuple(axes), sizes)
        finally:
            for each, mode in modes:
                each.training = mode
        # In float64, real errors are far above this limit, and layers that compute in float32 internally are below it.
        if not error <= (1e-6 if dtype == torch.float64 else torch.finfo(dtype).eps ** 0.5):
            differ = f"differ from the whole by {error:.1e}" if error < math.inf else "give a result of another size"
            remainder = size % reach.period
            raise InputError(
                CALL,
                got=f"a module whose tiles {differ} in dimension {dim}, with the halo ({reach.before}, {reach.after}) "
                "that propagating NaN shows",
                expected="a module whose result does not depend on the position, and that propagates NaN (no "
                "coordinates, no align_corners=True, no nan_to_num, no mean or count of where x > 100)",
                fix=f"pad the volume from {size} to {size - remainder + reach.period} if the module resizes to the "
                "size before a pooling, or move that part out of the module."
                if remainder
                else "move that part out of the module.",
            )

    def _difference(self, axes: tuple[ExactAxis, ...], sizes: Sequence[int]) -> tuple[float, torch.dtype]:
        """Return the largest difference between tiles and whole, relative to the largest result."""
        outcome = unless_failed(REFUSALS, self._difference_in, axes, sizes, torch.float64)
        if isinstance(outcome, Done):
            return outcome.result, torch.float64
        # no float64 on the device, or a layer that insists on another dtype
        return self._difference_in(axes, sizes, self._like.dtype), self._like.dtype

    def _difference_in(self, axes: tuple[ExactAxis, ...], sizes: Sequence[int], dtype: torch.dtype) -> float:
        state = {name: self._alive(each, dtype) for name, each in self._module.named_parameters()}
        state |= {name: each.to(dtype, copy=True) if each.is_floating_point() else each.clone()
                  for name, each in self._module.named_buffers()}  # fmt: skip

        def run(volume: Tensor) -> Tensor:
            with torch.autocast(volume.device.type, enabled=False):
                result: Tensor = functional_call(self._module, state, (volume,))
            return result

        def compare(x: Tensor, *, may_overflow: bool) -> float:
            whole = run(x.clone())
            if may_overflow and not whole.isfinite().all():  # an exponential
                return 0.0
            tiled = run_tiles(TileJob(self._module, axes), x, run)
            if whole.shape != tiled.shape:
                return math.inf
            return float((whole - tiled).abs().max() / whole.abs().max().clamp(min=torch.finfo(dtype).tiny))

        found = [compare(self._noise(1, sizes, dtype), may_overflow=False)]
        if (like_values := self._noise_like_values(sizes, dtype)) is not None:
            found.append(compare(like_values, may_overflow=True))
        return float(torch.tensor(found).max())  # NaN if one of them is

    def _alive(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a parameter; zero-initialized ones become noise, since they would hide the layers before them."""
        if not parameter.is_floating_point() or bool(parameter.any()):
            return parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()
        return torch.randn(parameter.shape, generator=self._generator, dtype=dtype, device=parameter.device)


class _Stairs:
    """First and last position that NaN reaches in one tensor, for each cut position.

    Attributes:
        size: Length of the tensor.
        first: (positions,) int64, for NaN from the position on; ``size`` if none arrives.
        last: (positions,) int64, for NaN up to the position; -1 if none arrives.
    """

    def __init__(self, size: int, first: Tensor, last: Tensor) -> None:
        self.size, self.first, self.last = size, first, last

    @classmethod
    def of(cls, tensor: Tensor, dim: int) -> _Stairs:
        lines = torch.isnan(tensor).movedim(dim, 1).flatten(2).any(2)[1:].cpu()  # (2 * positions, size)
        places = torch.arange(lines.shape[1])
        first = torch.where(lines[0::2], places, len(places)).amin(1)
        last = torch.where(lines[1::2], places, -1).amax(1)
        return cls(len(places), first, last)

    @classmethod
    def join(cls, parts: Sequence[_Stairs]) -> _Stairs:
        return cls(parts[0].size, torch.cat([each.first for each in parts]), torch.cat([each.last for each in parts]))

    @property
    def is_level(self) -> bool:
        """Whether NaN reaches the same positions from every cut position."""
        return bool((self.first == self.first[0]).all() and (self.last == self.last[0]).all())

    @property
    def is_all_or_nothing(self) -> bool:
        ends = int(self.first[0]), int(self.last[0])
        return self.is_level and ends in ((0, self.size - 1), (self.size, -1))


class _Footprints(LeanDispatchMode):
    """Records where NaN is in every operator result with the volume's number of rows and dimensions."""

    def __init__(self, dim: int, rows: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dim, self._ndim, self._num_rows = dim, rows.dim(), len(rows)
        self.stairs: list[_Stairs] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:  # uninitialized memory may hold NaN
            return result
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if (
                isinstance(each, Tensor)
                and each.is_floating_point()
                and each.dim() == self._ndim
                and len(each) == self._num_rows
                and each.numel()
            ):
                below = below_modes()  # a watching mode outside of this one would take longer than the forward
                self.stairs.append(_Stairs.of(each, self._dim))
                del below
        return result


def _is_inside(stairs: _Stairs) -> bool:
    """Return whether NaN reaches the result, but neither of its ends."""
    return bool(
        (stairs.first > 0).all()
        and (stairs.first < stairs.size).all()
        and (stairs.last >= 0).all()
        and (stairs.last < stairs.size - 1).all()
    )


def _least_reach(inside: Sequence[_Stairs], result: _Stairs, position: int, length: int) -> float:
    """Return a lower bound of the reach on both sides together, from one cut position.

    A result's position stands for its whole period, which is not known yet: it is taken from the shortest tensor.
    """
    scale = length / max(result.size, 1)
    before = (int(result.last[0]) + 1) * scale - position - 1
    after = position - int(result.first[0]) * scale
    period = min(-(-length // max(min(each.size for each in (*inside, result)), 1)), _PERIODS[-1])
    return max(before, 0) + max(after, 0) - 2 * period


def _period(stairs: Sequence[_Stairs], longest: int) -> int | None:
    """Return the shortest shift after which all step functions repeat; None if there is none."""
    # Tensors that are NaN everywhere or nowhere have no stride, nor do those that stay constant in a long search.
    is_long = longest == _PERIODS[-1]
    moving = [each for each in stairs[:-1] if not (each.is_all_or_nothing or (each.is_level and is_long))]
    lines = torch.stack([torch.stack([each.first, each.last]) for each in [*moving, stairs[-1]]])
    for period in range(1, longest + 1):
        rises = lines[..., period:] - lines[..., :-period]
        if bool((rises == rises[:, :1, :1]).all() and (rises > 0).all()):
            return period
    return None


def _reach(stairs: _Stairs, positions: Sequence[int], period: int, size: int) -> Reach:
    step = int(stairs.first[period] - stairs.first[0])
    places = torch.tensor(positions)
    before = (stairs.last // step * period - places).max()
    after = (places + 1 - (stairs.first // step + 1) * period).max()
    # Positions that no input reaches (gaps of a transposed convolution) may be missing at the end of a tile.
    lacking = -(-(size // period * step - stairs.size) // step) * period
    return Reach(max(int(before), 0), max(int(after), lacking, 0), period, step)


def _is_at_start(value: object, dim: int, num_dims: int) -> bool:
    """Return whether NaN is at the start of a dimension; for tensors with other dimensions, everywhere."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    is_nan = torch.isnan(value)
    return bool(is_nan.select(dim, 0).any() if value.dim() == num_dims else is_nan.all())
