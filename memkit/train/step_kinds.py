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


def wording_of(lines: object) -> object:
    """Return what a loss function's lines (`parts_of_loss`) have in common with the same text elsewhere."""
    if isinstance(lines, types.CodeType):
        constants = [wording_of(each) if isinstance(each, types.CodeType) else each for each in lines.co_consts]
        return lines.co_code, lines.co_names, lines.co_varnames, constants
    return tuple(map(wording_of, lines)) if isinstance(lines, tuple) else lines


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
