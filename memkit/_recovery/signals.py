"""Ctrl-C waits where something must be done whole."""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
from types import FrameType
from typing import Any

_WAITING = (signal.SIGINT, signal.SIGTERM)
# Beneath the enums that the module's own functions turn their arguments and results into, which take longer.
_get, _set = inspect.unwrap(signal.getsignal), inspect.unwrap(signal.signal)


def are_plain() -> bool:
    """Say whether SIGINT raises KeyboardInterrupt and SIGTERM ends the process, as from the start."""
    return _get(signal.SIGINT) is signal.default_int_handler and _get(signal.SIGTERM) == signal.SIG_DFL


class deferred_signals(contextlib.AbstractContextManager[None]):  # noqa: N801 - a context like contextlib's own
    """In the block, SIGINT and SIGTERM wait for its end; then they come again, and their own handlers may raise.

    Python runs handlers between two lines of the main thread, so that a handler that raises, or saves a state, would
    meet an optimizer's step half done. In other threads no handler runs, and there is nothing to do.

    Time cost: four system calls.
    """

    def __init__(self) -> None:
        self._own: dict[int, Any] = {}
        self._arrived: list[int] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _WAITING:
                self._own[number] = _get(number)
                _set(number, self._note)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._restore()  # what is left, where a signal came in the middle of that
            for each in self._arrived:
                signal.raise_signal(each)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's form
        self._arrived.append(number)

    def _restore(self) -> None:
        while self._own:
            number, handler = next(iter(self._own.items()))
            if handler is not None:  # else it was not set from Python, and cannot be
                _set(number, handler)
            del self._own[number]
