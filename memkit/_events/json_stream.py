"""Parse JSON piece by piece, so that memory use depends on the values that are kept, not on the whole file.

``[{},{},...]`` takes 24 times its own size when parsed as a whole, and a thousandth of its size when compressed.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_AFTER: Final = frozenset(" \t\n\r,:]}")
_HALF: Final = re.compile(r"\\u[dD]")
_LARGEST_CHARS: Final = 2**24  # per value: a line of a log may have that many bytes
_SMALL_CHARS: Final = 2**20
_CHARS_PER_CONTAINER: Final = 16  # minimum for a large value, since it holds strings and numbers


class NotWholeError(ValueError):
    """The text is not valid JSON, and may be a truncated document."""


def check_density(text: str) -> None:
    """Reject a large value that consists almost only of containers, before it is parsed.

    Raises:
        ValueError: The value would take far more memory than its length.
    """
    num_chars = len(text)
    if num_chars > _SMALL_CHARS:
        num_containers = sum(text.count(each) for each in "{[")
        if num_containers * _CHARS_PER_CONTAINER > num_chars:
            raise ValueError(f"{num_containers} containers in {num_chars} characters")


class JsonStream:
    """A JSON text, parsed one value at a time on request.

    Args:
        chunks: The text in UTF-8, in chunks of any length.
        decoder: Parses the values.

    Raises:
        NotWholeError: The text is not valid JSON; raised by all methods.
        ValueError: The decoder rejects a value, or a value is too large; raised by all methods.
    """

    def __init__(self, chunks: Iterable[bytes], decoder: json.JSONDecoder) -> None:
        self._chunks, self._decode = iter(chunks), decoder.raw_decode
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._num_before = "", 0, 0
        self._any_halves = self._has_halves = False

    @property
    def num_chars(self) -> int:
        """Number of characters skipped or parsed."""
        return self._num_before + self._at

    @property
    def may_have_halves(self) -> bool:
        """Whether an escape in the last value may be half of a surrogate pair."""
        return self._has_halves

    def peek(self) -> str:
        """Return the next non-space character; empty at the end of the text."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def expect(self, characters: str) -> str:
        """Skip the next non-space character, which must be one of these."""
        found = self.peek()
        if not found or found not in characters:
            names = " or ".join(repr(each) for each in characters)
            raise NotWholeError(f"invalid JSON at character {self.num_chars} (Expecting {names})")
        self._at += 1
        return found

    def expect_end(self) -> None:
        """Check that nothing follows."""
        if self.peek():
            raise NotWholeError(f"invalid JSON at character {self.num_chars} (Extra data)")

    def value(self) -> Any:
        """Parse the next value."""
        while True:
            self.peek()
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._read_on(len(self._text) - self._at):  # double the text: the value is parsed again
                    place = self._num_before + error.pos
                    raise NotWholeError(f"invalid JSON at character {place} ({error.msg})") from None
            except RecursionError:
                raise ValueError("JSON that is nested too deeply") from None
            else:
                if (
                    self._text[end : end + 1] in _AFTER or not self._read_on()
                ):  # otherwise a number may continue: "1", "1.", "1e"
                    self._has_halves = self._any_halves and bool(_HALF.search(self._text, self._at, end))
                    self._at = end
                    return value

    def elements(self) -> Iterator[Any]:
        """Parse the next array, one element at a time."""
        self.expect("[")
        if self.peek() == "]":
            self.expect("]")
            return
        while True:
            yield self.value()
            if self.expect(",]") == "]":
                return

    def names(self) -> Iterator[str]:
        """Parse the names in the next object; the value must be read after each name."""
        self.expect("{")
        if self.peek() == "}":
            self.expect("}")
            return
        while True:
            if self.peek() != '"':
                self.expect('"')
            key: str = self.value()
            self.expect(":")
            yield key
            if self.expect(",}") == "}":
                return

    def _read_on(self, num_chars: int = 1) -> bool:
        """Read ``num_chars`` or more further characters, or all that are left; return whether there were any."""
        if len(self._text) - self._at > _LARGEST_CHARS:
            raise ValueError(f"a value of over {_LARGEST_CHARS} characters at character {self.num_chars}")
        pieces, num_new = [self._text[self._at :]], 0
        try:
            while num_new < num_chars and (chunk := next(self._chunks, None)) is not None:
                pieces.append(self._utf8.decode(chunk))
                num_new += len(pieces[-1])
            if num_new < num_chars:
                self._utf8.decode(b"", final=True)
        except UnicodeDecodeError:
            raise NotWholeError("text that is not UTF-8") from None
        if not num_new:
            return False
        self._num_before += self._at
        self._text, self._at = "".join(pieces), 0
        self._any_halves = bool(_HALF.search(self._text))
        check_density(self._text)
        return True
