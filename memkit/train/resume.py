"""Resume an interrupted optimizer step by skipping the in-place operators that were already applied.

If an optimizer steps one tensor after the other, each operator that writes to a parameter or its state increments that
tensor's version. So the versions before and after tell how far a step has come, without any copies. To resume, the
same step runs again and skips the operators already applied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from memkit._core.errors import StateError
from memkit._torch.dispatch import TorchDispatchMode
from memkit._torch.fake import FakeTensor
from memkit._torch.operators import schema_of
from memkit._torch.tensors import live_versions, version_of
from memkit.train.parameterwise import ELEMENTWISE, Group, known_kind, step_group

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))  # a simulated step takes the real one's path
Progress = dict[str, int]  # applied in-place operators by state name, "" for the parameter itself

# Not resumable: Adadelta computes its update from state that it has already changed, and ASGD its decayed gradient from
# the parameter that it then changes twice.
_RESUMABLE = frozenset(ELEMENTWISE) - {optim.Adadelta, optim.ASGD}


class StepJournal:
    """The parameters that an optimizer steps one by one, and the progress of the current step.

    It does not keep the state alive, so another one may be loaded.

    Args:
        entries: The parameters with a gradient, with their groups and states, in the order of the step.
        others: The optimizer's parameters without a gradient.

    Attributes:
        parameters: Those with a gradient, with their groups.
        num_begun: Number of parameters begun when the step was interrupted.
        progress: Progress of the last of these.
    """

    def __init__(
        self, entries: Sequence[tuple[Group, torch.Tensor, dict[str, torch.Tensor]]], others: list[torch.Tensor]
    ) -> None:
        self.parameters, self._others = [(group, parameter) for group, parameter, _ in entries], others
        self.num_begun, self.progress = 0, Progress()
        # For each tensor: its parameter's index, its name.
        self._keys = [(number, name) for number, (_, _, state) in enumerate(entries) for name in ("", *state)]
        tensors = [each for _, parameter, state in entries for each in (parameter, *state.values())]
        self._tensors = [weakref.ref(each) for each in tensors]
        self._versions: list[int] = []

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepJournal | None:
        """Make a journal; None if the next step cannot be resumed."""
        if known_kind(optimizer) not in _RESUMABLE or not _num_stepped_singly(optimizer):
            return None
        entries, others = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    others.append(parameter)
                    continue
                state = _complete_state(optimizer, group, parameter)
                if state is None:
                    return None
                entries.append((group, parameter, state))
        return cls(entries, others)

    def describes(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer still steps these parameters, with this state."""
        if _num_stepped_singly(optimizer) != len(self.parameters) + len(self._others):
            return False
        if not self.parameters or (self._others and any(each.grad is not None for each in self._others)):
            return False
        last, name = self.parameters[-1][1], self._keys[-1][1]
        return self._tensors[-1]() is ((optimizer.state.get(last) or {}).get(name) if name else last)

    def begin(self) -> bool:
        """Record the versions before a step; return False if some state is gone."""
        versions = live_versions(self._tensors)
        self._versions = versions or []
        return versions is not None

    def cut_off(self, optimizer: Optimizer) -> None:
        """Record the progress of an interrupted step.

        Raises:
            StateError: A state tensor was replaced in the meantime, so the progress is unknown.
        """
        self.num_begun, self.progress = 0, {}
        for (number, name), noted, version in zip(self._keys, self._tensors, self._versions, strict=True):
            parameter = self.parameters[number][1]
            tensor = optimizer.state.get(parameter, {}).get(name) if name else parameter
            if tensor is not noted() or tensor is None:
                raise StateError(
                    "optimizer.step()",
                    got=f"an interrupted step of a parameter whose state {name!r} was replaced by a new tensor",
                    expected="an optimizer that changes its state in place",
                    fix="resume from the last checkpoint.",
                )
            applied = version_of(tensor) - version
            if applied and number >= self.num_begun:
                self.num_begun, self.progress = number + 1, {}
            if applied and number == self.num_begun - 1:
                self.progress[name] = applied


def go_on(optimizer: Optimizer, group: Group, parameter: torch.Tensor, progress: Progress) -> None:
    """Run the rest of a parameter's step; if it is interrupted again, update ``progress``."""
    state = {name: each for name, each in optimizer.state.get(parameter, {}).items() if each is not None}
    tensors = {"": parameter, **state}
    versions = {name: version_of(each) for name, each in tensors.items()}
    try:
        with _SkipApplied({id(each): progress.get(name, 0) for name, each in tensors.items()}):
            step_group(optimizer, group, [parameter])
    except BaseException:
        for name, each in tensors.items():  # skipped operators have raised versions too
            progress[name] = max(progress.get(name, 0), version_of(each) - versions[name])
        raise


class _SkipApplied(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Skips the first in-place operators on some tensors.

    Args:
        applied: Number of operators to skip, by id of the tensor.
    """

    def __init__(self, applied: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = dict(applied)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema_of(func).is_mutable:
            for written in _written(func, args, kwargs):
                if self._left.get(id(written), 0) > 0:
                    self._left[id(written)] -= 1
                    return written
        return func(*args, **kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to; operators of single-tensor steps write to one."""
    for number, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                yield value


def _num_stepped_singly(optimizer: Optimizer) -> int:
    """Count the parameters of an optimizer that steps them one by one; 0 if it may step several at once."""
    number = 0
    for group in optimizer.param_groups:
        get, parameters = group.get, group["params"]
        if get("foreach") or get("fused") or get("capturable") or get("differentiable"):
            return 0
        if parameters and not parameters[0].is_cpu:  # off the CPU, foreach is the default
            return 0
        number += len(parameters)
    return number


def _complete_state(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Return a parameter's state if it is complete and the parameter is stepped directly; else None."""
    gradient = parameter.grad
    is_plain = type(parameter) in _PLAIN and not parameter.is_complex()
    if gradient is None or not is_plain or gradient.layout != torch.strided or not parameter.is_cpu:
        return None
    state = {name: each for name, each in optimizer.state.get(parameter, {}).items() if each is not None}
    needs_none = known_kind(optimizer) is optim.SGD and group["momentum"] == 0
    is_there = bool(state) or needs_none
    return state if is_there and all(isinstance(each, torch.Tensor) for each in state.values()) else None
