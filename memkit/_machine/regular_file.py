"""Files that somebody names: ordinary ones of a sane size are read, and nothing else is waited for."""

from __future__ import annotations

import os
import stat

from memkit._core.errors import FileFormatError
from memkit._core.units import format_bytes

MOST_BYTES = 64 * 2**20


def read_regular(path: str | os.PathLike[str], call: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a file that a user has named.

    Args:
        path: The file; a link is followed.
        call: The user's call, for the error.
        most_bytes: A larger one is refused.

    Raises:
        FileFormatError: It is a pipe, a device, a directory or a socket, or larger than that.
        OSError: It cannot be read.
    """
    # Without O_NONBLOCK a pipe without a writer would be waited for.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise _refusal(call, f"a {_kind(mode)}", "an ordinary file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise _refusal(call, f"more than {format_bytes(most_bytes)}", "a file of that size at most")
    return data


def _kind(mode: int) -> str:
    kinds = {"pipe": stat.S_ISFIFO, "device": stat.S_ISCHR, "disk": stat.S_ISBLK, "folder": stat.S_ISDIR}
    return next((name for name, is_one in kinds.items() if is_one(mode)), "socket")


def _refusal(call: str, got: str, expected: str) -> FileFormatError:
    return FileFormatError(call, got=got, expected=expected, fix="give another file, or leave it out.")
