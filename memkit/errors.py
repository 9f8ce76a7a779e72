"""Errors and warnings of memkit. Each error is a `MemkitError`, and also the built-in error that a caller expects."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit._core.errors import (
        AbsentError as AbsentError,
        ConfigError as ConfigError,
        FileFormatError as FileFormatError,
        InputError as InputError,
        InputTypeError as InputTypeError,
        MemkitError as MemkitError,
        MemkitOutOfMemoryError as MemkitOutOfMemoryError,
        MemkitWarning as MemkitWarning,
        NotSimulatedError as NotSimulatedError,
        StateError as StateError,
        TorchVersionError as TorchVersionError,
    )
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "AbsentError": "memkit._core.errors",
        "ConfigError": "memkit._core.errors",
        "FileFormatError": "memkit._core.errors",
        "InputError": "memkit._core.errors",
        "InputTypeError": "memkit._core.errors",
        "MemkitError": "memkit._core.errors",
        "MemkitOutOfMemoryError": "memkit._core.errors",
        "MemkitWarning": "memkit._core.errors",
        "NotSimulatedError": "memkit._core.errors",
        "StateError": "memkit._core.errors",
        "TorchVersionError": "memkit._core.errors",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
