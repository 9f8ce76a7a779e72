"""torch.compile, without loading it: that takes a second."""

import sys


def is_loaded() -> bool:
    """Say whether anybody has loaded torch.compile."""
    return "torch._dynamo" in sys.modules


def count_graphs() -> int:
    """Return how many graphs it has made in this process; its counters are what torch's own tests read."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
