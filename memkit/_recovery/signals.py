"""Deferral of Ctrl-C during work that must not be interrupted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

_WAITING = (signal.SIGINT, signal.SIGTERM)
_PASSIVE = (signal.SIG_DFL, signal.SIG_IGN)
_NOTES = "only_noting"  # attribute of a handler
Handler = TypeVar("Handler", bound=Callable[..., None])
# The C module, without the slower conversion of arguments and results to enums in the public functions.
_c_module: Any = vars(signal)["_signal"]
_get, _set = _c_module.getsignal, _c_module.signal
# `faulthandler.register` sets its handler in C, behind Python's back: only the system's own record brings it back. A
# function of PyDLL keeps the interpreter's lock. Windows has no such handlers.
_exchange: Any = ctypes.PyDLL(None).sigaction if os.name == "posix" else None
_Record = ctypes.c_char * 1024  # more than a `struct sigaction` has anywhere


def only_noting(handler: Handler) -> Handler:
    """Mark a signal handler that only records the signal for later: it neither raises nor reads any state."""
    vars(handler)[_NOTES] = True
    return handler


def are_plain() -> bool:
    """Return whether SIGINT and SIGTERM have no custom handlers, except one that is `only_noting`."""
    interrupt, terminate = _get(signal.SIGINT), _get(signal.SIGTERM)
    if interrupt is not signal.default_int_handler and interrupt not in _PASSIVE:
        return False
    return terminate in _PASSIVE or hasattr(terminate, _NOTES)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block, then deliver them; their handlers may raise.

    Python runs handlers between two lines of the main thread, so a handler that raises, or saves a state, could hit a
    half-finished optimizer step. In other threads no handler runs, and there is nothing to do. A handler that was set
    before Python began is left in place: Python could not set it again.

    Time cost: eight system calls.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    own: dict[int, tuple[Any, Any]] = {}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        arrived.append(number)

    try:
        try:
            for number in _WAITING:
                handler, record = _get(number), _Record()
                if handler is None:  # not set from Python
                    continue
                if _exchange is not None:
                    _exchange(number, None, record)
                own[number] = handler, record
                _set(number, note)
            yield
        finally:
            _restore(own)
    finally:
        _restore(own)  # the remaining handlers, if a signal arrived during the restore above
        if arrived:
            _deliver(sorted(arrived))


def _restore(own: dict[int, tuple[Any, Any]]) -> None:
    while own:
        number, (handler, record) = next(iter(own.items()))
        _set(number, handler)
        if _exchange is not None:
            _exchange(number, record, None)
        del own[number]


def _deliver(arrived: list[int]) -> None:
    """Deliver each signal, also if a handler raises: the last error propagates, with that before it as its context.

    Sorted, SIGTERM comes last: code that catches a KeyboardInterrupt and goes on does not catch the end of the process.
    """
    try:
        signal.raise_signal(arrived.pop(0))
    finally:
        if arrived:
            _deliver(arrived)
