"""Names that compiled Python code looks up outside of itself."""

from __future__ import annotations

import dis
import functools
from types import CodeType


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """Return the global names that code reads, assigns or deletes, and those of functions inside it; no attributes."""
    own = {each.argval for each in dis.get_instructions(code) if "GLOBAL" in each.opname or each.opname in _BY_NAME}
    inside = (global_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*inside)


_BY_NAME = frozenset({"LOAD_NAME", "STORE_NAME", "DELETE_NAME"})  # of a module's or a class's own code
