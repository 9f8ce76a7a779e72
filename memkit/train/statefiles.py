"""States on a disk: a folder each, which is there as a whole or not at all, with a checksum of every file.

A state is written into a folder of a hidden name. Its files are flushed to the disk, the manifest (size and SHA-256 of
each file) comes last, and one rename shows the folder under its name. Whatever stops the process, a folder with a
state's name is complete. Who writes holds a lock on the directory, which the kernel frees when the process dies: so
hidden folders that a writer finds are left over from dead ones, and it removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

if sys.platform != "win32":
    import fcntl

from memkit._atomic import write_text

_VERSION = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{8,})-step-(\d+)")
_HIDDEN = ".memkit-"
_CHUNK_BYTES = 4 * 2**20

Entry = dict[str, Any]  # of a file: its size in bytes, and its SHA-256


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state's folder.

    Attributes:
        path: The folder.
        serial: Its number: states are numbered in the order in which they were saved.
        step: The training step that it was saved at.
    """

    path: Path
    serial: int
    step: int

    def read_manifest(self) -> dict[str, Any]:
        """Return the manifest.

        Raises:
            ValueError: It is not what was written.
            OSError: It cannot be read.
        """
        record = json.loads((self.path / _MANIFEST).read_text())
        if not isinstance(record, dict) or record.get("sha256") != _digest(record.get("content")):
            raise ValueError(f"{_MANIFEST} does not match its own checksum")
        content: dict[str, Any] = record["content"]
        if content["version"] != _VERSION:
            raise ValueError(f"{_MANIFEST} has version {content['version']}, this memkit reads {_VERSION}")
        return content

    def check_files(self, files: Mapping[str, Entry]) -> None:
        """Read files and compare them with their entries in the manifest.

        Raises:
            ValueError: A file is not what was written.
            OSError: A file is missing or cannot be read.
        """
        for name, entry in files.items():
            if describe_file(self.path / name) != entry:
                raise ValueError(f"{name} does not match its checksum")


def list_states(directory: Path) -> list[SavedState]:
    """Return the states in a directory, the newest first; none where there is no directory."""
    paths = directory.iterdir() if directory.exists() else ()
    matches = [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]
    states = [SavedState(path, int(match[1]), int(match[2])) for path, match in matches]
    return sorted(states, key=lambda state: state.serial, reverse=True)


@contextlib.contextmanager
def locked(directory: Path, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Hold a lock on a directory: alone to write, with other readers to read. Waits for who holds it.

    A file system without locks (and Windows) goes without: then at most one process may use the directory.

    Yields:
        A function that flushes the directory's own entries to the disk.
    """
    if sys.platform == "win32":  # cannot open a directory
        yield lambda: None
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield lambda: os.fsync(descriptor)
    finally:
        with contextlib.suppress(OSError):
            # A child that was forked in the meantime holds the lock too: closing alone would not free it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def drafting(directory: Path) -> Iterator[Draft]:
    """Write a state in the block, alone in the directory; without `Draft.commit` nothing of it stays.

    Args:
        directory: Where the states are; made if it is not there.

    Raises:
        OSError: The directory cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory, alone=True) as flush:
        for stale in directory.glob(f"{_HIDDEN}*"):
            shutil.rmtree(stale)
        draft = Draft(directory, flush)
        try:
            yield draft
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)


@final
class Draft:
    """A state that is being written.

    Args:
        directory: Where the states are.
        flush: Flushes the directory, see `locked`.

    Attributes:
        path: The hidden folder, for the state's files.
    """

    def __init__(self, directory: Path, flush: Callable[[], None]) -> None:
        self._directory, self._flush = directory, flush
        self.path = directory / f"{_HIDDEN}new"
        self.path.mkdir()

    def commit(self, step: int, files: Mapping[str, Entry], notes: Mapping[str, Any]) -> None:
        """Show the state to everybody: from here on it survives whatever comes.

        Args:
            step: The training step.
            files: What `write_file` returned, by name.
            notes: More plain values for the manifest.
        """
        content = {"version": _VERSION, "step": step, "files": dict(files), **notes}
        record = {"sha256": _digest(content), "content": content}
        write_text(self.path / _MANIFEST, json.dumps(record, indent=1) + "\n")  # flushes the folder's entries too
        serial = max((state.serial for state in list_states(self._directory)), default=0) + 1
        self.path.rename(self._directory / f"{serial:08d}-step-{step}")
        self._flush()


def remove_states(states: Iterable[SavedState]) -> None:
    """Remove states: each is hidden first, so that it is never seen in part."""
    for state in states:
        hidden = state.path.with_name(f"{_HIDDEN}{state.path.name}")
        state.path.rename(hidden)
        shutil.rmtree(hidden)


def write_file(path: Path, write: Callable[[IO[bytes]], None]) -> Entry:
    """Write a file and flush it to the disk.

    Args:
        path: The new file.
        write: Writes into the file that it is given, from beginning to end.

    Returns:
        The file's entry in the manifest. The checksum is of what was handed over, not of what the disk gives back.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("xb") as file:
        hashed = _HashedFile(file)
        try:
            write(hashed)  # type: ignore[arg-type] # it only writes
        except Exception:
            if hashed.failure is not None:  # torch.save says only that the file is too short
                raise hashed.failure from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashed.entry()


def describe_file(path: Path, *, flush: bool = False) -> Entry:
    """Read a file and return its entry in the manifest; ``flush`` first brings it to the disk."""
    with path.open("r+b" if flush else "rb") as file:
        if flush:
            os.fsync(file.fileno())
        digest, num_bytes = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


class _HashedFile:
    """A file that is only written to, and the checksum of all that was."""

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

    def entry(self) -> Entry:
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
