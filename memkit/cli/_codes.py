"""Exit codes: each one has the same meaning for all commands."""

from __future__ import annotations

from typing import Final

YES: Final = 0
NO: Final = 1
WRONG_USE: Final = 2
NOT_KNOWN: Final = 3
FAILED: Final = 4
INTERRUPTED: Final = 130

MEANINGS: Final = {
    YES: "yes, or done",
    NO: "no: it does not fit, there are findings, the peak grew too much",
    WRONG_USE: "wrong use, or input that cannot be read",
    NOT_KNOWN: "not known: too close to say, dependent on a guess, or not recorded",
    FAILED: "your own code failed",
    INTERRUPTED: "interrupted with Ctrl-C",
}
