"""Properties that are called like methods."""

from __future__ import annotations

import sys
from dis import opname

from memkit._core.errors import InputTypeError

_UNKNOWN = (3, 15)  # the first Python whose bytecode may differ; from there on, Python's own error is raised
_IS_METHOD = 1  # in the argument of LOAD_ATTR, since Python 3.12: the attribute is called next


def refuse_called_property(call: str, instead: str) -> None:
    """Refuse the lookup of a property by code that calls it like a method; for use in the property's getter.

    Args:
        call: The user's call, such as ``"monitor.should_stop()"``.
        instead: The code to write instead.

    Raises:
        InputTypeError: The property is called. Python would say that a bool is not callable, without a way out.
    """
    if sys.version_info >= _UNKNOWN:
        return
    frame = sys._getframe(2)  # noqa: SLF001 - no public access to the code that looks the property up
    code, place = frame.f_code.co_code, frame.f_lasti
    is_called = opname[code[place]] == "LOAD_METHOD"
    if opname[code[place]] == "LOAD_ATTR" and sys.version_info >= (3, 12):
        is_called = bool(code[place + 1] & _IS_METHOD)
    if is_called:
        raise InputTypeError(call, got="a call of a property", expected="the property itself", fix=f"write {instead}")
