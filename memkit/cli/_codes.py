"""Meaning of the exit codes of all commands."""

from __future__ import annotations

from typing import Final

YES: Final = 0  # or: done
NO: Final = 1  # it does not fit, there are findings, it got worse
WRONG_USE: Final = 2  # also: unreadable input
NOT_KNOWN: Final = 3
FAILED: Final = 4  # the user's own code
