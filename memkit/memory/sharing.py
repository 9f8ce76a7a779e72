"""Detection of other memkit processes on the same GPU, through locked files."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl


class DeviceClaim:
    """Announces to this user's other memkit processes that this one uses a GPU, until `close` or until it is freed.

    The file is held under a lock, which the system releases however the process ends: a file that can be locked has no
    owner, and is removed. The search finds no other process where this cannot work: without such locks (Windows),
    without a writable directory, and in a directory of another user, who could have placed links there.

    Args:
        identity: Unique ID of the GPU.
        directory: Directory of the files; None uses memkit's own in the system's temporary directory. Containers that
            do not share it do not see each other.
    """

    def __init__(self, identity: str, *, directory: Path | None = None) -> None:
        self._card = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in identity)
        self._directory: Path | None = None
        self._file: IO[str] | None = None
        if sys.platform != "win32":
            directory = directory or Path(tempfile.gettempdir(), f"memkit-{os.getuid()}")
            with contextlib.suppress(OSError):  # training must not stop just because nothing can be written
                directory.mkdir(mode=0o700, exist_ok=True)
                if _is_private(directory):
                    self._directory = directory
                    self._file = self._lock_own(directory)
        self._release = weakref.finalize(self, _release, self._file, os.getpid())  # also at the end of the program

    def others(self) -> tuple[int, ...]:
        """Return the PIDs of the other processes that hold a claim on the GPU, ascending."""
        if self._directory is None:
            return ()
        own = str(os.getpid())
        paths = [path for path in self._directory.glob(f"{self._card}.*.lock") if path.name.split(".")[1] != own]
        return tuple(sorted({int(path.name.split(".")[1]) for path in paths if _is_held(path)}))

    def close(self) -> None:
        """Release the claim."""
        self._release()

    def _lock_own(self, directory: Path) -> IO[str] | None:
        while sys.platform != "win32":
            # An unpredictable name: claims of one process do not collide, and no link can be planted there.
            path = directory / f"{self._card}.{os.getpid()}.{secrets.token_hex(4)}.lock"
            file = path.open("x")
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # removed as stale by another process before it was locked: retry
        return None


def _release(file: IO[str] | None, owner: int) -> None:
    """Close a claim's file, and remove it unless this is a forked copy of the process that holds the lock."""
    if file is not None:
        if os.getpid() == owner:
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
        file.close()


def _is_private(directory: Path) -> bool:
    """Return whether a directory belongs to this user, and no other user can write to it."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _is_held(path: Path) -> bool:
    """Return whether a live process holds a claim; remove the claim of a dead one."""
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
