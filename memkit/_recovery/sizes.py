"""Record of the micro-batch sizes that fit, per input shape, and of when a larger one is worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_PATIENCE = 10  # clean steps before a larger size is tried again
_MAX_PATIENCE = 640
_BEYOND = 4  # multiple of the patience before a size that has failed is tried again
_MOST_SHAPES = 1024  # of those that ran out of memory, and of the others: texts have ever new lengths


@dataclass(slots=True)
class SizeEntry:
    """State of one key."""

    proven: int = 0  # the largest size that ran
    failed: int | None = None  # the smallest size that ran out of memory
    clean: int = 0  # steps since the last failure or trial
    patience: int = _PATIENCE


class _Entries(dict[str, SizeEntry]):
    """Entries by key, the one used last at the end; a new one makes room, but never at the cost of one that failed."""

    def __missing__(self, key: str) -> SizeEntry:
        if len(self) >= _MOST_SHAPES:
            self._forget_oldest(_MOST_SHAPES - 1, failed=False)
        entry = self[key] = SizeEntry()
        return entry

    def limit_failed(self) -> None:
        """Forget the oldest of too many that failed."""
        self._forget_oldest(_MOST_SHAPES, failed=True)

    def _forget_oldest(self, num_kept: int, *, failed: bool) -> None:
        keys = [key for key, entry in self.items() if (entry.failed is not None) is failed]
        for key in keys[: max(0, len(keys) - num_kept)]:
            del self[key]


class SizeMemory:
    """Known micro-batch sizes. A size counts rows, or elements for packed batches; a key is an input shape.

    Of shapes that never ran out of memory those used last are known, and apart from them those that did.
    """

    def __init__(self) -> None:
        self._entries = _Entries()

    def largest(self, key: str) -> int | None:
        """Return the largest size expected to fit; None if nothing has ever failed."""
        entry = self._entries[key]
        return None if entry.failed is None else _largest(entry.proven, entry.failed)

    def num_parts(self, key: str, size: int, at_least: int) -> int:
        """Choose the number of parts to cut a batch into.

        After enough clean steps, fewer parts are tried, with a size halfway to the one that failed, and after a success
        immediately fewer again, so that the size grows back when memory does. Going beyond a size that failed takes
        more patience, and each failed trial doubles the patience.

        Args:
            key: The input shape.
            size: Size of the batch.
            at_least: Minimum number of parts.
        """
        entry = self._entries[key]
        if entry.failed is None:
            return at_least
        largest = _largest(entry.proven, entry.failed)
        num_parts = max(at_least, math.ceil(size / largest))
        if num_parts == at_least or entry.clean < entry.patience:
            return num_parts
        middle = (entry.proven + (entry.failed or size)) // 2
        fewer = max(at_least, min(num_parts - 1, math.ceil(size / max(1, middle))))
        is_beyond = math.ceil(size / fewer) >= entry.failed
        if is_beyond and entry.clean < _BEYOND * entry.patience:
            return num_parts
        entry.clean = 0
        return fewer

    def is_proven(self, key: str, size: int) -> bool:
        """Return whether this size, or a larger one, has run successfully."""
        entry = self._entries.get(key)
        return entry is not None and size <= entry.proven

    def note_success(self, key: str, size: int) -> None:
        """Record that a micro-batch of this size ran."""
        entry = self._entries[key]
        if entry.failed is not None and size > entry.proven > 0:
            entry.patience, entry.clean = _PATIENCE, _BEYOND * _PATIENCE  # it grows: continue without waiting
        entry.proven = max(entry.proven, size)
        if entry.failed is not None and entry.failed <= entry.proven:
            entry.failed = None

    def note_failure(self, key: str, size: int) -> None:
        """Record that a micro-batch of this size ran out of memory."""
        entry = self._entries[key]
        if 0 < entry.proven < size:  # a failed trial: the proven size still fits
            entry.patience = min(2 * entry.patience, _MAX_PATIENCE)
        entry.failed = size
        if entry.proven >= size:
            entry.proven = 0  # the proven size is out of date: something else has taken memory
        entry.clean = 0
        self._entries.limit_failed()

    def forget(self, key: str) -> None:
        """Forget what ran and what failed, after a step that was refused: the next one tries the whole batch."""
        self._entries.pop(key, None)

    def note_clean_step(self, key: str) -> None:
        """Record an optimizer step without any failure."""
        entry = self._entries[key]
        entry.clean += 1
        del self._entries[key]
        self._entries[key] = entry

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state as plain types."""
        return {key: asdict(entry) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the state from `state_dict`."""
        self._entries = _Entries({key: SizeEntry(**entry) for key, entry in state.items()})


def _largest(proven: int, failed: int) -> int:
    """Return the largest size expected to fit, between one that ran and one that failed."""
    return max(1, proven, failed // 2)
