"""An optimiser's step that out-of-memory leaves whole: each parameter, with its state, is either old or new.

The step runs on one chunk of parameters after the other, each time the optimiser's own code. A chunk's old values are
kept until it is done. What runs out of memory is put back and tried again in halves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import optim
from torch.optim import Optimizer

from memkit._device import release_cached_memory
from memkit._errors import ConfigError, MemkitOutOfMemoryError
from memkit._oom import describe_error, drop_frames, is_out_of_memory, retry_once
from memkit.train.gradients import as_list
from memkit.train.parameterwise import (
    ELEMENTWISE,
    Group,
    create_state,
    known_kind,
    known_names,
    lent_state,
    put_state,
    step_group,
    steps_parameterwise,
    writes_gradients,
)
from memkit.train.ranks import local_part

if TYPE_CHECKING:
    from collections import OrderedDict

# A chunk costs copies of all that it has, and up to four temporary results: less than a tenth of the whole.
_NUM_CHUNKS = 32
_SMALLEST_CHUNK_BYTES = 2**20
_SMALLEST_SLICE = 1024  # elements


@contextlib.contextmanager
def atomic_steps(optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[None]:
    """Make the steps of optimisers whole for the block: out-of-memory leaves no parameter half stepped, and goes on.

    ``optimizer.step()`` is called as before, by you, a loss scaler or a trainer; schedules, step hooks (those that were
    registered before the block), closures and tensor learning rates work. Inside, it runs on a 32nd of the parameters
    at a time, and keeps their old values until they are done. After an out-of-memory they are put back, with their
    gradients and state, and are stepped in halves. A parameter above the 32nd is stepped in slices. The result is
    bit-identical to the plain step.

    Args:
        optimizer: One of torch's own optimisers but LBFGS, a subclass that leaves the step alone, or a class of
            `register_parameterwise`; or several.

    Raises:
        ConfigError: The optimiser is not known to step each parameter by itself: LBFGS, other people's.
        MemkitOutOfMemoryError: From ``step()``: even the smallest part does not fit. The message says how many
            parameters are stepped; each is whole.

    Memory:
        The old values and the temporary results of one chunk: less than a tenth of parameters, gradients and state, or
        a few MiB. A plain ``foreach`` step needs once or twice the parameters.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with mk.atomic_steps(optimizer):
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
    """
    optimizers = as_list(optimizer)
    for each in optimizers:
        if not steps_parameterwise(each):
            raise ConfigError(
                f"atomic_steps({type(each).__name__})",
                got=f"a {type(each).__name__}",
                expected=f"one of {known_names()}, or a subclass that leaves the step alone",
                fix="use one of these, or step without it; if it steps each parameter by itself, call "
                f"memkit.register_parameterwise({type(each).__name__}).",
            )
    with chunked_steps(optimizers):
        yield


@contextlib.contextmanager
def chunked_steps(optimizers: Sequence[Optimizer], *, only_once: bool = False) -> Iterator[None]:
    """Do what `atomic_steps` does; with ``only_once`` a second step in the block finds all done and changes nothing."""
    with contextlib.ExitStack() as stack:
        for each in optimizers:
            stepper = _ChunkedStep(each, only_once=only_once)
            before = each.register_step_pre_hook(stepper.run)  # the last, so that others' have done what they do
            stack.callback(before.remove)
            after = each.register_step_post_hook(stepper.end)
            hooks = cast("OrderedDict[int, Any]", each._optimizer_step_post_hooks)  # noqa: SLF001 - no public way
            hooks.move_to_end(after.id, last=False)  # the first, so that others' find all as it was
            stack.callback(after.remove)
        yield


class _ChunkedStep:
    """Does the work of an optimiser's step before torch's own code comes, which then finds no parameters."""

    def __init__(self, optimizer: Optimizer, *, only_once: bool) -> None:
        self._optimizer, self._only_once = optimizer, only_once
        self._groups = optimizer.param_groups
        self._is_done = self._is_running = False
        self._chunk_bytes = self._num_stepped = self._num_inner = 0

    def run(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The hook before the step."""
        if self._is_running or not optimizer.param_groups:  # the step calls its base's, which calls the hooks again
            self._num_inner += 1
            return args, kwargs
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._groups, self._num_stepped, self._num_inner = optimizer.param_groups, 0, 0
        total_bytes = sum(_num_bytes(parameter) for group in self._groups for parameter in group["params"])
        self._chunk_bytes = max(_SMALLEST_CHUNK_BYTES, total_bytes // _NUM_CHUNKS)
        self._is_running = True
        try:
            for group in self._groups if not self._is_done else ():
                for chunk in self._chunks(group):
                    self._step(group, chunk)
        finally:
            self._is_running = False
        self._is_done = self._only_once
        optimizer.param_groups = []
        return (optimizer,), {} if closure is None else {"closure": lambda: result}

    def end(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002 - the hook's signature
        """The hook after the step."""
        if self._num_inner:
            self._num_inner -= 1
        else:
            optimizer.param_groups = self._groups

    def _chunks(self, group: Group) -> Iterator[list[torch.Tensor]]:
        """Yield a group's parameters that have gradients, as many at a time as a chunk holds."""
        chunk, num_bytes = list[torch.Tensor](), 0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if chunk and num_bytes + _num_bytes(parameter) > self._chunk_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(parameter)
            num_bytes += _num_bytes(parameter)
        if chunk:
            yield chunk

    def _step(self, group: Group, parameters: list[torch.Tensor]) -> None:
        """Step parameters together; after an out-of-memory those of each half."""
        has_slices = len(parameters) == 1 and _has_slices(self._optimizer, group, parameters[0])
        if has_slices and _num_bytes(parameters[0]) > self._chunk_bytes:
            self._step_slices(group, parameters[0])
            return
        step = functools.partial(_step_or_undo, self._optimizer, group, parameters)
        failure = _try(step)
        if failure is not None and len(parameters) > 1:
            half = len(parameters) // 2
            self._step(group, parameters[:half])
            self._step(group, parameters[half:])
            return
        if failure is not None and (failure := _try(step)) is not None:
            self._refuse(failure)
        self._num_stepped += len(parameters)

    def _step_slices(self, group: Group, parameter: torch.Tensor) -> None:
        """Step one parameter slice by slice along its longest dimension."""
        before = dict(self._optimizer.state.get(parameter, {}))
        try:
            retry_once(lambda: create_state(self._optimizer, group, [parameter]), "making the optimiser's state")
        except MemkitOutOfMemoryError as error:
            self._refuse(error.got)
        dim = max(range(parameter.dim()), key=lambda each: parameter.shape[each])
        size, elements = parameter.shape[dim], parameter.numel() // parameter.shape[dim]
        length = min(size, max(1, self._chunk_bytes // (elements * parameter.element_size())))
        smallest = max(1, min(length, _SMALLEST_SLICE // elements))
        start = num_failures = 0
        while start < size:
            part = _Slice(self._optimizer, parameter, dim, start, min(length, size - start))
            failure = _try(functools.partial(part.step, group))
            if failure is None:
                start, num_failures = start + part.length, 0
                continue
            num_failures = num_failures + 1 if length == smallest else 0
            if num_failures > 1:
                if not start:
                    put_state(self._optimizer, parameter, before)
                self._refuse(failure, f"; one more is stepped in {start} of its {size} rows" if start else "")
            length = max(smallest, length // 2)
        retry_once(part.keep_counters, "optimizer.step()")
        self._num_stepped += 1

    def _refuse(self, failure: str, torn: str = "") -> NoReturn:
        total = sum(parameter.grad is not None for group in self._groups for parameter in group["params"])
        whole = f"{self._num_stepped} of {total} parameters are stepped, each of them whole with its state{torn}"
        raise MemkitOutOfMemoryError(
            "optimizer.step()",
            got=f"out of memory inside it, also in the smallest parts: {failure}; "
            + (whole if self._num_stepped or torn else "parameters and state are as they were before the step"),
            expected="memory for the optimiser's state, and a little for temporary results",
            fix="call memkit.materialize_state(optimizer) before the first forward, and leave more memory free.",
        )


class _Slice:
    """A stand-in for a part of a parameter: views of the parameter, its gradient and its state."""

    def __init__(self, optimizer: Optimizer, parameter: torch.Tensor, dim: int, start: int, length: int) -> None:
        self.length = length
        self._optimizer, self._state = optimizer, optimizer.state[parameter]
        self._whole = (parameter.shape, dim, start)
        self._own: dict[str, torch.Tensor] = {}
        self._stand_in = parameter.detach().narrow(dim, start, length).requires_grad_()
        gradient = parameter.grad
        assert gradient is not None  # noqa: S101 - only parameters with a gradient are stepped
        if gradient.dtype != parameter.dtype:
            self._stand_in.grad_dtype = gradient.dtype
        self._stand_in.grad = gradient.narrow(dim, start, length)

    def step(self, group: Group) -> None:
        """Step it, or leave it as it is."""
        shape, dim, start = self._whole
        self._own = {
            name: value.narrow(dim, start, self.length) if value.shape == shape else value.clone()
            for name, value in self._state.items()
        }
        self._optimizer.state[self._stand_in] = self._own
        try:
            _step_or_undo(self._optimizer, group, [self._stand_in])
        finally:
            del self._optimizer.state[self._stand_in]

    def keep_counters(self) -> None:
        """Take over, after the last slice, what the state keeps for the whole parameter."""
        for name, value in self._own.items():
            if value.dim() == 0:
                self._state[name].copy_(value)


class _Undo:
    """Old values of some parameters and their state, and of their gradients where the step writes to these."""

    def __init__(self, optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters}
        tensors = list(parameters)
        for state in self._states.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        if writes_gradients(optimizer, group):
            tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._tensors = [local_part(tensor.detach()) for tensor in tensors]
        self._values = torch._foreach_clone(self._tensors)  # noqa: SLF001 - the batched form, as torch's optimisers use

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place; this needs no memory, and may be done again."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        for parameter, state in self._states.items():
            put_state(self._optimizer, parameter, state)


def _try(step: Callable[[], None]) -> str | None:
    """Do all of something or nothing; return what ran out of memory."""
    try:
        step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = describe_error(error)
        drop_frames(error)
    else:
        return None
    release_cached_memory()
    return failure


@torch.no_grad()
def _step_or_undo(optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
    """Step parameters together; any error leaves them as they were."""
    with lent_state(optimizer, parameters):
        undo = _Undo(optimizer, group, parameters)
        try:
            step_group(optimizer, group, parameters)
        except BaseException:
            retry_once(undo.restore, "undoing a part of optimizer.step()")
            raise


def _num_bytes(parameter: torch.Tensor) -> int:
    return local_part(parameter.detach()).nbytes


def _has_slices(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> bool:
    """Say whether a parameter may be stepped slice by slice."""
    if known_kind(optimizer) not in ELEMENTWISE or type(parameter) not in {torch.Tensor, torch.nn.Parameter}:
        return False
    if known_kind(optimizer) is optim.SGD and group["momentum"] != 0 and group["dampening"] != 0:
        return False  # its state starts from the first gradient
    dense = parameter.grad is not None and parameter.grad.layout == torch.strided
    return dense and parameter.dim() > 0 and parameter.numel() > 1
