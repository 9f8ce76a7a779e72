"""Optimizers whose step needs a closure."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from memkit._core.errors import ConfigError


def refuse_closure(optimizer: Optimizer, call: str, instead: str) -> None:
    """Refuse an optimizer whose step needs a closure, such as LBFGS.

    Args:
        optimizer: The optimizer.
        call: The user's call.
        instead: The call with another optimizer.

    Raises:
        ConfigError: It is one.
    """
    step = getattr(optimizer, "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            call,
            got=f"{type(optimizer).__name__}, whose step() evaluates the loss again through a closure",
            expected="an optimizer that steps with the gradients it finds",
            fix="in a loop of your own the closure may compute its loss in parts, by split = mk.SplitLoss(model, "
            "num_microbatches=4) and loss = split(batch, loss_fn), and recompute blocks or offload activations. With "
            f"another optimizer write {instead}.",
        )
