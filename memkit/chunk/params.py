"""The tensors that a function trains besides its arguments: its own parameters, and those passed as ``params``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._gradients.captured import UNSHARDED
from memkit._torch import pytree


def function_name(fn: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return str(getattr(fn, "__name__", type(fn).__name__))


def check_function(call: str, fn: object, rows: Sequence[object] = ()) -> None:
    """Refuse anything that cannot be called, such as the rows in its place.

    Raises:
        InputTypeError: It cannot be called.
    """
    if isinstance(fn, type):
        made = f"{fn.__name__}(...)"
        raise InputTypeError(
            f"{call}({fn.__name__}, ...)",
            got=f"the class {fn.__name__}",
            expected="a module or a function",
            fix=f"write {call}({made})(x)" if call == "ChunkedProcessor" else f"write {call}({made}, x)",
        )
    if not callable(fn):
        is_swapped = any(callable(each) for each in rows)
        raise InputTypeError(
            f"{call}({type(fn).__name__}, ...)",
            got=f"a {type(fn).__name__} in place of the function" + ", which came after it" * is_swapped,
            expected="the function first, then its rows",
            fix=f"write {call}(fn, x)" if call != "ChunkedProcessor" else "write ChunkedProcessor(fn)(x)",
        )


def used_parameters(call: str, fn: Callable[..., Any], params: Iterable[Tensor] | None) -> list[Tensor]:
    """Return the tensors that need a gradient besides the arguments, each once.

    Args:
        call: The user's call, for the message.
        fn: A module, a method of one, or a `functools.partial` of either contributes its own; any other function none.
        params: Additional tensors.

    Raises:
        InputError: One of ``params`` was computed from others, whose gradients would be counted twice; or FSDP gathers
            the parameters of ``fn`` at each call.
    """
    _refuse_sharded(call, fn)
    found = {id(tensor): tensor for tensor in [*_owned(fn), *listed(call, params)] if tensor.requires_grad}
    for tensor in found.values():
        if not tensor.is_leaf:
            raise InputError(
                call,
                got=f"a parameter of shape {tuple(tensor.shape)} that was computed from other tensors",
                expected="leaf tensors, as module.parameters() returns",
                fix="compute this tensor inside the function, from leaf tensors in params; if it is expensive, such as "
                "an encoder's grid that all rows read, pass leaf = tensor.detach().requires_grad_() instead, and call "
                "tensor.backward(leaf.grad) after the loss's backward().",
            )
    return list(found.values())


def listed(call: str, params: Iterable[Tensor] | None) -> list[Tensor]:
    """Return ``params`` as a list.

    Raises:
        InputTypeError: It is not an iterable of tensors; a single tensor would be split into its rows.
    """
    given = [] if params is None else params
    is_one = isinstance(given, Tensor) or not isinstance(given, Iterable)
    found: list[Any] = [given] if is_one else list(given)
    if is_one or not all(isinstance(each, Tensor) for each in found):
        raise InputTypeError(
            call,
            got=f"params as {'a single' if is_one else 'items of type'} "
            + ", ".join(sorted({type(each).__name__ for each in found})),
            expected="a list of tensors, or module.parameters()",
            fix="pass params=[tensor] or params=module.parameters().",
        )
    return found


def _refuse_sharded(call: str, fn: object) -> None:
    for module in _modules(fn):
        # By name: torch.distributed.fsdp is a heavy import, and is already loaded if any module is sharded.
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise InputError(
                call,
                got=f"a {type(module).__name__}, whose parameters are gathered from all ranks at each call",
                expected="parameters that stay available while chunks run, because ranks may run different numbers "
                "of chunks",
                fix=UNSHARDED,
            )


def _modules(fn: object) -> Iterator[nn.Module]:
    if isinstance(fn, nn.Module):
        yield from fn.modules()
    elif isinstance(fn, functools.partial):
        for part in (fn.func, *pytree.tree_leaves((fn.args, fn.keywords))):
            yield from _modules(part)


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
