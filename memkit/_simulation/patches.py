"""What a simulation changes of torch and of other packages while it runs: how that is done, undone, and listed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Patches(NamedTuple):
    """New values for attributes of one owner.

    Attributes:
        owner: A module or a class.
        purpose: What they are for.
        values: The values by name.
    """

    owner: Any
    purpose: str
    values: Mapping[str, Any]


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value for a while; one that was inherited is inherited again afterwards."""
    had = vars(owner).get(name, patched)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had is patched:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


@contextmanager
def applied(patches: Iterable[Patches]) -> Iterator[None]:
    """Apply patches for a while; they are undone in the opposite order, whatever happens."""
    with ExitStack() as stack:
        for each in patches:
            for name, value in each.values.items():
                stack.enter_context(patched(each.owner, name, value))
        yield


class Shared:
    """Patches that are in place while at least one block runs, of one or of several threads.

    Args:
        make: Makes them when the first block begins.
    """

    def __init__(self, make: Callable[[], Iterable[Patches]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._applied = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have them in place within the block."""
        with self._lock:
            self._num_blocks += 1
            if self._num_blocks == 1:
                self._applied.enter_context(applied(self._make()))
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                if not self._num_blocks:
                    self._applied.close()
