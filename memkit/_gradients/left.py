"""Results with a graph that calls of modules leave in attributes, such as an auxiliary loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from memkit._torch.modules import MACHINERY, recomputed_by_hooks


class LeftResults:
    """Tells which results calls have left in modules since this object was made.

    A result may be in a list or a dict. A weight that a hook computes anew before each forward (``weight_norm``) is
    none.

    Args:
        owners: Modules with their paths.
    """

    def __init__(self, owners: Iterable[tuple[str, nn.Module]]) -> None:
        self._owners = [(path, owner, {id(each) for _, each in _kept_in(owner)}) for path, owner in owners]

    def names(self) -> list[str]:
        """Return the paths of the attributes that hold a new tensor with a graph."""
        return [
            f"{path}.{name}".lstrip(".")
            for path, owner, before in self._owners
            for name, value in _kept_in(owner)
            if value.grad_fn is not None and id(value) not in before and name not in recomputed_by_hooks(owner)
        ]


def _kept_in(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's plain attributes, and in lists and dicts there."""
    for name, value in vars(owner).items():
        held: Iterable[object] = (value,)
        if name not in MACHINERY:
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, deque)) else held
        yield from ((name, each) for each in held if isinstance(each, Tensor))
