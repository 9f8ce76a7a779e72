"""Deferral of Ctrl-C during work that must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WAITING = (signal.SIGINT, signal.SIGTERM)
_PASSIVE = (signal.SIG_DFL, signal.SIG_IGN)
# The C module, without the slower conversion of arguments and results to enums in the public functions.
_beneath: Any = vars(signal)["_signal"]
_get, _set = _beneath.getsignal, _beneath.signal


def are_plain() -> bool:
    """Return whether SIGINT and SIGTERM have no custom handlers: each has its default handler or is ignored."""
    interrupt, terminate = _get(signal.SIGINT), _get(signal.SIGTERM)
    return (interrupt is signal.default_int_handler or interrupt in _PASSIVE) and terminate in _PASSIVE


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block, then deliver them; their handlers may raise.

    Python runs handlers between two lines of the main thread, so a handler that raises, or saves a state, could hit a
    half-finished optimizer step. In other threads no handler runs, and there is nothing to do.

    Time cost: four system calls.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    own: dict[int, Any] = {}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
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
        _restore(own)  # the remaining handlers, if a signal arrived during the restore above
        for each in arrived:
            signal.raise_signal(each)


def _restore(own: dict[int, Any]) -> None:
    while own:
        number, handler = next(iter(own.items()))
        if handler is not None:  # otherwise it was not set from Python, and cannot be restored
            _set(number, handler)
        del own[number]
