"""torch.compile queries that do not load it, since loading takes a second."""

import sys


def is_loaded() -> bool:
    """Return whether torch.compile has been loaded."""
    return "torch._dynamo" in sys.modules


def count_graphs() -> int:
    """Return the number of graphs compiled in this process, from the counters that torch's own tests read."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"].get("unique_graphs", 0) if dynamo else 0
