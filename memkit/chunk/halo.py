"""A module's receptive field and stride, found by tracing NaN through a small volume.

NaN in the input shows up in every result that depends on it, regardless of the weights: zeros and dead ReLUs do not
hide it. One half of a small volume is set to NaN, up to or from a cut position. The first and the last position that
NaN reaches, in the result and in every intermediate tensor, are step functions of the cut position; their step width is
the stride.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from memkit._core.errors import InputError, warn_user
from memkit._recovery.attempt import Done, Failed, unless_failed
from memkit._torch import pytree
from memkit._torch.autocast import without_gradients
from memkit._torch.dispatch import LeanDispatchMode, below_modes
from memkit._torch.graph import have_tangents, is_transforming
from memkit.chunk.branches import Reads, note_reads
from memkit.chunk.probes import Probes, forward_hooks, undone
from memkit.chunk.stand_in import lacks_data, on_noise
from memkit.chunk.tileloop import CALL, check_form
from memkit.chunk.tiles import ExactAxis, Reach
from memkit.chunk.traits import traits_of
from memkit.chunk.volumes import is_batched

_SIZES = (8, 16, 32, 64, 128)  # sizes of the small volume; the strides of most networks divide one of them
_LONGEST = 512
_PERIODS = (2, 8, 32)  # longest period to search for, cheap search first
_VOXELS = 2**13  # per run of the probe, if its rows can be split
_REMAINDERS = 2 * _PERIODS[-1]
# Multiples to which modules pad, by a multiple of all of them.
_PADDED = {
    64: (2, 4, 8, 16, 32, 64), 48: (3, 6, 12, 24, 48), 56: (7, 14, 28, 56), 60: (5, 10, 15, 20, 30, 60),
    72: (9, 18, 36, 72), 88: (11, 22, 44), 52: (13, 26, 52),
}  # fmt: skip
_MOST_NOISES = 16
_MOST_COMPARED = 2**17  # voxels of a line through the volume that is compared as long as it is
REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)  # of a size or dtype, by modules
_APART = (
    "apply the part of the module before that layer in tiles, and that layer to the whole volume; "
    "monai.inferers.sliding_window_inference approximates the result."
)

_Key = tuple[Any, ...]
_LOOKED: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()  # traits with which results were looked for
_CACHE: WeakKeyDictionary[nn.Module, dict[_Key, dict[int, Reach]]] = WeakKeyDictionary()
_FITTED: WeakKeyDictionary[nn.Module, dict[_Key, Reach]] = WeakKeyDictionary()
PartLengths = Callable[[int, Reach], Sequence[int]]


def find_reach(
    module: nn.Module,
    x: Tensor,
    dims: Sequence[int],
    lengths: PartLengths | None = None,
    *,
    values: Tensor | None = None,
) -> dict[int, Reach]:
    """Find a module's reach along the given dimensions.

    The module runs without gradients on small volumes with noise and NaN. What it changes is put back, whatever holds
    it. The reach is verified: small volumes, of noise and of values like the caller's, are run whole and in tiles, in
    float64 and in evaluation mode. It is kept as long as what decides how the module works stays the same, whatever the
    values of later volumes: see `traits_of`.

    A module that pads its input to a multiple, and crops the result, works on the ends of a volume in a way that
    depends on the remainder of the size by that multiple, which NaN does not show. So the small volumes and their tiles
    are as long as the real ones, or have their remainders. If they differ, the period becomes the multiple of itself
    that makes them equal.

    Args:
        module: A module that is equivariant to shifts, as convolutions are.
        x: (B, C, *spatial); only its shape, dtype and device matter, and its values if there are no others.
        dims: Dimensions to examine, counted from the end.
        lengths: Returns the lengths of the parts that the module will read along a dimension, given its reach. They are
            equal to the size modulo the period. None for `quarters`.
        values: The values of the volume, (rows, C, ...), if ``x`` does not have them.

    Returns:
        The reach along each dimension. If it covers the whole volume, its exact size is not determined.

    Raises:
        InputError: The module depends on the whole input, changes its buffers or parameters, depends on absolute
            position, or stops NaN.

    Memory cost: a run without gradients over a few thousand voxels, more for a large receptive field, and in float64
    over a line through the volume (131,072 voxels at most); a copy of what the module writes to, and of its state in
    float64.
    """
    traits, form = traits_of(module), (x.shape[1], x.dtype, tuple(size % _REMAINDERS for size in x.shape[2:]))
    known = _CACHE.setdefault(module, {})
    keys = [(traits, form, tuple(dims)), (traits, form, tuple(dims), tuple(x.shape))]
    found = next((known[each] for key in keys for each in _keys(key, module, x) if each in known), None)
    if found is None:
        with _probing(module, x, values) as probe:
            found = {dim: probe.reach(dim) for dim in dims}
        traits = traits_of(module)  # the search has seen which of them calls change
        covers = any(found[dim].covers(x.shape[dim]) for dim in dims)
        # The key has the remainders of the sizes by powers of two.
        has_remainder = any(_REMAINDERS % found[dim].period for dim in dims)
        # A reach as large as this volume may fit into a larger one.
        key = traits, form, tuple(dims), *([tuple(x.shape)] if covers or has_remainder else [])
        known[_keys(key, module, x)[-1]] = found
    lengths = lengths or functools.partial(quarters, x)
    return {dim: _fitted(module, x, dim, reach, lengths, (traits, form), values) for dim, reach in found.items()}


def quarters(x: Tensor, dim: int, reach: Reach) -> list[int]:
    """Return the length of parts of which the volume has about four; that of the volume if the reach covers it."""
    size = x.shape[dim]
    own = max((size - reach.before - reach.after) // 4, 1)
    return [size if reach.covers(size) else ExactAxis.cut(size, own, reach).length]


def _fitted(
    module: nn.Module,
    x: Tensor,
    dim: int,
    reach: Reach,
    lengths: PartLengths,
    kind: Hashable,
    values: Tensor | None,
) -> Reach:
    """Return the reach with a period for which parts of these lengths have the results of the whole."""
    known, size = _FITTED.setdefault(module, {}), x.shape[dim]

    def key_of(reach: Reach) -> _Key:
        return kind, dim, reach, size, tuple(sorted({length for length in lengths(dim, reach) if length < size}))

    key = key_of(reach)
    if not key[-1]:
        return reach
    stored = next((each for each in _keys(key, module, x) if each in known), None)
    if stored is None:
        stored = _keys(key, module, x)[-1]
        with _probing(module, x, values) as probe:
            found = probe.fitted(dim, reach, lengths)
        known[stored] = known[_keys(key_of(found), module, x)[-1]] = found
    found = known[stored]
    # With a longer period, the parts have other lengths, which another call may not share.
    return found if found == reach else _fitted(module, x, dim, found, lengths, kind, values)


def _keys(key: _Key, module: nn.Module, x: Tensor) -> list[_Key]:
    """Return the keys under which an answer may be: what an estimate finds on noise does not stand for real checks."""
    return [key, (*key, "without data")] if lacks_data(module, x) else [key]


@contextlib.contextmanager
def _probing(module: nn.Module, x: Tensor, values: Tensor | None) -> Iterator[_Probe]:
    with on_noise(module, x) as like, without_gradients(), undone(module) as probes:
        yield _Probe(module, like, probes, like if values is None or like is not x else values)


def warn_of_kept_results(module: nn.Module, x: Tensor, call: str) -> None:
    """Warn, once while its traits stay the same, of a module that leaves a result with a graph in an attribute.

    Args:
        module: A module that will run on parts of the volume, because its reach is known.
        x: See `find_reach`.
        call: The user's call.
    """
    if not torch.is_grad_enabled() or lacks_data(module, x):
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
                return self._in_phase(dim, sizes, reach)
            if length >= _LONGEST // 2 and self._culprit(dim, sizes):
                break  # a longer volume would not help
        raise self._unsettled(dim, sizes)

    def _in_phase(self, dim: int, sizes: list[int], reach: Reach) -> Reach:
        """Search again in a volume with the remainder of the real one by the period, if the last one had another.

        A module that pads at the beginning has its strides elsewhere then.
        """
        size = self._like.shape[dim]
        for _ in range(len(_PERIODS)):
            if (size - sizes[dim]) % reach.period == 0 or reach.covers(size):
                break
            again = math.lcm(self._step, reach.period)
            sizes[dim] = min(size, sizes[dim] + (size - sizes[dim]) % again)
            outcome = unless_failed(REFUSALS, self._settle, dim, sizes)
            if isinstance(outcome, Failed) or outcome.result is None:
                break
            reach = outcome.result
        return reach

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

    def _noise(self, rows: int, sizes: Sequence[int], dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        like = self._like
        self._generator.manual_seed(seed)
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
        loose: list[bool] = []  # tensors without the volume's dimensions, as tokens, that NaN has reached in part

        def watch(child: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            before, after = (
                any(_is_at_start(each, dim, self._like.dim()) for each in pytree.tree_leaves(values))
                for values in (inputs, output)
            )
            if after and not before:
                shown = f"`{names[child]}` ({type(child).__name__})" if names[child] else type(child).__name__
                found.append(f"{shown}, or a layer before it that sees tokens" if loose else shown)
            elif any(_is_loose(each, self._like.dim()) for each in pytree.tree_leaves(output)):
                loose.append(True)

        rows = self._noise(1, sizes)
        rows.narrow(dim, sizes[dim] - 1, 1).fill_(math.nan)
        with forward_hooks(names, watch):
            outcome = unless_failed(REFUSALS, self._module, rows)
        return found[0] if found and isinstance(outcome, Done) else None

    def fitted(self, dim: int, reach: Reach, lengths: PartLengths) -> Reach:
        """Return the reach with the shortest period for which parts of these lengths have the results of the whole."""
        size = self._like.shape[dim]
        refusal = self._refusal_of_parts(dim, reach, reach.period, lengths(dim, reach))
        if refusal is None:
            return reach
        least = _least_part(reach)
        for again, multiples in _PADDED.items():
            common = math.lcm(again, reach.period)
            alike = least + (size - least) % common
            if self._refusal(dim, reach, [(alike, alike + common)]):  # no multiple helps
                continue
            for period in sorted({math.lcm(each, reach.period) for each in multiples} - {reach.period}):
                wide = replace(reach, period=period, step=reach.step * (period // reach.period))
                parts = [each for each in lengths(dim, wide) if each < size]
                if parts and self._refusal_of_parts(dim, reach, period, parts) is None:
                    return wide
                if not parts and size % period:
                    more = size - size % period + period
                    refusal.fix = f"pad the volume from {size} to {more} before the call, if the module pads it itself."
                    raise refusal
        raise refusal

    def _refusal_of_parts(self, dim: int, reach: Reach, period: int, lengths: Sequence[int]) -> InputError | None:
        """Return the error for parts of these lengths, which are equal to the size modulo a period; None if exact.

        What a module does with the remainders of its sizes (pooling, then resizing to the size before; padding to a
        multiple) depends on those: the small volume and its parts are as long as the real ones, or, of a very long
        volume, have their remainders, and are longer if the module needs it. Margins are compared as they are, not as
        rounded up to a longer period: that would hide a margin that is too small.
        """
        size, least = self._like.shape[dim], _least_part(reach)
        is_long = math.prod(self._sizes) // self._sizes[dim] * size > _MOST_COMPARED
        tried = set()
        for length, each in itertools.product(lengths, _PADDED if is_long else [size]):
            again = math.lcm(each, period)
            short = min(length, least + (length - least) % again)
            parts = sorted({short, min(length, short + again), length})
            pairs = tuple((part, min(size, part + period + (size - part - period) % again)) for part in parts)
            if length == size or pairs[0] in tried:
                continue
            tried.add(pairs[0])
            if refusal := self._refusal(dim, reach, pairs):
                return refusal
        return None

    def _refusal(self, dim: int, reach: Reach, pairs: Sequence[tuple[int, int]]) -> InputError | None:
        """Compare a whole run with its parts on a small volume; return the error if they differ.

        This catches modules that stop NaN or use positions.

        Args:
            dim: The dimension that is cut.
            reach: The reach along it.
            pairs: Lengths of a part and of the whole, to try until the module accepts both.
        """
        modes = [(each, each.training) for each in self._module.modules()]
        try:
            for each, _ in modes:
                each.training = False  # not eval(), which modules may override; dropout would differ by chance
            error, dtype = self._difference(dim, reach, pairs)
        finally:
            for each, mode in modes:
                each.training = mode
        # In float64, real errors are far above this limit, and layers that compute in float32 internally are below it.
        if error <= (1e-6 if dtype == torch.float64 else torch.finfo(dtype).eps ** 0.5):
            return None
        differ = f"differ from the whole by {error:.1e}" if error < math.inf else "give a result of another size"
        size = self._like.shape[dim]
        remainder = size % reach.period
        return InputError(
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

    def _difference(self, dim: int, reach: Reach, pairs: Sequence[tuple[int, int]]) -> tuple[float, torch.dtype]:
        """Return the largest difference between parts and whole, relative to the largest result, and its dtype."""
        failed: Failed | None = None
        for part, whole in pairs:
            # no float64 on the device, or a layer that insists on another dtype
            for dtype in (torch.float64, self._like.dtype):
                outcome = unless_failed(REFUSALS, self._difference_in, dim, reach, part, whole, dtype)
                if isinstance(outcome, Done):
                    return outcome.result, dtype
                failed = outcome
        assert failed is not None  # noqa: S101 - there is at least one pair
        raise InputError(
            CALL,
            got=f"a module that does not run on a part of {pairs[-1][0]} positions of dimension {dim} ({failed.error})",
            expected="a module that runs on parts of the volume",
            fix="choose another size of parts, or one that covers this dimension.",
        ) from failed.error

    def _difference_in(self, dim: int, reach: Reach, length: int, size: int, dtype: torch.dtype) -> float:
        sizes = list(self._sizes)
        sizes[dim] = size
        state = {name: self._alive(each, dtype) for name, each in self._module.named_parameters()}
        state |= {name: each.to(dtype, copy=True) if each.is_floating_point() else each.clone()
                  for name, each in self._module.named_buffers()}  # fmt: skip
        kept = max(length - reach.after, 0) // reach.period * reach.step  # of the first part
        skipped = -(-reach.before // reach.period) * reach.step  # of the last part
        start = (size - length) // reach.period * reach.step

        def run(volume: Tensor) -> Tensor:
            given = volume.clone()
            with torch.autocast(volume.device.type, enabled=False), Reads(given) as reads:
                result: Tensor = functional_call(self._module, state, (given,))
            note_reads(self._module, reads)
            return result

        def compare(x: Tensor, *, may_overflow: bool) -> float:
            whole = run(x)
            if may_overflow and not whole.isfinite().all():  # an exponential
                return 0.0
            first, last = run(x.narrow(dim, 0, length)), run(x.narrow(dim, size - length, length))
            if first.shape != last.shape or last.shape[dim] + start != whole.shape[dim]:
                return math.inf
            errors = [first.narrow(dim, 0, kept) - whole.narrow(dim, 0, kept)]
            remaining = last.shape[dim] - skipped
            if remaining > 0:
                errors.append(last.narrow(dim, skipped, remaining) - whole.narrow(dim, start + skipped, remaining))
            return float(torch.cat(errors, dim).abs().max() / whole.abs().max().clamp(min=torch.finfo(dtype).tiny))

        num_rows = max(1, min(_MOST_NOISES, _VOXELS // math.prod(sizes)))  # a maximum hides most of what differs
        noise = torch.cat([self._noise(1, sizes, dtype, seed) for seed in range(num_rows)])
        found = [compare(noise, may_overflow=False)]
        if (like_values := self._noise_like_values(sizes, dtype)) is not None:
            found.append(compare(like_values, may_overflow=True))
        return float(torch.tensor(found).max())  # NaN if one of them is

    def _alive(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a parameter; zero-initialized ones become noise, since they would hide the layers before them."""
        if not parameter.is_floating_point() or bool(parameter.any()):
            return parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()
        return torch.randn(parameter.shape, generator=self._generator, dtype=dtype, device=parameter.device)


def _least_part(reach: Reach) -> int:
    """Return the shortest length that gives one period of the result in the middle of a volume."""
    return (-(-reach.before // reach.period) + 1) * reach.period + reach.after


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


def _is_loose(value: object, num_dims: int) -> bool:
    """Return whether a tensor has other dimensions than the volume, and NaN in some places alone."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == num_dims:
        return False
    is_nan = torch.isnan(value)
    return bool(is_nan.any()) and not bool(is_nan.all())
