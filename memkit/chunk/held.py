"""Modules and random generators that a function may use."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from memkit._core.attributes import attributes_of
from memkit._machine.random_state import GENERATORS
from memkit._torch import pytree

_WANTED = (nn.Module, *GENERATORS)
_CONTAINERS = (list, tuple, dict)
_MAX_ITEMS = 4096  # of a list or dict that is searched
_WITHOUT = (types.ModuleType, Tensor, str, bytes, int, float, complex, type, type(None))  # nothing to look for


def modules_of(fn: object) -> list[nn.Module]:
    """Return the modules a function uses: itself, a method's owner, those in a partial or named by its code."""
    return [each for each in held_by(fn) if isinstance(each, nn.Module)]


def held_by(fn: object) -> list[nn.Module | Any]:
    """Return the modules and generators that a function may use; not the children of modules, nor what they hold."""
    return [each for each in searched(fn) if isinstance(each, _WANTED)]


def searched(fn: object) -> list[Any]:
    """Return what a function may use: modules and generators, without what they hold, functions and other objects.

    It is searched for what its code names: variables outside, defaults, functions of its own file, and what lists,
    dicts and other objects there hold.
    """
    found: list[object] = []
    queue, seen = [fn], dict[int, object]()
    while queue:
        each = queue.pop(0)
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, _WITHOUT):
            continue
        if inspect.ismethod(each):
            queue += [each.__self__, each.__func__]
            continue
        found.append(each)
        if isinstance(each, functools.partial):
            queue += [each.func, *pytree.tree_leaves((each.args, each.keywords))]
        elif inspect.isfunction(each):
            queue += _named(each)
        elif isinstance(each, _CONTAINERS):
            queue += _items(each, _WANTED)
        elif not isinstance(each, _WANTED):
            queue += _items(attributes_of(each), (*_WANTED, *_CONTAINERS))
    return found


def _named(function: Any) -> list[object]:
    """Return what a function's code names; functions only from its own file."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values = [*variables_of(function).values(), *defaults]
    near = [each for each in values if getattr(each, "__globals__", None) is function.__globals__]
    return [*near, *(each for each in values if not isinstance(each, types.FunctionType | type))]


def variables_of(function: Any) -> dict[str, Any]:
    """Return the variables outside of a function that its code names; none while one of them has no value yet."""
    with contextlib.suppress(ValueError):
        variables = inspect.getclosurevars(function)
        return {**variables.globals, **variables.nonlocals}
    return {}


def _items(container: Any, kinds: tuple[type, ...]) -> Iterable[object]:
    values = container.values() if isinstance(container, dict) else container
    return [each for each in values if isinstance(each, kinds)] if len(container) <= _MAX_ITEMS else ()
