"""Autograd's graph during a backward: the current node, the current backward, and the creation order of nodes."""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _current_autograd_node,
    _current_graph_task_id as current_backward,  # -1 outside of one
)
from torch._C._autograd import (
    _get_current_graph_task_keep_graph as keeps_graph,  # whether it may run again
    _get_sequence_nr as next_sequence_number,  # of the next node in this thread
    _top_saved_tensors_default_hooks,
)
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import Node, _engine_run_backward
from torch.overrides import has_torch_function

ENGINE = _engine_run_backward.__code__
"""The code that calls the engine: frames above it belong to a backward."""

__all__ = [
    "ENGINE",
    "accumulate_gradients",
    "asks_for_whole_backward",
    "at_end_of_backward",
    "current_backward",
    "current_node",
    "fields_of",
    "gradients_of",
    "graph_behind",
    "have_tangents",
    "inputs_of",
    "is_called_by_transform",
    "is_functorch_wrapped_tensor",
    "is_transforming",
    "keeps_graph",
    "next_sequence_number",
    "outside_transforms",
    "saved",
    "saved_as_stored",
    "saved_or_none",
    "saving_hooks",
    "sequence_number",
]


current_node: Callable[[], Node | None] = _current_autograd_node
"""Returns the node that the engine is running, if any."""

sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns a node's sequence number within its thread: later operations have higher numbers."""


def graph_behind(results: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Return the leaves that need a gradient in the graphs of results, and the lowest number of their other nodes."""
    leaves, nodes = [], set[Any]()
    for each in results:
        if each.grad_fn is not None:
            nodes.add(each.grad_fn)
        elif each.requires_grad:
            leaves.append(each)
    todo = list(nodes)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                todo.append(node)
    lowest = _OF_LEAVES
    for node in nodes:
        number = node._sequence_nr()
        if number == _OF_LEAVES:
            leaves.append(node.variable)
        elif number < lowest:
            lowest = number
    return leaves, lowest


_OF_LEAVES = 2**64 - 1  # the number of each node that adds to a leaf's gradient


def accumulate_gradients(
    loss: Tensor, slope: Tensor | None, leaves: Sequence[Tensor], *, retain_graph: bool = False
) -> None:
    """Call ``torch.autograd.backward(loss, slope, inputs=leaves)``, which takes three steps of Python for each leaf.

    Args:
        loss: 0-dim.
        slope: Gradient of the loss, of its shape and dtype; None is 1.
        leaves: The tensors whose ``.grad`` it adds to.
        retain_graph: As in `torch.autograd.backward`.
    """
    if not loss.requires_grad or maybe_current_level() is not None or has_torch_function((loss, *leaves)):
        torch.autograd.backward(loss, slope, retain_graph=retain_graph, inputs=leaves)
        return
    if slope is None:
        slope = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward(
        (loss,), (slope,), retain_graph, _CREATE_GRAPH, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def gradients_of(
    results: Sequence[Tensor], slopes: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Call ``torch.autograd.grad(results, leaves, slopes, allow_unused=True)``, which takes as long for each leaf.

    Args:
        results: Tensors with a graph.
        slopes: Their gradients, of their shapes and dtypes.
        leaves: The tensors whose gradients are returned.
    """
    if maybe_current_level() is not None or has_torch_function((*results, *leaves)):
        return torch.autograd.grad(results, leaves, slopes, allow_unused=True)
    keep_graph = False
    return _engine_run_backward(
        tuple(results), tuple(slopes), keep_graph, _CREATE_GRAPH, tuple(leaves), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip


_CREATE_GRAPH = False
_NONE = -1  # number of a backward, or level of forward-mode differentiation


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward ends, whose error is then that of the backward; outside of one, now."""
    if current_backward() == _NONE:
        call()
    else:
        Variable._execution_engine.queue_callback(call)


def saving_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the hooks that pack and unpack tensors saved for a backward now, such as a checkpoint's; None if none."""
    hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    hooks = _top_saved_tensors_default_hooks(False)  # noqa: FBT003 - whether to pass over a tracer's
    return hooks


def is_transforming() -> bool:
    """Return whether the code runs inside a transform of `torch.func`."""
    return maybe_current_level() is not None


def is_called_by_transform() -> bool:
    """Return whether a transform of `torch.func` is among the callers, also where torch has left it for an operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch._functorch."):
        frame = frame.f_back
    return frame is not None


def have_tangents(tensors: Iterable[Tensor]) -> bool:
    """Return whether a tensor has a tangent, of forward-mode differentiation at its current level."""
    if forward_ad._current_level == _NONE:
        return False
    return any(_tangent_of(each) is not None for each in tensors)


def _tangent_of(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


def saved(node: Any, name: str) -> Any:
    """Return the value that a node has saved under a name; there is no public access to it.

    Raises:
        AttributeError: The node has saved nothing under this name.
    """
    return getattr(node, f"_saved_{name}")


def saved_or_none(node: Any, name: str) -> Any:
    """Return the value that a node has saved under a name; None if there is none."""
    return getattr(node, f"_saved_{name}", None)


def inputs_of(node: Any) -> Any:
    """Return shape, dtype and device of the gradients that flow into a node; empty if it does not expose them."""
    return getattr(node, "_input_metadata", ())


def fields_of(kind: type) -> list[str]:
    """List the fields that nodes of a class have saved, for `saved_as_stored`."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def saved_as_stored(node: Any, field: str) -> list[Any]:
    """Return the saved values of a node's field as stored: the tensors, or the results of their pack hook.

    Nothing is unpacked: that would run hooks, which copy or recompute.

    Raises:
        RuntimeError: A backward has freed it.
    """
    value = getattr(node, field)
    packed = [each for each in (value if isinstance(value, (tuple, list)) else [value]) if each is not None]
    if all(hasattr(each, "data") for each in packed):
        return [each.data for each in packed]
    return _saved_without_hooks(node, field.removeprefix("_raw_saved_"))


def _saved_without_hooks(node: Any, name: str) -> list[Any]:
    """Read tensors the usual way, which calls no Python code without a hook; a hook is stopped before it runs."""
    packed: list[Any] = []

    class HookError(Exception):
        """A hook began."""

    def stop(frame: FrameType, event: str, _: object) -> None:
        # A Python function is being called, whose last argument is the result of the pack hook.
        if event == "call":
            code = frame.f_code
            packed.append(frame.f_locals.get(code.co_varnames[code.co_argcount - 1]) if code.co_argcount else None)
            raise HookError

    profile, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # garbage collections call functions too
    sys.setprofile(stop)
    try:
        value = (
            getattr(node, f"_saved_{name}") if hasattr(type(node), f"_saved_{name}") else getattr(node, f"saved_{name}")
        )
    except HookError:
        value = packed
    finally:
        sys.setprofile(profile)
        if collects:
            gc.enable()
    return list(value) if isinstance(value, (tuple, list)) else [value]


def asks_for_whole_backward(node: Any) -> bool:
    """Return whether a node's function, written in Python, refuses a backward with given inputs."""
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    return "_is_checkpoint_valid" in getattr(getattr(backward, "__code__", None), "co_names", ())
