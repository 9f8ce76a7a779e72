"""Which modules and files are the user's own, and which are of installed packages."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from sysconfig import get_paths
from types import ModuleType

_INSTALLED = (*(get_paths()[name] for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
_SITES = {"site-packages", "dist-packages"}  # of any environment: a venv may see those of the system


def is_users_module(module: ModuleType | None) -> bool:
    """Whether a module is the user's own, not an installed one."""
    if module is None or module.__name__ in sys.builtin_module_names:
        return False
    return is_users_file(str(getattr(module, "__file__", "")))


@lru_cache(maxsize=4096)  # each search for what a forward holds asks again
def is_users_file(file: str) -> bool:
    """Whether a file of code is the user's own, typed in a console, or frozen; not an installed one."""
    return not file.startswith(_INSTALLED) and _SITES.isdisjoint(Path(file).parts)
