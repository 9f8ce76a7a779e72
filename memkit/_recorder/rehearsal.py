"""Run the user's own forward and backward in place for inspection, without side effects.

Nothing is copied beforehand, so it works where a copy would not: with models that keep activations, teachers that
a loss function closes over, models that fill the memory. Below autograd, a dispatch mode sees every operator:

- An existing tensor is copied right before an operator writes to it, no matter what holds it, and restored later.
- Random draws of a run can be kept and replayed row by row in runs on some of the rows.
- Operators can be made to round slightly differently, to distinguish rounding from a real difference.
- Operators that exchange tensors with other processes are rejected before they start: the others may not be running.

`Attributes` saves those of modules, and of the objects that they and the loss function hold, and restores them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memkit._machine import random_state
from memkit._recorder.attributes import Attributes, HeldBuffer, HeldGradient, HeldNumber, storage_of
from memkit._recorder.ranked import SELECTING, RowLimit, limit_not_reached, values_of_rows
from memkit._torch import aten
from memkit._torch.compiler import eagerly
from memkit._torch.dispatch import LeanDispatchMode, OpOverload, fake_mode
from memkit._torch.graph import outside_transforms
from memkit._torch.modules import is_compiled
from memkit._torch.operators import schema_of
from memkit._torch.tensors import storage_key

_MOST_RANKED = 2  # the last ones: a loss selects after the model
_NAMESPACES_OF_RANKS = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
# Arguments that native_batch_norm writes to, although its schema does not declare it.
_WRITTEN_UNDECLARED = ("running_mean", "running_var")
_DIVIDES = "scale_grad_by_freq"  # of embeddings
_TF32_EPS = 2.0**-10
_FEWEST_NUMEL = 256  # of a piece that is perturbed at once
# Operators that select or move values without rounding: a value must stay equal to its source (topk, then >=).
_EXACT_OPERATORS = frozenset(
    """
    topk sort msort kthvalue median nanmedian mode max min amax amin aminmax cummax cummin clone copy _to_copy cat stack
    index index_select gather take embedding select slice where masked_fill masked_select masked_scatter scatter
    index_put index_copy index_fill clamp clamp_min clamp_max relu abs neg sign floor ceil round trunc flip roll repeat
    tril triu diag_embed constant_pad_nd max_pool2d_with_indices max_pool3d_with_indices zeros ones full empty fill
    zero arange eye minimum maximum nan_to_num threshold hardtanh select_backward slice_backward threshold_backward
    new_zeros new_ones new_full zeros_like ones_like full_like scalar_tensor unsafe_split split_with_sizes
    """.split()  # noqa: SIM905 - a table of words
)
_SUMS = frozenset({torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList})


class RanksError(Exception):
    """A rehearsed run tried to exchange tensors with other processes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a rehearsal's batch that a run sees: from ``start`` up to ``stop`` (exclusive) of ``total``.

    For a batch without rows, ``number`` is the index of the part: parts that run in order draw one after the other. It
    is None for the whole batch.
    """

    start: int = 0
    stop: int = 0
    total: int = 0
    number: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the run sees the whole batch."""
        return self.number is None and self.stop - self.start == self.total


@dataclass(slots=True)
class _Draw:
    shape: torch.Size
    values: Callable[[], Tensor]  # redrawn from ``state``, or kept if they depend on an input
    is_kept: bool
    state: Tensor
    state_after: Tensor
    edges: list[int]  # start of each part's draws, for parts without rows


class Rehearsal:
    """Runs without side effects.

    Enter `run` around each forward and backward, and call `close` at the end. A run starts from the same state as the
    first one, unless it continues from the end of the last one.

    Args:
        roots: Modules and functions whose state, including the objects that they hold, is restored.
        room_bytes: Total bytes that the operators of a forward may allocate on the CPU, where running out of memory
            would kill the process; None for no limit.
        as_called: Whether runs keep the caller's grad mode, and may exchange tensors with other processes, which then
            all run the same; otherwise gradients are recorded, and such operators are rejected.
        except_for: Types of objects whose attributes are not restored, and not those of what only they hold.

    Attributes:
        most_elements: Number of elements of the largest tensor that an operator created.
        has_unmatched_draws: Whether random numbers were drawn that have no match in the first run.
        has_several_per_row: Whether draws were matched to rows of which a row of the batch has several: they may be in
            another order, as where a forward joins labeled rows and three times as many others.
        has_permutations: Whether a permutation was drawn.
        has_draws_for_all: Whether fewer rows drew as many random numbers as all: they belong to no row.
        has_fewer_draws: Whether fewer rows drew less often: a loop over rows draws for each, and a part's first row got
            the numbers of the batch's first.
        has_branches: Whether Python branched on the value of a tensor, so that other rows may take the other branch.
        ranked: The values by which operators select among all rows, one per row, of the last `_MOST_RANKED` operators.
        counts_in_backward: Whether an embedding that is trained divides a row's gradient by its count in the batch.
    """

    def __init__(
        self,
        roots: Sequence[object],
        *,
        room_bytes: int | None = None,
        as_called: bool = False,
        except_for: tuple[type, ...] = (),
    ) -> None:
        self._room_bytes, self.as_called, self._except_for = room_bytes, as_called, except_for
        self.left_bytes: int | None = None
        self._attributes = self._attributes_of(roots)
        # Of modules and optimizers that the roots do not hold: a criterion, in a loop by hand.
        self._found: list[Attributes] = []
        self._random = random_state.capture()
        self._before: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # storages written to, original bytes
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # the user's own, with their initial state
        self._draws: dict[tuple[object, ...], _Draw] = {}
        self.ranked: collections.deque[tuple[float, ...]] = collections.deque(maxlen=_MOST_RANKED)
        self._limits: dict[bool, set[RowLimit]] = {True: set(), False: set()}  # of the whole, and of parts
        self._is_dirty, self.most_elements, self.is_backward = False, 0, False
        self.has_unmatched_draws = self.has_branches = self.has_permutations = False
        self.has_several_per_row = self.has_draws_for_all = self.has_fewer_draws = self.counts_in_backward = False
        self._num_draws = self._num_draws_of_whole = 0

    @contextlib.contextmanager
    def run(
        self,
        span: Span | None = None,
        *,
        goes_on: bool = False,
        random_goes_on: Literal["host", "all"] | None = None,
        rounding: torch.Generator | None = None,
        other_noise: bool = False,
        other_host_noise: bool = False,
    ) -> Iterator[None]:
        """Return a context for one forward and backward.

        Args:
            span: The rows of the run. The first run with a span sees all rows, and its random draws are kept; later
                runs reuse its draws for their rows.
            goes_on: Start from the state at the end of the last run, not from that of the first run.
            random_goes_on: The same for random numbers, either NumPy's and Python's or all: draws made row by row
                then equal those of the whole batch.
            rounding: Perturbs each operator's results by about one unit in the last place.
            other_noise: Draw different random numbers from the other runs.
            other_host_noise: The same for NumPy's and Python's random numbers only.

        Raises:
            RanksError: The block exchanges tensors with other processes.
        """
        if not goes_on:
            self.undo()
        self._is_dirty, self.left_bytes, self.is_backward = True, self._room_bytes, False
        host = random_state.capture_host()
        if random_goes_on != "all":
            for generator, state in self._generators.values():
                generator.set_state(state)  # noise is the same in each run, regardless of later draws
            random_state.restore(self._random)
        if random_goes_on is not None:
            random_state.restore_host(host)
        if other_noise:
            random_state.advance([generator for generator, _ in self._generators.values()])
        elif other_host_noise:
            random_state.advance_host()
        with contextlib.ExitStack() as stack:
            if not self.as_called:
                stack.enter_context(torch.inference_mode(mode=False))
                stack.enter_context(torch.enable_grad())
            stack.enter_context(eagerly())  # nothing is compiled for an inspection
            stack.enter_context(self._finding_others())
            stack.enter_context(_Watch(self, span, rounding))
            self._num_draws = 0
            yield
            if span is not None and span.is_whole:
                self._num_draws_of_whole = self._num_draws
            self.has_fewer_draws |= 0 < self._num_draws < self._num_draws_of_whole

    @property
    def limits(self) -> set[RowLimit]:
        """The limits that neither the run of all rows nor one of fewer has reached."""
        return self._limits[True] & self._limits[False]

    def note_limit(self, func: Any, args: tuple[Any, ...], span: Span) -> None:
        """Note a limit of an operator that a run of these rows does not reach."""
        limit = limit_not_reached(func, args, span.stop - span.start)
        if limit is not None:
            self._limits[span.is_whole].add(limit)

    @contextlib.contextmanager
    def _finding_others(self) -> Iterator[None]:
        """Save, in the block, what modules and optimizers hold that the roots do not, before they first run or step."""
        thread = threading.get_ident()  # other threads train models of their own
        simulation = fake_mode()

        def notice(found: object, *_: Any) -> None:
            if fake_mode() is not simulation:  # an estimate's, which holds its stand-ins now
                return
            known = any(each.hold(found) for each in (self._attributes, *self._found))
            if not known and threading.get_ident() == thread:
                with outside_transforms():  # inside of torch.func.grad, copies would be wrappers without a storage
                    self._found.append(self._attributes_of([[found]]))  # no root: it is told with its class

        hooks = [register_optimizer_step_pre_hook(notice)]
        # A compiled module would be compiled again, for the hook.
        if not any(is_compiled(each) for each in self._attributes.holders() if isinstance(each, nn.Module)):
            hooks.append(register_module_forward_pre_hook(notice))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _attributes_of(self, roots: Sequence[object]) -> Attributes:
        how: dict[str, Any] = {"gradients_but_of": (), "with_optimizers": True}
        return Attributes(roots, content="arrays", except_for=self._except_for, **how)

    def modules(self) -> set[nn.Module]:
        """Return the modules among the roots and what they hold, and those that have run."""
        return set().union(*(each.modules() for each in (self._attributes, *self._found)))

    def end_forward(self) -> None:
        """Mark the start of a run's backward, which allocates less than its forward."""
        self.left_bytes, self.is_backward = None, True

    def undo(self) -> None:
        """Restore everything that the runs so far have changed."""
        if not self._is_dirty:
            return
        with torch.no_grad():
            for storage, copy in self._before.values():
                if storage.nbytes() not in (0, len(copy)):  # an observer's first forward resizes its buffers
                    storage.resize_(len(copy))
                if storage.nbytes():  # else it was freed since, by FSDP
                    _as_bytes(storage).copy_(copy)
        for held in (*self._found, self._attributes):
            held.restore()
        for generator, state in self._generators.values():
            generator.set_state(state)
        random_state.restore(self._random)
        self._is_dirty = False

    def close(self) -> None:
        """Restore everything, and drop the copies."""
        self.undo()
        self._before.clear()
        self._draws.clear()
        self._found.clear()

    def original(self, tensor: Tensor) -> Tensor:
        """Return a tensor's content from before the runs: the tensor itself if none has written to its storage."""
        storage = storage_of(tensor)
        _, copy = self._before.get(storage_key(storage), (None, None)) if storage is not None else (None, None)
        if copy is None:
            return tensor
        place = copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)

    @property
    def draws_are_rows(self) -> bool:
        """Whether all random numbers of the runs were matched to rows: parts then drew those of the whole."""
        is_matched = not (self.has_unmatched_draws or self.has_several_per_row or self.has_permutations)
        have_drawn = any(each.have_drawn() for each in (self._attributes, *self._found))
        return is_matched and not self.has_drawn_on_the_host and not have_drawn

    @property
    def has_drawn_on_the_host(self) -> bool:
        """Whether the last run has drawn from Python's random or NumPy."""
        return not random_state.is_same_state(self._random.host, random_state.capture_host())

    def changed(self) -> list[str]:
        """Return the names of module attributes that the runs since the last `undo` have changed."""
        return self._attributes.changed(self._written())

    def changed_buffers(self) -> list[HeldBuffer]:
        """Return the buffers that these runs have changed, of modules that the roots do not hold too."""
        found, written = list[HeldBuffer](), self._written()
        for held in (self._attributes, *self._found):
            names = set(held.changed(written))
            found += [each for each in held.buffers() if each.shown in names]
        return found

    def changed_gradients(self) -> list[HeldGradient]:
        """Return the gradients that these runs have left in ``.grad``, of modules that the roots do not hold too."""
        written = self._written()
        return [each for held in (self._attributes, *self._found) for each in held.changed_gradients(written)]

    def changed_numbers(self) -> list[HeldNumber]:
        """Return the floating-point numbers outside of buffers that these runs have changed."""
        written = self._written()
        found = self._attributes.changed_numbers(written)
        for held in self._found:
            found += held.changed_numbers(written, is_by_class=True)
        return found

    def _written(self) -> set[int]:
        """Return the keys of the storages whose content differs."""
        return {key for key, (storage, copy) in self._before.items() if not torch.equal(_as_bytes(storage), copy)}

    # ------------------------------------------------------------------ for the mode

    def keep(self, tensor: Tensor, born: set[int]) -> None:
        """Copy a tensor's storage before it is written to, unless a run created it."""
        storage = storage_of(tensor)
        if storage is None or not storage.nbytes():
            return
        key = storage_key(storage)  # the same for all Python objects of one storage
        if key not in born and key not in self._before:
            self._before[key] = (storage, _as_bytes(storage).clone())

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], span: Span | None) -> Any:
        """Run a random operator; keep its draws, or replay the kept ones."""
        found = _find_generator(args, kwargs)
        if found is None:  # on a device whose generator is unknown
            self.has_unmatched_draws = True
            return func(*args, **kwargs)
        generator, is_own = found
        state = generator.get_state()
        if is_own and id(generator) not in self._generators:
            self._generators[id(generator)] = generator, state
        out = func(*args, **kwargs)
        self.has_permutations |= func.overloadpacket is torch.ops.aten.randperm
        after = generator.get_state()
        if torch.equal(state, after):  # nothing was drawn: dropout with p=0, an operator that need not draw
            return out
        self._num_draws += 1
        values = _drawn_values(func, out)
        key = (func, str(generator.device), state.numpy().tobytes())
        kept = self._draws.get(key)
        if kept is None:
            if span is not None and span.is_whole and values is not None:
                self._draws[key] = _draw_of(func, args, kwargs, values, state, after)
            else:
                self.has_unmatched_draws |= span is not None
            return out
        if values is not None and values.shape == kept.shape and span is not None and span.number is None:
            self.has_draws_for_all |= span.stop - span.start < span.total
        if values is not None and values.shape == kept.shape and not kept.is_kept:
            return out  # the same numbers, from the same state
        rows = None if values is None or span is None else _rows_of(kept, values.shape, span)
        if values is None or rows is None:
            self.has_unmatched_draws = True
            return out
        if span is not None and span.number is None:
            self.has_several_per_row |= rows[2] != span.stop - span.start
        with torch.no_grad():
            generator.set_state(kept.state)
            drawn = kept.values()
            _put_values(func, out, values, drawn if drawn.shape == values.shape else drawn.narrow(*rows), args)
        generator.set_state(kept.state_after)
        return out


class _Watch(LeanDispatchMode):
    """Dispatch mode that sees every operator of a run."""

    supports_higher_order_operators = True

    def __init__(self, rehearsal: Rehearsal, span: Span | None, rounding: torch.Generator | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rehearsal, self._span, self._rounding = rehearsal, span, rounding
        self._born: set[int] = set()
        self._simulation = fake_mode()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Higher-order operators are not inspected; nor are those of a simulation within the run (an estimate), whose
        # tensors have no data and are gone at its end.
        if not isinstance(func, OpOverload) or fake_mode() is not self._simulation:
            return func(*args, **kwargs)
        if func.namespace in _NAMESPACES_OF_RANKS and not self._rehearsal.as_called:
            raise RanksError(str(func))
        if func is aten.local_scalar_dense and args[0].dtype is torch.bool:
            self._rehearsal.has_branches = True
        if func in SELECTING:
            self._note_selection(func, args, kwargs)
        facts = _facts(func)
        if facts.divides is not None and facts.divides < len(args) and args[facts.divides] and args[0].requires_grad:
            self._rehearsal.counts_in_backward = True
        for position in facts.written:
            written = args[position] if isinstance(position, int) and position < len(args) else None
            written = kwargs.get(position, written) if isinstance(position, str) else written
            for each in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(each, Tensor):
                    self._rehearsal.keep(each, self._born)
        is_drawn = facts.is_random and fake_mode() is None  # in an estimate, draws have no values
        out = self._rehearsal.draw(func, args, kwargs, self._span) if is_drawn else func(*args, **kwargs)
        if facts.makes_tensors:
            self._note(func, args, kwargs, out)
        return out

    def _note_selection(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._span is None or fake_mode() is not None:
            return
        self._rehearsal.note_limit(func, args, self._span)
        if not self._span.is_whole:
            return
        values = values_of_rows(func, args, kwargs, self._span.total)
        if values is not None and values not in self._rehearsal.ranked:
            self._rehearsal.ranked.append(values)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        for each in out if isinstance(out, (list, tuple)) else (out,):
            storage = storage_of(each) if isinstance(each, Tensor) else None
            if storage is not None:
                self._rehearsal.most_elements = max(self._rehearsal.most_elements, each.numel())
                self._count(storage)
                self._born.add(storage_key(storage))
                if self._rounding is not None and (_facts(func).rounds or self._narrows(func, args, each)):
                    _round_differently(each, func, args, kwargs, self._rounding)

    def _narrows(self, func: Any, args: tuple[Any, ...], out: Tensor) -> bool:
        """Whether a gradient, which is the sum of the parts', is cast to a lower precision.

        A forward's casts are the same for the whole and its parts, and may be compared with each other.
        """
        if not self._rehearsal.is_backward or func is not aten.to_copy:
            return False
        given = args[0]
        return _digits(given.dtype) > _digits(out.dtype) > 0

    def _count(self, storage: torch.UntypedStorage) -> None:
        rehearsal = self._rehearsal
        if rehearsal.left_bytes is not None and storage.device.type == "cpu":
            rehearsal.left_bytes -= storage.nbytes()
            if rehearsal.left_bytes < 0:
                raise MemoryError("inspecting these rows takes more host memory than is available")


@dataclass(frozen=True, slots=True)
class _Facts:
    written: tuple[int | str, ...]  # positions, or names of keywords
    is_random: bool
    makes_tensors: bool  # its results are new tensors, not views of its arguments
    rounds: bool
    divides: int | None  # position of the argument that makes its backward divide rows by their counts


@functools.cache
def _facts(func: Any) -> _Facts:
    schema = schema_of(func)  # the only source for the arguments that an operator writes to
    written = [
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _WRITTEN_UNDECLARED
    ]
    names = [schema.arguments[position].name for position in written if isinstance(position, int)]
    aliases = any(each.alias_info is not None for each in schema.returns)
    return _Facts(
        (*written, *names),
        torch.Tag.nondeterministic_seeded in func.tags,
        bool(schema.returns) and not aliases,
        schema.name.rpartition("::")[2] not in _EXACT_OPERATORS,
        next((number for number, each in enumerate(schema.arguments) if each.name == _DIVIDES), None),
    )


def _digits(dtype: torch.dtype) -> float:
    """Return the inverse of the relative precision of a floating-point type; 0 for other types."""
    return 1 / torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _round_differently(
    tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator
) -> None:
    """Change a result by about one unit in the last place; a sum by that of its terms, which may cancel."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    eps = torch.finfo(tensor.dtype).eps
    if tensor.is_cuda and tensor.dtype is torch.float32 and "convolution" in str(func):
        eps = max(eps, _TF32_EPS)
    with torch.no_grad():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.device != generator.device or not real.numel():
            return
        if func in _SUMS and real is tensor:
            sizes = func(args[0].abs(), *args[1:], **kwargs)
            noise = torch.empty_like(sizes).uniform_(-2 * eps, 2 * eps, generator=generator).mul_(sizes)
            tensor.add_(noise.masked_fill_(sizes == sizes.round(), 0))
            return
        for piece in _pieces(real):
            noise = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
            noise.uniform_(-eps, eps, generator=generator).mul_(piece)
            piece.add_(noise.masked_fill_(piece == piece.round(), 0))  # integers are exact: counts, one-hot rows


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor into views, contiguous in memory, so that work on each needs little memory."""
    if not torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return (tensor,)
    return torch.split(tensor.as_strided((tensor.numel(),), (1,)), max(_FEWEST_NUMEL, tensor.numel() // 16))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# -------------------------------------------------------------------------------------------------------- random draws


def _find_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Generator, bool] | None:
    """Return the generator that an operator draws from, and whether it is the user's own."""
    own = next((each for each in (*kwargs.values(), *args) if isinstance(each, torch.Generator)), None)
    if own is not None:
        return own, True
    device = kwargs.get("device")
    if device is None:
        tensor = next((each for each in args if isinstance(each, Tensor)), None)
        device = tensor.device if tensor is not None else "cpu"
    generator = random_state.default_generator(torch.device(device))
    return None if generator is None else (generator, False)


def _drawn_values(func: Any, out: Any) -> Tensor | None:
    """Return the tensor that an operator has drawn; None if the draw is not returned, or not returned alone."""
    if isinstance(out, Tensor):
        return out
    if func is torch.ops.aten.native_dropout.default:
        mask: Tensor = out[1]
        return mask
    return None


def _draw_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Tensor, state: Tensor, state_after: Tensor
) -> _Draw:
    """Record a draw. A draw that depends only on shapes is redrawn on demand, and takes no memory."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    by_shape = len(tensors) == 1 and tensors[0] is args[0] and _draws_by_shape(func)
    is_kept = bool(tensors) and not by_shape
    if is_kept:
        copy = values.clone()
        return _Draw(values.shape, lambda: copy, is_kept, state, state_after, [0])
    like = (args[0].shape, args[0].stride(), args[0].dtype, args[0].device) if by_shape else None
    others = args[1:] if by_shape else args

    def again() -> Tensor:
        filled = []
        if like is not None:
            shape, stride, dtype, device = like
            filled = [torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()]
        drawn = _drawn_values(func, func(*filled, *others, **kwargs))
        assert drawn is not None  # noqa: S101 - it was not, the first time
        return drawn

    return _Draw(values.shape, again, is_kept, state, state_after, [0])


def _draws_by_shape(func: Any) -> bool:
    """Whether an operator uses only the shape of its tensor: it fills it, or creates a similar tensor or a mask."""
    name = schema_of(func).name.rpartition("::")[2]  # see `_facts`
    return bool(name.endswith(("_", "_like")) or name == "native_dropout")


def _put_values(func: Any, out: Any, values: Tensor, part: Tensor, args: tuple[Any, ...]) -> None:
    """Change an operator's result as if it had drawn ``part``."""
    values.copy_(part)
    if func is torch.ops.aten.native_dropout.default:
        x, p = args[0], args[1]
        torch.mul(x, values, out=out[0]).mul_(1 / (1 - p) if p < 1 else 0.0)


def _rows_of(draw: _Draw, shape: torch.Size, span: Span) -> tuple[int, int, int] | None:
    """Locate some rows' draws among those of all rows: the one dimension that differs, the start, and the length."""
    if draw.shape == shape:
        return 0, 0, 0  # all
    differing = [dim for dim, (all_rows, some) in enumerate(zip(draw.shape, shape, strict=False)) if all_rows != some]
    if len(draw.shape) != len(shape) or len(differing) != 1:
        return None
    dim, num_rows = differing[0], span.stop - span.start
    if span.number is not None:
        if span.number >= len(draw.edges):
            return None
        start = draw.edges[span.number]
        if span.number + 1 == len(draw.edges):
            draw.edges.append(start + shape[dim])
        return (dim, start, shape[dim]) if start + shape[dim] <= draw.shape[dim] else None
    factor, rest = divmod(draw.shape[dim], span.total)
    if rest or shape[dim] != factor * num_rows:
        return None
    return dim, factor * span.start, factor * num_rows
