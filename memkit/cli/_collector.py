"""Python's cycle collector, put off while a command handles many small records that hold no cycles."""

from __future__ import annotations

import functools
import gc
from argparse import Namespace
from collections.abc import Callable


def without_collector(run: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    """Let a command run without it: it would look at every record again and again, and find nothing."""

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
