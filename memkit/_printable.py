"""Text of others on a terminal: what moves the cursor, turns letters around or ends a line is shown, not done."""

from __future__ import annotations

import unicodedata

# Control and format characters (escape sequences, bidirectional overrides), lone surrogates, ends of lines.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, is_one_line: bool = True) -> str:
    r"""Return a text with every character that is no letter, mark or sign as its escape sequence.

    Args:
        text: File names, lines of code, messages: anything.
        is_one_line: Whether newlines are escaped too.

    Example:
        >>> from memkit._printable import printable
        >>> print(printable("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    if text.isprintable():
        return text
    kept = "" if is_one_line else "\n\t"
    return "".join(each if each in kept or not _is_hidden(each) else repr(each)[1:-1] for each in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN
