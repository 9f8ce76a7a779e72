"""Which modules are the user's own, and which are installed packages."""

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
    return _is_users_file(str(getattr(module, "__file__", "")))


@lru_cache(maxsize=4096)  # each search for what a forward holds asks again
def _is_users_file(file: str) -> bool:
    return not file.startswith(_INSTALLED) and _SITES.isdisjoint(Path(file).parts)
