"""The only place where a command writes to the terminal: what others have named and written stays text."""

from __future__ import annotations

import sys

from memkit._core.printable import printable


def say(line: str = "", *, is_error: bool = False) -> None:
    """Write one line: newlines in it are shown as such."""
    print(printable(line), file=sys.stderr if is_error else sys.stdout)


def say_all(text: str, *, is_error: bool = False) -> None:
    """Write a text of several lines, each of which is memkit's own."""
    print(printable(text.removesuffix("\n"), is_one_line=False), file=sys.stderr if is_error else sys.stdout)
