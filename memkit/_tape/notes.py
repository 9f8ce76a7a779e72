"""Notes on a forward and its backward: which operator makes what from what, what is saved, and when it is needed.

They are taken in a simulation, where data do not matter: saved tensors are dropped, and new ones without data take
their place in backward. So it is seen when the forward itself lets go of a tensor that autograd would keep.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memkit._tape.plan import ForwardCounts
from memkit._tape.tape import (
    PlannedForward,
    SavedKind,
    Storages,
    View,
    are_counts,
    counts,
    is_plain,
    is_random,
    leaves_unfilled,
    operator_name,
    repeats,
    selects_by_values,
    shape_only_argument,
    tensors_in,
    without_statistics,
    written_arguments,
)
from memkit._torch.dispatch import LeanDispatchMode
from memkit._torch.graph import current_backward, saving_hooks
from memkit._torch.tensors import version_of

_NO_BACKWARD = -1


@dataclass(slots=True)
class OperatorNote:
    """An operator of the forward.

    Attributes:
        name: Its name.
        seconds: Its time.
        flops: Its floating point operations, as torch counts them.
        repeats: Whether it may run again.
        is_random: Whether it draws random numbers.
        is_shape_only: Whether it saves an argument of which backward reads the shape alone.
        begin: Moment at which it begins.
        end: Moment at which it has made its results.
        scratch_bytes: Bytes that it takes inside, beside its results.
        sources: The values that it needs.
        makes: The values whose storages it makes.
        changes: The values that it changes in place.
    """

    name: str
    seconds: float
    flops: int
    repeats: bool
    is_random: bool
    is_shape_only: bool = False
    begin: int = 0
    end: int = 0
    scratch_bytes: int = 0
    sources: list[ValueNote] = field(default_factory=list)
    makes: list[ValueNote] = field(default_factory=list)
    changes: list[ValueNote] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ValueNote:
    """The content of a storage that an operator of the forward made.

    Attributes:
        number: Its number, in the order of the forward.
        nbytes: Bytes of the storage.
        makers: Numbers of the operators that made and changed it.
        death: Moment by which the forward has let go of it.
        is_saved: Whether autograd saves it for a backward that needs more than its shape. A graph may die before: that
            of scores, if the forward only looks for the highest ones.
        is_saved_for_shape: Whether autograd saves it where backward reads the shape alone.
        first_use: Moment at which backward first needs it.
        readers: Operators that have read it since it last changed.
        is_filled: Whether it has content yet.
    """

    number: int
    nbytes: int
    makers: list[int]
    death: int | None = None
    is_saved: bool = False
    is_saved_for_shape: bool = False
    first_use: int | None = None
    readers: list[OperatorNote] = field(default_factory=list)
    is_filled: bool = True


@dataclass(frozen=True, slots=True)
class SaveNote:
    """A tensor that autograd saves.

    Attributes:
        kind: Its kind, as text.
        value: What it shows; None for parameters and inputs.
        num_operators: Number of operators by then.
        is_filled: Whether it has content by then.
        is_in_backward: Whether a backward inside of the forward saves it.
    """

    kind: str
    value: ValueNote | None
    num_operators: int = 0
    is_filled: bool = True
    is_in_backward: bool = False


class ForwardNotes(LeanDispatchMode):
    """Takes notes on one forward and its backward, in a simulation.

    Args:
        clock: Returns the moment, as a number that grows.
        seconds: Returns the time of an operator: ``seconds(func, args, kwargs, out)``.
        flops: Returns its floating point operations, likewise.

    Attributes:
        operators: The operators of the forward.
        values: The storages that they made.
        saves: What autograd saves, in order.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        clock: Callable[[], int],
        seconds: Callable[[Any, Any, Any, Any], float],
        flops: Callable[[Any, Any, Any, Any], int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[OperatorNote] = []
        self.values: list[ValueNote] = []
        self.saves: list[SaveNote] = []
        self._clock, self._seconds, self._flops = clock, seconds, flops
        self._storages: Storages[ValueNote] = Storages()
        self._fresh: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # of values that backward has asked for
        self._from_outside: list[tuple[weakref.ref[Tensor], int, OperatorNote]] = []
        self._packed: list[weakref.ref[_Dropped]] = []
        self._is_packing = False
        self._latest: list[_Dropped] = []  # what was packed since the last operator

    @property
    def saved_bytes(self) -> int:
        """All bytes of the operators' results that autograd saves."""
        return sum(each.nbytes for each in self.values if each.is_saved)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Take notes on a forward within the block; on its backward, whenever that runs."""
        with self, saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._latest.clear()
        for packed in (each() for each in self._packed):
            if packed is not None and not packed.is_shape_only:
                packed.value.is_saved = True
        for given, version, operator in self._from_outside:
            tensor = given()
            if tensor is not None and version_of(tensor) != version:  # changed by the forward: it cannot be had again
                operator.repeats = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_packing or not counts(func) or current_backward() != _NO_BACKWARD:
            return func(*args, **kwargs)
        may_repeat = repeats(func) and not selects_by_values(func, args)
        note = OperatorNote(operator_name(func), 0.0, 0, may_repeat, is_random(func, args, kwargs))
        self._note_shape_only(note, shape_only_argument(func, args))
        self._note_sources(note, without_statistics(func, args), kwargs)
        number = len(self.operators)
        self.operators.append(note)
        note.changes = [each for each in map(self._storages.find, written_arguments(func, args, kwargs)) if each]
        for value in note.changes:
            value.makers.append(number)
            value.is_filled = True
            for reader in value.readers:  # what they have read is gone then
                reader.repeats = reader.repeats and reader is note
            value.readers = []
        given = {id(each.untyped_storage()) for each in tensors_in((args, kwargs)) if is_plain(each)}
        note.begin = self._clock()
        out = func(*args, **kwargs)
        note.end = self._clock()
        note.seconds, note.flops = self._seconds(func, args, kwargs, out), self._flops(func, args, kwargs, out)
        for tensor in tensors_in(out):
            if not is_plain(tensor):
                note.repeats = False
            elif are_counts(tensor):
                continue
            elif id(tensor.untyped_storage()) not in given and self._storages.find(tensor) is None:
                self._note_value(tensor, number, note).is_filled = not leaves_unfilled(func)
        return out

    def _note_sources(self, note: OperatorNote, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in tensors_in((args, kwargs)):
            value = self._storages.find(tensor)
            if value is not None:
                note.sources.append(value)
                value.readers.append(note)
            elif is_plain(tensor):
                self._from_outside.append((weakref.ref(tensor), version_of(tensor), note))
            else:
                note.repeats = False

    def _note_shape_only(self, note: OperatorNote, tensor: Tensor | None) -> None:
        """Note that a tensor, packed right before, is needed for its shape alone."""
        value = None if tensor is None else self._storages.find(tensor)
        for packed in reversed(self._latest):
            if packed.value is value:
                packed.is_shape_only = note.is_shape_only = packed.value.is_saved_for_shape = True
                break
        self._latest.clear()

    def _note_value(self, tensor: Tensor, number: int, note: OperatorNote) -> ValueNote:
        value = ValueNote(len(self.values), tensor.untyped_storage().nbytes(), [number])
        self.values.append(value)
        note.makes.append(value)
        return self._storages.learn(tensor, value, self._note_death)

    def _note_death(self, value: ValueNote) -> None:
        value.death = self._clock() + 1  # the recorder hears of it next

    def _pack(self, tensor: Tensor) -> Any:
        value = self._storages.find(tensor)
        self.saves.append(
            SaveNote(
                str(SavedKind(tensor.is_floating_point(), tensor.dim())),
                value,
                len(self.operators),
                is_filled=value is None or value.is_filled,
                is_in_backward=current_backward() != _NO_BACKWARD,
            )
        )
        if value is None:
            self._is_packing = True
            try:
                return tensor.detach()
            finally:
                self._is_packing = False
        packed = _Dropped(value, View.of(tensor))
        self._latest.append(packed)
        self._packed.append(weakref.ref(packed))
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Dropped):
            return packed  # type: ignore[no-any-return]  # a tensor from outside
        if packed.is_shape_only:
            return packed.view.stand_in()
        value = packed.value
        value.is_saved = True  # for a backward inside of the forward
        if value.first_use is None:
            value.first_use = self._clock()
        known = self._fresh.get(value.number)
        storage = None if known is None else known()
        if storage is None:
            storage = torch.empty(value.nbytes, dtype=torch.uint8, device=packed.view.device).untyped_storage()
            self._fresh[value.number] = weakref.ref(storage)
        return packed.view.on(storage)


@contextmanager
def noting_calls(noted: list[ForwardCounts]) -> Iterator[None]:
    """Note what the forward under a plan that ends with the block has run or saved."""
    yield
    hooks = saving_hooks()
    forward = None if hooks is None else getattr(inspect.unwrap(hooks[0]), "__self__", None)
    if isinstance(forward, PlannedForward):
        noted.append(frozenset(forward.counts().items()))


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Dropped:
    """Placeholder for a saved tensor until backward needs it."""

    value: ValueNote
    view: View
    is_shape_only: bool = False
