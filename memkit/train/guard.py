"""Out of memory inside an optimiser's step leaves nothing half done."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from memkit._core.errors import MemkitOutOfMemoryError, warn_user
from memkit._core.units import format_bytes
from memkit._machine.devices import has_room, release_cached_memory
from memkit._recorder.recorder import Recorder
from memkit._recovery.attempt import Done, attempt
from memkit._torch.tensors import sparse_parts
from memkit.train.parameterwise import steps_parameterwise
from memkit.train.ranks import local_part
from memkit.train.transaction import ChunkedStep, close_all

_SMALL_BYTES = 64 * 1024  # not worth a file
_MOST_BYTES = 2**30  # of a copy that nobody has asked for
_NUM_GUARDED_STEPS = 2  # the first makes the optimiser's state, the second is the first to have it all


class StepGuard:
    """Protects the steps of optimisers that may run out of memory.

    One that steps one tensor after the other steps in one piece, and goes on where it was cut off, until memory has run
    out in a step (`memkit.train.resume`). Torch's others, and those of `register_parameterwise`, step in chunks, which
    are whole (`atomic_steps`). An
    optimiser that nobody knows is protected by a copy of all parameters, gradients and state, of all that step
    together, before the steps that may run out of memory. Those are the first two, when the state is made; in the
    second one the temporary results are counted. Later ones are those before which so much memory cannot be had: it is
    asked for, and given back at once. The copy of an accelerator's tensors lies in host memory, that of host tensors in
    temporary files: it must not take the memory that is short. After an out-of-memory all is put back, and the step is
    tried once more with the allocator's cache released. A copy of more than `_MOST_BYTES`, or one that does not fit, is
    not made. Whether it is made, and how large it is, is said once, at the first step.

    Args:
        optimizers: The optimisers that step together.

    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [_inner(each) for each in optimizers]
        self._unknown = next((type(each).__name__ for each in self._optimizers if not steps_parameterwise(each)), None)
        self._num_steps = 0
        self._is_told = False
        self._chunked = [] if self._unknown else [ChunkedStep(each, only_once=True) for each in self._optimizers]
        self._temporary_bytes: dict[torch.device, int] = {}

    @property
    def goes_on(self) -> bool:
        """Whether a step that an interrupt cuts off is gone on with to its end."""
        return self._unknown is None

    @property
    def has_stepped(self) -> bool:
        """Whether the last step in chunks was done to its end, although it may have been interrupted."""
        return _are_done(self._chunked)

    def forget(self) -> None:
        """Before a step, forget how the last one ended."""
        for each in self._chunked:
            each.forget()

    def run(self, step: Callable[[], bool]) -> bool:
        """Run ``step``, which steps the optimisers; return what it returns.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory; the message says whether all is as it was before.
        """
        if self._unknown is None:
            return self._run_in_chunks(step)
        with contextlib.ExitStack() as stack:
            before = self._copy() if self._num_steps < _NUM_GUARDED_STEPS or not self._has_room() else None
            run = functools.partial(self._counted, step) if self._num_steps == _NUM_GUARDED_STEPS - 1 else step
            if before is not None:
                stack.enter_context(before)
                outcome = attempt(run, undo=before.restore)
            if before is None or not isinstance(outcome, Done):
                outcome = attempt(run, undo=None if before is None else before.restore)
            if isinstance(outcome, Done):
                self._num_steps += outcome.result
                return outcome.result
        raise MemkitOutOfMemoryError(
            "optimizer.step()",
            got=f"out of memory inside it: {outcome.description}; parameters and state are "
            + ("as they were before the step" if before else f"as {self._unknown} left them, perhaps half stepped"),
            expected="memory for the optimizer's state and its temporary results",
            fix="leave more memory free" + ("." if before else "; go on from the last checkpoint."),
        ) from outcome.error

    def _run_in_chunks(self, step: Callable[[], bool]) -> bool:
        try:
            try:
                for each in self._chunked:
                    each.open()
                return self._run_to_the_end(step)
            finally:
                close_all(self._chunked)
        finally:
            close_all(self._chunked)  # again, where an interrupt came in the middle of it

    def _run_to_the_end(self, step: Callable[[], bool]) -> bool:
        try:
            return _in_two_tries(step, self._chunked)
        except Exception:
            raise
        except BaseException:  # an interrupt that no signal brought: what has begun is done whole
            if any(each.num_stepped for each in self._chunked):
                step()
            raise

    def _counted(self, step: Callable[[], bool]) -> bool:
        """Run a step, and note how far it rises above both of its ends."""
        with Recorder() as recorder:
            stepped = step()
        recording = recorder.recording()
        if stepped:
            for device in recording.devices:
                live = recording.timeline(device)
                self._temporary_bytes[torch.device(device)] = int(live.max(initial=0)) - int(live[-1])
        return stepped

    def _has_room(self) -> bool:
        """Whether the step's temporary results fit. In one piece, so no may be wrong, which costs a copy only."""
        for _ in range(2):
            if all(has_room(device, num_bytes) for device, num_bytes in self._temporary_bytes.items()):
                return True
            release_cached_memory()
        return False

    def _copy(self) -> _Copy | None:
        num_bytes = sum(map(_num_bytes, _tensors(self._optimizers)))
        copied = None
        if num_bytes <= _MOST_BYTES:
            outcome = attempt(_Copy, self._optimizers, others=(OSError,))
            copied = outcome.result if isinstance(outcome, Done) else None  # else no temporary folder, or no room
        if not self._is_told:
            self._is_told = True
            self._tell(num_bytes, is_copied=copied is not None)
        return copied

    def _tell(self, num_bytes: int, *, is_copied: bool) -> None:
        size = format_bytes(num_bytes)
        what = (
            f"parameters, gradients and state ({size} now) are copied to the host before its first two steps, and "
            "before later ones without room, so that an out-of-memory inside leaves them whole"
            if is_copied
            else f"an out-of-memory inside its step may leave parameters and state half stepped. They are not copied: "
            f"{size} are too many, or do not fit"
        )
        warn_user(
            f"optimizer.step(): memkit does not know how {self._unknown} steps; {what}. Way out: where it steps "
            f"each parameter by itself, say memkit.train.register_parameterwise({self._unknown}), and its step is "
            "whole without a copy; on_oom='raise', or guard_steps=False, guards nothing."
        )


def _in_two_tries(step: Callable[[], bool], chunked: Sequence[ChunkedStep]) -> bool:
    outcome = attempt(step)
    if isinstance(outcome, Done):
        return outcome.result
    if isinstance(outcome.error, MemkitOutOfMemoryError):
        raise outcome.error  # of the chunks: nothing smaller is left
    if any(each.was_in_hooks for each in chunked):
        ends = "stepped" if _are_done(chunked) else "as they were before the step"
        raise MemkitOutOfMemoryError(
            "optimizer.step()",
            got=f"out of memory in a step hook: {outcome.description}; parameters are {ends}",
            expected="memory for step hooks; those that have run already are not called twice",
            fix="leave more memory free, or do what the hook does after the step.",
        ) from outcome.error
    return step()  # it failed beside the chunks; what they have stepped stays


def _are_done(chunked: Sequence[ChunkedStep]) -> bool:
    begun = [each for each in chunked if each.num_stepped]
    return bool(begun) and all(each.is_done for each in begun)


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that accelerate has prepared: its step does nothing but call the inner one's, unless it scales."""
    inner = getattr(optimizer, "optimizer", None)
    is_prepared = type(optimizer).__module__.startswith("accelerate.") and getattr(optimizer, "scaler", None) is None
    return inner if is_prepared and isinstance(inner, Optimizer) else optimizer


def _tensors(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield what a copy holds."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield from (local_part(parameter.detach()), local_part(parameter.grad.detach()))
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            yield from (local_part(value.detach()) for value in values if isinstance(value, torch.Tensor))


def _num_bytes(tensor: torch.Tensor) -> int:
    return sum(part.nbytes for part in sparse_parts(tensor)) if tensor.is_sparse else tensor.nbytes


class _Copy(contextlib.AbstractContextManager["_Copy"]):
    """Parameters, gradients and optimiser state at one instant; its files go when the context ends."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._cleanup = contextlib.ExitStack()
        self._num_files = 0
        try:
            self._parameters = [
                (parameter, self._copy(parameter), parameter.grad, self._copy(parameter.grad))
                for optimizer in optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            self._states = [
                (optimizer, {parameter: self._copy_state(state) for parameter, state in optimizer.state.items()})
                for optimizer in optimizers
            ]
            self._groups = [
                (group, copy.deepcopy({name: value for name, value in group.items() if name != "params"}))
                for optimizer in optimizers
                for group in optimizer.param_groups
            ]
        except BaseException:
            self._cleanup.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._parameters, self._states = [], []  # some systems cannot remove a file that is mapped
        self._cleanup.close()

    @torch.no_grad()
    def restore(self) -> None:
        """Write everything back in place."""
        for parameter, value, gradient, its_value in self._parameters:
            local_part(parameter).copy_(_load(value))
            local_part(gradient).copy_(_load(its_value))  # weight decay may have been added to it
            parameter.grad = gradient
        for optimizer, states in self._states:
            for parameter in list(optimizer.state):
                if parameter not in states:
                    del optimizer.state[parameter]
                elif isinstance(states[parameter], dict):
                    _restore_state(optimizer.state[parameter], states[parameter])
                else:
                    optimizer.state[parameter] = states[parameter]
        for group, settings in self._groups:
            group.update(settings)

    def _copy_state(self, state: Any) -> Any:
        if not isinstance(state, dict):
            return copy.deepcopy(state)
        return {
            name: self._copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in state.items()
        }

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor | _Stored:
        tensor = local_part(tensor.detach())
        if tensor.device.type != "cpu" or tensor.is_sparse or tensor.nbytes < _SMALL_BYTES:
            return tensor.to("cpu", copy=True)
        if self._num_files == 0:
            self._folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="memkit-step-"))
        self._num_files += 1
        return _Stored(tensor, Path(self._folder, str(self._num_files)))


class _Stored:
    """A host tensor in a file. Written, not mapped: a full disk is then an error and not a crash."""

    def __init__(self, tensor: torch.Tensor, path: Path) -> None:
        self._path, self._shape, self._dtype, self._nbytes = path, tensor.shape, tensor.dtype, tensor.nbytes
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(path)

    def load(self) -> torch.Tensor:
        stored = torch.from_file(str(self._path), shared=True, size=self._nbytes, dtype=torch.uint8)
        return stored.view(self._dtype).view(self._shape)


def _load(value: torch.Tensor | _Stored) -> torch.Tensor:
    return value.load() if isinstance(value, _Stored) else value


def _restore_state(state: dict[str, Any], before: dict[str, Any]) -> None:
    for name in state.keys() - before.keys():
        del state[name]
    for name, value in before.items():
        if isinstance(value, torch.Tensor | _Stored):
            local_part(state[name]).copy_(_load(value))
        else:
            state[name] = copy.deepcopy(value)
