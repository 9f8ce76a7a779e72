"""Safe display of untrusted text: characters that move the cursor, reverse text or end a line are escaped."""

from __future__ import annotations

import json
import re
import reprlib
import unicodedata
from collections.abc import Sequence
from typing import Any

# Control and format characters (escape sequences, bidirectional overrides), lone surrogates, line separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_MAX_SHORT, _MAX_BITS = 160, 63  # characters of a text; bits of a number that is written out
_NOT_ASCII = re.compile("[\x7f-\ud7ff\ue000-\U0010ffff]")  # surrogates are left to the encoder


def printable(text: str, *, is_one_line: bool = True) -> str:
    r"""Return a text with every control, format and line-ending character escaped.

    Args:
        text: Any text, such as file names, lines of code or messages.
        is_one_line: Whether to escape newlines too.

    Example:
        >>> from memkit._core.printable import printable
        >>> print(printable("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    if text.isprintable():
        return text
    kept = "" if is_one_line else "\n\t"
    return "".join(each if each in kept or not _is_hidden(each) else repr(each)[1:-1] for each in text)


def printable_json(text: str) -> str:
    r"""Return a JSON text of the same values, with hidden non-ASCII characters escaped; JSON escapes the ASCII ones.

    Example:
        >>> from memkit._core.printable import printable_json
        >>> printable_json('"\u00e9\u202e\x9b"')
        '"é\\u202e\\u009b"'
    """
    return text if text.isascii() and "\x7f" not in text else _NOT_ASCII.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def described(value: Any) -> str:
    """Describe a value by its type; a tensor or an array also by its shape and dtype."""
    kind = f"a {type(value).__name__}"
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return f"{kind} of shape {tuple(value.shape)}, {value.dtype}" if is_array else kind


def list_some(names: Sequence[str], most: int = 5) -> str:
    """List the first names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def percent(share: float) -> str:
    """Return a share as a percentage, without trailing zeros: ``"20%"`` for 0.2."""
    return f"{100 * share:g}%"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1.

    Example:
        >>> from memkit._core.printable import counted
        >>> counted(1, "file"), counted(2000, "file")
        ('1 file', '2,000 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(value: object) -> str:
    """Describe any value in a few words, even one whose own text would be very long."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write one of 4,300 digits
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_SHORT else text[: _MAX_SHORT - 3] + "..."  # each level of a nested value is short
