"""Names of a package that are loaded when they are first used (PEP 562), so that importing it costs nothing."""

from __future__ import annotations

import difflib
import importlib
import opcode
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

_ROOT = "memkit"


def load_lazily(
    package: str, homes: Mapping[str, str], packages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Its name.
        homes: By public name, the module that defines it.
        packages: Its public packages and modules.
    """
    names = sorted([*homes, *packages])

    def load(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            # Of an AttributeError, `from memkit import name` would make an ImportError that says nothing.
            error = ImportError if _is_import(sys._getframe(1)) else AttributeError  # noqa: SLF001 - no public form
            raise error(f"module {package!r} has no attribute {name!r}{_hint(package, name, names)}")
        value = getattr(importlib.import_module(homes[name]), name)
        vars(sys.modules[package])[name] = value  # the next access finds it without this function
        return value

    def list_names() -> list[str]:
        return list(names)

    return load, list_names, sorted(homes)


def _is_import(frame: FrameType) -> bool:
    """Return whether a frame is executing ``from ... import ...``."""
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def _hint(package: str, name: str, names: Sequence[str]) -> str:
    """Say where a name is, or which one was meant."""
    if name.startswith("_"):
        return ""
    root = importlib.import_module(_ROOT)
    rooms = [_ROOT, *(f"{_ROOT}.{each}" for each in dir(root) if each.islower() and each in vars(root)["_PACKAGES"])]
    homes = [room for room in rooms if room != package and name in dir(importlib.import_module(room))]
    if homes:
        return f"; it is {homes[0]}.{name}"
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
