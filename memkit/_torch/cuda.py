"""What torch.cuda asks of itself before it answers: names for whoever answers in its place."""

LAZY = ("_lazy_init", "_lazy_call")
"""Functions that start CUDA."""

EXCHANGE = ("_exchange_device", "_maybe_exchange_device")
"""Functions that make another device the current one, and return the one before."""

RECORD_HISTORY, SNAPSHOT = "_record_memory_history", "_snapshot"
"""Functions of the allocator's history, documented under these names."""
