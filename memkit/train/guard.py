"""Protection of optimizer steps: an out-of-memory inside one leaves nothing half done."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memkit._core.attributes import attributes_of, set_attributes
from memkit._core.errors import MemkitOutOfMemoryError, warn_user
from memkit._core.printable import list_some
from memkit._core.units import format_bytes
from memkit._machine import random_state
from memkit._machine.devices import has_room, release_cached_memory
from memkit._recorder.attributes import Attributes
from memkit._recorder.recorder import Recorder
from memkit._recovery.attempt import Done, Failure, attempt
from memkit._torch.tensors import bytes_held, put_back
from memkit.train.chunked_steps import ChunkedStep, OomCount, close_all
from memkit.train.gradients import local_part
from memkit.train.offload_files import map_file
from memkit.train.parameterwise import exchanges_in_step, has_shared_memory, known_kind, steps_parameterwise

_SMALL_BYTES = 64 * 1024  # not worth a file
_MOST_BYTES = 2**30  # of an automatic copy
_NUM_GUARDED_STEPS = 2  # the first creates the optimizer's state, the second is the first to start with it


class StepGuard:
    """Protects the steps of optimizers that may run out of memory.

    Most of torch's optimizers run in one piece, resuming where they were interrupted, until a step runs out of memory
    (`memkit.train.resume`). Its others, and those of `register_parameterwise`, step in atomic chunks (`atomic_steps`).

    An unknown optimizer is protected by a copy of the parameters, gradients and state of all optimizers that step
    together (what they keep in attributes, in inner optimizers and in random numbers included), made before steps that
    may run out of memory. These are the first two, when the state is created (the
    second also measures the temporary results), and later ones before which a trial allocation of the temporary
    results fails. Accelerator tensors are copied to host memory, host tensors to a temporary file, so the copy does not
    use the scarce memory. After an out-of-memory everything is restored, and the step is retried once with the
    allocator's cache released. A copy larger than `_MOST_BYTES`, or one that does not fit, is not made. Whether a copy
    is made, and its size, is reported once, at the first step.

    Args:
        optimizers: The optimizers that step together.

    Attributes:
        goes_on: Whether an interrupted step is resumed and completed.
        ooms: Number of out-of-memory errors inside the last step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [_inner(each) for each in optimizers]
        found = next((each for each in self._optimizers if not steps_parameterwise(each)), None)
        self._unknown: str | None = None
        self._may_register = False
        if found is not None:
            kind, shares = type(found), known_kind(found) is not None and has_shared_memory(found)
            self._unknown = f"{kind.__name__} with parameters that share memory" if shares else kind.__name__
            self._may_register = not shares and not exchanges_in_step(kind)
        self.goes_on = self._unknown is None
        self.ooms = OomCount()
        self._num_steps = 0
        self._has_warned = False
        self._chunked = [ChunkedStep(each, only_once=True, ooms=self.ooms) for each in self._optimizers if self.goes_on]
        self._temporary_bytes: dict[torch.device, int] = {}

    @property
    def has_stepped(self) -> bool:
        """Whether the last step in chunks was completed, even if it was interrupted."""
        return _are_done(self._chunked)

    def forget(self) -> None:
        """Before a step, forget how the last one ended."""
        self.ooms.num = 0
        for each in self._chunked:
            each.forget()

    def run(self, step: Callable[[], bool]) -> bool:
        """Run ``step``, which steps the optimizers, and return its result.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory; the message says whether everything was restored.
        """
        if self._unknown is not None:
            return self._run_unknown(step)
        are_closed = False
        try:
            try:
                for each in self._chunked:
                    each.open()
                outcome = attempt(step)
                return outcome.result if isinstance(outcome, Done) else self._again(step, outcome)
            except Exception:
                raise
            except BaseException:  # an interrupt not raised by a signal: complete a step that has begun
                if any(each.num_stepped for each in self._chunked):
                    step()
                raise
            finally:
                close_all(self._chunked)
                are_closed = True
        finally:
            if not are_closed:  # an interrupt cut it short
                close_all(self._chunked)

    def _again(self, step: Callable[[], bool], outcome: Failure) -> bool:
        """Try a step that ran out of memory once more."""
        if isinstance(outcome.error, MemkitOutOfMemoryError):
            raise outcome.error  # raised by the chunks: there is nothing smaller to try
        if any(each.was_in_hooks for each in self._chunked):
            ends = "stepped" if _are_done(self._chunked) else "as they were before the step"
            raise MemkitOutOfMemoryError(
                "optimizer.step()",
                got=f"out of memory in a step hook: {outcome.description}; parameters are {ends}",
                expected="memory for step hooks; hooks that have already run are not called twice",
                fix="free more memory, or run the hook's work after the step.",
            ) from outcome.error
        self.ooms.num += 1
        return step()  # it failed outside the chunks; what they have stepped stays

    def _run_unknown(self, step: Callable[[], bool]) -> bool:
        outcome, is_copied = self._run_copied(step)
        if isinstance(outcome, Done):
            self._num_steps += outcome.result
            return outcome.result
        raise MemkitOutOfMemoryError(
            "optimizer.step()",
            got=f"out of memory inside it: {outcome.description}; parameters and state are "
            + ("as they were before the step" if is_copied else f"as {self._unknown} left them, perhaps half stepped"),
            expected="memory for the optimizer's state and its temporary results",
            fix="free more memory, for example with a smaller batch"
            + ("." if is_copied else "; resume from the last checkpoint."),
        ) from outcome.error

    def _run_copied(self, step: Callable[[], bool]) -> tuple[Done[bool] | Failure, bool]:
        """Run ``step``, twice if a copy allows it; return the outcome, and whether there was a copy to go back to."""
        before = self._copy() if self._num_steps < _NUM_GUARDED_STEPS or not self._has_room() else None
        undo = None if before is None else before.restore
        run = functools.partial(self._counted, step) if self._num_steps == _NUM_GUARDED_STEPS - 1 else step
        outcome = attempt(run, undo=undo)
        if undo is not None and not isinstance(outcome, Done):
            self.ooms.num += 1
            outcome = attempt(run, undo=undo)
        if before is not None and not isinstance(outcome, Done) and before.noted:
            outcome = self._run_as_noted(run, before)
        return outcome, undo is not None

    def _run_as_noted(self, run: Callable[[], bool], before: _Copy) -> Done[bool] | Failure:
        """Run a step once more that has noted its failure in attributes, as one that then takes less memory may."""
        names = list_some([name for _, name, _ in before.noted], 3)
        for optimizer, name, value in before.noted:
            setattr(optimizer, name, value)
        outcome = attempt(run, undo=before.restore)
        if isinstance(outcome, Done):
            self.ooms.num += 1
            warn_user(
                f"optimizer.step(): {self._unknown} ran out of memory twice, and stepped when its attributes {names} "
                "were left as the failed step had set them; everything else was undone. If its update depends on them, "
                "as on a count of steps, it is not that of a step which fits. Way out: keep such counts in "
                "optimizer.state, and free more memory, for example with a smaller batch."
            )
        return outcome

    def _counted(self, step: Callable[[], bool]) -> bool:
        """Run a step, and record how far its peak memory rises above the level at its end."""
        with Recorder() as recorder:
            stepped = step()
        recording = recorder.recording()
        if stepped:
            for device in recording.devices:
                live = recording.timeline(device)
                self._temporary_bytes[torch.device(device)] = int(live.max(initial=0)) - int(live[-1])
        return stepped

    def _has_room(self) -> bool:
        """Return whether the temporary results fit in one block; a wrong False costs only a copy."""
        for _ in range(2):
            if all(has_room(device, num_bytes) for device, num_bytes in self._temporary_bytes.items()):
                return True
            release_cached_memory()
        return False

    def _copy(self) -> _Copy | None:
        kept = _Kept(self._optimizers)
        num_bytes = sum(map(_num_bytes, (*_tensors(kept.optimizers), *kept.tensors)))
        copied = None
        if num_bytes <= _MOST_BYTES:
            outcome = attempt(_Copy, kept, others=(OSError,))
            copied = outcome.result if isinstance(outcome, Done) else None  # else no temporary folder, or no space
        if not self._has_warned:
            self._has_warned = True
            self._warn(num_bytes, is_copied=copied is not None)
        return copied

    def _warn(self, num_bytes: int, *, is_copied: bool) -> None:
        size = format_bytes(num_bytes)
        what = (
            f"parameters, gradients and state ({size} now) are copied to the host before its first two steps, and "
            "before later steps when memory is short, so that an out-of-memory error inside a step can be undone"
            if is_copied
            else "an out-of-memory error inside its step may leave parameters and state half stepped. They are not "
            f"copied, because {size} is too much or does not fit"
        )
        register = (
            f"if it steps each parameter independently, call memkit.train.register_parameterwise({self._unknown}), "
            "which makes its step safe without a copy; "
        )
        warn_user(
            f"optimizer.step(): memkit does not know how {self._unknown} steps; {what}. Way out: "
            f"{register if self._may_register else ''}on_oom='raise' or guard_steps=False turns this guard off."
        )


def _are_done(chunked: Sequence[ChunkedStep]) -> bool:
    begun = [each for each in chunked if each.num_stepped]
    return bool(begun) and all(each.is_done for each in begun)


def _inner(optimizer: Optimizer) -> Optimizer:
    """Unwrap an optimizer prepared by accelerate: without a scaler its step only calls the inner one's."""
    inner = getattr(optimizer, "optimizer", None)
    is_prepared = type(optimizer).__module__.startswith("accelerate.") and getattr(optimizer, "scaler", None) is None
    return inner if is_prepared and isinstance(inner, Optimizer) else optimizer


def _stepped(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """List the parameters with a gradient."""
    return [each for each in _parameters(optimizers) if each.grad is not None]


def _parameters(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    listed = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    return list({id(each): each for each in listed}.values())


def _with_inner(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """List optimizers with those that they hold: Lookahead's, or the local one of a ZeroRedundancyOptimizer."""
    found, todo = dict[int, Optimizer](), list(optimizers)
    while todo:
        each = todo.pop(0)
        if id(each) not in found:
            found[id(each)] = each
            values = list(_others_of(each).values())
            inside = [one for value in values if isinstance(value, (list, tuple)) for one in value]
            todo += [one for one in (*values, *inside) if isinstance(one, Optimizer)]
    return list(found.values())


def _others_of(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in attributes_of(optimizer).items() if name not in ("state", "param_groups")}


def _tensors(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a copy holds, but for those in attributes."""
    for parameter in _stepped(optimizers):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    yield from (value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _num_bytes(tensor: torch.Tensor) -> int:
    return bytes_held(local_part(tensor.detach()))


class _Kept:
    """Saved attributes of optimizers, such as a count of steps, slow weights or an inner optimizer.

    Attributes:
        optimizers: The optimizers, with those that they hold.
        tensors: Their tensors, whose content is not saved.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = _with_inner(optimizers)
        self._own = [(each, attributes_of(each)) for each in self.optimizers]
        held = [value for each in self.optimizers for value in _others_of(each).values()]
        self._others = Attributes(held, content="arrays")
        copied = {id(each) for each in (*_parameters(self.optimizers), *_tensors(self.optimizers))}
        self.tensors = [each for each in self._others.plain_tensors() if id(each) not in copied]

    def noted(self) -> list[tuple[Optimizer, str, object]]:
        """Return the numbers and words in attributes of the optimizers that have changed."""
        return [
            (optimizer, name, value)
            for optimizer, attributes in self._own
            for name, value in attributes_of(optimizer).items()
            if type(value) in (bool, int, str) and value != attributes.get(name)
            if not name.startswith("_")  # such as a schedule's mark that the step was called
        ]

    def restore(self) -> None:
        """Restore all but the content of the tensors."""
        for optimizer, attributes in self._own:
            set_attributes(optimizer, attributes)
        self._others.restore()


class _Copy:
    """A copy of parameters, gradients and optimizer state, and of random states.

    Attributes:
        noted: What the last step that was undone had changed of the numbers and words in the optimizers' attributes.
    """

    def __init__(self, kept: _Kept) -> None:
        self._kept, self._random = kept, random_state.capture()
        self.noted: list[tuple[Optimizer, str, object]] = []
        own = list(_tensors(kept.optimizers))
        copied = list(_copied([*own, *kept.tensors]))
        copies: dict[int, Any] = dict(zip(map(id, own), copied, strict=False))
        aliases = [each.detach() for each in kept.tensors]
        self._held = list(zip(kept.tensors, aliases, copied[len(own) :], strict=True))
        self._parameters = [
            (each, each.grad, copies[id(each)], copies[id(each.grad)]) for each in _stepped(kept.optimizers)
        ]
        self._states = [  # tensors are replaced by their copies, other values are deep-copied
            (
                optimizer,
                {
                    parameter: (dict(state) if isinstance(state, dict) else None, copy.deepcopy(state, copies))
                    for parameter, state in optimizer.state.items()
                },
            )
            for optimizer in kept.optimizers
        ]
        self._groups = [
            (group, copy.deepcopy({name: value for name, value in group.items() if name != "params"}))
            for optimizer in kept.optimizers
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place."""
        self.noted = self._kept.noted()
        self._kept.restore()
        for tensor, place, value in self._held:
            put_back(tensor, place)
            local_part(place).copy_(value)
        for parameter, gradient, value, its_value in self._parameters:
            local_part(parameter).copy_(value)
            if gradient is not None:
                local_part(gradient).copy_(its_value)  # weight decay may have been added to it
            parameter.grad = gradient
        for optimizer, states in self._states:
            _restore_states(optimizer, states)
        for group, settings in self._groups:
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group.update(copy.deepcopy(settings))
        random_state.restore(self._random)


def _copied(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield copies in host memory, or in a file for large tensors that are in host memory already."""
    local = [local_part(each.detach()).resolve_conj().resolve_neg() for each in tensors]
    in_file = [each.is_cpu and not each.is_sparse and each.nbytes >= _SMALL_BYTES for each in local]
    mapped = iter(map_file(list(itertools.compress(local, in_file))))
    return (
        next(mapped) if is_large else each.to("cpu", copy=True) for each, is_large in zip(local, in_file, strict=True)
    )


def _restore_states(optimizer: Optimizer, states: dict[Any, tuple[dict[str, Any] | None, Any]]) -> None:
    for parameter in optimizer.state.keys() - states.keys():
        del optimizer.state[parameter]
    for parameter, (own, before) in states.items():
        if own is not None and isinstance(optimizer.state.get(parameter), dict):
            _restore_state(optimizer.state[parameter], own, before)
        else:
            optimizer.state[parameter] = copy.deepcopy(before)


def _restore_state(state: dict[str, Any], own: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore a parameter's state: its own tensors, with the values that they had."""
    for name in state.keys() - before.keys():
        del state[name]
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            state[name] = own[name]
            local_part(own[name]).copy_(value)
        else:
            state[name] = copy.deepcopy(value)
