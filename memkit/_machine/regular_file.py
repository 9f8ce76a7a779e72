"""Reading of user-named files: only regular files of a reasonable size, without blocking on anything else."""

from __future__ import annotations

import os
import stat

from memkit._core.errors import FileFormatError
from memkit._core.units import format_bytes

MOST_BYTES = 64 * 2**20


def read_regular(path: str | os.PathLike[str], call: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a file named by the user.

    Args:
        path: The file; links are followed.
        call: The user's call, for the error.
        most_bytes: Maximum size; a larger file is rejected.

    Raises:
        FileFormatError: The file is a pipe, a device, a directory or a socket, or larger than ``most_bytes``.
        OSError: The file cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _refusal(call, f"a {_kind(mode)}", "a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:  # for a folder it would raise an error without a name
            data = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise _refusal(call, f"more than {format_bytes(most_bytes)}", "a file of at most that size")
    return data


def _kind(mode: int) -> str:
    kinds = {"pipe": stat.S_ISFIFO, "device": stat.S_ISCHR, "disk": stat.S_ISBLK, "folder": stat.S_ISDIR}
    return next((name for name, is_one in kinds.items() if is_one(mode)), "socket")


def _refusal(call: str, got: str, expected: str) -> FileFormatError:
    return FileFormatError(call, got=got, expected=expected, fix="pass another file, or omit it.")
