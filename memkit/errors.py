"""Errors and warnings of memkit. Each error is a `MemkitError`, and also the built-in error that a caller expects."""

from memkit._core.errors import (
    ConfigError,
    FileFormatError,
    InputError,
    InputTypeError,
    MemkitError,
    MemkitOutOfMemoryError,
    MemkitWarning,
    NotSimulatedError,
    StateError,
    TorchVersionError,
)

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
