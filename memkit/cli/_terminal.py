"""The only code that writes to the terminal: plain text of 80 columns, with color and progress on a terminal.

Names and texts from outside are shown as plain text. Lines are folded at spaces to the same 80 columns everywhere, so
that a pipe, a log and a terminal have the same text; a word, such as a path, is never broken.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Final, Literal, Self, TextIO, TypeAlias

from memkit._charts.text import display_width, fold
from memkit._core.printable import printable

WIDTH: Final = 80
Tone: TypeAlias = Literal["good", "bad", "unsure"]
_COLORS: dict[Tone, str] = {"good": "\x1b[1;32m", "bad": "\x1b[1;31m", "unsure": "\x1b[1;33m"}
_PLAIN, _ERASED_LINE = "\x1b[0m", "\r\x1b[K"
_REDRAW_SECONDS = 1.0


def say(line: str = "", *, tone: Tone | None = None, is_error: bool = False) -> None:
    """Write one line, with any newlines in it escaped.

    Args:
        line: The line; it is folded if it is longer than 80 columns.
        tone: Meaning of the line, shown as a color if the output has colors.
        is_error: Whether to write to standard error.
    """
    _write(printable(line), tone, is_error=is_error)


def say_all(text: str, *, is_error: bool = False) -> None:
    """Write a text of several lines, all of them memkit's own."""
    _write(printable(text.removesuffix("\n"), is_one_line=False), None, is_error=is_error)


def say_json(value: Any) -> None:
    """Write a value as JSON."""
    say_verbatim(json.dumps(value, indent=2))


def say_verbatim(text: str, *, is_error: bool = False) -> None:
    """Write a text without folding its lines: another program reads them, or has written them."""
    print(printable(text, is_one_line=False), file=sys.stderr if is_error else sys.stdout)


def folded(text: str) -> str:
    """Return a text with each of its lines folded to 80 columns."""
    return "\n".join(part for line in text.split("\n") for part in fold(line, WIDTH))


def _write(text: str, tone: Tone | None, *, is_error: bool) -> None:
    file = sys.stderr if is_error else sys.stdout
    text = folded(text)
    print(f"{_COLORS[tone]}{text}{_PLAIN}" if tone and _has_colors(file) else text, file=file)


def _has_colors(file: TextIO) -> bool:
    """Return whether a stream shows colors; NO_COLOR and FORCE_COLOR, if not empty, decide before the terminal does."""
    variables = os.environ  # noqa: TID251 - the user's settings for terminals
    if variables.get("NO_COLOR"):
        return False
    return bool(variables.get("FORCE_COLOR")) or is_watched(file)


def is_watched(file: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return file.isatty() and os.environ.get("TERM") != "dumb"  # noqa: TID251 - the terminal's own setting


class ProgressLine:
    """A line on standard error that names the running task and its time; only on a terminal. It is erased at the end.

    Args:
        text: The running task.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._start = time.monotonic()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, daemon=True) if is_watched(sys.stderr) else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def show(self, text: str) -> None:
        """Show another running task."""
        self._text = text
        if self._thread is not None:
            self._draw()

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._has_ended.set()
            self._thread.join()
            self._erase_and_write("")

    def _redraw(self) -> None:
        while not self._has_ended.wait(_REDRAW_SECONDS):  # a task that ends before needs no line
            self._draw()

    def _draw(self) -> None:
        text = printable(f"{self._text}, {time.monotonic() - self._start:.0f} s")
        while display_width(text) >= WIDTH:  # a line that wraps could not be erased
            text = text[1:]
        self._erase_and_write(text)

    def _erase_and_write(self, text: str) -> None:
        sys.stderr.write(_ERASED_LINE + text)
        sys.stderr.flush()
