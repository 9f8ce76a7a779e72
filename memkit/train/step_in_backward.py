"""Step each parameter as soon as backward has its gradient, so that the gradients never lie there all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from memkit._device import process_rank
from memkit._errors import ConfigError, StateError
from memkit.train.parameterwise import Group, step_group, steps_parameterwise

_CALL = "step_in_backward(optimizer)"


@contextlib.contextmanager
def step_in_backward(optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[None]:
    """Let ``loss.backward()`` step each parameter when its gradient is complete, and free the gradient at once.

    Call ``optimizer.step()`` after each backward as before: it finds no gradients left, and runs your step hooks and
    what schedules count. Parameters and state are bit-identical to the plain loop's.

    It is exact where a step needs one parameter's gradient only. So there is no clipping by the total norm, no loss
    scaler (an infinity is found when half of the parameters are stepped), no accumulation, no other ranks. An
    out-of-memory in the backward leaves some parameters stepped: a step cannot be taken back, so
    `MemoryEfficientTrainingWrapper` and `GradientAccumulator` refuse such an optimiser.

    Args:
        optimizer: One of torch's own optimisers but LBFGS, or several.

    Raises:
        ConfigError: The optimiser needs more than one parameter's gradient, or there are several ranks.
        StateError: From a backward: the second one before ``optimizer.step()``, which would have to accumulate.

    Memory:
        The largest gradient, and the temporary results of its step, in place of all gradients.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with mk.step_in_backward(optimizer):
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
        >>> model.weight.grad is None
        True
    """
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in optimizers:
        if not steps_parameterwise(each):
            _refuse(f"a {type(each).__name__}", "one of torch's optimisers that step each parameter by itself")
    if process_rank()[1] > 1:
        _refuse(f"{process_rank()[1]} ranks", "one process: ranks exchange their gradients when backward has them all")
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            stepped = _Stepped(each)
            stack.callback(each.register_step_post_hook(stepped.forget).remove)
            for group in each.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        hook = _Hook(stepped, group)
                        stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Say whether an optimiser's parameters are stepped by backward."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    hooks = [hook for each in parameters for hook in (each._post_accumulate_grad_hooks or {}).values()]  # noqa: SLF001
    return any(isinstance(hook, _Hook) for hook in hooks)


class _Stepped:
    """Which parameters of an optimiser were stepped since its last `step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: set[torch.Tensor] = set()

    def forget(self, *_: object) -> None:
        self.parameters.clear()


class _Hook:
    """Called by autograd with a parameter whose gradient is complete."""

    def __init__(self, stepped: _Stepped, group: Group) -> None:
        self._stepped, self._group = stepped, group

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter in self._stepped.parameters:
            raise StateError(
                "backward() inside step_in_backward(optimizer)",
                got=f"a second gradient of a parameter of shape {tuple(parameter.shape)}, which is stepped already",
                expected="optimizer.step() after each backward: gradients cannot be accumulated",
                fix="call optimizer.step() after each backward, or accumulate with GradientAccumulator without it.",
            )
        step_group(self._stepped.optimizer, self._group, [parameter])
        self._stepped.parameters.add(parameter)
        parameter.grad = None


def _refuse(got: str, expected: str) -> None:
    raise ConfigError(_CALL, got=got, expected=expected, fix="step after backward, in memkit.atomic_steps(optimizer).")
