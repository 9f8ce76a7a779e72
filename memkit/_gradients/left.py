"""Results that calls of modules leave in attributes, such as an auxiliary loss or statistics of the rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from memkit._torch.modules import MACHINERY, recomputed_by_hooks
from memkit._torch.tensors import version_of


class LeftResults:
    """Finds the results that calls have left in modules' attributes since this object was made.

    A result may be in a list, a tuple or a dict. A weight that a hook recomputes before each forward (``weight_norm``)
    does not count.

    Args:
        owners: Modules with their paths.
    """

    def __init__(self, owners: Iterable[tuple[str, nn.Module]]) -> None:
        self._owners = [
            (path, owner, {id(each): (each, _version(each)) for _, each in _kept_in(owner)}) for path, owner in owners
        ]

    def names(self) -> list[str]:
        """Return the paths of the attributes that hold a new tensor with a graph."""
        return [name for name, value, is_new in self._left() if is_new and value.grad_fn is not None]

    def values(self) -> dict[str, list[Tensor]]:
        """Return the new tensors without a graph, by the paths of their attributes."""
        return _grouped((name, value) for name, value, is_new in self._left() if is_new and value.grad_fn is None)

    def written(self) -> dict[str, list[Tensor]]:
        """Return copies of the older tensors that calls have written to, by the paths of their attributes."""
        return _grouped((name, value.detach().clone()) for name, value, is_new in self._left() if not is_new)

    def _left(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the tensors that calls have made or written to, and whether they are new."""
        for path, owner, before in self._owners:
            for name, value in _kept_in(owner):
                there, version = before.get(id(value), (None, None))
                if (there is None or version != _version(value)) and name not in recomputed_by_hooks(owner):
                    yield f"{path}.{name}".lstrip("."), value, there is None


def _grouped(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, value in named:
        found.setdefault(name, []).append(value)
    return found


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


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
