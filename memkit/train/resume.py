"""Resume an interrupted optimizer step by skipping the in-place operators that were already applied.

Where an optimizer steps one tensor after the other, each operator that writes to a parameter or its state increments
that tensor's version, so the versions before and after tell how far a step has come. Operators on all tensors of a
group at once, the default on a GPU, do so too, but not beneath a dispatch mode, and fused ones never; and views of one
tensor, made into parameters, share a version. Those are counted as they run. Neither takes a copy. To resume, the same
step runs again, for one parameter after the other, and skips the operators already applied.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.optim import Optimizer

from memkit._core.errors import StateError
from memkit._torch.dispatch import LeanDispatchMode, current_modes, num_modes
from memkit._torch.fake import FakeTensor
from memkit._torch.operators import kernel_of, schema_of
from memkit._torch.tensors import live_versions, share_versions, version_of, versions_tell_together
from memkit.train.parameterwise import ELEMENTWISE, Group, known_kind, step_group, steps_together, writes_gradients

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))  # a simulated step takes the real one's path
Progress = dict[str, int]  # applied in-place operators by state name, "" for the parameter itself

# Not resumable: Adadelta computes its update from state that it has already changed, and ASGD its decayed gradient from
# the parameter that it then changes twice.
_RESUMABLE = frozenset(ELEMENTWISE) - {optim.Adadelta, optim.ASGD}
# Nor is Rprop with all tensors at once: it copies the gradients over the previous ones, and then reads both.
_RESUMABLE_TOGETHER = _RESUMABLE - {optim.Rprop}


class Interrupted(NamedTuple):
    """A parameter whose step may be half done."""

    group: Group
    parameter: torch.Tensor
    progress: Progress


class StepJournal:
    """The parameters that an optimizer steps, in the order of the step, and where the current step was interrupted.

    It does not keep the state alive, so another one may be loaded.

    Args:
        entries: The parameters with a gradient, with their groups and states.
        others: The optimizer's parameters without a gradient.

    Attributes:
        parameters: Those with a gradient, with their groups.
        num_done: Number of parameters that were stepped before the step was interrupted.
        interrupted: The parameters after these that were begun: one, or those of a group that is stepped at once.
        watched: What must run the step that has begun, and counts its operators; None where versions tell.
    """

    def __init__(
        self, entries: Sequence[tuple[Group, torch.Tensor, dict[str, torch.Tensor]]], others: list[torch.Tensor]
    ) -> None:
        self.parameters, self._others = [(group, parameter) for group, parameter, _ in entries], others
        self.num_done, self.interrupted = 0, list[Interrupted]()
        self._is_together = any(steps_together(group) for group, _ in self.parameters)
        self._is_fused = any(group.get("fused") for group, _ in self.parameters)
        self.watched: CountApplied | None = None
        self._shares_versions = share_versions([each for _, one, state in entries for each in (one, *state.values())])
        # The parameters that are stepped by the same operators, by the first of them, which speaks for all: to read
        # hundreds of versions takes longer than all else.
        self._alike: dict[int, list[int]] = {}
        firsts: dict[int, int] = {}
        for number, (group, _, _) in enumerate(entries):
            first = firsts.setdefault(id(group), number) if steps_together(group) else number
            self._alike.setdefault(first, []).append(number)
        # For each tensor of these: its parameter's index, its name.
        self._keys = [(first, name) for first in self._alike for name in ("", *entries[first][2])]
        tensors = [each for first in self._alike for each in (entries[first][1], *entries[first][2].values())]
        self._tensors = [_reference(each, name) for (_, name), each in zip(self._keys, tensors, strict=True)]
        self._versions: list[int] = []
        # The last parameter's last tensor, with its name.
        lasts = [{"": parameter, **state} for _, parameter, state in entries[-1:]]
        self._last = [(name, _reference(each, name)) for each_state in lasts for name, each in each_state.items()][-1:]

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepJournal | None:
        """Make a journal; None if the next step cannot be resumed."""
        if not _num_resumable(optimizer):
            return None
        entries, others = [], []
        for group in optimizer.param_groups:
            kinds = set()
            for parameter in group["params"]:
                if parameter.grad is None:
                    others.append(parameter)
                    continue
                state = _complete_state(optimizer, group, parameter)
                if state is None:
                    return None
                entries.append((group, parameter, state))
                kinds.add((parameter.device, parameter.dtype))
            if len(kinds) > 1 and steps_together(group):  # one kind after the other, in no known order
                return None
        return cls(entries, others)

    def describes(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer still steps these parameters, with this state."""
        if _num_resumable(optimizer) != len(self.parameters) + len(self._others):
            return False
        if not self.parameters or (self._others and any(each.grad is not None for each in self._others)):
            return False
        last, ((name, noted),) = self.parameters[-1][1], self._last
        return noted() is ((optimizer.state.get(last) or {}).get(name) if name else last)

    def begin(self) -> bool:
        """Record the versions before a step; return False if some state is gone."""
        leaves_versions = self._is_fused or (self._is_together and (num_modes() or not versions_tell_together()))
        self.watched = CountApplied() if leaves_versions or self._shares_versions else None
        versions = live_versions(self._tensors)
        self._versions = versions or []
        return versions is not None

    def cut_off(self, optimizer: Optimizer) -> None:
        """Find where a step was interrupted.

        Raises:
            StateError: A state tensor was replaced in the meantime, so the progress is unknown.
        """
        applied: dict[int, Progress] = {}
        for (first, name), noted, version in zip(self._keys, self._tensors, self._versions, strict=True):
            parameter = self.parameters[first][1]
            tensor = optimizer.state.get(parameter, {}).get(name) if name else parameter
            if tensor is not noted() or tensor is None:
                raise StateError(
                    "optimizer.step()",
                    got=f"an interrupted step of a parameter whose state {name!r} was replaced by a new tensor",
                    expected="an optimizer that changes its state in place",
                    fix="resume from the last checkpoint.",
                )
            num = version_of(tensor) - version if self.watched is None else self.watched.counts[id(tensor)]
            for number in self._alike[first] if num else ():
                applied.setdefault(number, {})[name] = num
        self.num_done = 0
        if applied:
            last = max(applied)
            group = self.parameters[last][0]
            self.num_done = (
                last if not steps_together(group) else [id(each) for each, _ in self.parameters].index(id(group))
            )
        self.interrupted = [
            Interrupted(*self.parameters[number], progress)
            for number, progress in applied.items()
            if number >= self.num_done
        ]


def _reference(tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor | None]:
    """Return a weak reference to state; parameters, which the journal keeps, would not swap beside one.

    `torch.utils.swap_tensors`, and with it some ways of `load_state_dict`, refuses tensors with weak references.
    """
    return weakref.ref(tensor) if name else itertools.repeat(tensor).__next__


def go_on(optimizer: Optimizer, group: Group, parameter: torch.Tensor, progress: Progress) -> None:
    """Run the rest of a parameter's step; if it is interrupted again, update ``progress``."""
    state = {name: each for name, each in optimizer.state.get(parameter, {}).items() if each is not None}
    tensors = {"": parameter, **state}
    skipping = _SkipApplied({id(each): progress.get(name, 0) for name, each in tensors.items()})
    try:
        skipping.run(lambda optimizer: step_group(optimizer, group, [parameter]), optimizer)
    except BaseException:
        for name, each in tensors.items():
            progress[name] = max(progress.get(name, 0), skipping.counts[id(each)])
        raise


class CountApplied(LeanDispatchMode):
    """Counts the in-place operators that are applied to each tensor, by its id, where versions do not tell.

    Each operator of the step runs through Python for it: those that write, and one for each number that is read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[int] = Counter()

    def run(self, step: Callable[..., object], optimizer: Optimizer) -> None:
        """Run a step, and count anew."""
        self.counts.clear()
        try:
            try:
                self.__enter__()  # type: ignore[no-untyped-call]  # torch's own
                step(optimizer)
            finally:
                self._leave()
        finally:
            self._leave()  # again, in case an interrupt cut it short

    def _leave(self) -> None:
        if current_modes()[-1:] == [self]:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not schema_of(func).is_mutable:
            return func(*args, **kwargs)
        note = partial(self.counts.update, [id(each) for each in _written(func, args, kwargs)])
        # Both calls are made from C, so that no interrupt comes between them.
        result, _ = map(operator.call, (partial(kernel_of(func), *args, **kwargs), note))
        return result


class _SkipApplied(CountApplied):
    """Skips the first in-place operators on some tensors, and counts them with those that are applied.

    Args:
        applied: Number of operators to skip, by id of the tensor.
    """

    def __init__(self, applied: Mapping[int, int]) -> None:
        super().__init__()
        self._applied_before = applied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if schema_of(func).is_mutable:
            written = list(_written(func, args, kwargs or {}))
            if any(self.counts[id(each)] < self._applied_before.get(id(each), 0) for each in written):
                self.counts.update(map(id, written))
                return written[0] if schema_of(func).returns else None
        return super().__torch_dispatch__(func, types, args, kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to: of one parameter, whichever way its optimizer steps."""
    for number, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (each for each in (value if isinstance(value, (list, tuple)) else (value,)) if _is_tensor(each))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _num_resumable(optimizer: Optimizer) -> int:
    """Count the parameters of an optimizer whose step can be resumed; 0 if there is one whose step cannot."""
    kind, number = known_kind(optimizer), 0
    for group in optimizer.param_groups:
        is_together = steps_together(group)
        if group.get("capturable") or group.get("differentiable"):
            return 0
        if kind not in (_RESUMABLE_TOGETHER if is_together else _RESUMABLE):
            return 0
        # Nesterov's momentum is added to the gradients, which are not looked at; a fused step changes all at once.
        if is_together and not group.get("fused") and writes_gradients(optimizer, group):
            return 0
        number += len(group["params"])
    return number


def _complete_state(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Return a parameter's state if it is complete and the parameter is stepped directly; else None."""
    gradient = parameter.grad
    is_plain = type(parameter) in _PLAIN and not parameter.is_complex()
    if gradient is None or not is_plain or gradient.layout != torch.strided:
        return None
    state = {name: each for name, each in optimizer.state.get(parameter, {}).items() if each is not None}
    needs_none = known_kind(optimizer) is optim.SGD and group["momentum"] == 0
    is_there = bool(state) or needs_none
    if not is_there or not all(isinstance(each, torch.Tensor) for each in state.values()):
        return None
    if steps_together(group):
        # An operator on tensors of one kind is one kernel; on others it is a loop, which may end in its middle.
        like_it = [gradient, *(each for each in state.values() if each.dim())]
        if any((each.device, each.dtype) != (parameter.device, parameter.dtype) for each in like_it):
            return None
    return state
