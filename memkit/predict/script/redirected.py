"""Redirect the writes of a process to a separate folder: no file of the user is created, changed or removed.

The folder mirrors the file system: a file that the process writes to ``/a/b`` is stored in ``FOLDER/a/b``, is read from
there, and is listed along with the contents of the real ``/a``. Removed files are only hidden. This covers files opened
by Python (and everything built on it: NumPy, Pillow, logging) and by `torch.save`, but not files opened in C by
libraries, nor other programs that the process starts. safetensors' writes are refused; see
`memkit.predict.script.imports`.
"""
# It replaces functions of os, on which pathlib is built.
# ruff: noqa: PTH100, PTH112, PTH114, PTH117, PTH118, PTH120

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memkit._core.errors import StateError
from memkit._core.protocols import Closing

_ORIGINALS = ("posix", "nt", "_io")  # the modules that os and io take their functions from
_UNTOUCHED = ("/dev", "/proc", "/sys")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READERS = ("access", "getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs")
_CHANGERS = ("chmod", "chown", "removexattr", "setxattr", "truncate", "utime")


WITHOUT_WRITE = (
    "leave this write out in the dry run (save_strategy='no' for transformers' Trainer), or end the run before it with "
    "fewer --steps"
)
"""The way out where a library writes a file in a way that cannot be redirected."""


class Redirection:
    """The mirror. `install` it once, in a process of its own: it cannot be undone.

    Args:
        folder: Existing folder for the written files. Paths inside its parent folder are not redirected.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._untouched = (*_UNTOUCHED, str(Path(self._folder).parent))
        self._removed: set[str] = set()
        self._open, self._save, self._load = builtins.open, torch.save, torch.load
        self._real = {name: function for name, function in vars(os).items() if callable(function)}

    def install(self) -> None:
        """Make this process, and those that it forks, write to the mirror from now on."""
        by_name: dict[str, Callable[..., Any]] = {
            **{name: self._placed(name, self.to_read) for name in _READERS if name in self._real},
            **{name: self._placed(name, self.to_change) for name in _CHANGERS if name in self._real},
            "chdir": self._placed("chdir", self._to_enter),
            "open": self._opened_by_flags,
            "mkdir": self._mkdir,
            "rmdir": self._rmdir,
            "remove": self._remove,
            "unlink": self._remove,
            "rename": self._rename,
            "replace": self._rename,
            "link": self._link,
            "symlink": self._symlink,
            "listdir": self._listdir,
            "scandir": self._scandir,
        }
        replacements = {id(self._real[name]): function for name, function in by_name.items()}
        replacements |= {id(self._open): self._opened, id(self._save): self._saved, id(self._load): self._loaded}
        for module in list(sys.modules.values()):  # including names that modules have imported: from os import makedirs
            if type(module) is ModuleType and module.__name__ not in _ORIGINALS:
                names = vars(module)
                names.update({name: replacements[id(old)] for name, old in names.items() if id(old) in replacements})
        setattr(shutil, "_use_fd_functions", False)  # noqa: B010 - private; makes rmtree use paths

    def written(self) -> tuple[str, ...]:
        """Return the files in the mirror, by the names that the process used."""
        files = (os.path.join(folder, name) for folder, _, names in os.walk(self._folder) for name in names)
        return tuple(sorted(file.removeprefix(self._folder) for file in files))

    def refuse_write_of(self, library: str, path: Any) -> None:
        """Refuse a write to a path that is redirected, by a library that opens the file itself.

        Raises:
            StateError: The path is redirected.
        """
        _, mirrored = self._both(path)
        if mirrored is not None:
            raise StateError(
                f"a write by {library}",
                got=f"{os.fspath(path)!r}, a file that {library} opens itself, not by Python",
                expected="a write by Python: others cannot be redirected to the temporary folder",
                fix=f"{WITHOUT_WRITE}, or write by torch.save(model.state_dict(), PATH).",
            )

    # ------------------------------------------------------------------------------------------ where a path is

    def to_read(self, path: Any) -> Any:
        """Return where to read a path: in the mirror if the process wrote it, otherwise the path itself."""
        real, mirrored = self._both(path)
        if mirrored is None:
            return path
        if self._is_there(mirrored):
            return mirrored
        if self._is_removed(real):
            raise _error(errno.ENOENT, path)
        return path

    def to_write(self, path: Any) -> Any:
        """Return where to create or overwrite a path."""
        real, mirrored = self._both(path)
        if mirrored is None:
            return path
        if not self._exists(os.path.dirname(real)):
            raise _error(errno.ENOENT, path)
        self._make_folder(os.path.dirname(mirrored))
        return mirrored

    def to_change(self, path: Any) -> Any:
        """Return where to modify a path, after copying its content there."""
        real, mirrored = self._both(path)
        if mirrored is None or self._is_there(mirrored) or not self._exists(path):
            return self.to_write(path)
        if os.path.isdir(real):
            self._make_folder(mirrored)
        else:
            self._copy(real, self.to_write(path))
        return mirrored

    def _to_enter(self, path: Any) -> Any:
        real, _ = self._both(path)
        return path if self._is_there(real) and not self._is_removed(real) else self.to_read(path)

    def _both(self, path: Any) -> tuple[str, str | None]:
        """Return the absolute path and its place in the mirror; None if it is not redirected."""
        if isinstance(path, int):
            return "", None
        real = os.path.abspath(os.fsdecode(path))
        if any(real == folder or real.startswith(folder + os.sep) for folder in self._untouched):
            return real, None
        return real, self._folder + os.path.splitdrive(real)[1]

    def _exists(self, path: Any) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._is_there(self.to_read(path))
        return False

    def _is_there(self, path: Any) -> bool:
        with contextlib.suppress(OSError):
            self._real["lstat"](path)
            return True
        return False

    def _is_removed(self, real: str) -> bool:
        return any(real == gone or real.startswith(gone + os.sep) for gone in self._removed)

    def _make_folder(self, folder: str) -> None:
        if not self._is_there(folder):
            self._make_folder(os.path.dirname(folder))
            self._real["mkdir"](folder)

    def _copy(self, old: str, new: str) -> None:
        with self._open(old, "rb") as source, self._open(new, "wb") as target:
            shutil.copyfileobj(source, target)

    # ---------------------------------------------------------------------------------- replaced functions

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" in mode and self._exists(file):
            raise _error(errno.EEXIST, file)
        is_new, is_changed = not {"w", "x"}.isdisjoint(mode), not {"a", "+"}.isdisjoint(mode)
        place = self.to_write if is_new else self.to_change if is_changed else self.to_read
        return self._open(place(file), mode, *args, **kwargs)

    def _opened_by_flags(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and flags & os.O_EXCL and self._exists(path):
            raise _error(errno.EEXIST, path)
        if flags & _WRITING:
            _refuse(path, dir_fd)
            path = self.to_write(path) if flags & os.O_TRUNC else self.to_change(path)
        elif dir_fd is None:
            path = self.to_read(path)
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        return descriptor

    def _saved(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        self._save(obj, self.to_write(f) if isinstance(f, (str, os.PathLike)) else f, *args, **kwargs)

    def _loaded(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        return self._load(self.to_read(f) if isinstance(f, (str, os.PathLike)) else f, *args, **kwargs)

    def _placed(self, name: str, place: Callable[[Any], Any]) -> Callable[..., Any]:
        function = self._real[name]

        @wraps(function)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if dir_fd is None:
                return function(place(path), *args, **kwargs)
            if name in _CHANGERS:
                _refuse(path, dir_fd)
            return function(path, *args, dir_fd=dir_fd, **kwargs)

        return call

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        _refuse(path, dir_fd)
        if self._exists(path):
            raise _error(errno.EEXIST, path)
        self._real["mkdir"](self.to_write(path), mode)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        _refuse(path, dir_fd)
        if self._listdir(path):
            raise _error(errno.ENOTEMPTY, path)
        self._forget(path, self._real["rmdir"])

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        _refuse(path, dir_fd)
        if os.path.isdir(path) and not os.path.islink(path):
            raise _error(errno.EISDIR, path)
        self._forget(path, self._real["remove"])

    def _forget(self, path: Any, remove: Callable[[Any], None]) -> None:
        real, mirrored = self._both(path)
        if not self._exists(path):
            raise _error(errno.ENOENT, path)
        if mirrored is None or self._is_there(mirrored):
            remove(mirrored or path)
        if mirrored is not None and self._is_there(real):
            self._removed.add(real)

    def _rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        _refuse(source, src_dir_fd)
        _refuse(target, dst_dir_fd)
        real, mirrored = self._both(source)
        place, new = self.to_read(source), self.to_write(target)
        has_old = self._is_there(real) and not self._is_removed(real)
        if mirrored is not None and has_old and os.path.isdir(place):
            shutil.copytree(source, new)  # through the functions above, so written files are included
            if place == mirrored:
                shutil.rmtree(mirrored)
        elif mirrored is None or place == mirrored:
            self._real["replace"](place, new)
        else:
            self._copy(place, new)
        if mirrored is not None and self._is_there(real):
            self._removed.add(real)

    def _link(self, source: Any, target: Any, **_: Any) -> None:
        self._copy(self.to_read(source), self.to_write(target))  # a link would let writes through

    def _symlink(self, source: Any, target: Any, *_: Any, dir_fd: int | None = None) -> None:
        _refuse(target, dir_fd)
        if self._exists(target):
            raise _error(errno.EEXIST, target)
        self._real["symlink"](self.to_read(source) if os.path.isabs(source) else source, self.to_write(target))

    def _listdir(self, path: Any = ".") -> list[Any]:
        return [entry.name for entry in self._scandir(path)]

    def _scandir(self, path: Any = ".") -> Any:
        real, mirrored = self._both(path)
        if mirrored is None or not (self._is_there(mirrored) or self._removed):
            return self._real["scandir"](path)
        entries: dict[Any, os.DirEntry[Any]] = {}
        if self._is_there(real) and not self._is_removed(real):
            with self._real["scandir"](path) as found:
                names = {entry.name: entry for entry in found}
            entries = {
                name: entry
                for name, entry in names.items()
                if os.path.join(real, os.fsdecode(name)) not in self._removed
            }
        elif not self._is_there(mirrored):
            raise _error(errno.ENOENT, path)
        if self._is_there(mirrored):
            with self._real["scandir"](os.fsencode(mirrored) if isinstance(path, bytes) else mirrored) as found:
                entries |= {entry.name: entry for entry in found}
        return _Entries(entries.values())


class _Entries(Closing):
    """Result of `os.scandir`."""

    def __init__(self, entries: Iterable[os.DirEntry[Any]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[Any]]:
        return self._entries

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _refuse(path: Any, dir_fd: int | None) -> None:
    if dir_fd is not None:
        raise StateError(
            f"a write to {os.fspath(path)!r} with dir_fd={dir_fd}",
            got="a path relative to an open directory",
            expected="an absolute path, or one relative to the working directory: others cannot be redirected",
            fix="write to an absolute path, or skip this write in the dry run.",
        )


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))
