"""Who else computes on this card: processes that say so to each other through locked files."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl


class DeviceClaim:
    """Says to other memkit processes of this user that this one uses a card, until `close` or the end of the process.

    The file is held under a lock, which the system lets go when the process ends in whatever way: a file that can be
    locked belongs to nobody, and is removed. Where that cannot work nobody is found: without such locks (Windows),
    without a directory to write to, and where the directory is somebody else's, who could have put links there.

    Args:
        identity: What tells the card from all others.
        directory: Where the files are; None takes memkit's in the system's directory for temporary files. Containers
            that do not share it do not see each other.
    """

    def __init__(self, identity: str, *, directory: Path | None = None) -> None:
        self._card = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in identity)
        self._directory: Path | None = None
        self._file: IO[str] | None = None
        if sys.platform != "win32":
            directory = directory or Path(tempfile.gettempdir(), f"memkit-{os.getuid()}")
            with contextlib.suppress(OSError):  # a machine where nothing can be written is no reason to stop a training
                directory.mkdir(mode=0o700, exist_ok=True)
                if _is_private(directory):
                    self._directory = directory
                    self._file = self._lock_own(directory)

    def others(self) -> tuple[int, ...]:
        """Return the numbers of the other processes that hold a claim on the card, ascending."""
        if self._directory is None:
            return ()
        own = str(os.getpid())
        paths = [path for path in self._directory.glob(f"{self._card}.*.lock") if path.name.split(".")[1] != own]
        return tuple(sorted({int(path.name.split(".")[1]) for path in paths if _is_held(path)}))

    def close(self) -> None:
        """Let go."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                Path(self._file.name).unlink()
            self._file.close()
            self._file = None

    def _lock_own(self, directory: Path) -> IO[str] | None:
        while sys.platform != "win32":
            # A name that nobody knows before: several claims of one process do not meet, and no link can wait there.
            path = directory / f"{self._card}.{os.getpid()}.{secrets.token_hex(4)}.lock"
            file = path.open("x")
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # somebody took it for a dead one before it was locked, and removed it: once more
        return None


def _is_private(directory: Path) -> bool:
    """Say whether a directory is this user's own, and nobody else can write in it."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _is_held(path: Path) -> bool:
    """Say whether a process holds a claim; remove the claim of one that is gone."""
    if sys.platform != "win32":
        try:
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
