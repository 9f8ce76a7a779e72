"""Readable reports of memory logs. Nothing here imports torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit._events.reader import read_memory_events as read_memory_events
    from memkit.report import nodes as nodes
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "read_memory_events": "memkit._events.reader",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES, ("nodes",))
