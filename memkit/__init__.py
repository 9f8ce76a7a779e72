"""memkit: train the PyTorch model you have on the GPU you have.

This module holds names only. Each one is loaded on first use (PEP 562), so that ``import memkit`` costs nothing and
has no side effect; the code behind a name lives in the room that `_HOMES` says.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memkit._version import __version__

if TYPE_CHECKING:
    from memkit._errors import (
        ConfigError,
        FileFormatError,
        InputError,
        InputTypeError,
        MemkitError,
        MemkitWarning,
        StateError,
    )
    from memkit._units import format_bytes, parse_bytes
    from memkit.train.accumulate import GradientAccumulator

_HOMES = {
    "ConfigError": "_errors",
    "FileFormatError": "_errors",
    "GradientAccumulator": "train.accumulate",
    "InputError": "_errors",
    "InputTypeError": "_errors",
    "MemkitError": "_errors",
    "MemkitWarning": "_errors",
    "StateError": "_errors",
    "format_bytes": "_units",
    "parse_bytes": "_units",
}

__all__ = [
    "ConfigError",
    "FileFormatError",
    "GradientAccumulator",
    "InputError",
    "InputTypeError",
    "MemkitError",
    "MemkitWarning",
    "StateError",
    "__version__",
    "format_bytes",
    "parse_bytes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memkit.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return __all__
