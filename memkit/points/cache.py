"""A cache of grid indexes that never returns the index of another scene."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memkit.points.grid import GridIndex

_SPOTS = 64  # rows of the coordinates that are compared even with the caller's own key


class IndexCache:
    """An LRU cache of indexes by key, limited in bytes.

    Thread-safe. Pickled copies are empty; a forked process starts with the parent's entries.

    Args:
        max_bytes: Total size of the cached indexes. A larger index is built but not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, GridIndex] = OrderedDict()
        self._lock = ProcessLock()

    def get(self, key: Hashable, make: Callable[[], GridIndex]) -> GridIndex:
        """Return the index of a key, building it if missing. Two threads may both build one: one is kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        index = make()  # outside the lock, so that other threads do not wait
        if index.nbytes > self.max_bytes:
            return index
        with self._lock:
            index = self._kept.setdefault(key, index)
            self._kept.move_to_end(key)
            too_many = self._sum() - self.max_bytes
            while too_many > 0:
                too_many -= self._kept.popitem(last=False)[1].nbytes
        return index

    @property
    def nbytes(self) -> int:
        """Total bytes of the cached indexes."""
        with self._lock:
            return self._sum()

    def _sum(self) -> int:
        return sum(index.nbytes for index in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexCache, (self.max_bytes,)


class ProcessLock:
    """A lock that is free in a forked child, even if a parent thread held it, and in an unpickled copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLock, ()


def fingerprint(array: NDArray[Any]) -> bytes:
    """Return the SHA-256 of an array's content, dtype and shape; 10 ms for a million points of three float32."""
    digest = hashlib.sha256(repr((array.dtype.str, array.shape)).encode())
    digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.digest()


def spot_check(array: NDArray[Any]) -> bytes:
    """Return the `fingerprint` of 64 rows spread over an array, plus its shape; takes microseconds."""
    spots = np.linspace(0, max(len(array) - 1, 0), _SPOTS).astype(np.int64)
    return fingerprint(array[spots[: len(array)]]) + repr(array.shape).encode()
