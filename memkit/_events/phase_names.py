"""Classification of phases by their names, for the memory manager and the report."""

from __future__ import annotations

import re
from functools import lru_cache

_EVALUATION = re.compile(r"val(id(ation|ate)?)?|eval(uat(e|ion))?|test(ing)?|infer(ence)?|predict(ion)?", re.IGNORECASE)


@lru_cache(maxsize=1024)  # a log has few phases, and each of them often
def is_evaluation(path: str) -> bool:
    """Whether a phase evaluates, by its path.

    Example:
        >>> from memkit._events.phase_names import is_evaluation
        >>> is_evaluation("epoch/validation"), is_evaluation("train/forward")
        (True, False)
    """
    return any(_EVALUATION.fullmatch(word) for part in path.split("/") for word in re.split(r"[ _-]|\d+", part))
