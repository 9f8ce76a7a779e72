"""What optimizers keep to themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach  # decides whether several tensors are stepped at once
from torch.utils.hooks import RemovableHandle

MUON: tuple[type[Optimizer], ...] = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))
"""2.8 lacks it."""

__all__ = [
    "LISTS_OF_DEVICES",
    "LISTS_OF_TYPES",
    "MUON",
    "call_first",
    "foreach",
    "has_step_hooks",
    "init_group_of",
    "makes_state",
    "mark_stepped",
    "own_step",
    "states_of_scaler",
]


def call_first(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Call a hook before all others of an optimizer's step."""
    handle = optimizer.register_step_pre_hook(hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # it is ordered
    return handle


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Say whether hooks run before or after an optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def init_group_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return what makes the state of one of torch's own optimizers."""
    return optimizer._init_group  # type: ignore[attr-defined, no-any-return]  # all of torch's have it


def mark_stepped(optimizer: Optimizer) -> None:
    """Note that an optimizer has stepped, as a schedule's own step does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule looks for it


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return ``step(optimizer, closure)`` beneath torch's call of the hooks."""
    return type(optimizer).step.__wrapped__  # type: ignore[attr-defined, no-any-return]  # torch puts its own around it


def makes_state(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Say whether an optimizer can make its state before it steps."""
    return hasattr(optimizer, "_init_group")


def states_of_scaler(scaler: object) -> dict[int, dict[str, Any]]:
    """Return what a gradient scaler has noted of each optimizer, by its identity; there is no public way back."""
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return states


LISTS_OF_DEVICES = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices")
"""Names of the functions that list the devices on which several tensors are stepped at once, or by one kernel."""


LISTS_OF_TYPES: tuple[list[Any], ...] = (foreach._foreach_supported_types, optimizer_module._foreach_supported_types)
"""The lists of classes of tensors that are stepped at once."""
