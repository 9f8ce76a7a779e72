"""Optimizers whose step needs a closure."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from torch.optim import Optimizer

from memkit._core.errors import ConfigError

_MAYBE = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_AROUND = ("torch.enable_grad()", "enable_grad()")
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
    """Whether a step fails without a closure: by its signature, or by its source (SAM's default is None).

    Its source has a check, or calls the closure whatever it is.
    """
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
    (first, *_) = tree.body
    is_called = isinstance(first, ast.FunctionDef) and _calls_it(first.body)
    return bool(is_called) or any(map(_insists, ast.walk(tree)))


def _insists(node: ast.AST) -> bool:
    """Whether a statement fails without a closure."""
    if isinstance(node, ast.Assert):
        return ast.unparse(node.test) in _WITH
    return isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and ast.unparse(node.test) in _WITHOUT


def _calls_it(body: Sequence[ast.stmt]) -> bool | None:
    """Whether statements call the closure whatever it is; False once they look at it or replace it, else None."""
    for each in body:
        if isinstance(each, ast.With):
            found = _calls_it(each.body)
        elif isinstance(each, (ast.Expr, ast.Assign, ast.Return)):
            found = _is_called_by(each)
        else:
            found = False if any(map(_is_closure, ast.walk(each))) else None
        if found is not None:
            return found
    return None


def _is_called_by(statement: ast.Expr | ast.Assign | ast.Return) -> bool | None:
    if any(isinstance(each, ast.Call) and _is_function(each.func) for each in _evaluated(statement)):
        return True
    stored = [each for each in ast.walk(statement) if _is_closure(each) and isinstance(each.ctx, ast.Store)]
    is_other = bool(stored) and not (isinstance(statement, ast.Assign) and _is_function(statement.value))
    return False if is_other or isinstance(statement, ast.Return) else None


def _is_function(node: ast.AST) -> bool:
    """Whether a node is the closure, or ``torch.enable_grad()(closure)``, which does not look at it."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _AROUND:
        return any(map(_is_closure, node.args))
    return _is_closure(node)


def _is_closure(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == "closure"


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that run whenever it runs."""
    yield node
    if not isinstance(node, _MAYBE):
        for each in ast.iter_child_nodes(node):
            yield from _evaluated(each)
