"""Parameters that a loss depends on, of which none of the given optimizers takes the gradient.

In a GAN that is meant: the other network gets its gradient from a loss of its own. With a criterion that has parameters
and an optimizer of its own it is a mistake, which nothing else shows: that optimizer then steps without a gradient. An
optimizer that steps inside backward, by a parameter's hook, does not even do that: the hook is never called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from memkit._core.errors import warn_user
from memkit._torch.graph import graph_behind
from memkit._torch.tensors import accumulate_hooks, hooks_of

_MOST_NAMES = 3


class Bystanders:
    """Warns of an optimizer with such parameters if, in its first step after this loss, it has no gradient at all.

    Warns at once of those with hooks that wait for their gradient.

    Args:
        loss: A loss with its graph, before its backward.
        own: The parameters that get their gradients.
        kind: The class of the object that the user works with, for messages.
        way_out: How these get gradients, too, for messages.
        models: Modules that may have the parameters, for their names.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        own: Sequence[torch.Tensor],
        kind: str,
        way_out: str,
        models: Sequence[nn.Module] = (),
    ) -> None:
        known = set(map(id, own))
        self._kind, self._way_out, self._left = kind, way_out, WeakTensorKeyDictionary()
        for each in graph_behind([loss])[0]:
            if id(each) not in known:
                self._left[each] = None
        waiting = [each for each in self._left if _waits_for_gradient(each)]
        if waiting:
            self._tell_of_hooks(waiting, models)
        self._handle: RemovableHandle | None = None
        if self._left:
            self._handle = register_optimizer_step_pre_hook(functools.partial(_look, weakref.ref(self)))
            weakref.finalize(self, self._handle.remove)

    def _tell_of_hooks(self, waiting: Sequence[torch.Tensor], models: Sequence[nn.Module]) -> None:
        names = {id(each): repr(name) for model in models for name, each in model.named_parameters()}
        shown = [names.get(id(each), f"a tensor of shape {tuple(each.shape)}") for each in waiting[:_MOST_NAMES]]
        more = f" and {len(waiting) - _MOST_NAMES} more" if len(waiting) > _MOST_NAMES else ""
        warn_user(
            f"{self._kind}: hooks on tensors that the loss depends on are never called here: they are on "
            f"{', '.join(shown)}{more}, and the backward reaches the parameters of the given optimizers only. An "
            "optimizer that steps in such a hook (register_post_accumulate_grad_hook) trains nothing. Way out: remove "
            f"these hooks, and {self._way_out} Or keep stepping inside backward, in a plain loop: "
            "with memkit.train.step_in_backward([optimizer, other]): loss.backward()"
        )

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


def _waits_for_gradient(leaf: torch.Tensor) -> bool:
    # A hook on another network's gradient, such as a clamp, has nothing to do in this loss; `look` sees that network.
    return bool(accumulate_hooks(leaf) or (hooks_of(leaf) and not isinstance(leaf, nn.Parameter)))


def _look(watch: Callable[[], Bystanders | None], optimizer: Optimizer, *_: Any) -> None:
    # With nothing left to watch it stays: no hook may be removed while torch goes through them.
    if (found := watch()) is not None and found.is_watching:
        found.look(optimizer)
