"""Autograd's graph while a backward runs: which node, which backward, in which order nodes were made."""

from typing import Any

from torch._C import _current_autograd_node as current_node  # that the engine runs now
from torch._C import _current_graph_task_id as current_backward  # -1 outside of one
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph  # whether it may run again
from torch._C._autograd import _get_sequence_nr as next_sequence_number  # of the next node in this thread
from torch.autograd.graph import _engine_run_backward

ENGINE = _engine_run_backward.__code__
"""The code from which the engine runs: frames above it are of a backward."""

__all__ = [
    "ENGINE",
    "RAW_SAVED",
    "current_backward",
    "current_node",
    "inputs_of",
    "keeps_graph",
    "next_sequence_number",
    "saved",
    "saved_or_none",
    "sequence_number",
]


def sequence_number(node: Any) -> int:
    """Return a node's place among those of its thread: a later operation has a higher number."""
    return int(node._sequence_nr())


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


RAW_SAVED = "_raw_saved_"
"""How the names of a node's attributes begin that hold what it has saved, as it lies there."""
