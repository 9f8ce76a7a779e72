"""Which loss function this is: a loop may make its function anew in each step, and may change what it is made from."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from memkit._core.recent import keep_newest

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
SWITCHES = (type(None), bool, str)
LossParts: TypeAlias = tuple[tuple[object, ...], list[object], list[object]]
_FUNCTIONS = (types.FunctionType, functools.partial)
_MOST_VALUES = 4  # of a variable, before it counts as one that changes all the time: a step, an annealed weight


class LossKinds:
    """Tells loss functions apart: by their lines, and by the values and objects that they are made from.

    From its fifth value on, a variable counts as one that changes all the time, as a step's number does, or a criterion
    that is made anew in each step: then its values make no other kinds.

    Attributes:
        pools_objects: Whether the last loss has objects that are not told apart any more.
    """

    def __init__(self) -> None:
        self.pools_objects = False
        self._values: dict[object, list[set[object]]] = {}  # of each variable, by the lines of the loss

    def kind_of(self, loss_fn: object) -> tuple[object, ...]:
        """Return what this loss function has in common with others of its kind."""
        lines, objects, values = parts_of_loss(loss_fn)
        seen = self._values.get(lines)
        if seen is None:
            seen = [set[object]() for _ in (*objects, *values)]
            keep_newest(self._values, lines, seen)
        kind: list[object] = [lines]
        for before, value in zip(seen, (*objects, *values), strict=True):
            if len(before) <= _MOST_VALUES:
                before.add(value)
            kind.append(value if len(before) <= _MOST_VALUES else ...)
        self.pools_objects = ... in kind[1 : 1 + len(objects)]
        return tuple(kind)


def parts_of_loss(loss_fn: object) -> LossParts:
    """Return what a loss function is made from, in an order that its lines give.

    Returns:
        Its lines: the code of its functions, and the types of all else that they hold.
        Criteria and other objects among these, by weak references.
        Numbers, texts, None and the like, in variables, defaults and arguments; of the attributes of objects only
        those that look like a switch, since a number there may be a count.
    """
    lines: list[object] = []
    objects: list[object] = []
    values: list[object] = []
    held, seen = [loss_fn], set[int]()
    for each in held:  # which grows
        lines.append(type(each))
        if isinstance(each, _PLAIN):
            values.append(each)
        elif callable(each) and not isinstance(each, torch.Tensor) and id(each) not in seen:  # it may hold itself
            seen.add(id(each))
            held += _in_function(each, lines) if isinstance(each, _FUNCTIONS) else _in_object(each, lines, objects)
    return tuple(lines), objects, values


def key_of_loss(loss_fn: object) -> object:
    """Return what a loss function has in common with those of other steps that are made by the same lines.

    Those lines may be given another criterion. So the objects that it is made from count, and the types of all else.
    """
    lines, objects, _ = parts_of_loss(loss_fn)
    return lines, *objects


def _in_function(fn: types.FunctionType | functools.partial[Any], lines: list[object]) -> Iterable[object]:
    """Note the code of a function, and return what it holds."""
    if isinstance(fn, functools.partial):
        lines.append((len(fn.args), *fn.keywords))
        return fn.func, *fn.args, *fn.keywords.values()
    lines.append(fn.__code__)
    held = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a variable without a value yet
            held.append(None)
    return held


def _in_object(value: Any, lines: list[object], objects: list[object]) -> Iterable[object]:
    """Note an object, or that of a bound method, and return the attributes that look like a switch."""
    if isinstance(value, types.MethodType):
        lines += type(value.__self__), getattr(value.__func__, "__code__", None)
        value = value.__self__
    try:
        reference = weakref.ref(value)
        hash(reference)  # while the object is there
        objects.append(reference)
    except TypeError:  # an object with slots, or without a hash
        lines.append(None)
    names: list[str] = []
    switches: list[object] = []
    if not isinstance(value, type):
        for name, each in getattr(value, "__dict__", {}).items():
            if isinstance(each, SWITCHES):
                names.append(name)
                switches.append(each)
    lines.append(tuple(names))
    return switches
