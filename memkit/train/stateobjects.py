"""The objects of a training: what each one's state is, and how it is put back into tensors that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._errors import FileFormatError, InputTypeError
from memkit._protocols import Stateful
from memkit.train.gradients import set_gradient
from memkit.train.models import unwrap_model

_GRADIENTS = "memkit gradients"


def check_objects(call: str, objects: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return the objects, models without their wrappers, so that a state fits with and without them.

    Raises:
        InputTypeError: An object has no state.
    """
    for name, value in objects.items():
        if not isinstance(value, Stateful):
            raise InputTypeError(
                f"TrainingStateManager.{call}({name}=...)",
                got=type(value).__name__,
                expected="objects with state_dict() and load_state_dict(state)",
                fix=f"leave {name} out, or give it these two methods.",
            )
    return {name: unwrap_model(each) if isinstance(each, nn.Module) else each for name, each in objects.items()}


def find_replicated(objects: Mapping[str, Any]) -> set[str]:
    """Return the names of objects that are the same on all ranks: models in DDP, and optimisers over them alone."""
    models = {name: each for name, each in objects.items() if isinstance(each, nn.parallel.DistributedDataParallel)}
    own = {parameter for model in models.values() for parameter in model.parameters()}
    optimizers = {name for name, each in objects.items() if isinstance(each, Optimizer) and own.issuperset(_list(each))}
    return {*models, *optimizers}


def state_of(target: Stateful) -> Mapping[str, Any]:
    """Return an object's state; an optimiser's with the gradients that are there, which its next step depends on."""
    state = target.state_dict()
    if isinstance(target, Optimizer):
        gradients = [parameter.grad for parameter in _list(target)]
        if any(gradient is not None for gradient in gradients):
            return {**state, _GRADIENTS: gradients}
    return state


def own_part(target: Stateful) -> dict[str, Any] | None:
    """Return what is a rank's own of an object in `find_replicated`: the gradients of an optimiser, until its step."""
    return {_GRADIENTS: [parameter.grad for parameter in _list(target)]} if isinstance(target, Optimizer) else None


def with_own_parts(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's states with those of a rank in their places, or with its own parts of them."""
    merged = dict(shared)
    for name, state in own.items():
        is_part = isinstance(state, dict) and state.keys() == {_GRADIENTS}
        merged[name] = {**shared[name], **state} if is_part else state
    return merged


def load_into(target: Stateful, state: dict[str, Any], name: str) -> None:
    """Put a state back; values go into the tensors that are there, so that no device holds them twice.

    Raises:
        FileFormatError: The state is that of another kind of object.
    """
    try:
        if isinstance(target, Optimizer):
            _load_optimizer(target, state)
        else:
            target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(
            f"TrainingStateManager.restore({name}=...)",
            got=f"a state that {type(target).__name__}.load_state_dict refuses: {error}",
            expected="the state of an object that was made alike; some objects may hold the saved values already",
            fix=f"make {name} as it was made when it was saved, or leave it out.",
        ) from error


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    gradients = state.pop(_GRADIENTS, None)
    # Twice: first without values, which compares the groups and frees the values that are there.
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    optimizer.load_state_dict(state)
    parameters = _list(optimizer)
    for index, saved in state["state"].items():
        live = optimizer.state[parameters[index]]
        for key, value in saved.items():  # torch gives values the parameter's dtype: float32 of bfloat16 were lost
            if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        set_gradient(parameter, None if gradient is None else gradient.to(parameter.device))


def _list(optimizer: Optimizer) -> list[torch.Tensor]:
    """An optimiser's parameters, in the order of the numbers in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
