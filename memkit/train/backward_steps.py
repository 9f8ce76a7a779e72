"""Step each parameter as soon as backward has its gradient, so that the gradients never coexist in memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, StateError
from memkit._machine.devices import process_rank
from memkit._torch.tensors import accumulate_hooks
from memkit.train.gradients import given_optimizers
from memkit.train.parameterwise import Group, has_shared_memory, step_group, steps_parameterwise

_CALL = "step_in_backward(optimizer)"


@contextlib.contextmanager
def step_in_backward(optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[None]:
    """Make ``loss.backward()`` step each parameter when its gradient is complete, and free the gradient at once.

    Call ``optimizer.step()`` after each backward as before: it finds no gradients left, runs your step hooks and counts
    for schedulers. Parameters and state are bit-identical to the plain loop's.

    This is exact if a step needs one parameter's gradient only. So it excludes clipping by the total norm, loss scalers
    (an infinity would be found after half of the parameters are stepped), accumulation and several ranks. Anything
    that reads a gradient between backward and ``optimizer.step()``, or adds to it, raises. An out-of-memory in the
    backward leaves some parameters stepped: a step cannot be undone, so `MemoryEfficientTrainingWrapper` and
    `GradientAccumulator` refuse such an optimizer.

    Args:
        optimizer: Any of torch's own optimizers except LBFGS, or several.

    Raises:
        ConfigError: The optimizer needs more than one parameter's gradient, backward already steps its parameters, or
            there are several ranks.
        StateError: From a second backward before ``optimizer.step()``, also after ``zero_grad()``: the first one has
            stepped already. From anything that needs a freed gradient: clipping by the total norm, a loss scaler. The
            scaler's error comes after its first backward has already stepped.
            From ``optimizer.step()`` if a parameter was unfrozen or added in the block: backward does not step it.

    Memory:
        The largest gradient and the temporary results of its step, instead of all gradients.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with mk.train.step_in_backward(optimizer):
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
        >>> model.weight.grad is None
        True
    """
    optimizers = given_optimizers("step_in_backward", optimizer)
    for each in optimizers:
        if has_shared_memory(each):
            _refuse(
                "parameters that share memory",
                "parameters that can be stepped one after the other, while the backward still reads the others",
                "call optimizer.step() without this block",
            )
        if not steps_parameterwise(each):
            _refuse(f"a {type(each).__name__}", "an optimizer known to step each parameter independently of the others")
    if process_rank()[1] > 1:
        _refuse(
            f"{process_rank()[1]} ranks",
            "one process: ranks exchange gradients only after backward has computed all of them",
        )
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            if steps_in_backward(each):
                _refuse(
                    "an optimizer that is already inside step_in_backward",
                    "each optimizer in one step_in_backward block",
                )
            stack.callback(_forget, each)
            stack.callback(each.register_step_pre_hook(_before_step).remove)
            stepped = set[int]()
            stack.callback(each.register_step_post_hook(functools.partial(_after_step, stepped)).remove)
            for group in each.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        hook = _Hook(each, group, stepped)
                        stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Return whether backward steps an optimizer's parameters."""
    trainable = (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
    first = next(trainable, None)  # only the first, because this is called for each micro-batch
    hooks = (None if first is None else accumulate_hooks(first)) or {}
    return any(isinstance(hook, _Hook) for hook in hooks.values())


def hooks_of_others(parameter: torch.Tensor) -> list[Any]:
    """Return the hooks that run after a parameter's gradient is accumulated, but for those that step it here."""
    return [hook for hook in (accumulate_hooks(parameter) or {}).values() if not isinstance(hook, _Hook)]


class _Hook:
    """Hook that autograd calls with a parameter whose gradient is complete.

    Args:
        optimizer: The optimizer.
        group: The parameter's group in it.
        stepped: Ids of the parameters that were stepped since the last call of ``optimizer.step()``.
    """

    def __init__(self, optimizer: Optimizer, group: Group, stepped: set[int]) -> None:
        self._optimizer, self._group, self._stepped = optimizer, group, stepped

    def __call__(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._stepped:
            parameter.grad = None
            raise StateError(
                f"loss.backward() in {_CALL}",
                got="a second backward through parameters that the first one has stepped, as for adversarial inputs, "
                "or with the other network of a GAN",
                expected="one backward for each optimizer.step(), through the parameters that are to be stepped",
                fix="freeze them for the other backward, model.requires_grad_(False), or take its gradients by "
                "torch.autograd.grad(loss, inputs).",
            )
        if parameter.grad is None:  # autograd calls it without one, too: as in a double backward that ends before
            return
        self._stepped.add(id(parameter))
        step_group(self._optimizer, self._group, [parameter])
        parameter.grad = _Freed(parameter.grad)


class _Freed(torch.Tensor):
    """Zero-memory stand-in for a freed gradient that raises when it is used."""

    @staticmethod
    def __new__(cls: type[_Freed], gradient: torch.Tensor) -> _Freed:
        return cls._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device, storage_size=0
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse_freed(func)

    def tolist(self) -> NoReturn:
        """Refuse the read; torch's own error would name this class."""
        _refuse_freed("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:  # noqa: ARG002 - torch's signature
        """Refuse the read, as `tolist` does."""
        _refuse_freed("numpy()")


def _refuse_freed(what: object) -> NoReturn:
    raise StateError(
        _CALL,
        got=f"{what} on a gradient that backward has stepped with and freed",
        expected="optimizer.step() after each backward, and nothing in between that needs gradients: no "
        "clipping by the total norm, no accumulation, no loss scaler",
        fix="remove that operation, or step after backward: use memkit.train.atomic_steps(optimizer) instead.",
    )


def _forget(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter.grad, _Freed):
                parameter.grad = None


def _before_step(optimizer: Optimizer, *_: object) -> None:
    _forget(optimizer)
    if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
        raise StateError(
            "optimizer.step() in step_in_backward(optimizer)",
            got="a gradient that backward did not step with: its parameter was unfrozen, added, or given a gradient "
            "by hand inside the block",
            expected="the parameters that were trainable when the block was entered, with gradients from backward",
            fix="unfreeze and add parameters before the block, or leave it and enter it again.",
        )


def _after_step(stepped: set[int], *_: object) -> None:
    stepped.clear()


def _refuse(got: str, expected: str, fix: str = "use memkit.train.atomic_steps(optimizer) instead") -> None:
    raise ConfigError(_CALL, got=got, expected=expected, fix=f"step after backward: {fix}.")
