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
from memkit.train.checks import Caller
from memkit.train.owners import constructor_call


class Bystanders:
    """Warns of an optimizer, in its first step after this loss, if such parameters are all that it has a gradient for.

    Args:
        loss: A loss with its graph, before its backward.
        own: The parameters that get their gradients.
        caller: The object that the user works with, for messages.
    """

    def __init__(self, loss: torch.Tensor, own: Sequence[torch.Tensor], caller: Caller) -> None:
        known = set(map(id, own))
        self._caller, self._left = caller, WeakTensorKeyDictionary()
        for each in graph_behind([loss])[0]:
            if id(each) not in known:
                self._left[each] = None
        self._handle: RemovableHandle | None = None
        if self._left:
            self._handle = register_optimizer_step_pre_hook(functools.partial(_look, weakref.ref(self)))
            weakref.finalize(self, self._handle.remove)

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
        if not self._left:
            self.close()
        if found and all(each.grad is None for each in parameters):
            kind, shape = type(optimizer).__name__, tuple(found[0].shape)
            right = constructor_call(self._caller, "[optimizer, other]")
            warn_user(
                f"{self._caller.kind}: another optimizer ({kind}) steps without any gradient, though the loss depends "
                f"on {len(found)} of its parameters (one of shape {shape}): a loss gives gradients to the parameters "
                f"of the given optimizers alone. Way out: write {right}, and leave out other.step()."
            )


def _look(watch: Callable[[], Bystanders | None], optimizer: Optimizer, *_: Any) -> None:
    if (found := watch()) is not None:
        found.look(optimizer)
