"""The error tree, and the four-part message that every memkit error carries.

MemkitError
├── ConfigError             a setting is wrong                         (also ValueError)
├── InputError              data handed to a call is wrong             (also ValueError)
│   └── NotSimulatedError   a step asks for what only data would say   (also ValueError)
├── InputTypeError          data handed to a call has the wrong type   (also TypeError)
├── StateError              calls came in an order that cannot work    (also RuntimeError)
├── TorchVersionError       this PyTorch lacks what a feature needs    (also RuntimeError)
├── FileFormatError         a file cannot be read as what it claims    (also ValueError)
└── MemkitOutOfMemoryError  memory ran out at every size allowed       (also RuntimeError)
MemkitWarning               something works, but not as the user may think  (UserWarning)
"""

from __future__ import annotations

import sys
import warnings

__all__ = [
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
    """Base of every error that memkit raises on purpose.

    The message has four parts, and each is kept as an attribute: which call, what came, what was expected,
    and the way out.

    Args:
        call: The call as the user wrote it, for example ``"get_preset_config(name='hgih')"``.
        got: What came, in the user's own terms.
        expected: The rule that was broken.
        fix: What to do instead.

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
        # The keyword-only constructor is not what pickle would call: worker processes send errors by pickle.
        return _rebuild, (type(self), self.call, self.got, self.expected, self.fix)


def _rebuild(cls: type[MemkitError], call: str, got: str, expected: str, fix: str) -> MemkitError:
    return cls(call, got=got, expected=expected, fix=fix)


class ConfigError(MemkitError, ValueError):
    """A setting is wrong, or two settings exclude each other."""


class InputError(MemkitError, ValueError):
    """Data handed to a call has a wrong value or shape."""


class NotSimulatedError(InputError):
    """A step on tensors without data needs what only data would say: the answer is not known."""


class InputTypeError(MemkitError, TypeError):
    """Data handed to a call has a wrong type."""


class StateError(MemkitError, RuntimeError):
    """Calls came in an order that cannot give a right result."""


class TorchVersionError(MemkitError, RuntimeError):
    """The installed version of PyTorch lacks what a feature is made of."""


class FileFormatError(MemkitError, ValueError):
    """A file cannot be read as what it claims to be."""


class MemkitOutOfMemoryError(MemkitError, RuntimeError):
    """Memory ran out, and nothing smaller is left to try. It counts as out-of-memory for an outer recovery."""


class MemkitWarning(UserWarning):
    """Something works, but not in the way that the user may think."""


def warn_user(text: str) -> None:
    """Give a `MemkitWarning` at the line of the user's code that led to it, however deep in memkit it arises."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - warnings.warn(skip_file_prefixes=...) needs Python 3.12
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("memkit."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, MemkitWarning, stacklevel=level)


for _public in __all__:  # the name that people read in a traceback, and import
    globals()[_public].__module__ = "memkit.errors"
