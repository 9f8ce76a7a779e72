"""Parameters that a loss depends on, of which none of the given optimizers takes the gradient.

In a GAN that is meant: the other network gets its gradient from a loss of its own. With a criterion that has parameters
and an optimizer of its own it is a mistake, which nothing else shows: that optimizer then steps without a gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from memkit._core.errors import warn_user
from memkit._torch.graph import graph_behind


class Bystanders:
    """Warns of an optimizer with such parameters if, in its first step after this loss, it has no gradient at all.

    Args:
        loss: A loss with its graph, before its backward.
        own: The parameters that get their gradients.
        kind: The class of the object that the user works with, for messages.
        way_out: How these get gradients, too, for messages.
    """

    def __init__(self, loss: torch.Tensor, own: Sequence[torch.Tensor], kind: str, way_out: str) -> None:
        known = set(map(id, own))
        self._kind, self._way_out, self._left = kind, way_out, WeakTensorKeyDictionary()
        for each in graph_behind([loss])[0]:
            if id(each) not in known:
                self._left[each] = None
        self._handle: RemovableHandle | None = None
        if self._left:
            self._handle = register_optimizer_step_pre_hook(functools.partial(_look, weakref.ref(self)))
            weakref.finalize(self, self._handle.remove)

    @property
    def is_watching(self) -> bool:
        """Whether an optimizer with some of the parameters has not stepped yet."""
        return bool(self._left)

    def close(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()

    def look(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is about to step."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        found = [each for each in parameters if each in self._left]
        for each in found:
            del self._left[each]
        if found and all(each.grad is None for each in parameters):
            name, shape = type(optimizer).__name__, tuple(found[0].shape)
            warn_user(
                f"{self._kind}: another optimizer ({name}) steps without any gradient, though the loss depends on "
                f"{len(found)} of its parameters (one of shape {shape}): they get none here. Way out: {self._way_out}"
            )


def _look(watch: Callable[[], Bystanders | None], optimizer: Optimizer, *_: Any) -> None:
    # With nothing left to watch it stays: no hook may be removed while torch goes through them.
    if (found := watch()) is not None and found.is_watching:
        found.look(optimizer)
