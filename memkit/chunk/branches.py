"""Detect modules in which tiles take different Python branches on their values: `if x.max() > 1: x = x / 255`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from memkit._machine import random_state
from memkit._recovery.attempt import Done, unless_failed
from memkit._torch.dispatch import LeanDispatchMode
from memkit._torch.pytree import tree_leaves
from memkit._torch.tensors import storage_key

_READING = WeakSet[nn.Module]()  # modules that were seen to read numbers of their input
_NUMBERS = frozenset({bool, int, float})
_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)


class Reads(LeanDispatchMode):
    """Records the numbers and truth values that Python reads from tensors that are computed from an input.

    Args:
        x: The input.
        instead: Answers to give in place of the first ones.

    Attributes:
        numbers: What was read, in order.
    """

    def __init__(self, x: Tensor, instead: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[Any] = []
        self._instead = instead
        self._from_input = {_key(x)} - {None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_from_input = any(_key(each) in self._from_input for each in tree_leaves((args, kwargs)))
        if type(result) in _NUMBERS and is_from_input:
            self.numbers.append(result)
            return self._instead[len(self.numbers) - 1] if len(self.numbers) <= len(self._instead) else result
        keys = {_key(each) for each in tree_leaves(result)} - {None}
        if is_from_input:
            self._from_input |= keys
        else:  # one that is gone may have had the same place
            self._from_input -= keys
        return result


def note_reads(module: nn.Module, reads: Reads) -> None:
    """Note what a run for inspection has read: the tiles of this module are then watched."""
    if reads.numbers:
        _READING.add(module)


def reads_numbers(module: nn.Module) -> bool:
    """Return whether a module was seen to read numbers of its input."""
    return module in _READING


def extremes(read: Sequence[Sequence[Any]]) -> tuple[int, int] | None:
    """Return which of some runs have read the least and the largest number; None if all have read the same."""
    texts = [tuple(map(repr, each)) for each in read]  # NaN is not equal to itself
    for place in range(max(map(len, texts), default=0)):
        if len({each[place : place + 1] for each in texts}) > 1:
            ranks = [_rank(each, place) for each in read]
            return ranks.index(min(ranks)), ranks.index(max(ranks))
    return None


def _rank(numbers: Sequence[Any], place: int) -> tuple[int, bool, Any]:
    if place >= len(numbers):
        return 0, False, 0
    is_nan = math.isnan(numbers[place])
    return 1, is_nan, 0 if is_nan else numbers[place]


def changes_with(module: nn.Module, tile: Tensor, instead: Sequence[Any]) -> bool:
    """Return whether a tile has another result if Python reads other numbers from it."""
    random = random_state.capture()
    own = module(tile.clone())
    after = random_state.capture()
    random_state.restore(random)
    again = tile.clone()
    with Reads(again, instead):
        other = unless_failed(_ERRORS, module, again)
    random_state.restore(after)
    if not isinstance(other, Done) or other.result.shape != own.shape:
        return True
    if not own.is_floating_point():
        return not torch.equal(own, other.result)
    limit = torch.finfo(own.dtype).eps ** 0.5 * float(own.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return not torch.allclose(own, other.result, rtol=0, atol=limit, equal_nan=True)


def _key(value: object) -> int | None:
    """Return the key of a tensor's storage; None if it has none of its own."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    try:
        return storage_key(value.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a wrapper around others
        return None
