"""Writes of a process that go to a folder of their own: no file of the user is made, changed or removed.

The folder mirrors the file system: what the process writes to ``/a/b`` lies in ``FOLDER/a/b``, is read from there, and
is listed beside what the real ``/a`` holds. What is removed is only forgotten. So it is for files that Python opens (and
all that stands on it: NumPy, Pillow, logging, TensorBoard) and for `torch.save`; not for libraries that open files in C,
and not for other programs that the process starts.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch

_ORIGINALS = ("posix", "nt", "_io")  # the modules that os and io take their functions from
_UNTOUCHED = ("/dev", "/proc", "/sys")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READERS = ("access", "chdir", "lstat", "readlink", "stat", "statvfs")
_CHANGERS = ("chmod", "chown", "truncate", "utime")


class Redirection:
    """The mirror. `install` it once, in a process of its own: nothing undoes it.

    Args:
        folder: Where what is written goes; it exists. Nothing is redirected that lies in the folder around it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._untouched = (*_UNTOUCHED, str(Path(self._folder).parent))
        self._removed: set[str] = set()
        self._open = builtins.open
        self._real = {name: function for name, function in vars(os).items() if callable(function)}

    def install(self) -> None:
        """From here on this process, and those that it forks, write to the mirror."""
        replacements = {
            self._open: self._opened,
            **{self._real[name]: self._placed(name, self.to_read) for name in _READERS if name in self._real},
            **{self._real[name]: self._placed(name, self.to_change) for name in _CHANGERS if name in self._real},
            self._real["open"]: self._opened_by_flags,
            self._real["mkdir"]: self._mkdir,
            self._real["rmdir"]: self._rmdir,
            self._real["remove"]: self._remove,
            self._real["unlink"]: self._remove,
            self._real["rename"]: self._rename,
            self._real["replace"]: self._rename,
            self._real["link"]: self._link,
            self._real["symlink"]: self._symlink,
            self._real["listdir"]: self._listdir,
            self._real["scandir"]: self._scandir,
        }
        for module in list(sys.modules.values()):  # also names that modules have taken: from os import makedirs
            if getattr(module, "__name__", "") not in _ORIGINALS:
                _replace(vars(module), replacements)
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # rmtree goes by paths
        for name, place in (("save", self._place_save), ("load", self._place_load)):
            replacement = place(getattr(torch, name))
            setattr(torch, name, replacement)
            setattr(torch.serialization, name, replacement)

    def written(self) -> tuple[str, ...]:
        """The files in the mirror, by the names that the process gave them."""
        files = (os.path.join(folder, name) for folder, _, names in os.walk(self._folder) for name in names)
        return tuple(sorted(file.removeprefix(self._folder) for file in files))

    # ------------------------------------------------------------------------------------------ where a path is

    def to_read(self, path: Any) -> Any:
        """Where to read a path: in the mirror if it was written, else where it says."""
        real, mirrored = self._both(path)
        if mirrored is None:
            return path
        if self._is_there(mirrored):
            return mirrored
        if real in self._removed:
            raise _error(errno.ENOENT, path)
        return path

    def to_write(self, path: Any) -> Any:
        """Where to write a path anew."""
        real, mirrored = self._both(path)
        if mirrored is None:
            return path
        if not self._exists(os.path.dirname(real)):
            raise _error(errno.ENOENT, path)
        if self._exists(real) and os.path.isdir(real):
            raise _error(errno.EISDIR, path)
        self._make_folder(os.path.dirname(mirrored))
        return mirrored

    def to_change(self, path: Any) -> Any:
        """Where to write a path that keeps what it holds: a copy of it."""
        real, mirrored = self._both(path)
        if mirrored is None or self._is_there(mirrored) or not self._exists(real):
            return self.to_write(path) if mirrored is None or not os.path.isdir(mirrored) else mirrored
        self._make_folder(mirrored if os.path.isdir(real) else os.path.dirname(mirrored))
        if not os.path.isdir(real):
            with self._open(real, "rb") as old, self._open(mirrored, "wb") as new:
                shutil.copyfileobj(old, new)
        return mirrored

    def _both(self, path: Any) -> tuple[str, str | None]:
        """The absolute path, and its place in the mirror: None where it is not redirected."""
        if isinstance(path, int):
            return "", None
        real = os.path.abspath(os.fsdecode(path))
        if any(real == folder or real.startswith(folder + os.sep) for folder in self._untouched):
            return real, None
        return real, self._folder + os.path.splitdrive(real)[1]

    def _exists(self, path: Any) -> bool:
        with contextlib.suppress(OSError):
            return self._is_there(self.to_read(path))
        return False

    def _is_there(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            self._real["lstat"](path)
            return True
        return False

    def _make_folder(self, folder: str) -> None:
        if not self._is_there(folder):
            self._make_folder(os.path.dirname(folder))
            self._real["mkdir"](folder)

    # ------------------------------------------------------------------------------------------ what is replaced

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" in mode and self._exists(file):
            raise _error(errno.EEXIST, file)
        place = (
            self.to_write if "w" in mode or "x" in mode else self.to_change if {"a", "+"} & {*mode} else self.to_read
        )
        return self._open(place(file), mode, *args, **kwargs)

    def _opened_by_flags(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        if flags & os.O_CREAT and flags & os.O_EXCL and self._exists(path):
            raise _error(errno.EEXIST, path)
        place = self.to_write if flags & os.O_TRUNC else self.to_change if flags & _WRITING else self.to_read
        return self._real["open"](place(path), flags, mode, dir_fd=_no_folder(dir_fd, path))

    def _placed(self, name: str, place: Callable[[Any], Any]) -> Callable[..., Any]:
        function = self._real[name]

        @wraps(function)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                path = place(path)
            elif place == self.to_change:
                _no_folder(kwargs["dir_fd"], path)
            return function(path, *args, **kwargs)

        return call

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        _no_folder(dir_fd, path)
        if self._exists(path):
            raise _error(errno.EEXIST, path)
        self._real["mkdir"](self.to_write(path), mode)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        _no_folder(dir_fd, path)
        if self._listdir(path):
            raise _error(errno.ENOTEMPTY, path)
        self._forget(path, "rmdir")

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        _no_folder(dir_fd, path)
        self._forget(path, "remove")

    def _forget(self, path: Any, remove: str) -> None:
        place, (real, mirrored) = self.to_read(path), self._both(path)
        self._real["lstat"](place)  # it says that there is none
        if mirrored is not None and self._is_there(real):
            self._removed.add(real)
        if place != path or mirrored is None:
            self._real[remove](place)

    def _rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        _no_folder(src_dir_fd, source)
        _no_folder(dst_dir_fd, target)
        real, mirrored = self._both(source)
        place, new = self.to_read(source), self._both(target)[1] or target
        self._make_folder(
            os.path.dirname(self.to_write(os.path.join(os.fsdecode(target), os.curdir, "x")))
        ) if False else None
