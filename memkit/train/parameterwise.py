"""Which optimisers step each parameter by itself, and their own code run on some of the parameters only."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from memkit._errors import ConfigError
from memkit._oom import retry_once
from memkit.train.gradients import as_list

Group = dict[str, Any]

# Each element is stepped by itself, so a large parameter can be stepped slice by slice.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
# Each parameter is stepped by itself. Exact types: a subclass may do anything.
PARAMETERWISE = (*ELEMENTWISE, optim.Adafactor, optim.Muon, optim.SparseAdam)


def steps_parameterwise(optimizer: Optimizer) -> bool:
    """Say whether an optimiser is known to step each parameter by itself, so that its step can go in chunks."""
    return type(optimizer) in PARAMETERWISE and not optimizer.defaults.get("differentiable", False)


def materialize_state(optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Make an optimiser's state now, and not in its first step: the second step then needs no more than the first.

    The values are those that the first step would start from. Call it before the first forward. State is made for all
    trainable parameters, also for those that will never have a gradient. SGD with both momentum and dampening starts
    from its first gradient, so its state stays for the first step.

    Args:
        optimizer: One of torch's optimisers, or several.

    Raises:
        ConfigError: The optimiser is not one of those that are known to make their state before they step.
        MemkitOutOfMemoryError: The state does not fit; none was made for the parameter group that failed.

    Memory:
        The state: twice the parameters for Adam.

    Example:
        >>> import torch, memkit as mk
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(3, 1).parameters())
        >>> mk.materialize_state(optimizer)
        >>> sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
        40
    """
    for each in as_list(optimizer):
        if not steps_parameterwise(each) or not hasattr(each, "_init_group"):
            raise ConfigError(
                f"materialize_state({type(each).__name__})",
                got=f"a {type(each).__name__}",
                expected=f"one of {', '.join(kind.__name__ for kind in PARAMETERWISE[:-1])}",
                fix="let its first step make the state.",
            )
        for group in each.param_groups:
            trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
            retry_once(lambda: create_state(each, group, trainable), "materialize_state(optimizer)")  # noqa: B023


def writes_gradients(optimizer: Optimizer, group: Group) -> bool:
    """Say whether a step may change gradients: SGD adds the momentum to them; fused ones take the loss scale out."""
    return bool(group.get("fused")) or (type(optimizer) is optim.SGD and group["nesterov"])


def step_group(optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
    """Run the optimiser's own step on some parameters of a group, without its hooks."""
    groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": list(parameters)}]
    try:
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # beneath torch's call of the hooks
    finally:
        optimizer.param_groups = groups


def create_state(optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
    """Make the state of parameters that have none, by the optimiser's own code; all of it or nothing."""
    own_init = optimizer._init_group  # type: ignore[attr-defined]  # noqa: SLF001 - all of torch's have it
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(own_init).parameters)[1:]]
    states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters}
    lacking = [parameter for parameter in parameters if parameter.grad is None]  # which it would skip
    try:
        for parameter in lacking:
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = parameter.detach().new_zeros((), dtype=dtype).expand(parameter.shape)
        own_init({**group, "params": list(parameters)}, *lists)
        if type(optimizer) is optim.SGD and group["momentum"] != 0 and group["dampening"] == 0:
            for parameter in parameters:  # minus zero plus the first gradient is that gradient, bit for bit
                if optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, -0.0).detach()
    except BaseException:
        for parameter, state in states.items():
            put_state(optimizer, parameter, state)
        raise
    finally:
        for parameter in lacking:
            parameter.grad = None


def put_state(optimizer: Optimizer, parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Give a parameter the state that it had; without any, none."""
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


@contextlib.contextmanager
def lent_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let state that lies elsewhere (`offload_state`) come to its parameters, and go back unless the block fails."""
    lent = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        visiting = {
            name: value.to(parameter.device, copy=True)
            for name, value in state.items()
            if _lies_elsewhere(value, parameter)
        }
        if visiting:
            lent.append((parameter, state, visiting))
    try:
        for parameter, state, visiting in lent:
            optimizer.state[parameter] = {**state, **visiting}
        yield
    finally:
        for parameter, state, _ in lent:
            optimizer.state[parameter] = state
    for _, state, visiting in lent:
        for name, value in visiting.items():
            retry_once(functools.partial(state[name].copy_, value), "optimizer.step()")


def _lies_elsewhere(value: object, parameter: torch.Tensor) -> bool:
    # Counters always lie on the host, and SparseAdam's are no tensors.
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
