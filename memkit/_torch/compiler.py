"""torch.compile queries that do not load it, since loading takes a second."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def is_loaded() -> bool:
    """Return whether torch.compile has been loaded."""
    return "torch._dynamo" in sys.modules


def uncompiled(hook: Callable[..., T]) -> Callable[..., T]:
    """Keep torch.compile from compiling a hook, as it does after a graph break in the surrounding layer."""
    return torch.compiler.disable(hook) if is_loaded() else hook  # type: ignore[no-untyped-call]


def count_graphs() -> int:
    """Return the number of graphs compiled in this process, from the counters that torch's own tests read."""
    if not _counters and "torch._dynamo.utils" in sys.modules:
        _counters.append(sys.modules["torch._dynamo.utils"].counters)
    return _counters[0]["stats"].get("unique_graphs", 0) if _counters else 0


_counters: list[Any] = []  # torch's own, once they are there
