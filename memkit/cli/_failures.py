"""Failures of a command: who is at fault, what the terminal shows, and the exit code."""

from __future__ import annotations

import traceback
from pathlib import Path
from sysconfig import get_paths
from types import TracebackType

from memkit._core.errors import MemkitError, NotSimulatedError
from memkit.cli._codes import FAILED, INTERRUPTED, NOT_KNOWN, WRONG_USE
from memkit.cli._terminal import say, say_verbatim

_WAY_OUT = " Way out: "
_PACKAGE = str(Path(__file__).parents[1])
# Code in these folders, and frozen code, does not belong to the user.
_INSTALLED = (*(get_paths()[name] for name in ("stdlib", "purelib", "platlib")), _PACKAGE, "<")


def code_of(error: BaseException) -> int | None:
    """Report an error on standard error, and return the exit code; None if it is neither memkit's nor the user's."""
    is_users = _first_own(error) is not None or isinstance(error, SyntaxError)
    if isinstance(error, SystemExit):
        if not is_users:
            return None
        say(f"memkit: error: your code exited: {type(error).__name__}({error.code!r})", is_error=True)
        return FAILED
    if isinstance(error, NotSimulatedError):
        say_error("memkit: not known", error)
        return NOT_KNOWN
    if isinstance(error, MemkitError) or (isinstance(error, OSError) and not is_users):
        say_error("memkit: error", error)
        return WRONG_USE
    if isinstance(error, KeyboardInterrupt):
        say("memkit: interrupted", is_error=True)
        return INTERRUPTED
    if not isinstance(error, Exception):
        return None
    say_verbatim("".join(_traceback(error, is_users=is_users).format()).rstrip("\n"), is_error=True)
    if is_users:
        return FAILED
    say("memkit: this is a bug in memkit; please report it with the output above", is_error=True)
    return NOT_KNOWN


def say_error(what: str, error: BaseException) -> None:
    """Write an error to standard error; its way out, which may be copied, begins a line."""
    text, separator, fix = str(error).partition(_WAY_OUT)
    say(f"{what}: {text}", is_error=True)
    if separator:
        say(f"  {_WAY_OUT.lstrip()}{fix}", is_error=True)


def _first_own(error: BaseException) -> TracebackType | None:
    """Return where a traceback enters the user's own code."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename.startswith(_INSTALLED):
        place = place.tb_next
    return place


def _traceback(error: Exception, *, is_users: bool) -> traceback.TracebackException:
    """Return a traceback; for the user's code from the user's file on, without memkit's internals."""
    if not is_users:
        return traceback.TracebackException.from_exception(error)
    shown = traceback.TracebackException.from_exception(error.with_traceback(_first_own(error)))
    each: traceback.TracebackException | None = shown
    while each is not None:
        each.stack = traceback.StackSummary.from_list(
            [frame for frame in each.stack if not frame.filename.startswith((_PACKAGE, "<frozen"))]
        )
        each = each.__cause__ or each.__context__
    return shown
