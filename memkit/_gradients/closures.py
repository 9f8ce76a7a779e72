"""Optimizers whose step needs a closure."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from memkit._core.errors import ConfigError

_WITH, _WITHOUT = ("closure", "closure is not None"), ("not closure", "closure is None")


def refuse_closure(optimizer: Optimizer, call: str, instead: str) -> None:
    """Refuse an optimizer whose step needs a closure, such as LBFGS or SAM.

    Args:
        optimizer: The optimizer.
        call: The user's call.
        instead: The call with another optimizer.

    Raises:
        ConfigError: It is one.
    """
    step = getattr(optimizer, "step", None)
    if step is not None and _needs_closure(step):
        raise ConfigError(
            call,
            got=f"{type(optimizer).__name__}, whose step() evaluates the loss again through a closure",
            expected="an optimizer that steps with the gradients it finds",
            fix="in a loop of your own the closure, or each pass of SAM, may compute its loss in parts, by split = "
            "mk.SplitLoss(model, num_microbatches=4) and loss = split(batch, loss_fn), and recompute blocks or offload "
            f"activations. With another optimizer write {instead}.",
        )


def _needs_closure(step: Callable[..., Any]) -> bool:
    """Whether a step fails without a closure: by its signature, or by a check in its source (SAM's default is None)."""
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    function = inspect.unwrap(step)
    if (function.__module__ or "").startswith("torch."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source
        return False
    return any(map(_insists, ast.walk(tree)))


def _insists(node: ast.AST) -> bool:
    """Whether a statement fails without a closure."""
    if isinstance(node, ast.Assert):
        return ast.unparse(node.test) in _WITH
    return isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and ast.unparse(node.test) in _WITHOUT
