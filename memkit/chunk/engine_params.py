"""Which tensors a function uses besides its arguments: its parameters, and what it captured unseen."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from memkit._errors import InputError


def parameters_of(call: str, fn: Callable[..., Any], params: Iterable[Tensor] | None) -> list[Tensor]:
    """Return the tensors that need a gradient besides the arguments, each once.

    Args:
        call: The user's call, for the message.
        fn: A module, a method of one, or a `functools.partial` of either brings its own; another function none.
        params: More of them.

    Raises:
        InputError: One of ``params`` was computed from others, whose gradients would be counted twice.
    """
    found = {id(tensor): tensor for tensor in [*_owned(fn), *(params or ())] if tensor.requires_grad}
    for tensor in found.values():
        if not tensor.is_leaf:
            raise InputError(
                call,
                got=f"a parameter of shape {tuple(tensor.shape)} that was computed from others",
                expected="leaf tensors, as module.parameters() gives",
                fix="compute it inside the function, or pass strategy='checkpoint'.",
            )
    return list(found.values())


def _owned(fn: object) -> Iterator[Tensor]:
    if isinstance(fn, Tensor):
        yield fn
    elif isinstance(fn, nn.Module):
        yield from fn.parameters()
    elif isinstance(fn, functools.partial):
        for part in (fn.func, *pytree.tree_leaves((fn.args, fn.keywords))):
            yield from _owned(part)
    elif inspect.ismethod(fn):
        yield from _owned(fn.__self__)


def refuse_captured(call: str, fn: Callable[..., Any], results: Iterable[Tensor], known: Sequence[Tensor]) -> None:
    """Refuse a function whose results depend on a tensor that needs a gradient and is not known: it would get none.

    Args:
        call: The user's call, for the message.
        fn: The function.
        results: What it returned, with a graph.
        known: Tensors whose gradients are asked for.

    Raises:
        InputError: Names the tensors, with shape, and the way out.
    """
    edges = [get_gradient_edge(tensor) for tensor in known if tensor.requires_grad]
    seen: set[Any] = {edge.node for edge in edges}  # all are leaves: each has a node of its own
    stack = [result.grad_fn for result in results if result.requires_grad and result.grad_fn]
    strangers = [result for result in results if result.is_leaf and result.requires_grad]
    strangers = [tensor for tensor in strangers if not any(tensor is each for each in known)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # the node that would add to a leaf's .grad
            strangers.append(node.variable)
        stack.extend(before for before, _ in node.next_functions if before is not None)
    if strangers:
        names = [_name(fn, tensor) for tensor in strangers]
        raise InputError(
            call,
            got=f"a function that uses {', '.join(names)} from outside of its arguments",
            expected="every tensor that needs a gradient as an argument or a parameter: it would silently get none",
            fix="pass params=[...] with these tensors (params=module.parameters()), or strategy='checkpoint'.",
        )


def _name(fn: Callable[..., Any], tensor: Tensor) -> str:
    shape = f"of shape {tuple(tensor.shape)}"
    for name, value in _variables(fn):
        if value is tensor:
            return f"`{name}` {shape}"
        if isinstance(value, nn.Module):
            for path, parameter in value.named_parameters():
                if parameter is tensor:
                    return f"`{name}.{path}` {shape}"
    return f"a tensor {shape}"


def _variables(fn: object) -> Iterator[tuple[str, object]]:
    """Names from outside that a function's code uses, with their values."""
    if isinstance(fn, functools.partial):
        for part in (fn.func, *fn.args):
            yield from _variables(part)
    elif inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        yield from variables.nonlocals.items()
        yield from variables.globals.items()
