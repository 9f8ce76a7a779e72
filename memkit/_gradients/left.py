"""Results that calls of modules leave in attributes, such as an auxiliary loss or statistics of the rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from memkit._torch.modules import MACHINERY, recomputed_by_hooks


class LeftResults:
    """Tells which results calls have left in modules since this object was made.

    A result may be in a list, a tuple or a dict. A weight that a hook computes anew before each forward
    (``weight_norm``) is none.

    Args:
        owners: Modules with their paths.
    """

    def __init__(self, owners: Iterable[tuple[str, nn.Module]]) -> None:
        self._owners = [(path, owner, {id(each) for _, each in _kept_in(owner)}) for path, owner in owners]

    def names(self) -> list[str]:
        """Return the paths of the attributes that hold a new tensor with a graph."""
        return [name for name, value in self._new() if value.grad_fn is not None]

    def values(self) -> dict[str, list[Tensor]]:
        """Return the new tensors without a graph, by the paths of their attributes."""
        found: dict[str, list[Tensor]] = {}
        for name, value in self._new():
            if value.grad_fn is None:
                found.setdefault(name, []).append(value)
        return found

    def _new(self) -> Iterator[tuple[str, Tensor]]:
        for path, owner, before in self._owners:
            for name, value in _kept_in(owner):
                if id(value) not in before and name not in recomputed_by_hooks(owner):
                    yield f"{path}.{name}".lstrip("."), value


def _kept_in(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's plain attributes, and in lists, tuples and dicts there."""
    for name, value in vars(owner).items():
        held: Iterable[object] = (value,)
        if name not in MACHINERY:
            held = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, (list, tuple, deque))
                else held
            )
        yield from ((name, each) for each in held if isinstance(each, Tensor))
