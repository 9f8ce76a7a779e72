"""Who is told of `UntypedStorage.resize_`, which is no operator: FSDP gathers into storages that it empties again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

UNSHARD = "fsdp.unshard"  # who made such a storage
_resize = torch.UntypedStorage.resize_
# Blocks may end in another order than they began, in several threads: each leaves by itself.
_listeners: list[Callable[[torch.UntypedStorage], None]] = []


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for listener in tuple(_listeners):
        listener(storage)
    return result


@contextmanager
def telling(listener: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``listener`` with each storage after it was resized, in whichever thread."""
    _listeners.append(listener)
    torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
