"""Remember which micro-batch sizes fit, per input shape, and when a larger one is worth a try."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

_PATIENCE = 10  # clean steps before a larger size is tried again
_MAX_PATIENCE = 640
_BEYOND = 4  # times the patience before a size is tried that is known to have failed


@dataclass(slots=True)
class SizeEntry:
    """What is known of one key."""

    proven: int = 0  # the largest size that ran
    failed: int | None = None  # the smallest size that ran out of memory
    clean: int = 0  # steps since the last failure or trial
    patience: int = _PATIENCE


class SizeMemory:
    """What is known of micro-batch sizes. A size is rows, or elements for packed batches; a key is an input shape."""

    def __init__(self) -> None:
        self._entries: dict[str, SizeEntry] = {}

    def largest(self, key: str) -> int | None:
        """Return the largest size that may be expected to fit; None where nothing ever failed."""
        entry = self._entries.setdefault(key, SizeEntry())
        return None if entry.failed is None else max(1, entry.proven, entry.failed // 2)

    def num_parts(self, key: str, size: int, at_least: int) -> int:
        """Choose into how many parts to cut a batch.

        After enough clean steps fewer parts are tried, half-way to the size that failed, and after a success fewer
        again at once, so that the size grows back when memory does. Going beyond a size that failed takes more
        patience, and each failure doubles it.

        Args:
            key: The input shape.
            size: Size of the batch.
            at_least: The fewest parts that are wanted.
        """
        largest = self.largest(key)
        if largest is None:
            return at_least
        entry = self._entries[key]
        num_parts = max(at_least, math.ceil(size / largest))
        if num_parts == at_least or entry.clean < entry.patience:
            return num_parts
        middle = (entry.proven + (entry.failed or size)) // 2
        fewer = max(at_least, min(num_parts - 1, math.ceil(size / max(1, middle))))
        is_beyond = entry.failed is not None and math.ceil(size / fewer) >= entry.failed
        if is_beyond and entry.clean < _BEYOND * entry.patience:
            return num_parts
        entry.clean = 0
        return fewer

    def is_proven(self, key: str, size: int) -> bool:
        """Say whether this size, or a larger one, has run to its end."""
        entry = self._entries.get(key)
        return entry is not None and size <= entry.proven

    def note_success(self, key: str, size: int) -> None:
        """Note that a micro-batch of this size ran."""
        entry = self._entries.setdefault(key, SizeEntry())
        if entry.failed is not None and size > entry.proven > 0:
            entry.patience, entry.clean = _PATIENCE, _BEYOND * _PATIENCE  # it grows: go on without waiting
        entry.proven = max(entry.proven, size)
        if entry.failed is not None and entry.failed <= entry.proven:
            entry.failed = None

    def note_failure(self, key: str, size: int) -> None:
        """Note that a micro-batch of this size ran out of memory."""
        entry = self._entries.setdefault(key, SizeEntry())
        if 0 < entry.proven < size:  # a trial: what ran before still does
            entry.patience = min(2 * entry.patience, _MAX_PATIENCE)
        entry.failed = size
        if entry.proven >= size:
            entry.proven = 0  # what ran before says nothing any more: something else has taken memory
        entry.clean = 0

    def note_clean_step(self, key: str) -> None:
        """Note an optimiser step without any failure."""
        self._entries.setdefault(key, SizeEntry()).clean += 1

    def entry(self, key: str) -> SizeEntry | None:
        """Return a copy of what is known of a key."""
        entry = self._entries.get(key)
        return None if entry is None else replace(entry)

    def put_entry(self, key: str, entry: SizeEntry | None) -> None:
        """Know of a key what `entry` said."""
        self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = entry

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain types."""
        return {key: asdict(entry) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore `state_dict`."""
        self._entries = {key: SizeEntry(**entry) for key, entry in state.items()}
