"""The error tree, and the four-part message that every memkit error carries.

MemkitError
├── ConfigError             a setting is wrong                         (also ValueError)
├── InputError              data handed to a call is wrong             (also ValueError)
│   └── NotSimulatedError   a step depends on values of tensors        (also ValueError)
├── InputTypeError          data handed to a call has the wrong type   (also TypeError)
├── AbsentError             an object has no such method or attribute  (also AttributeError)
├── StateError              calls were made in an invalid order        (also RuntimeError)
├── TorchVersionError       this PyTorch lacks a required feature      (also RuntimeError)
├── FileFormatError         a file does not have the expected format   (also ValueError)
└── MemkitOutOfMemoryError  memory ran out at every size allowed       (also RuntimeError)
MemkitWarning               something works, but perhaps not as the user expects  (UserWarning)
"""

from __future__ import annotations

import sys
import warnings

__all__ = [
    "AbsentError",
    "ConfigError",
    "FileFormatError",
    "InputError",
    "InputTypeError",
    "MemkitError",
    "MemkitOutOfMemoryError",
    "MemkitWarning",
    "NotSimulatedError",
    "StateError",
    "TorchVersionError",
]


class MemkitError(Exception):
    """Base class of every error that memkit raises on purpose.

    The message has four parts, each kept as an attribute: the call, the value it got, the value it expected, and
    the fix.

    Args:
        call: The call as the user wrote it, for example ``"get_preset_config(name='hgih')"``.
        got: The offending value, in the user's own terms.
        expected: The rule that was broken.
        fix: Suggested fix.

    Example:
        >>> from memkit import MemkitError
        >>> raise MemkitError("f(x=3)", got="x=3", expected="an even x", fix="pass 2 or 4.")
        Traceback (most recent call last):
        ...
        memkit.errors.MemkitError: f(x=3): got x=3; expected an even x. Way out: pass 2 or 4.
    """

    def __init__(self, call: str, *, got: str, expected: str, fix: str) -> None:
        super().__init__(call, got, expected, fix)
        self.call = call
        self.got = got
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.call}: got {self.got}; expected {self.expected}. Way out: {self.fix}"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Worker processes send errors by pickle, which by default would call the constructor without keywords.
        return _rebuild, (type(self), self.call, self.got, self.expected, self.fix)


def of_call(call: str, error: MemkitError) -> MemkitError:
    """Return an error under the name of the user's own call, which led to the one that refused a value."""
    return type(error)(call, got=error.got, expected=error.expected, fix=error.fix)


def _rebuild(cls: type[MemkitError], call: str, got: str, expected: str, fix: str) -> MemkitError:
    return cls(call, got=got, expected=expected, fix=fix)


class ConfigError(MemkitError, ValueError):
    """A setting is wrong, or two settings are mutually exclusive."""


class InputError(MemkitError, ValueError):
    """Data handed to a call has the wrong value or shape."""


class NotSimulatedError(InputError):
    """A step simulated on tensors without data depends on their values, so the result is unknown."""


class InputTypeError(MemkitError, TypeError):
    """Data handed to a call has the wrong type."""


class AbsentError(MemkitError, AttributeError):
    """An object has no such method or attribute; the way out names the one that serves the purpose."""


class StateError(MemkitError, RuntimeError):
    """Calls were made in an order that cannot give a correct result."""


class TorchVersionError(MemkitError, RuntimeError):
    """The installed version of PyTorch lacks something that a feature needs."""


class FileFormatError(MemkitError, ValueError):
    """A file cannot be read in the format that it claims to have."""


class MemkitOutOfMemoryError(MemkitError, RuntimeError):
    """Memory ran out, and nothing smaller is left to try. An outer recovery treats it as out-of-memory."""


class OutOfMemoryElsewhereError(MemkitOutOfMemoryError):
    """Memory ran out on another rank. A log tells it by this name from an error of its own rank."""


class MemkitWarning(UserWarning):
    """Something works, but perhaps not in the way that the user expects."""


_BETWEEN = ("memkit.", "torch.", "contextlib")  # modules whose lines are not the user's


def warn_user(text: str) -> None:
    """Issue a `MemkitWarning` at the line of the user's code that led to it, however deep in memkit it arises."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - warnings.warn(skip_file_prefixes=...) needs Python 3.12
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, MemkitWarning, stacklevel=level)


for _public in __all__:  # the public name, as shown in tracebacks and imported
    globals()[_public].__module__ = "memkit.errors"
