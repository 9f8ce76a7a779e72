"""States on disk: one folder each, written atomically, with a checksum of every file.

A state is written into a folder with a hidden name. Its files are flushed to disk, the manifest (size and SHA-256 of
each file) comes last, and one rename makes the folder visible under its name. Whatever stops the process, a folder with
a state's name is complete. A writer holds a lock on the directory, which the kernel frees when the process dies: hidden
folders that a writer finds are therefore leftovers of dead processes, and it removes them.

Foreign files may lie next to the states and inside them, and states may have been copied from elsewhere. Only files
that a writer creates are removed, only folders that hold nothing else, and links are never followed. Only regular files
are read: a pipe in place of one would block the reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

if sys.platform != "win32":
    import fcntl

from memkit._core.errors import StateError, warn_user
from memkit._machine.files import write_text

LARGEST_STEP = 10**18 - 1
ManifestEntry = dict[str, Any]  # one file: its size in bytes, and its SHA-256
_MANIFEST = "manifest.json"
_VERSION = 2
_LARGEST_MANIFEST_BYTES = 2**26  # enough for some 300,000 files
# Files that a writer creates in a state's folder: its own, and temporary ones that are renamed when whole.
_OWN_FILE = re.compile(
    r"rank-\d+\.pt|manifest\.json|__\d+_\d+\.distcp|\.metadata(\.tmp)?|\.[0-9a-f]{8}\..*\.memkit-tmp", re.ASCII
)
_NAME = re.compile(r"(\d{8,12})-step-(\d{1,18})", re.ASCII)
_DRAFT = ".memkit-new"
_HIDDEN = re.compile(rf"({re.escape(_DRAFT)}|\.memkit-{_NAME.pattern})(-[0-9a-f]{{8}})?", re.ASCII)
_CHUNK_BYTES = 4 * 2**20
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state's folder.

    Attributes:
        path: The folder.
        serial: Its number: states are numbered in the order they were saved.
        step: The training step at which it was saved.
    """

    path: Path
    serial: int
    step: int

    def read_manifest(self) -> dict[str, Any]:
        """Return the manifest: ``step``, ``metric``, ``mode``, ``num_ranks``, ``is_sharded``, ``files``.

        Raises:
            ValueError: It does not match what was written.
            OSError: It cannot be read.
        """
        content = _parse_manifest(read_file(self.path / _MANIFEST, num_bytes=_LARGEST_MANIFEST_BYTES).decode())
        if content["step"] != self.step:
            raise ValueError(f"{_MANIFEST} belongs to step {content['step']}: the folder was renamed")
        return content

    def check_files(self, files: Mapping[str, ManifestEntry]) -> None:
        """Read files and compare them with their manifest entries.

        Raises:
            ValueError: A file does not match what was written.
            OSError: A file is missing or cannot be read.
        """
        for name, entry in files.items():
            path = self.path / name
            if path.stat().st_size != entry["bytes"] or describe_file(path) != entry:
                raise ValueError(f"{name} does not match its checksum")


def list_states(directory: Path) -> list[SavedState]:
    """Return the states in a directory, newest first; empty if there is no directory."""
    states = [
        SavedState(path, int(match[1]), int(match[2])) for path, match in _named_as_states(directory) if path.is_dir()
    ]
    return sorted(states, key=lambda state: state.serial, reverse=True)


def list_strays(directory: Path) -> list[Path]:
    """Return paths that have a state's name but are not folders."""
    return sorted(path for path, _ in _named_as_states(directory) if not path.is_dir())


def _named_as_states(directory: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    return [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]


@contextlib.contextmanager
def locked(directory: Path, *, exclusive: bool) -> Iterator[Callable[[], None]]:
    """Hold a lock on a directory: exclusive for writing, shared for reading. Waits for the current holder.

    The lock is on the directory itself, so that it can be taken in a read-only directory. File systems without locks
    (and Windows) do without it: then at most one process may use the directory.

    Yields:
        A function that flushes the directory's own entries to disk.
    """
    if sys.platform == "win32":  # cannot open a directory
        yield lambda: None
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, directory, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield lambda: os.fsync(descriptor)
    finally:
        with contextlib.suppress(OSError):
            # A child process that was forked meanwhile holds the lock too: closing the file would not free it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, directory: Path, kind: int) -> None:
    """Take a lock; warn if that takes long, since a stopped process keeps its lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"TrainingStateManager has waited {_PATIENCE_S:.0f} s for another process that uses {directory}"
        reminder = threading.Timer(_PATIENCE_S, warn_user, (text,))
        reminder.daemon = True
        reminder.start()
        try:
            fcntl.flock(descriptor, kind)
        finally:
            reminder.cancel()
    except OSError as error:
        text = f"TrainingStateManager cannot lock {directory} ({error.strerror}): let one process at a time use it"
        warn_user(text)


@contextlib.contextmanager
def drafting(directory: Path) -> Iterator[Draft]:
    """Write a state in the block, with exclusive access; without `Draft.commit` it is removed again.

    Args:
        directory: Where the states are stored; created if missing.

    Raises:
        OSError: The directory cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, exclusive=True) as flush:
        for stale in directory.iterdir():
            if _HIDDEN.fullmatch(stale.name):
                _remove_folder(stale)
        draft = Draft(directory, flush)
        try:
            yield draft
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)


@final
class Draft:
    """A state being written.

    Args:
        directory: Where the states are stored.
        flush: Flushes the directory, see `locked`.

    Attributes:
        path: The hidden folder for the state's files.
    """

    def __init__(self, directory: Path, flush: Callable[[], None]) -> None:
        self._directory, self._flush = directory, flush
        self.path = _free_path(directory / _DRAFT)
        self.path.mkdir()

    def commit(self, step: int, files: Mapping[str, ManifestEntry], notes: Mapping[str, Any]) -> None:
        """Make the state visible under its name: from here on it survives a crash.

        Args:
            step: The training step.
            files: The results of `write_file`, by name.
            notes: More plain values for the manifest.
        """
        text = _write_manifest({"step": step, "files": dict(files), **notes})
        write_text(self.path / _MANIFEST, text)  # flushes the folder's entries too
        # Anything with a state's name uses up its number: a rename onto it would fail, or replace an empty folder.
        serial = max((int(match[1]) for _, match in _named_as_states(self._directory)), default=0) + 1
        name = f"{serial:08d}-step-{step}"
        if not _NAME.fullmatch(name):
            raise StateError(
                f"TrainingStateManager.save({step})",
                got=f"{serial - 1} as the number of a state in {self._directory}",
                expected="numbers of at most 12 digits, as save assigns them",
                fix="move that folder elsewhere.",
            )
        self.path.rename(self._directory / name)
        self._flush()


def remove_states(states: Iterable[SavedState]) -> None:
    """Remove states: each is hidden first, so it is never seen incomplete. One that cannot be removed stays."""
    for state in states:
        if not _is_own_folder(state.path):
            _warn_not_removed(state.path, "something in it was not written by memkit")
            continue
        if not any(state.path.iterdir()):  # an empty folder was not written here either
            continue
        hidden = _free_path(state.path.with_name(f".memkit-{state.path.name}"))
        try:
            state.path.rename(hidden)
        except OSError as error:
            _warn_not_removed(state.path, str(error))
        else:
            _remove_folder(hidden)


def _remove_folder(path: Path) -> None:
    """Remove a folder that holds only files of a writer; leave any other folder unchanged."""
    if not _is_own_folder(path):
        return
    try:
        for entry in list(path.iterdir()):
            entry.unlink()
        path.rmdir()
    except OSError as error:
        _warn_not_removed(path, str(error))


def _is_own_folder(path: Path) -> bool:
    """Whether a path is a folder, not a link, that holds only regular files of the kind a writer creates."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            return False
        with os.scandir(path) as entries:
            return all(_OWN_FILE.fullmatch(each.name) and each.is_file(follow_symlinks=False) for each in entries)
    except OSError:
        return False


def _warn_not_removed(path: Path, reason: str) -> None:
    text = f"TrainingStateManager does not remove {path}, which it no longer needs: {reason}"
    warn_user(text)


def _free_path(path: Path) -> Path:
    """Return an unused path: this one, or one with the same beginning."""
    while os.path.lexists(path):
        path = path.with_name(f"{path.name[:64]}-{os.urandom(4).hex()}")
    return path


def write_file(path: Path, write: Callable[[IO[bytes]], None]) -> ManifestEntry:
    """Write a file and flush it to disk.

    Args:
        path: The new file.
        write: Writes into the given file, from start to end.

    Returns:
        The file's manifest entry. The checksum is of the data written, not of what the disk returns.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("xb") as file:
        hashed = _HashedFile(file)
        try:
            write(hashed)  # type: ignore[arg-type] # it only writes
        except Exception:
            if hashed.failure is not None:  # torch.save only says that the file is too short
                raise hashed.failure from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashed.entry()


def describe_file(path: Path, *, flush: bool = False) -> ManifestEntry:
    """Read a file and return its manifest entry; ``flush`` writes it through to disk first."""
    with path.open("r+b") if flush else opened(path) as file:
        if flush:
            os.fsync(file.fileno())
        digest, num_bytes = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file for reading.

    Raises:
        ValueError: It is a pipe, a device, or the like.
        OSError: It cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # each system has one of the two
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield file


def read_file(path: Path, start: int = 0, num_bytes: int = sys.maxsize) -> bytes:
    """Return the bytes of a regular file from ``start`` on, at most ``num_bytes``.

    Raises:
        ValueError: It is a pipe, a device, or the like.
        OSError: It cannot be read.
    """
    with opened(path) as file:
        num_left = os.fstat(file.fileno()).st_size - start
        file.seek(start)
        return file.read(max(0, min(num_bytes, num_left)))


class _HashedFile:
    """A write-only file with a running checksum of its data."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._num_bytes = file, hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._num_bytes += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def entry(self) -> ManifestEntry:
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}


# ---- the manifest: the files that belong to a state, with a checksum of each and one of its own


def _write_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest."""
    versioned = {"version": _VERSION, **content}
    return json.dumps({"sha256": _digest(versioned), "content": versioned}, indent=1) + "\n"


def _parse_manifest(text: str) -> dict[str, Any]:
    """Parse a manifest.

    Raises:
        ValueError: It was not written by `_write_manifest`.
    """
    try:
        record = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(record, dict) or record.get("sha256") != _digest(record.get("content")):
            raise ValueError(f"{_MANIFEST} does not match its own checksum")
    except RecursionError:
        raise ValueError(f"{_MANIFEST} is nested too deeply") from None
    content = record["content"]
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        raise ValueError(f"{_MANIFEST} has no version")
    if content["version"] != _VERSION:
        raise ValueError(f"{_MANIFEST} has version {content['version']}, but this memkit reads {_VERSION}")
    if not _is_manifest(content):
        raise ValueError(f"{_MANIFEST} does not have the entries of a state")
    return content


def file_of_rank(rank: int) -> str:
    """Return the name of a rank's own file."""
    return f"rank-{rank}.pt"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError(f"{_MANIFEST} has {Counter(name for name, _ in pairs).most_common(1)[0][0]!r} twice")
    return values


def _is_manifest(content: Mapping[str, Any]) -> bool:
    """Whether a manifest has the entries of a state, each of the right type."""
    files, num_ranks = content.get("files"), content.get("num_ranks")
    if type(content.get("step")) is not int or type(num_ranks) is not int or num_ranks < 1:
        return False
    if type(content.get("metric", "")) not in {float, type(None)} or type(content.get("is_sharded")) is not bool:
        return False
    if content.get("mode", "") not in (None, "min", "max") or not isinstance(files, dict):
        return False
    is_whole = all(file_of_rank(rank) in files for rank in range(min(num_ranks, len(files) + 1)))
    return is_whole and all(
        _OWN_FILE.fullmatch(name) and isinstance(entry, dict) and type(entry.get("bytes")) is int
        for name, entry in files.items()
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
