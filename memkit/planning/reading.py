"""Where code reads numbers from tensors without data, and which of them are known all the same."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch

from memkit._torch import aten
from memkit._torch.dispatch import no_dispatch
from memkit._torch.fake import FakeTensor
from memkit.planning.guesses import Guesses, plain_number

_aten = torch.ops.aten
_KNOWN = "known_value"  # an attribute of tensors whose numbers are all the same, and known

# ----------------------------------------------------------------------------------- whether numbers are finite
#
# Code asks whether numbers are NaN or infinite to stop a training that has failed. What is simulated has not failed.

_IS_FINITE = {_aten.isnan.default: 0, _aten.isinf.default: 0, _aten.isposinf.default: 0, _aten.isneginf.default: 0}
_COMPARED = {_aten.eq.Tensor: 1, _aten.ne.Tensor: 0}  # with itself: what only NaN is not equal to
_WITH_INFINITY = {_aten.eq.Scalar: 0, _aten.ne.Scalar: 1}
_NEGATED = {_aten.logical_not.default, _aten.bitwise_not.default}
_SUMMED = {_aten.sum.default, _aten.count_nonzero.default}
_OR = {_aten.logical_or.default, _aten.bitwise_or.Tensor, _aten.maximum.default}
_AND = {_aten.logical_and.default, _aten.bitwise_and.Tensor, _aten.minimum.default, _aten.mul.Tensor}
_KEPT = {
    aten.is_any_true, aten.is_all_true,  # what anomaly detection asks
    _aten.any.default, _aten.any.dim, _aten.any.dims, _aten.all.default, _aten.all.dim, _aten.all.dims,
    _aten.max.default, _aten.min.default, _aten.amax.default, _aten.amin.default, _aten.mean.default,
    aten.to_copy, _aten.clone.default, _aten.detach.default, _aten.alias.default,
    _aten.view.default, _aten.expand.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.unsqueeze.default, _aten.select.int, _aten.slice.Tensor, _aten.t.default, _aten.transpose.int,
}  # fmt: skip


def note_known(func: Any, args: Sequence[Any], out: Any) -> None:
    """Remember of what an operator made that it is known, if all numbers are finite."""
    if isinstance(out, FakeTensor):
        value = _value(func, args)
        if value is not None:
            setattr(out, _KNOWN, value)


def _value(func: Any, args: Sequence[Any]) -> float | None:
    if func in _IS_FINITE:
        return _IS_FINITE[func]
    if func in _COMPARED:
        return _COMPARED[func] if args[0] is args[1] else None
    if func in _WITH_INFINITY:
        return _WITH_INFINITY[func] if isinstance(args[1], float) and math.isinf(args[1]) else None
    known: list[float] = [value for value in map(known_value, args[:2]) if value is not None]
    if not known:
        return None
    if func in _NEGATED:
        return float(not known[0])
    if func in _SUMMED:
        return known[0] * int(args[0].numel())
    if func in _OR or func in _AND:
        decides = max(known) == 1 if func in _OR else min(known) == 0
        both = max(known) if func in _OR else min(known)
        return both if decides or len(known) > 1 else None
    return known[0] if func in _KEPT else None


def known_value(tensor: Any) -> float | None:
    """The number that all elements of a tensor are, where it is known."""
    return getattr(tensor, _KNOWN, None) if isinstance(tensor, FakeTensor) else None


# -------------------------------------------------------------------------------------- methods that read numbers


def _guesses_of(tensor: Any) -> Guesses | None:
    """Whose guess a tensor's numbers are; None where it has data, or is out of use."""
    mode = tensor.fake_mode
    guesses = getattr(mode, "guesses", None)
    is_guessed = isinstance(guesses, Guesses) and tensor.constant is None and mode.is_open
    return guesses if is_guessed else None


def _answered(guesses: Guesses, tensor: Any, kind: Callable[[Any], Any], guess: Callable[[], Any]) -> Any:
    value = known_value(tensor)
    if value is None:
        return guess()
    guesses.finite()
    return kind(value)


def _as_dtype(dtype: torch.dtype) -> Callable[[Any], Any]:
    return bool if dtype is torch.bool else float if dtype.is_floating_point else int


def _item(guesses: Guesses, tensor: Any) -> Any:
    return _answered(guesses, tensor, _as_dtype(tensor.dtype), lambda: guesses.number(tensor.dtype))


def _truth(guesses: Guesses, tensor: Any) -> bool:
    return bool(_answered(guesses, tensor, bool, guesses.truth))


def _index(guesses: Guesses, tensor: Any) -> int:
    return int(_answered(guesses, tensor, int, guesses.size))


def _number(kind: type) -> Callable[[Guesses, Any], Any]:
    return lambda guesses, tensor: _answered(guesses, tensor, kind, lambda: guesses.plain(tensor.dtype, kind))


def _of_one(answer: Callable[[Guesses, Any], Any]) -> Callable[[Any], Any]:
    """A method of tensors with one element, such as `Tensor.item`."""

    def make(original: Any) -> Any:
        @wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            guesses = _guesses_of(self)
            if guesses is None or self.numel() != 1:
                return original(self, *args, **kwargs)
            return answer(guesses, self)

        return method

    return make


def _listing(original: Any) -> Any:
    @wraps(original)
    def tolist(self: Any) -> Any:
        guesses = _guesses_of(self)
        if guesses is None:
            return original(self)
        if 0 in self.shape:
            return np.empty(self.shape).tolist()
        return _nested(_item(guesses, self), tuple(self.shape))

    return tolist


def _nested(number: Any, shape: tuple[int, ...]) -> Any:
    return [_nested(number, shape[1:]) for _ in range(shape[0])] if shape else number


def _formatting(original: Any) -> Any:
    @wraps(original)
    def shown(self: Any, specification: str) -> str:
        guesses = _guesses_of(self)
        if guesses is None or self.dim():
            return str(original(self, specification))
        return format(plain_number(_item(guesses, self)), specification)

    return shown


def _array(original: Any) -> Any:
    @wraps(original)
    def numpy(self: Any, *, force: bool = False) -> Any:
        guesses = _guesses_of(self)
        if self.is_cuda and not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with no_dispatch():
            if self.constant is not None:
                return self.constant.detach().numpy()
            if guesses is None:
                return original(self, force=force)
            return torch.full(self.shape, guesses.array(self.dtype), dtype=self.dtype, device="cpu").numpy()

    return numpy


_METHODS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (FakeTensor, "item", _of_one(_item)),
    (FakeTensor, "__bool__", _of_one(_truth)),
    (FakeTensor, "__index__", _of_one(_index)),
    (FakeTensor, "__int__", _of_one(_number(int))),
    (FakeTensor, "__float__", _of_one(_number(float))),
    (FakeTensor, "__complex__", _of_one(_number(complex))),
    (FakeTensor, "tolist", _listing),
    (FakeTensor, "numpy", _array),
    (FakeTensor, "__format__", _formatting),
)


class _Following:
    """Puts these methods in place while a block runs, of one or of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._before: list[tuple[Any, str, Any]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Answer within the block; tensors with data answer as ever."""
        with self._lock:
            self._num_blocks += 1
            for owner, name, make in _METHODS if self._num_blocks == 1 else ():
                self._before.append((owner, name, vars(owner).get(name, self)))
                setattr(owner, name, make(getattr(owner, name)))
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                while not self._num_blocks and self._before:
                    self._restore(*self._before.pop())

    def _restore(self, owner: Any, name: str, before: Any) -> None:
        if before is self:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, before)


reading = _Following()
