"""A SIGTERM as a request to stop, which a loop honors between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

from memkit._recovery.signals import only_noting


class StopSignal:
    """Records a SIGTERM while the block runs. Outside the main thread, where no handler can be set, it does nothing.

    Attributes:
        has_arrived: Whether a SIGTERM arrived in the last block.
    """

    def __init__(self) -> None:
        self.has_arrived = False

    def __enter__(self) -> Self:
        self.has_arrived = False
        self._before = signal.getsignal(signal.SIGTERM)
        # None: a handler that was not installed from Python and could not be restored.
        self._is_ours = threading.current_thread() is threading.main_thread() and self._before is not None
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, self._before)

    @only_noting
    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.has_arrived = True
