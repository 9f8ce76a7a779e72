"""Remember which micro-batch sizes fit, per input shape, and when a larger one is worth a try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_PATIENCE = 10  # clean steps before a larger size is tried again
_MAX_PATIENCE = 640


@dataclass(slots=True)
class _Entry:
    proven: int = 0  # the largest size that ran
    failed: int | None = None  # the smallest size that ran out of memory
    clean: int = 0  # steps since the last failure or trial
    patience: int = _PATIENCE


class SizeMemory:
    """What is known of micro-batch sizes. A size is rows, or elements for packed batches; a key is an input shape."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def limit(self, key: str, wanted: int) -> int:
        """Return the size to run: ``wanted``, or less where that is known not to fit.

        After enough clean steps the middle between what fits and what failed is tried, so that the size grows back
        when memory does; each failure doubles the patience.
        """
        entry = self._entries.setdefault(key, _Entry())
        if entry.failed is None or wanted <= entry.proven:
            return wanted
        if entry.clean >= entry.patience:
            entry.clean = 0
            if entry.failed - entry.proven <= max(1, entry.proven // 8):
                entry.failed = 2 * entry.failed  # as near as it gets; but memory may have become free since
            return max(1, min(wanted, (entry.proven + entry.failed) // 2))
        return max(1, min(wanted, entry.proven or entry.failed // 2))

    def is_proven(self, key: str, size: int) -> bool:
        """Say whether this size, or a larger one, has run to its end."""
        entry = self._entries.get(key)
        return entry is not None and size <= entry.proven

    def note_success(self, key: str, size: int) -> None:
        """Note that a micro-batch of this size ran."""
        entry = self._entries.setdefault(key, _Entry())
        entry.proven = max(entry.proven, size)
        if entry.failed is not None and entry.failed <= entry.proven:
            entry.failed = None

    def note_failure(self, key: str, size: int) -> None:
        """Note that a micro-batch of this size ran out of memory."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.failed is not None:
            entry.patience = min(2 * entry.patience, _MAX_PATIENCE)
        entry.failed = size
        entry.proven = min(entry.proven, size - 1)
        entry.clean = 0

    def note_clean_step(self, key: str) -> None:
        """Note an optimiser step without any failure."""
        self._entries.setdefault(key, _Entry()).clean += 1

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain types."""
        return {key: asdict(entry) for key, entry in self._entries.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore `state_dict`."""
        self._entries = {key: _Entry(**entry) for key, entry in state.items()}
