"""The product that a forward ends with, which its repetitions need not compute if no backward reads it.

A linear layer saves its input, not its result: when a forward runs again for its backward alone, a last linear layer is
work for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memkit._tape.kept import is_kept, terms
from memkit._tape.references import Counts, Run, references, references_if_unread
from memkit._tape.tape import is_plain
from memkit._torch.dispatch import LeanDispatchMode, current_modes
from memkit._torch.modules import is_compiled
from memkit._torch.operators import is_query
from memkit._torch.tensors import storage_key

_LEAST_MULTIPLICATIONS = 2**23  # measured on a CPU: a smaller product takes hardly longer than the code here


class UnreadEnd:
    """Learns from one forward whether it ends with a product that is an output and that no backward reads.

    Such a result is recognized by its references: the graph, or an object of the user's, would add to them. Where these
    cannot be told apart, none is left out.

    Repetitions put NaN in its place. They may run other operators than the first forward: once another one follows, or
    something refers to the result, it is computed after all.

    Args:
        modules: Modules that the forward calls. A repetition sees operators only from the last one's call on, because
            each that Python sees takes longer.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._end: _End | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is something to leave out."""
        return self._end is not None

    def first(self, run: Run, num_rows: int) -> list[Tensor]:
        """Run the first forward, which builds a graph.

        Args:
            run: The forward.
            num_rows: Rows of its outputs.

        Returns:
            Its outputs.
        """
        self._end = None
        modules = [child for module in self._modules for child in module.modules()]
        if any(is_compiled(each) for each in modules):  # it would be compiled again, for the hook on a module
            return run()
        mode = _Noting()
        # Scripted modules take no hooks.
        hookable = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
        with mode, _watching(hookable, mode.enter):
            outputs = run()
        if mode.storage is None or mode.num_multiplications < _LEAST_MULTIPLICATIONS:
            return outputs
        key = storage_key(mode.storage)
        for place in range(len(outputs)):  # a loop over the tensors would refer to them
            if storage_key(outputs[place].untyped_storage()) != key:
                continue
            if references(outputs, place) == _references_if_unread():
                self._end = mode.end(num_rows, outputs[place].detach())
        return outputs

    def again(self, run: Run, num_rows: int) -> list[Tensor]:
        """Run a repetition without the last product.

        Args:
            run: The forward, with a graph.
            num_rows: Rows of its outputs.

        Returns:
            Its outputs, of which one then is NaN.
        """
        assert self._end is not None  # noqa: S101 - `is_known`
        mode = _LeavingOut(self._end, num_rows)
        outputs = mode.run(run)
        if mode.stand_in is not None and not _is_unread_again(outputs, mode):
            mode.compute()
        return outputs


class _Call(NamedTuple):
    """A product among others, by what it gets besides values.

    A count would not do: autocast casts weights in one forward, and remembers them in the next.

    Attributes:
        func: The operator.
        given: Its arguments; of tensors their sizes and dtypes.
    """

    func: Any
    given: list[Any]

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        """Describe an operator's arguments, without referring to a tensor."""
        return cls(func, [_described(each) for each in (*args, *kwargs.values())])

    def is_as(self, first: _Call, num_rows: int, num_first_rows: int) -> bool:
        """Return whether this is the same product as in the first forward, for another number of rows."""
        if self.func is not first.func or len(self.given) != len(first.given):
            return False
        return all(
            now == then or (_is_shape(now, then) and _is_same_shape(now[1:], then[1:], num_rows, num_first_rows))
            for now, then in zip(self.given, first.given, strict=True)
        )


def _described(argument: Any) -> Any:
    return (argument.dtype, *argument.shape) if isinstance(argument, Tensor) else argument


def _is_shape(now: Any, then: Any) -> bool:
    return isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then) and now[0] == then[0]


def _is_same_shape(now: Sequence[int], then: Sequence[int], num_rows: int, num_first_rows: int) -> bool:
    return all(a == b or (a == num_rows and b == num_first_rows) for a, b in zip(now, then, strict=True))


class _Place(NamedTuple):
    """A module's call, the how manieth of its own."""

    module: nn.Module
    number: int


class _End(NamedTuple):
    """The product to leave out.

    Attributes:
        call: Its arguments in the first forward.
        number: The how manieth it is with such arguments since the call of the last module.
        place: That call; None if there is no module.
        num_rows: Rows of the first forward.
        result: Its result without rows.
    """

    call: _Call
    number: int
    place: _Place | None
    num_rows: int
    result: Tensor


class _Watching(LeanDispatchMode):
    """Sees the operators of a forward."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the block run compiled, as torch's own selective checkpoint does."""
        return True


class _Noting(_Watching):
    """Notes products, and holds the storage that the last operator has made.

    Attributes:
        storage: Of the last product's result; None if other operators follow it.
        num_multiplications: Work of the last product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storage: torch.UntypedStorage | None = None
        self.num_multiplications = 0.0
        self._numbers: dict[nn.Module, int] = {}
        self._place: _Place | None = None
        self._calls: list[_Call] = []  # since then

    def enter(self, module: nn.Module) -> None:
        """Note the call of a module."""
        number = self._numbers[module] = self._numbers.get(module, 0) + 1
        self._place, self._calls = _Place(module, number), []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_query(func):
            return func(*args, **(kwargs or {}))
        self.storage, kwargs = None, kwargs or {}
        out = func(*args, **kwargs)
        if is_kept(func, args, kwargs) and isinstance(out, Tensor) and is_plain(out):
            self._calls.append(_Call.of(func, args, kwargs))
            self.storage, self.num_multiplications = out.untyped_storage(), out.numel() * terms(func, args)
        return out

    def end(self, num_rows: int, result: Tensor) -> _End:
        """Describe the last product."""
        call = self._calls[-1]
        number = sum(each.is_as(call, num_rows, num_rows) for each in self._calls)
        return _End(call, number, self._place, num_rows, result.new_empty(0, *result.shape[1:]))


class _LeavingOut(_Watching):
    """Gives NaN for the result of one product, until another operator follows.

    Attributes:
        stand_in: The tensor given for the result; None if it was computed.
    """

    def __init__(self, end: _End, num_rows: int) -> None:
        super().__init__()
        self._end, self._num_rows, self._count = end, num_rows, 0
        self._num_calls, self._num_modes, self._thread, self._is_entered = 0, 0, 0, False
        self._product: Callable[[], Tensor] | None = None
        self.stand_in: Tensor | None = None

    def run(self, forward: Run) -> list[Tensor]:
        """Run a forward, and see its operators from the call of the last module on."""
        place, self._thread, self._num_modes = self._end.place, threading.get_ident(), len(current_modes())
        if place is None:
            with self:
                return forward()
        # No contexts: they would take as long as the rest.
        handle = place.module.register_forward_pre_hook(self._enter)
        try:
            return forward()
        finally:
            handle.remove()
            if self._is_entered:
                self.__exit__(None, None, None)

    def _enter(self, module: nn.Module, _: Any) -> None:  # noqa: ARG002 - torch's signature
        if threading.get_ident() != self._thread:  # others may use the module, too
            return
        self._num_calls += 1
        assert self._end.place is not None  # noqa: S101 - the hook is there
        # A mode that the function has entered would be left before this one.
        if self._num_calls == self._end.place.number and len(current_modes()) == self._num_modes:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.stand_in is not None and not is_query(func):
            self.compute()
        if func is self._end.call.func and self._is_such(_Call.of(func, args, kwargs)):
            self._count += 1
            if self._count == self._end.number:
                self._product = functools.partial(func, *args, **kwargs)
                nan = self._end.result.new_full((), math.nan)
                self.stand_in = nan.expand(self._num_rows, *self._end.result.shape[1:])
                return self.stand_in
        return func(*args, **kwargs)

    def _is_such(self, call: _Call) -> bool:
        return call.is_as(self._end.call, self._num_rows, self._end.num_rows)

    def compute(self) -> None:
        """Compute the result after all, into the tensor that was given for it."""
        product, stand_in = self._product, self.stand_in
        self._product = self.stand_in = None
        assert product is not None and stand_in is not None  # noqa: S101, PT018 - both are there, or none
        with torch.no_grad():
            stand_in.data = product()  # the tensor itself is in graphs already


@contextlib.contextmanager
def _watching(modules: Sequence[nn.Module], enter: Callable[[nn.Module], None]) -> Iterator[None]:
    """Tell of this thread's calls of modules in the block."""
    thread = threading.get_ident()

    def tell(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            enter(module)

    handles = [each.register_forward_pre_hook(tell) for each in modules]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _is_unread_again(outputs: list[Tensor], mode: _LeavingOut) -> bool:
    assert mode.stand_in is not None  # noqa: S101 - asked only then
    key = storage_key(mode.stand_in.untyped_storage())
    return any(
        references(outputs, place) == _references_if_unread_again()
        for place in range(len(outputs))
        if storage_key(outputs[place].untyped_storage()) == key
    )


@functools.cache
def _references_if_unread() -> Counts | None:
    """Return the references to an unread output while `_Noting` holds its storage."""
    return references_if_unread(lambda run: _watched(_Noting(), run))


@functools.cache
def _references_if_unread_again() -> Counts | None:
    """Return the references to an unread output that `_LeavingOut` holds, too."""

    def watch(run: Run) -> tuple[object, list[Tensor]]:
        noting = _Noting()
        _, outputs = _watched(noting, run)
        return _watched(_LeavingOut(noting.end(1, outputs[0].detach()), 1), run)

    return references_if_unread(watch)


def _watched(mode: _Watching, run: Run) -> tuple[object, list[Tensor]]:
    with mode:
        outputs = run()
    return mode, outputs
