"""Tell steps of one kind from others: by their loss function, the modes of modules, and the parameters."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._torch.modules import children_of, parameters_of, training_flags
from memkit.train.gradients import parameters_in_order

ParameterMarks: TypeAlias = tuple[tuple[torch.Size, torch.dtype, bool], ...]

_marks_of: Callable[[Any], tuple[torch.Size, torch.dtype, bool]] = operator.attrgetter(
    "shape", "dtype", "requires_grad"
)
_is_there = functools.partial(operator.is_not, None)


def identity_of(fn: object, around: frozenset[int] = frozenset()) -> object:
    """Return a key that is stable when a loop recreates its lambda, and differs for another function.

    Args:
        fn: The function.
        around: By `id`, the functions that hold it: a function may hold itself.
    """
    inside = functools.partial(identity_of, around=around | {id(fn)})
    if id(fn) in around:
        return None
    if isinstance(fn, functools.partial):
        return inside(fn.func), tuple(inside(each) for each in (*fn.args, *fn.keywords.values()))
    if isinstance(fn, types.MethodType):
        return fn.__func__.__code__ if hasattr(fn.__func__, "__code__") else fn.__func__, id(fn.__self__)
    if isinstance(fn, types.FunctionType):
        cells = []
        for cell in fn.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # a variable without a value yet
                continue
        return fn.__code__, tuple(inside(each) for each in cells if callable(each))
    return (type(fn), id(fn)) if callable(fn) and not isinstance(fn, torch.Tensor) else None


def wording_of(identity: object) -> object:
    """Return what an `identity_of` shares with those of the same text elsewhere, with other objects of equal types."""
    if isinstance(identity, types.CodeType):
        constants = [wording_of(each) if isinstance(each, types.CodeType) else each for each in identity.co_consts]
        return identity.co_code, identity.co_names, identity.co_varnames, constants
    if isinstance(identity, tuple):
        return tuple(wording_of(each) for each in identity if not isinstance(each, int))
    return identity


def state_of_step(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[ParameterMarks | None, tuple[bool, ...]]:
    """Return what a step's memory depends on besides its loss and its batch: it may change while training goes on.

    Returns:
        The size, the dtype and ``requires_grad`` of each parameter, first the model's, then the optimizers'; None as
        long as there are lazy ones. And the modes of the modules.
    """
    modules, known = [model], {id(model)}
    parameters: list[torch.Tensor | None] = []
    for module in modules:  # the list grows in the loop: `modules()` takes four times as long
        parameters += parameters_of(module).values()
        for child in children_of(module).values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                modules.append(child)
    modes = tuple(training_flags(modules))
    try:
        return tuple(map(_marks_of, filter(_is_there, (*parameters, *parameters_in_order(*optimizers))))), modes
    except RuntimeError:  # a lazy one has no shape
        return None, modes
