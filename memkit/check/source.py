"""Read the files to check: Python files in their own encoding, code cells of notebooks, shell scripts."""

from __future__ import annotations

import io
import json
import tokenize
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from memkit._core.errors import FileFormatError
from memkit._machine.regular_file import read_regular

PYTHON, NOTEBOOK, SHELL = ".py", ".ipynb", ".sh"
_MOST_BYTES = 32 * 2**20  # a notebook with images; no script is that large
SUFFIXES = frozenset({PYTHON, NOTEBOOK, SHELL})


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one file, and for a notebook the starting line of each code cell."""

    path: str
    text: str
    is_shell: bool = False
    cell_starts: tuple[int, ...] = field(default=())

    def cell_at(self, line: int) -> tuple[int | None, int]:
        """The code cell that contains a line, and the line inside it, both from 1."""
        cell = bisect_right(self.cell_starts, line)
        return (cell, line - self.cell_starts[cell - 1] + 1) if cell else (None, line)


def read_source(path: Path) -> Source:
    """Read one file.

    Raises:
        FileFormatError: It is not text, not a notebook, not a regular file, or too large for a script.
        OSError: It cannot be read.
    """
    data = read_regular(path, f"check {path}", _MOST_BYTES)
    if path.suffix == NOTEBOOK:
        return _read_notebook(str(path), data)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        got, expected = f"bytes that do not decode ({error})", "text in UTF-8 or the encoding it declares"
        raise _cannot_read(str(path), got, expected) from None
    return Source(str(path), text, is_shell=path.suffix == SHELL)


def _read_notebook(path: str, data: bytes) -> Source:
    starts: list[int] = []
    lines: list[str] = []
    try:
        for cell in json.loads(data)["cells"]:
            if cell["cell_type"] != "code":
                continue
            starts.append(len(lines) + 1)
            code = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
            lines += _without_magics(code.split("\n"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _cannot_read(path, f"{type(error).__name__}: {error}", "a notebook of format 4, with cells") from None
    return Source(path, "\n".join(lines) + "\n", cell_starts=tuple(starts))


def _without_magics(lines: list[str]) -> list[str]:
    """Return the lines of a cell with IPython syntax replaced by `pass`, line for line."""
    if lines[0].startswith("%%"):
        return ["pass"] * len(lines)
    return [
        line[: -len(rest)] + "pass" if (rest := line.lstrip()).startswith(("%", "!", "?")) else line for line in lines
    ]


def _cannot_read(path: str, got: str, expected: str) -> FileFormatError:
    return FileFormatError(f"check {path}", got=got, expected=expected, fix="save the file as such, or leave it out.")
