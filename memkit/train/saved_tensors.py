"""`treat_saved_tensors`: keep, recompute or offload each tensor that a forward saves, as a plan says."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memkit._core.errors import InputTypeError, StateError, warn_user
from memkit._core.printable import counted
from memkit._core.units import format_bytes
from memkit._recorder.data_reads import DataReads
from memkit._tape.plan import SavedTensorPlan
from memkit._tape.tape import (
    GeneratorState,
    Leaf,
    OperatorInput,
    PlannedForward,
    Reading,
    Rerun,
    Saved,
    SavedKind,
    Step,
    Storages,
    Unpackable,
    Value,
    View,
    are_counts,
    changes_arguments,
    counts,
    is_plain,
    is_random,
    leaves_unfilled,
    mapped,
    may_be_random,
    operator_name,
    repeats,
    shape_only_argument,
    tensors_in,
    without_statistics,
    without_unfilled,
    written_arguments,
)
from memkit._torch.compiler import uncompiled
from memkit._torch.dispatch import LeanDispatchMode, OpOverload, current_modes, fake_mode
from memkit._torch.graph import current_backward, is_called_by_transform, saving_hooks
from memkit._torch.operators import kernel_of
from memkit._torch.script import as_written
from memkit.train.checks import check_transforms
from memkit.train.offload import offload_activations

_CALL = "with treat_saved_tensors(plan): ..."
_NO_BACKWARD = -1
_WHOLE_EVERY = 64  # forwards: one is compared with the plan to its end
_PLACES: tuple[Literal["disk", "host"], ...] = ("disk", "host")
Fate = Literal["recompute", "offload"]


@dataclass(frozen=True, slots=True)
class _Fates:
    """The plan for the calls of one operator.

    Attributes:
        results: The fate of its results, by the number of the call.
        shape_only: Numbers of the calls that save an argument for its shape alone.
    """

    results: dict[int, Fate] = field(default_factory=dict)
    shape_only: set[int] = field(default_factory=set)


_Offloads: TypeAlias = Mapping[Literal["disk", "host"], offload_activations]


@dataclass(frozen=True, slots=True)
class _Moves:
    """A plan for saved tensors that are moved or kept.

    Attributes:
        moved: Kind and number within that kind of those that are moved.
    """

    moved: frozenset[tuple[tuple[bool, int], int]]

    @classmethod
    def of(cls, plan: SavedTensorPlan) -> Self:
        """Read it from a plan."""
        seen: Counter[str] = Counter()
        moved = set()
        for number, kind in enumerate(plan.saves):
            if number in plan.moved:
                moved.add((SavedKind.parse(kind), seen[kind]))
            seen[kind] += 1
        return cls(frozenset(moved))


class treat_saved_tensors(AbstractContextManager["treat_saved_tensors"]):  # noqa: N801 - used like a function
    """Run a forward so that each tensor that autograd saves is kept, recomputed or offloaded, as a plan says.

    Gradients are bit-equal to those of the plain step: in backward the very operators of the forward run again, on the
    same tensors and with the same random numbers; no module runs twice, and statistics of BatchNorm are updated once.
    The same object can be entered again for each forward. A forward that runs other operators than the planned one (for
    a batch of another shape, or by another branch) gives the same gradients too, but may take more memory: tensors
    whose operators are not in the plan stay. A warning says so once: forwards are compared with the plan up to the last
    tensor that it treats, and the first of 64 to its end. A change through NumPy, which autograd does not see, reaches
    the plain step's backward; here backward gets the value that was saved.

    Args:
        plan: The plan, from `plan_training(...).saved_tensors`. None keeps every tensor.

    Attributes:
        plan: The plan.
        num_recomputed: Operators of the last forward that are run again if their results are needed.

    Raises:
        InputTypeError: ``plan`` is not a plan for saved tensors.
        StateError: It was entered twice, or inside of other hooks on saved tensors (of `offload_activations`, or of a
            checkpoint around it), which would have no effect. At the end of the forward: it wrote to a result that has
            a gradient through ``.data``, which autograd does not see. From the backward: a tensor that is needed was
            changed in place, or its memory was released.

    Warns:
        MemkitWarning: A forward ran other operators than the planned one, and than those that a plan for a loader was
            rehearsed with.

    Memory cost: what the plan keeps; with random operators that run again, their generator's state for each (5 kB on
    the CPU). Time cost, in Python, up to the last tensor that is treated: of a plan that only offloads, some
    microseconds for each saved tensor; of others besides 5 to 30 for each operator, the more the larger what kernels
    evict from the caches in between, and four to five times as much for each that runs again.

    Source: ``docs/plan.md``; the tape is `memkit/_tape/tape.py`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "123"))
        >>> x, loss_fn = torch.ones(512, 64), lambda model, x: model(x).square().mean()
        >>> plan = mk.plan_training(model, x, loss_fn, budget="1MiB", micro_batch_size=512, treat="tensors")
        >>> treated = mk.train.treat_saved_tensors(plan.saved_tensors)
        >>> with treated:
        ...     loss = loss_fn(model, x)
        >>> loss.backward()
        >>> plan.saved_tensors.waiting_bytes < plan.saved_tensors.saved_bytes
        True
    """

    def __init__(self, plan: SavedTensorPlan | None) -> None:
        if plan is not None and not isinstance(plan, SavedTensorPlan):
            raise InputTypeError(
                "treat_saved_tensors(plan)",
                got=f"a {type(plan).__name__}",
                expected="a SavedTensorPlan, or None",
                fix="write treat_saved_tensors(mk.plan_training(model, batch, loss_fn, budget=...).saved_tensors).",
            )
        self.plan = plan
        self.num_recomputed = 0
        self._make_forward: Callable[[int], _Forward] | None = None if plan is None else _forwards(plan)
        self._running: ExitStack | None = None
        self._num_forwards = 0
        self._is_told = False

    def __enter__(self) -> Self:
        """Begin a forward."""
        if self._running is not None:
            raise StateError(
                _CALL,
                got="a second forward inside the first one",
                expected="one forward at a time for each treat_saved_tensors(plan)",
                fix="make another treat_saved_tensors(plan) for the inner forward, or write one block after the other.",
            )
        if self._make_forward is not None and torch.is_grad_enabled() and saving_hooks() is not None:
            raise StateError(
                _CALL,
                got="other hooks on saved tensors around it, such as those of offload_activations or of a checkpoint",
                expected="one way to save tensors: of nested hooks only the innermost ones are called",
                fix="leave the outer ones out; a plan offloads by itself.",
            )
        with ExitStack() as stack:
            if self._make_forward is not None and torch.is_grad_enabled():
                forward = self._make_forward(self._last_save())
                stack.enter_context(as_written())  # fused operators of TorchScript come and go
                stack.enter_context(forward.following())
                if fake_mode() is None:
                    reads = stack.enter_context(DataReads(lambda tensor: tensor.grad_fn is not None))
                    stack.push(lambda kind, *_: _refuse_written(reads) if kind is None else None)
                stack.push(lambda kind, *_: self._note(forward) if kind is None else None)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the forward; its backward may run later."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(*error)
            if isinstance(error[1], RuntimeError):
                check_transforms(error[1], call=_CALL)

    def _last_save(self) -> int:
        """Return how far to follow the next forward: to its end now and then, in rehearsals, and if kinds differ."""
        if self.plan is None or len(self.plan.rehearsed) > 1 or fake_mode() is not None:
            return 0
        self._num_forwards += 1
        return self.plan.last_save if self._num_forwards % _WHOLE_EVERY != 1 else 0

    def _note(self, forward: _Forward) -> None:
        self.num_recomputed = forward.num_recomputed
        if fake_mode() is not None or self.plan is None:
            return
        counts, planned = forward.counts(), self.plan.counts(is_whole=forward.is_whole)
        if self._is_told or counts == planned or frozenset(counts.items()) in self.plan.rehearsed:
            return
        counts, planned = without_unfilled(counts), without_unfilled(planned)
        if counts in (planned, *(without_unfilled(dict(each)) for each in self.plan.rehearsed)):
            return
        self._is_told = True
        by_name = {name: counts.get(name, 0) - planned.get(name, 0) for name in {*counts, *planned}}
        fewer = {name: -number for name, number in by_name.items() if number < 0}
        more = {name: number for name, number in by_name.items() if number > 0}
        told = [_listed(forward.noun, each, how) for each, how in ((fewer, "fewer"), (more, "more")) if each]
        warn_user(
            f"{_CALL}: this forward is not the planned one: {' and '.join(told)}. Gradients are the "
            "same, but it may take more memory than planned. Way out: plan with a batch and modes as they are in "
            "training, or with a loader of all kinds of batch."
        )


def _refuse_written(reads: DataReads) -> None:
    """Refuse a forward that wrote to results through ``.data``: what is recomputed or offloaded lacks such changes.

    Raises:
        StateError: It did.
    """
    for whole in reads.written():
        raise StateError(
            _CALL,
            got=f"a forward that wrote through .data to a result of {format_bytes(whole.nbytes)} that has a gradient",
            expected="writes that autograd sees: the plain step's backward may read what was written, and here it "
            "would get the value from before",
            fix="write x = x.masked_fill(mask, 0) instead of x.data.masked_fill_(mask, 0), or do without a plan for "
            "tensors: treat='blocks'.",
        )


class _Operator:
    """The fate of one operator's results, call by call."""

    __slots__ = ("changes", "count", "counts", "draws", "fates", "repeats", "run", "shape_only")

    def __init__(self, func: Any, fates: _Fates) -> None:
        self.count, self.fates, self.shape_only = 0, fates.results, fates.shape_only
        self.changes, self.counts = changes_arguments(func), counts(func)
        self.repeats, self.draws = repeats(func), may_be_random(func)
        self.run = kernel_of(func) if type(func) is OpOverload else func


class _Replaceable:
    """A saved tensor that can still be let go: its shape may turn out to be enough."""

    __slots__ = ("key", "source")

    def __init__(self, source: OperatorInput, key: tuple[int, View]) -> None:
        self.source, self.key = source, key


class _Forward(PlannedForward):
    """One forward under a plan. It is followed up to the last tensor that is treated, or to its end.

    Args:
        offloads: Where tensors go that are moved out.
        last_save: Number of tensors that are saved until nobody follows any more; 0 if that is its end.

    Attributes:
        noun: What is counted.
        num_recomputed: Operators that are run again if their results are needed.
        is_whole: Whether it was followed to its end.
    """

    noun: str
    num_recomputed = 0

    def __init__(self, offloads: _Offloads, last_save: int) -> None:
        self.is_whole = True
        self._offloads, self._last_save, self._num_saved = offloads, last_save, 0
        self._following = ExitStack()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the forward that runs in the block."""
        with self._following:
            self._follow(self._following)
            yield

    @abstractmethod
    def _follow(self, following: ExitStack) -> None:
        """Enter what is needed to follow the forward."""

    def _count_saved(self) -> None:
        """Count a tensor that was just saved; after the last one that is treated, follow no further."""
        self._num_saved += 1
        if self._num_saved == self._last_save:
            self.is_whole = False
            self._following.close()


class _Moving(_Forward):
    """One forward under a plan by which nothing runs again: what autograd saves is all that it goes by.

    Saved tensors are counted by kind, so one of another kind that is not in the plan does not shift the others.
    """

    noun = "saved tensor"

    def __init__(self, moves: _Moves, offloads: _Offloads, last_save: int) -> None:
        super().__init__(offloads, last_save)
        self._moved = moves.moved
        self._counts: dict[tuple[bool, int], int] = {}

    def _follow(self, following: ExitStack) -> None:
        following.enter_context(saved_tensors_hooks(uncompiled(self.pack), uncompiled(self.unpack)))

    def pack(self, tensor: Tensor) -> Saved | Unpackable:
        """Keep a tensor that autograd saves, or move it out."""
        if current_backward() != _NO_BACKWARD:
            return Saved(tensor)
        self._count_saved()
        kind = tensor.is_floating_point(), tensor.dim()
        place = self._counts.get(kind, 0)
        self._counts[kind] = place + 1
        if (kind, place) in self._moved:
            # A forward that is not the planned one may save noise here that is drawn later: its backward refuses.
            return Unpackable(self._offloads[_place_of(tensor)].pack(tensor).unpack_for_node)
        return Saved(tensor)

    @staticmethod
    def unpack(source: Saved | Unpackable) -> Tensor:
        """Return a saved tensor."""
        return source.unpack()

    def counts(self) -> dict[str, int]:
        """Return how many tensors of each kind were saved."""
        return {str(SavedKind(*kind)): number for kind, number in self._counts.items()}


class _Taped(_Forward, LeanDispatchMode):
    """One forward under a plan by which operators run again: those are written down.

    Operators are counted by name, so one that is not in the plan does not shift the others.
    """

    noun = "operator"
    supports_higher_order_operators = True

    def __init__(self, fates: Mapping[str, _Fates], offloads: _Offloads, last_save: int) -> None:
        LeanDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        super().__init__(offloads, last_save)
        self._planned, self._is_packing = fates, False
        self._operators: dict[Any, _Operator] = {}
        self._storages: Storages[Value | Literal["offload", "unfilled"]] = Storages()
        self._leaves: Storages[list[weakref.ref[Leaf]]] = Storages()  # of operators that run again
        self._rerun = Rerun()
        self._has_shape_only = any(each.shape_only for each in fates.values())
        self._packed: list[_Replaceable] = []  # since the last operator, if there are some that need a shape alone

    def _follow(self, following: ExitStack) -> None:
        following.callback(self._settle_packed)
        following.enter_context(self)
        following.enter_context(saved_tensors_hooks(self.pack, self.unpack))

    def _count_saved(self) -> None:
        """Count a tensor that was just saved, unless by a backward inside of the forward."""
        if current_backward() != _NO_BACKWARD:
            return
        if self._num_saved + 1 == self._last_save and (current_modes()[-1:] != [self] or is_called_by_transform()):
            self._last_save = 0  # another mode, or vmap, was entered inside: it is not easy to leave before that
        super()._count_saved()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the model run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_packing or current_backward() != _NO_BACKWARD:
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func, self._planned.get(operator_name(func), _Fates()))
        if not operator.counts:
            return operator.run(*args, **kwargs)
        fate = operator.fates.get(operator.count)
        if self._packed:
            self._settle_packed(shape_only_argument(func, args) if operator.count in operator.shape_only else None)
        operator.count += 1
        if operator.changes:
            self._before_change(written_arguments(func, args, kwargs), is_recorded=fate == "recompute")
        if fate is None:
            return operator.run(*args, **kwargs)
        if fate == "offload":
            out = func(*args, **kwargs)
            where: Literal["offload", "unfilled"] = "unfilled" if leaves_unfilled(func) else "offload"
            for tensor in filter(_may_leave, tensors_in(out)):
                self._storages.learn(tensor, where)
            return out
        return self._recorded(operator, func, args, kwargs) if operator.repeats else func(*args, **kwargs)

    def _recorded(self, operator: _Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record it."""
        self.num_recomputed += 1
        random = None
        if operator.draws and is_random(func, args, kwargs):
            device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
            random = GeneratorState(kwargs.get("generator"), device)
        written = written_arguments(func, args, kwargs) if operator.changes else ()
        changed = [each for each in map(self._value_of, written) if each]
        were_read = [each.is_read for each in changed]
        step = Step(func, mapped(self._source, without_statistics(func, args)), mapped(self._source, kwargs), random)
        for value, was_read in zip(changed, were_read, strict=True):
            value.is_read = was_read or len(changed) > 1  # each needs the others before it; itself does not count
            value.append(step)
        out = operator.run(*args, **kwargs)
        for tensor in tensors_in(out):
            made = None
            is_given = self._storages.find(tensor) is not None or self._leaves.find(tensor) is not None
            if not is_given and _may_leave(tensor):
                made = Value(step)
                self._storages.learn(tensor, made)
            step.results.append(None if made is None else weakref.ref(made))
        return out

    def _before_change(self, written: Sequence[Tensor], *, is_recorded: bool) -> None:
        """Copy tensors that are about to change, if operators that run again need them."""
        for tensor in written:
            for kept in self._leaves.find(tensor) or ():
                leaf = kept()
                if leaf is not None:
                    leaf.copy()
            known = self._storages.find(tensor)
            if known == "unfilled":
                self._storages.learn(tensor, "offload")
            elif isinstance(known, Value) and not is_recorded:
                known.is_lost = True

    def _value_of(self, tensor: Tensor) -> Value | None:
        known = self._storages.find(tensor)
        return known if isinstance(known, Value) else None

    def _source(self, tensor: Tensor) -> OperatorInput:
        """Return how an operator that runs again gets this tensor, which is below autograd."""
        known = self._storages.find(tensor)
        if isinstance(known, Value) and not known.is_lost:
            return Reading.of(tensor, known)
        if known == "offload":
            return self._moved(tensor)
        leaf = Leaf(tensor)
        if leaf.is_plain:
            leaves = self._leaves.find(tensor)
            (self._leaves.learn(tensor, []) if leaves is None else leaves).append(weakref.ref(leaf))
        return leaf

    def _settle_packed(self, shape_only: Tensor | None = None) -> None:
        """Let go of a tensor that was packed right before, if its shape alone is needed; the others stay packed."""
        if shape_only is not None and is_plain(shape_only):
            storage, view = id(shape_only.untyped_storage()), View.of(shape_only)
            packed = next((each for each in reversed(self._packed) if each.key == (storage, view)), None)
            if packed is not None:
                packed.source = Unpackable(view.stand_in)
        self._packed.clear()

    def pack(self, tensor: Tensor) -> OperatorInput | _Replaceable:
        """Keep a tensor that autograd saves, or only the way to recompute or reload it."""
        source = self._pack(tensor)
        self._count_saved()
        if not self._has_shape_only or not is_plain(tensor):
            return source
        self._packed.append(_Replaceable(source, (id(tensor.untyped_storage()), View.of(tensor))))
        return self._packed[-1]

    def _pack(self, tensor: Tensor) -> OperatorInput:
        known = self._storages.find(tensor)
        if isinstance(known, Value) and not known.is_lost and known.is_filled:
            return Reading.of(tensor, known)
        self._is_packing = True
        try:
            return self._moved(tensor) if known == "offload" else Saved(tensor)
        finally:
            self._is_packing = False

    def unpack(self, source: OperatorInput | _Replaceable) -> Tensor:
        """Return a saved tensor."""
        return self._rerun.tensor(source.source if isinstance(source, _Replaceable) else source)

    def _moved(self, tensor: Tensor) -> Unpackable:
        return Unpackable(self._offloads[_place_of(tensor)].pack(tensor).unpack)

    def counts(self) -> dict[str, int]:
        """Return how often each operator ran, by name."""
        return {operator_name(func): operator.count for func, operator in self._operators.items() if operator.count}


def _may_leave(tensor: Tensor) -> bool:
    """Whether the memory of a result can be given up until the backward needs it."""
    return is_plain(tensor) and not are_counts(tensor)


def _place_of(tensor: Tensor) -> Literal["disk", "host"]:
    """Return where a tensor goes that is moved out."""
    return "disk" if tensor.device.type == "cpu" else "host"


def _forwards(plan: SavedTensorPlan) -> Callable[[int], _Forward] | None:
    """Return what makes each forward under a plan, from its ``last_save``; None if the plan keeps everything."""
    if not (plan.recomputed or plan.offloaded or plan.shape_only):
        return None
    offloads: _Offloads = {to: offload_activations(to=to, min_bytes=0) for to in _PLACES} if plan.offloaded else {}
    if plan.needs_tape:
        return partial(_Taped, _fates(plan), offloads)
    return partial(_Moving, _Moves.of(plan), offloads)


def _fates(plan: SavedTensorPlan) -> dict[str, _Fates]:
    """Return what the plan says of each operator, by its name."""
    found: dict[str, _Fates] = {}
    seen: Counter[str] = Counter()
    for number, name in enumerate(plan.operators):
        fates, call = found.setdefault(name, _Fates()), seen[name]
        seen[name] += 1
        if number in plan.recomputed:
            fates.results[call] = "recompute"
        elif number in plan.offloaded:
            fates.results[call] = "offload"
        if number in plan.shape_only:
            fates.shape_only.add(call)
    return found


def _listed(noun: str, counts: Mapping[str, int], fewer_or_more: str) -> str:
    shown = ", ".join(f"{count} x {name}" for name, count in list(counts.items())[:3])
    return f"{counted(sum(counts.values()), noun)} {fewer_or_more} ({shown}{', ...' * (len(counts) > 3)})"
