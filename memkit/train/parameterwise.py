"""Optimizers that step each parameter independently, and running their step on a subset of the parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import optim
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, InputTypeError
from memkit._recovery.attempt import insist
from memkit._torch.optimizers import MUON, init_group_of, makes_state, own_step
from memkit._torch.tensors import gradient_dtype, share_memory
from memkit.train.gradients import given_optimizers

Group = dict[str, Any]
_Kind = TypeVar("_Kind", bound=Optimizer)

# These step each element independently, so a large parameter can be stepped slice by slice.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
# These step each parameter independently.
PARAMETERWISE = (*ELEMENTWISE, optim.Adafactor, *MUON, optim.SparseAdam)
# Names a subclass may override without affecting the step: construction, repr, saving, and zeroing gradients.
_HARMLESS = frozenset(
    (
        *(
            "__init__",
            "__module__",
            "__doc__",
            "__qualname__",
            "__annotations__",
            "__dict__",
            "__weakref__",
            "__repr__",
        ),
        *("__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__type_params__"),
        *("__abstractmethods__", "_abc_impl", "zero_grad", "state_dict", "load_state_dict", "add_param_group"),
    )
)
_REGISTERED: weakref.WeakSet[type[Optimizer]] = weakref.WeakSet()


def register_parameterwise(kind: type[_Kind]) -> type[_Kind]:
    """Register an optimizer class that steps each parameter independently, as torch's own do: Lion, 8-bit Adam, ....

    memkit then treats it like torch's optimizers: steps that stay consistent under out-of-memory (`atomic_steps`, the
    wrapper, the accumulator) without a copy of everything, and `step_in_backward`. The step runs on some of a group's
    parameters at a time. It may read only the group's settings and each parameter with its gradient and its
    ``optimizer.state``, and may change only the parameter, its gradient and its state. A step that visibly keeps
    anything else, in its group or in attributes, is refused when it runs.

    Args:
        kind: The class, not including its subclasses. Also usable as a decorator.

    Returns:
        The class.

    Raises:
        InputTypeError: It is not an optimizer class.
        ConfigError: Its step exchanges tensors with other ranks, which would not run it in the same parts.

    Example:
        >>> import torch, memkit as mk
        >>> @mk.train.register_parameterwise
        ... class SignSGD(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=0.01):
        ...         super().__init__(params, {"lr": lr})
        ...     @torch.no_grad()
        ...     def step(self, closure=None):
        ...         for group in self.param_groups:
        ...             for parameter in group["params"]:
        ...                 if parameter.grad is not None:
        ...                     parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        >>> with mk.train.atomic_steps(SignSGD(torch.nn.Linear(3, 1).parameters())):
        ...     pass
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):  # type: ignore[redundant-expr]  # users pass anything
        raise InputTypeError(
            "register_parameterwise(kind)",
            got=f"a {type(kind).__name__}",
            expected="an optimizer class",
            fix="pass the class itself, not an instance: register_parameterwise(type(optimizer)).",
        )
    if exchanges_in_step(kind):
        raise ConfigError(
            f"register_parameterwise({kind.__name__})",
            got="an optimizer whose step exchanges tensors with the other ranks, which would wait for a part that they "
            "do not run",
            expected="an optimizer that steps each parameter independently, on its rank alone",
            fix="leave the registration out; an out-of-memory error inside a step is then undone from a copy: "
            "MemoryEfficientTrainingWrapper(model, optimizer).",
        )
    _REGISTERED.add(kind)
    return kind


def exchanges_in_step(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer class announces, for torch's `Join`, that its step exchanges tensors with ranks."""
    join = sys.modules.get("torch.distributed.algorithms.join")
    return join is not None and issubclass(kind, join.Joinable)


def steps_parameterwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step each parameter independently, so its step can run in chunks."""
    is_together = any(map(steps_together, optimizer.param_groups))
    return _is_known(optimizer) and not (is_together and has_shared_memory(optimizer))


def _is_known(optimizer: Optimizer) -> bool:
    return known_kind(optimizer) is not None and not optimizer.defaults.get("differentiable", False)


def steps_together(group: Group) -> bool:
    """Return whether the tensors of a group may be stepped by the same operators."""
    if group.get("foreach") is None and not group.get("fused"):
        return bool(group["params"]) and not group["params"][0].is_cpu  # off the CPU it is the default
    return bool(group.get("foreach") or group.get("fused"))


def has_shared_memory(optimizer: Optimizer) -> bool:
    """Return whether some parameters share memory, which all operators of a step then change twice, in turns."""
    return share_memory(each for group in optimizer.param_groups for each in group["params"])


def known_kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the known class whose step an optimizer runs: its own, or the torch base whose step it inherits.

    None for an unknown class.
    """
    kind = type(optimizer)
    if kind in PARAMETERWISE or kind in _REGISTERED:  # in this order: the first is searched in C
        return kind
    base = next((each for each in kind.__mro__ if each in PARAMETERWISE), None)
    return base if base is not None and _leaves_step_alone(kind, base) else None


def _leaves_step_alone(kind: type[Optimizer], base: type[Optimizer]) -> bool:
    """Return whether classes between a subclass and its base (mixins too) override nothing the base's step uses."""
    theirs = {"param_groups", "state", "defaults"} | {name for each in base.__mro__ for name in vars(each)} - _HARMLESS
    for each in kind.__mro__:
        if each not in base.__mro__ and theirs & (set(vars(each)) - {"step"}):
            return False
    return inspect.unwrap(kind.step) is inspect.unwrap(base.step)  # torch wraps it, in the class


def known_names(*, with_state: bool = False) -> str:
    """List the known classes, for a message; with ``with_state`` those that create their state before they step."""
    kinds = [*PARAMETERWISE, *sorted(_REGISTERED, key=lambda each: each.__name__)]
    return ", ".join(kind.__name__ for kind in kinds if not with_state or makes_state(kind))


def materialize_state(optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Create an optimizer's state now instead of in its first step, so the second step needs no more than the first.

    The values are those that the first step would start from. Call it before the first forward. State is created for
    all trainable parameters, including those that never get a gradient. SGD with both momentum and dampening starts
    from its first gradient, so its state is still created in the first step.

    Args:
        optimizer: One of torch's optimizers, or several.

    Raises:
        ConfigError: The optimizer is not known to create its state before it steps.
        MemkitOutOfMemoryError: The state does not fit; none was created for the parameter group that failed.

    Memory:
        The state: twice the parameters for Adam.

    Example:
        >>> import torch, memkit as mk
        >>> optimizer = torch.optim.AdamW(torch.nn.Linear(3, 1).parameters())
        >>> mk.train.materialize_state(optimizer)
        >>> sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
        40
    """
    for each in given_optimizers("materialize_state", optimizer):
        require_own_state(
            each,
            call=f"materialize_state({type(each).__name__})",
            fix="omit this call: the optimizer's first step creates the state.",
        )
        for group in each.param_groups:
            trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
            insist(lambda: create_state(each, group, trainable), "materialize_state(optimizer)")  # noqa: B023


def require_own_state(optimizer: Optimizer, *, call: str, fix: str) -> None:
    """Refuse an optimizer that is not known to create its state before it steps.

    Args:
        optimizer: The optimizer.
        call: The user's call, for the message.
        fix: The way out of that call.

    Raises:
        ConfigError: It is not known.
    """
    if not _is_known(optimizer) or not makes_state(optimizer):
        raise ConfigError(
            call, got=f"a {type(optimizer).__name__}", expected=f"one of {known_names(with_state=True)}", fix=fix
        )


def writes_gradients(optimizer: Optimizer, group: Group) -> bool:
    """Return whether a step may change gradients: SGD adds momentum to them; fused steps divide by the loss scale."""
    kind = known_kind(optimizer)
    return kind not in PARAMETERWISE or bool(group.get("fused")) or (kind is optim.SGD and group["nesterov"])


def step_group(optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
    """Run the optimizer's own step on some of a group's parameters, without its hooks."""
    lent = {**group, "params": list(parameters)}
    groups, before = optimizer.param_groups, _outside_state(optimizer, lent)
    try:
        optimizer.param_groups = [lent]
        own_step(optimizer)(optimizer)
    finally:
        optimizer.param_groups = groups
    if _outside_state(optimizer, lent) != before:
        name = type(optimizer).__name__
        raise ConfigError(
            f"register_parameterwise({name})",
            got="an optimizer whose step keeps values outside of the per-parameter state: in its groups, or in "
            "attributes",
            expected="an optimizer that steps each parameter independently of the others",
            fix=f"do not register {name}: a step on some of its parameters would differ from their part of the whole "
            "step.",
        )


def _outside_state(optimizer: Optimizer, group: Group) -> list[object] | None:
    """Return everything visible that a registered optimizer's step must not change; None for torch's own."""
    if type(optimizer) not in _REGISTERED:
        return None
    plain = int, float, str, bool, type(None)
    settings = [(name, value if isinstance(value, plain) else id(value)) for name, value in group.items()]
    attributes = [(name, value) for name, value in vars(optimizer).items() if isinstance(value, plain)]
    state: Any = optimizer.state  # its keys need not be parameters
    others = [(key, value) for key, value in state.items() if not isinstance(key, torch.Tensor)]
    return [*settings, *attributes, *copy.copy(others)]


def create_state(optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
    """Create missing parameter state with the optimizer's own code; all of it or nothing."""
    own_init = init_group_of(optimizer)
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(own_init).parameters)[1:]]
    states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters}
    lacking = [parameter for parameter in parameters if parameter.grad is None]  # it would skip these
    try:
        for parameter in lacking:
            dtype = gradient_dtype(parameter) or parameter.dtype
            parameter.grad = parameter.detach().new_zeros((), dtype=dtype).expand(parameter.shape)
        own_init({**group, "params": list(parameters)}, *lists)
        if known_kind(optimizer) is optim.SGD and group["momentum"] != 0 and group["dampening"] == 0:
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
    """Restore a parameter's state; an empty one removes the entry."""
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


@contextlib.contextmanager
def lent_state(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Bring offloaded state (`offload_state`) to its parameters' device, and write it back unless the block fails."""
    lent = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        visiting = {
            name: value.to(parameter.device, copy=True)
            for name, value in state.items()
            if _is_on_other_device(value, parameter)
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
    copies = [functools.partial(state[name].copy_, value) for _, state, there in lent for name, value in there.items()]
    try:
        _copy_all(copies)
    except BaseException:  # an interrupt: the parameters are stepped already
        _copy_all(copies)
        raise


def _copy_all(copies: Sequence[Callable[[], object]]) -> None:
    for each in copies:
        insist(each, "optimizer.step()")


def _is_on_other_device(value: object, parameter: torch.Tensor) -> bool:
    # Counters are always on the host, and SparseAdam's are not tensors.
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
