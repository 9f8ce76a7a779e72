"""Ctrl-C waits where something must be done whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WAITING = (signal.SIGINT, signal.SIGTERM)
_PASSIVE = (signal.SIG_DFL, signal.SIG_IGN)
# Beneath the enums that the module's own functions turn their arguments and results into, which take longer.
_beneath: Any = vars(signal)["_signal"]
_get, _set = _beneath.getsignal, _beneath.signal


def are_plain() -> bool:
    """Say whether SIGINT raises KeyboardInterrupt, SIGTERM ends the process, or they are ignored: nobody listens."""
    interrupt, terminate = _get(signal.SIGINT), _get(signal.SIGTERM)
    return (interrupt is signal.default_int_handler or interrupt in _PASSIVE) and terminate in _PASSIVE


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """In the block, SIGINT and SIGTERM wait for its end; then they come again, and their own handlers may raise.

    Python runs handlers between two lines of the main thread, so that a handler that raises, or saves a state, would
    meet an optimizer's step half done. In other threads no handler runs, and there is nothing to do.

    Time cost: four system calls.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    own: dict[int, Any] = {}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's form
        arrived.append(number)

    try:
        try:
            for number in _WAITING:
                own[number] = _get(number)
                _set(number, note)
            yield
        finally:
            _restore(own)
    finally:
        _restore(own)  # what is left, where a signal came in the middle of that
        for each in arrived:
            signal.raise_signal(each)


def _restore(own: dict[int, Any]) -> None:
    while own:
        number, handler = next(iter(own.items()))
        if handler is not None:  # else it was not set from Python, and cannot be
            _set(number, handler)
        del own[number]
