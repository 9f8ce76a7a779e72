"""Atomic file writes: the target is either the old or the new file, never a mix, even if the process is killed.

The new content goes to a temporary file in the same directory (a rename across file systems would be a copy), is
flushed to disk, and replaces the target in one step; then the directory entry is flushed too. A process that is
killed while writing leaves its temporary file behind: the next write to the same target removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from memkit._core.errors import InputError

_SUFFIX = ".memkit-tmp"


def check_folder(call: str, folder: Path, *, got: str = "") -> None:
    """Refuse a folder that is missing before anything is written to it.

    Args:
        call: The user's call, for the message.
        folder: The folder.
        got: The user's argument in words; without it, the folder itself.

    Raises:
        InputError: It is not a directory.
    """
    if not folder.is_dir():
        name = str(folder)
        raise InputError(
            call,
            got=f"{got or 'a path'} {name!r}, which is not a directory",
            expected="a directory that exists",
            fix=(
                f"use a directory, for example {str(folder.parent)!r}."
                if folder.exists()
                else f"create it first: os.makedirs({name!r}, exist_ok=True)."
            ),
        )


def check_place(call: str, path: Path, *, example: str = "file.json") -> None:
    """Refuse a path at which no file can be written: a directory, and a path in a directory that does not exist.

    Args:
        call: The user's call, for the message.
        path: The file to write.
        example: A name for the file, which the message suggests.

    Raises:
        InputError: It is such a path.
    """
    if path.is_dir():
        fix = f"add a file name, for example {str(path / example)!r}."
        raise InputError(call, got="a directory", expected="the path of a file", fix=fix)
    check_folder(call, path.parent, got="a path in")


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open ``path`` for writing, so that it is replaced as a whole when the block ends without an error.

    Args:
        path: The file to write. Its directory must exist. A symbolic link stays a link: the file that it points to
            changes, and must exist. An existing file keeps its permissions.

    Yields:
        A binary file. If the block raises, or the process dies at any instant, ``path`` is unchanged.

    Raises:
        InputError: ``path`` is a directory, or lies in one that does not exist.
        OSError: The file cannot be written (disk full, read-only, a dangling link, a device); ``path`` is unchanged
            and nothing is left behind.
    """
    check_place(f"writing {os.fspath(path)!r}", Path(path))
    target = _target_of(path)
    _sweep(target)
    temporary = target.with_name(f"{_prefix(target)}{os.getpid()}.{os.urandom(4).hex()}{_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            with contextlib.suppress(FileNotFoundError):
                temporary.chmod(target.stat().st_mode & 0o7777)
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # as of a read-only file system: the error is the one that is raised
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == os.fspath(temporary):
            error.filename, error.filename2 = os.fspath(path), None  # the name that the caller knows
        raise
    _fsync_directory(target.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path`` atomically; see `atomic_writer`."""
    with atomic_writer(path) as file:
        file.write(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8 with plain newlines, atomically; see `atomic_writer`."""
    write_bytes(path, text.encode())


def _target_of(path: str | os.PathLike[str]) -> Path:
    """Return the file to replace; reject a dangling link, which would let others choose where a file appears."""
    target = Path(os.path.realpath(path))
    if not target.exists() and Path(path).is_symlink():
        raise FileNotFoundError(errno.ENOENT, "a link to a missing file", os.fspath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        raise OSError(errno.EINVAL, "not a regular file, which a new file would replace", os.fspath(path))
    return target


def _prefix(target: Path) -> str:
    # The host is part of the name: on a shared file system, a PID says nothing about another machine. The checksum
    # stands for the target's own name, which may already be as long as the file system allows.
    return f".{zlib.crc32(target.name.encode()):08x}.{zlib.crc32(platform.node().encode()):08x}."


def _sweep(target: Path) -> None:
    """Remove temporary files for ``target`` whose writers on this host are dead."""
    if os.name != "posix":  # no harmless way to check whether a process is alive
        return
    prefix = _prefix(target)
    for stale in target.parent.glob(f"{prefix}*{_SUFFIX}"):
        pid = stale.name.removeprefix(prefix).split(".", 1)[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            stale.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process
    return True


def _fsync_directory(directory: Path) -> None:
    if os.name != "posix":  # Windows cannot open a directory
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
