"""Find patterns in scripts that cost memory, without running the scripts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.check.check import (
        check_paths as check_paths,
        check_source as check_source,
    )
    from memkit.check.findings import Finding as Finding
else:  # hidden from type checkers, which would accept any name because of `__getattr__`
    from memkit._core.lazy import load_lazily

    _HOMES = {
        "Finding": "memkit.check.findings",
        "check_paths": "memkit.check.check",
        "check_source": "memkit.check.check",
    }
    __getattr__, __dir__, __all__ = load_lazily(__name__, _HOMES)
