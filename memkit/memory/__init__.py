"""Device memory: tracking, accounting and release."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit._core.units import (
        format_bytes as format_bytes,
        parse_bytes as parse_bytes,
    )
    from memkit.memory.manager import MemoryManager as MemoryManager
    from memkit.memory.track import Tracker as Tracker
else:  # otherwise a type checker would accept any name, because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "MemoryManager": "memkit.memory.manager",
        "Tracker": "memkit.memory.track",
        "format_bytes": "memkit._core.units",
        "parse_bytes": "memkit._core.units",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
