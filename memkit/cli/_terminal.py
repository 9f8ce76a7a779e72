"""The only place where a command writes to the terminal: names and texts from outside are shown as plain text."""

from __future__ import annotations

import sys

from memkit._core.printable import printable


def say(line: str = "", *, is_error: bool = False) -> None:
    """Write one line, with any newlines in it escaped."""
    print(printable(line), file=sys.stderr if is_error else sys.stdout)


def say_all(text: str, *, is_error: bool = False) -> None:
    """Write a text of several lines, all of them memkit's own."""
    print(printable(text.removesuffix("\n"), is_one_line=False), file=sys.stderr if is_error else sys.stdout)
