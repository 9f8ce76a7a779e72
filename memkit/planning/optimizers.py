"""Optimizers by name, class, factory or as the instance in use."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._errors import ConfigError, InputTypeError

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
_NAMES = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS)
}


def optimizer_maker(optimizer: str | MakeOptimizer | Optimizer) -> MakeOptimizer:
    """Return a function of parameters; for an instance it gives that instance.

    Raises:
        ConfigError: No optimizer has that name.
        InputTypeError: It is no name, class, factory or optimizer.
    """
    if isinstance(optimizer, Optimizer):
        return lambda _: optimizer
    if isinstance(optimizer, str):
        maker = _NAMES.get(optimizer.lower())
        if maker is None:
            near = difflib.get_close_matches(optimizer.lower(), _NAMES, n=1)
            raise ConfigError(
                f"optimizer={optimizer!r}",
                got=repr(optimizer),
                expected=f"the name of a class in torch.optim: {', '.join(sorted(_NAMES))}",
                fix=(f"did you mean {near[0]!r}? " if near else "")
                + "For another optimizer pass its class, a function of the parameters, or the optimizer itself.",
            )
        return maker
    if not callable(optimizer):
        raise InputTypeError(
            f"optimizer={optimizer!r}",
            got=f"a {type(optimizer).__name__}",
            expected="a name, a class, a function of the parameters, or an Optimizer",
            fix="pass for example 'adamw', or lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9).",
        )
    return optimizer
