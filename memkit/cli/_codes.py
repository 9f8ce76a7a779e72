"""What the exit codes of all commands say."""

from __future__ import annotations

from typing import Final

YES: Final = 0  # or: done
NO: Final = 1  # it does not fit, there are findings, it became worse
WRONG_USE: Final = 2  # also: what was given cannot be read
NOT_KNOWN: Final = 3
FAILED: Final = 4  # the user's own code
