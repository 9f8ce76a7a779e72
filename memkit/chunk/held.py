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
_WITHOUT = (types.ModuleType, Tensor, str, bytes, int, float, complex, type(None))  # nothing to look for


def modules_of(fn: object) -> list[nn.Module]:
    """Return the modules a function uses: itself, a method's owner, those in a partial or named by its code."""
    return [each for each in held_by(fn) if isinstance(each, nn.Module)]


def held_by(fn: object) -> list[nn.Module | Any]:
    """Return the modules and generators that a function may use; not the children of modules, nor what they hold.

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
        if isinstance(each, _WANTED):
            found.append(each)
        elif isinstance(each, functools.partial):
            queue += [each.func, *pytree.tree_leaves((each.args, each.keywords))]
        elif inspect.ismethod(each):
            queue += [each.__self__, each.__func__]
        elif inspect.isfunction(each):
            queue += _named(each)
        elif isinstance(each, _CONTAINERS):
            queue += _items(each, _WANTED)
        elif not isinstance(each, _WITHOUT):
            queue += _items(attributes_of(each), (*_WANTED, *_CONTAINERS))
    return found


def _named(function: Any) -> list[object]:
    """Return what a function's code names; functions only from its own file."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    with contextlib.suppress(ValueError):  # a variable without a value yet
        variables = inspect.getclosurevars(function)
        values = [*variables.nonlocals.values(), *variables.globals.values(), *defaults]
        near = [each for each in values if getattr(each, "__globals__", None) is function.__globals__]
        return [*near, *(each for each in values if not isinstance(each, types.FunctionType | type))]
    return defaults


def _items(container: Any, kinds: tuple[type, ...]) -> Iterable[object]:
    values = container.values() if isinstance(container, dict) else container
    return [each for each in values if isinstance(each, kinds)] if len(container) <= _MAX_ITEMS else ()
