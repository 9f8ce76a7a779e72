"""Properties that are called like methods."""

from __future__ import annotations

import sys
from dis import opname

from memkit._core.errors import InputTypeError

_UNKNOWN = (3, 15)  # the first Python whose bytecode may say it in another way: there Python's own error must do
_IS_METHOD = 1  # in the argument of LOAD_ATTR, since Python 3.12: what is looked up is called next


def refuse_called_property(call: str, instead: str) -> None:
    """Refuse the lookup of a property that the looking code calls like a method; use it in a property's getter.

    Args:
        call: What the user wrote, such as ``"monitor.should_stop()"``.
        instead: What to write.

    Raises:
        InputTypeError: The property is called. Python would say that a bool is not callable, without a way out.
    """
    if sys.version_info >= _UNKNOWN:
        return
    frame = sys._getframe(2)  # noqa: SLF001 - the code that looks the property up has no public form
    code, place = frame.f_code.co_code, frame.f_lasti
    is_called = opname[code[place]] == "LOAD_METHOD"
    if opname[code[place]] == "LOAD_ATTR" and sys.version_info >= (3, 12):
        is_called = bool(code[place + 1] & _IS_METHOD)
    if is_called:
        raise InputTypeError(call, got="a call of a property", expected="the property itself", fix=f"write {instead}")
