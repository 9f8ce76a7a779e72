"""Autograd's graph while a backward runs: which node, which backward, in which order nodes were made."""

import gc
import sys
from collections.abc import Callable
from operator import methodcaller
from types import FrameType
from typing import Any

from torch._C import (
    _current_autograd_node as current_node,  # that the engine runs now
    _current_graph_task_id as current_backward,  # -1 outside of one
)
from torch._C._autograd import (
    _get_current_graph_task_keep_graph as keeps_graph,  # whether it may run again
    _get_sequence_nr as next_sequence_number,  # of the next node in this thread
)
from torch.autograd.graph import _engine_run_backward

ENGINE = _engine_run_backward.__code__
"""The code from which the engine runs: frames above it are of a backward."""

__all__ = [
    "ENGINE",
    "current_backward",
    "current_node",
    "fields_of",
    "inputs_of",
    "keeps_graph",
    "next_sequence_number",
    "saved",
    "saved_as_stored",
    "saved_or_none",
    "sequence_number",
]


sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Returns a node's place among those of its thread: a later operation has a higher number."""


def saved(node: Any, name: str) -> Any:
    """Return what a node has saved under a name, which stands nowhere else.

    Raises:
        AttributeError: Nothing.
    """
    return getattr(node, f"_saved_{name}")


def saved_or_none(node: Any, name: str) -> Any:
    """Return what a node has saved under a name; None where it has nothing."""
    return getattr(node, f"_saved_{name}", None)


def inputs_of(node: Any) -> Any:
    """Return shape, dtype and device of the gradients that come into a node; empty where it does not tell."""
    return getattr(node, "_input_metadata", ())


def fields_of(kind: type) -> list[str]:
    """Name what nodes of a class have saved, for `saved_as_stored`."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def saved_as_stored(node: Any, field: str) -> list[Any]:
    """Return what a node has saved under a field as it is stored: the tensors, or what a hook made of them.

    Nothing is unpacked: that would run hooks, which copy or compute again.

    Raises:
        RuntimeError: A backward has freed it.
    """
    value = getattr(node, field)
    packed = [each for each in (value if isinstance(value, (tuple, list)) else [value]) if each is not None]
    if all(hasattr(each, "data") for each in packed):
        return [each.data for each in packed]
    return _saved_without_hooks(node, field.removeprefix("_raw_saved_"))


def _saved_without_hooks(node: Any, name: str) -> list[Any]:
    """Read tensors the usual way, which calls no Python where there is no hook; a hook is stopped before it begins."""
    packed: list[Any] = []

    class HookError(Exception):
        """A hook began."""

    def stop(frame: FrameType, event: str, _: object) -> None:
        # A function that is written in Python is called, whose last argument is what the other hook made.
        if event == "call":
            code = frame.f_code
            packed.append(frame.f_locals.get(code.co_varnames[code.co_argcount - 1]) if code.co_argcount else None)
            raise HookError

    profile, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # collections call functions too
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
