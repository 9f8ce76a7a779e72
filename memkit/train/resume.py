"""Resume an interrupted optimizer step by skipping the in-place operators that were already applied.

Where an optimizer steps one tensor after the other, each operator that writes to a parameter or its state increments
that tensor's version, so the versions before and after tell how far a step has come. Operators on all tensors of a
group at once, the default on a GPU, do so too, but not beneath a dispatch mode, and fused ones never; and views of one
tensor, made into parameters, share a version. Those are counted as they run. Neither takes a copy. To resume, the same
step runs again, for one parameter after the other, and skips the operators already applied.
"""

from __future__ import annotations

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
from memkit.train.gradients import parameters_in_order
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
    """The parameters that an optimizer steps, in the order of the step, and how far the current step has come.

    Between steps it keeps neither parameters nor state alive, so others may take their places. It knows parameters by
    their `id`, since what has a weak reference is not swapped (`torch.utils.swap_tensors`, and with it some ways of
    `load_state_dict`): a parameter in the place and with the state of an old one is stepped like it.

    Args:
        entries: The parameters with a gradient: their places among all, groups and states.
        listed: All of the optimizer's parameters.

    Attributes:
        num_parameters: Number of parameters with a gradient.
        watched: What must run the step that has begun, and counts its operators; None where versions tell.
    """

    def __init__(
        self, entries: Sequence[tuple[int, Group, dict[str, torch.Tensor]]], listed: Sequence[torch.Tensor]
    ) -> None:
        self.num_parameters = len(entries)
        self.watched: CountApplied | None = None
        self._ids, self._places = list(map(id, listed)), [place for place, _, _ in entries]
        self._others = sorted(set(range(len(listed))).difference(self._places))  # places of those without a gradient
        self._is_together = any(steps_together(group) for _, group, _ in entries)
        self._is_fused = any(group.get("fused") for _, group, _ in entries)
        self._shares_versions = share_versions(
            [each for place, _, state in entries for each in (listed[place], *state.values())]
        )
        # The parameters that are stepped by the same operators, by the first of them, which speaks for all: to read
        # hundreds of versions takes longer than all else.
        self._alike: dict[int, list[int]] = {}
        firsts: dict[int, int] = {}
        for number, (_, group, _) in enumerate(entries):
            first = firsts.setdefault(id(group), number) if steps_together(group) else number
            self._alike.setdefault(first, []).append(number)
        self._first_places = [self._places[first] for first in self._alike]
        # For each tensor of the state of these: its parameter's index, its name.
        self._keys = [(first, name) for first in self._alike for name in entries[first][2]]
        self._state = [weakref.ref(entries[first][2][name]) for first, name in self._keys]
        self._versions: list[int] = []  # of the first parameters, then of their state
        # The last tensor of the last parameter's state, with its name.
        lasts = [(name, weakref.ref(each)) for _, _, state in entries[-1:] for name, each in state.items()]
        self._last = lasts[-1] if lasts else None

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepJournal | None:
        """Make a journal; None if the next step cannot be resumed."""
        if not _num_resumable(optimizer):
            return None
        entries, listed = list[tuple[int, Group, dict[str, torch.Tensor]]](), list[torch.Tensor]()
        for group in optimizer.param_groups:
            kinds = set()
            for parameter in group["params"]:
                listed.append(parameter)
                if parameter.grad is None:
                    continue
                state = _complete_state(optimizer, group, parameter)
                if state is None:
                    return None
                entries.append((len(listed) - 1, group, state))
                kinds.add((parameter.device, parameter.dtype))
            if len(kinds) > 1 and steps_together(group):  # one kind after the other, in no known order
                return None
        return cls(entries, listed)

    def begin(self, optimizer: Optimizer) -> bool:
        """Record the versions before a step; return False if it steps other parameters now, or with other state."""
        if _num_resumable(optimizer) != len(self._ids):
            return False
        listed = parameters_in_order(optimizer)
        if list(map(id, listed)) != self._ids:
            return False
        if self._others and any(listed[place].grad is not None for place in self._others):
            return False
        if self._last is not None:
            name, noted = self._last
            if (optimizer.state.get(listed[self._places[-1]]) or {}).get(name) is not noted():
                return False
        versions = live_versions(self._state)
        if versions is None:
            return False
        self._versions = [*map(version_of, map(listed.__getitem__, self._first_places)), *versions]
        leaves_versions = self._is_fused or (self._is_together and (num_modes() or not versions_tell_together()))
        self.watched = CountApplied() if leaves_versions or self._shares_versions else None
        return True

    def cut_off(self, optimizer: Optimizer) -> tuple[list[torch.Tensor], list[Interrupted]]:
        """Find where a step was interrupted.

        Returns:
            The parameters that were stepped before; and those after them that were begun: one, or those of a group that
            is stepped at once.

        Raises:
            StateError: A state tensor was replaced in the meantime, so the progress is unknown.
        """
        listed = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        parameters = [listed[place] for place in self._places]
        tensors = [(first, "", parameters[first][1]) for first in self._alike]
        for (first, name), noted in zip(self._keys, self._state, strict=True):
            tensor = optimizer.state.get(parameters[first][1], {}).get(name)
            if tensor is not noted() or tensor is None:
                raise StateError(
                    "optimizer.step()",
                    got=f"an interrupted step of a parameter whose state {name!r} was replaced by a new tensor",
                    expected="an optimizer that changes its state in place",
                    fix="resume from the last checkpoint.",
                )
            tensors.append((first, name, tensor))
        applied: dict[int, Progress] = {}
        for (first, name, tensor), version in zip(tensors, self._versions, strict=True):
            num = version_of(tensor) - version if self.watched is None else self.watched.counts[id(tensor)]
            for number in self._alike[first] if num else ():
                applied.setdefault(number, {})[name] = num
        num_done = 0
        if applied:
            num_done = max(applied)
            group = parameters[num_done][0]
            if steps_together(group):
                num_done = [id(each) for each, _ in parameters].index(id(group))
        begun = [
            Interrupted(*parameters[number], progress)
            for number, progress in sorted(applied.items())
            if number >= num_done
        ]
        return [parameter for _, parameter in parameters[:num_done]], begun


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
