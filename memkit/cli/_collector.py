"""Run a command without Python's cycle collector while it handles many small records that hold no cycles."""

from __future__ import annotations

import functools
import gc
from argparse import Namespace
from collections.abc import Callable


def without_collector(run: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    """Disable the collector for a command: it would scan all records again and again without finding a cycle."""

    @functools.wraps(run)
    def quick(arguments: Namespace) -> int:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return run(arguments)
        finally:
            if was_enabled:
                gc.enable()

    return quick
