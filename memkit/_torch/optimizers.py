"""Non-public parts of optimizers."""

from collections.abc import Callable, Mapping
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
    "before_step",
    "call_first",
    "foreach",
    "has_step_hooks",
    "init_group_of",
    "makes_state",
    "mark_stepped",
    "own_attributes",
    "own_step",
    "skip_early_steps",
    "states_of_scaler",
    "step_hooks_of",
]


_TORCHS_OWN = frozenset(
    (
        *("defaults", "param_groups", "state"),
        *("step", "_opt_called"),  # of a schedule
        *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
        *("_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
    )
)


def own_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of an optimizer's attributes that its class has added to torch's."""
    is_torchs = "_optimizer_"  # its dicts of hooks
    return {
        name: each for name, each in attributes.items() if name not in _TORCHS_OWN and not name.startswith(is_torchs)
    }


def before_step(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle | None:
    """Register a hook that runs before an optimizer's step; of the one inside, for a wrapper without hooks.

    None if there is no place for one: a class that does not call ``Optimizer.__init__``.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)  # accelerate's
        return before_step(inner, hook) if isinstance(inner, Optimizer) else None
    return optimizer.register_step_pre_hook(hook)


def call_first(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook that runs before all others of an optimizer's step."""
    handle = optimizer.register_step_pre_hook(hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # ordered
    return handle


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether any hooks run before or after an optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def step_hooks_of(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after an optimizer's step."""
    named = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # none without Optimizer.__init__
    return [hook for name in named for hook in getattr(optimizer, name, {}).values()]


def init_group_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the method that creates the state of one of torch's own optimizers."""
    return optimizer._init_group  # type: ignore[attr-defined, no-any-return]  # all of torch's have it


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark an optimizer as stepped, as a scheduler's step wrapper does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a schedule looks for it


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return ``step(optimizer, closure)`` without torch's wrapper that calls the hooks."""
    return type(optimizer).step.__wrapped__  # type: ignore[attr-defined, no-any-return]  # torch puts its own around it


# A step of theirs reads this value, and takes more memory once it has moved so far: RAdam's from the sixth step on,
# where it divides by the square root of the variance, and ASGD's once it averages, after t0 steps.
_LATER: dict[type[Optimizer], tuple[str, Callable[[torch.Tensor], object]]] = {
    torch.optim.RAdam: ("step", lambda step: step.add_(10**6)),
    torch.optim.ASGD: ("mu", lambda mu: mu.mul_(0.5)),
}


def skip_early_steps(optimizer: Optimizer) -> None:
    """Let an optimizer of torch's step as after many steps, where this takes more memory than at first."""
    for kind, (name, move) in _LATER.items():
        if isinstance(optimizer, kind):
            for state in optimizer.state.values():
                if name in state:  # a subclass may have a state of its own
                    move(state[name])


def makes_state(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Return whether an optimizer can create its state before it steps."""
    return hasattr(optimizer, "_init_group")


def states_of_scaler(scaler: object) -> dict[int, dict[str, Any]]:
    """Return a gradient scaler's state for each optimizer, by its `id`; there is no public way to reset it."""
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return states


LISTS_OF_DEVICES = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices")
"""Names of the functions that list the devices on which several tensors are stepped at once, or by one kernel."""


LISTS_OF_TYPES: tuple[list[Any], ...] = (foreach._foreach_supported_types, optimizer_module._foreach_supported_types)
"""The lists of tensor classes that are stepped at once."""
