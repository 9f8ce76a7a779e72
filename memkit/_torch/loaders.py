"""The workers of a DataLoader."""

from __future__ import annotations

from typing import Any


def starts_persistent_workers(loader: Any) -> bool:
    """Return whether the next pass over a DataLoader starts workers that stay.

    It then draws a seed for them from its generator, or from the global one; the passes after it draw none.
    """
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is None
