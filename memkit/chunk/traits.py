"""Traits of a function: the modes, plain attributes and children of its modules, and its other arguments.

The results of its checks (that it keeps rows apart, how far it sees, how much memory it takes) hold for as long as its
traits stay the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from argparse import Namespace
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memkit._core.attributes import attributes_of
from memkit._torch.modules import MACHINERY, buffers_of, children_of, parameters_of
from memkit.chunk.held import searched, variables_of

_WORDS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_MOST_ITEMS, _DEPTH = 32, 3  # of a list or dict that is looked into
_MODE = "training"
_NONE = object()

_MOST_VALUES = 16  # of one attribute, such as the number of the step, that a loop sets; then it is left out

_Names = weakref.WeakKeyDictionary[Any, set[str]]
# Names of attributes and variables by their owner: those that calls change themselves, and those that had many values.
_MOVED, _COUNTING = _Names(), _Names()
_LAST: weakref.WeakKeyDictionary[Any, dict[str, Hashable]] = weakref.WeakKeyDictionary()
_VALUES: weakref.WeakKeyDictionary[Any, dict[str, set[Hashable]]] = weakref.WeakKeyDictionary()


def traits_of(fn: object, others: Iterable[object] = (), *, with_counting: bool = False) -> Hashable:
    """Return what decides how a function works, without references to its modules.

    These are the modules that it uses, with their children, modes, and attributes that are numbers, text, or small
    containers of these, and the shapes of tensors; the same of its variables and its bound arguments. What runs for
    inspection were seen to change is left out (see `Moving`): counters, caches.

    Args:
        fn: The function.
        others: Arguments that it is called with, besides tensors.
        with_counting: Whether to include attributes that had many values already, such as the number of the step.
    """
    found: list[Any] = []
    left_out = [each for each in ((_MOVED,) if with_counting else (_MOVED, _COUNTING)) if each]
    for owner, values in _owners(fn):
        names, words = _plain(owner, values, left_out)
        found += (id(owner), type(owner), names, *words)
        if isinstance(owner, nn.Module):
            members = *parameters_of(owner).values(), *buffers_of(owner).values()
            found += [None if each is None or is_lazy(each) else each.shape for each in members]
    return (*found, *map(plain, others))


class Moving:
    """Learns what calls of a function change themselves: create it before calls for inspection, `note` it after each.

    It also learns what a loop sets to ever other values, since each of them leads to calls for inspection.

    Args:
        fn: The function.
    """

    def __init__(self, fn: object) -> None:
        self._fn = fn
        self._before = self._now()
        for owner, words in self._before:
            last = _LAST.get(owner, words)
            _LAST[owner] = words
            for name in _differing(last, words) - _COUNTING.get(owner, set()):
                values = _VALUES.setdefault(owner, {}).setdefault(name, {last.get(name)})
                values.add(words.get(name))
                if len(values) >= _MOST_VALUES:
                    _COUNTING.setdefault(owner, set()).add(name)

    def _now(self) -> list[tuple[Any, dict[str, Hashable]]]:
        return [
            (owner, dict(zip(*_plain(owner, values, [_MOVED]), strict=True))) for owner, values in _owners(self._fn)
        ]

    def note(self) -> None:
        """Leave out, from now on, what differs from before the calls; but no mode, which the user may change too."""
        now = {id(owner): after for owner, after in self._now()}
        for owner, before in self._before:
            if names := _differing(before, now.get(id(owner), before)):
                _MOVED.setdefault(owner, set()).update(names)


@contextlib.contextmanager
def spared(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block of calls that count nothing a second time: put numbers back that calls are known to change."""
    kept = [
        (own, name, own[name])
        for each in (modules if _MOVED else ())
        for own in (vars(each),)
        for name in _MOVED.get(each, ())
        if type(own.get(name, _NONE)) in _WORDS
    ]
    try:
        yield
    finally:
        for own, name, value in kept:
            own[name] = value


def _differing(before: dict[str, Hashable], after: dict[str, Hashable]) -> set[str]:
    """Return the names whose values differ, except modes: both a forward and the user may set these."""
    if before == after:
        return set()
    return {name for name in {*before, *after} if name != _MODE and before.get(name, _NONE) != after.get(name, _NONE)}


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Return a number or text, also within small containers and settings; of anything else its type."""
    kind: Any = type(value)
    if kind in _WORDS or isinstance(value, Enum | np.generic):
        return value
    if isinstance(value, FunctionType):
        return id(value.__code__)
    if kind is BuiltinFunctionType:
        return id(value)
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return kind, value.shape
    if depth and isinstance(value, tuple | list | dict) and len(value) <= _MOST_ITEMS:
        items = (*value, *value.values()) if isinstance(value, dict) else value
        return (kind, *[plain(each, depth - 1) for each in items])
    if depth and (is_dataclass(kind) or isinstance(value, SimpleNamespace | Namespace)):
        return plain(attributes_of(value), depth)
    return kind


def _owners(fn: object) -> Iterator[tuple[Any, Mapping[str, object]]]:
    """Yield what decides how a function works: modules with their attributes, the code of functions with its variables.

    Also the classes of other objects, with an object's attributes: a loop may make these anew for each call.
    """
    if isinstance(fn, nn.Module):  # the usual case, without a search
        yield from _tree(fn)
        return
    reached = searched(fn)
    codes = frozenset(each.__code__ for each in reached if inspect.isfunction(each))
    others = [each for each in reached if not isinstance(each, nn.Module | FunctionType | functools.partial)]
    names = _names_in(codes, frozenset(map(type, others)))
    for each in reached:
        if isinstance(each, nn.Module):
            yield from _tree(each)
        elif inspect.isfunction(each):
            yield each.__code__, _with_settings(variables_of(each), each.__code__.co_names)
        elif isinstance(each, functools.partial):
            bound = {str(place): value for place, value in enumerate(each.args)}
            yield getattr(each.func, "__code__", type(each.func)), {**each.keywords, **bound}
        else:  # of an object, what is named: it may hold anything else, such as the number of the step
            yield type(each), {name: value for name, value in attributes_of(each).items() if name in names}


@functools.lru_cache(256)
def _names_in(codes: frozenset[CodeType], kinds: frozenset[type]) -> frozenset[str]:
    """Return the names in the code of functions, and in that of the methods of some classes that they name."""
    calls = [inspect.getattr_static(kind, "__call__", None) for kind in kinds]
    queue = [*codes, *(each.__code__ for each in calls if inspect.isfunction(each))]
    names, seen = set[str](), set[CodeType]()
    while queue:
        code = queue.pop()
        if code in seen:
            continue
        seen.add(code)
        names.update(code.co_names)
        members = [inspect.getattr_static(kind, name, None) for kind in kinds for name in code.co_names]
        functions = [each.fget if isinstance(each, property) else each for each in members]
        queue += [each.__code__ for each in functions if inspect.isfunction(each)]
        queue += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(names)


def _tree(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, object]]]:
    queue, seen, settings = [module], set[int](), dict[type, dict[str, object]]()
    while queue:
        each = queue.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if kind not in settings:
            settings[kind] = _settings_of(kind)
        yield each, settings[kind] | vars(each) if settings[kind] else vars(each)
        if children_of(each):
            queue += [child for child in children_of(each).values() if child is not None]


def _with_settings(variables: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Return a function's variables, and the settings of classes and files that it may read, such as ``CFG.center``."""
    found = dict(variables)
    for name, value in variables.items():
        if isinstance(value, type | ModuleType):
            found |= {f"{name}.{each}": word for each, word in _words_in(value, names).items()}
    return found


def _words_in(owner: type | ModuleType, names: Iterable[str]) -> dict[str, object]:
    """Return the numbers and texts of these names in a class or a file; no attribute is computed for it."""
    spaces = [vars(base) for base in reversed(owner.__mro__)] if isinstance(owner, type) else [vars(owner)]
    return {each: space[each] for space in spaces for each in names if type(space.get(each, _NONE)) in _WORDS}


def _settings_of(kind: type) -> dict[str, object]:
    """Return the settings that the forward of a module's class may read: of the class, of others, of files."""
    forward = _forward_of(kind)
    if forward is None:
        return {}
    names = forward.__code__.co_names
    variables = {name: forward.__globals__[name] for name in names if name in forward.__globals__}
    return _with_settings(variables, names) | _words_in(kind, names)


@functools.lru_cache(256)
def _forward_of(kind: type) -> FunctionType | None:
    """Return the forward of a module's class, if it is not one of torch's own."""
    forward = getattr(kind, "forward", None)
    return forward if isinstance(forward, FunctionType) and not str(forward.__module__).startswith("torch.") else None


def _plain(
    owner: object, values: Mapping[str, object], left_out: Iterable[_Names]
) -> tuple[tuple[str, ...], list[Hashable]]:
    names = _own_names((*values,))
    for names_of in left_out:
        if some := names_of.get(owner):
            names = tuple(name for name in names if name not in some)
    return names, [each if type(each := values[name]) in _WORDS else plain(each) for name in names]


@functools.lru_cache(4096)
def _own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out what every module has, which is most."""
    return tuple(name for name in names if name not in MACHINERY)
