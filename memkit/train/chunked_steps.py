"""Optimizer steps that stay consistent under out-of-memory: each parameter, with its state, is either old or new.

The optimizer's own code steps one chunk of parameters after the other. A chunk's old values are kept until it is done.
A chunk that runs out of memory is restored and retried in halves.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memkit._core.errors import ConfigError, MemkitOutOfMemoryError
from memkit._machine import random_state
from memkit._recovery.attempt import Done, Failure, attempt, insist
from memkit._recovery.errors import describe_error
from memkit._recovery.signals import deferred_signals
from memkit._torch import foreach
from memkit._torch.optimizers import call_first, has_step_hooks, mark_stepped, own_step
from memkit._torch.tensors import assign_gradient_dtype, put_back, strided_parts
from memkit.train.gradients import given_optimizers, local_part
from memkit.train.parameterwise import (
    ELEMENTWISE,
    PARAMETERWISE,
    Group,
    create_state,
    has_shared_memory,
    known_kind,
    known_names,
    lent_state,
    put_state,
    step_group,
    steps_parameterwise,
    writes_gradients,
)
from memkit.train.resume import Progress, StepJournal, go_on

# A chunk costs a copy of its tensors and up to four temporary results: less than a tenth of the whole.
_NUM_CHUNKS = 32
_SMALLEST_CHUNK_BYTES = 2**20
_SMALLEST_SLICE = 1024  # elements


@contextlib.contextmanager
def atomic_steps(optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[None]:
    """Make optimizer steps atomic inside the block: out-of-memory leaves no parameter half stepped, and is recovered.

    ``optimizer.step()`` is called as before, by you, a loss scaler or a trainer; schedules, step hooks, closures and
    tensor learning rates work. Internally, it runs on 1/32 of the parameters at a time, and keeps their old values
    until they are done; Ctrl-C waits for the end of the step. After an out-of-memory they are restored, with their
    gradients and state, and stepped in halves. A parameter larger than 1/32 is stepped in slices. The result is
    bit-identical to the plain step.

    Args:
        optimizer: Any of torch's own optimizers except LBFGS, a subclass that does not change the step, or a class
            registered with `register_parameterwise`; or several.

    Raises:
        ConfigError: The optimizer is not known to step each parameter independently: LBFGS, third-party optimizers.
        MemkitOutOfMemoryError: From ``step()``: even the smallest part does not fit. The message says how many
            parameters were stepped; each is consistent with its state.

    Memory:
        The old values and the temporary results of one chunk: less than a tenth of parameters, gradients and state, or
        a few MiB. A plain ``foreach`` step needs once or twice the parameters.

    Example:
        >>> import torch, memkit as mk
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with mk.train.atomic_steps(optimizer):
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     optimizer.step()
    """
    optimizers = given_optimizers("atomic_steps", optimizer)
    for each in optimizers:
        if known_kind(each) is not None and not steps_parameterwise(each) and has_shared_memory(each):
            raise ConfigError(
                f"atomic_steps({type(each).__name__})",
                got="parameters that share memory, as in nn.Parameter(encoder.weight.t())",
                expected="parameters that its step changes independently of each other",
                fix="keep one of them, and use it in both places: linear(x, encoder.weight.t()).",
            )
        if not steps_parameterwise(each):
            raise ConfigError(
                f"atomic_steps({type(each).__name__})",
                got=f"a {type(each).__name__}",
                expected=f"one of {known_names()}, or a subclass that does not override step()",
                fix="use one of these, or step without atomic_steps; if this optimizer steps each parameter "
                f"independently, call memkit.train.register_parameterwise({type(each).__name__}).",
            )
    steps = [ChunkedStep(each, only_once=False) for each in optimizers]
    try:
        try:
            for step in steps:
                step.open()
            yield
        finally:
            close_all(steps)
    finally:
        close_all(steps)  # again, in case an interrupt cut it short


def close_all(steps: Sequence[ChunkedStep]) -> None:
    """Restore the optimizers' own steps."""
    for each in steps:
        each.close()


@dataclass(slots=True)
class OomCount:
    """A number of out-of-memory errors, which those who meet them share."""

    num: int = 0


class ChunkedStep:
    """Replaces an optimizer's ``step`` between `open` and `close`.

    Ctrl-C in the middle of a step waits for its end, so that old and new parameters never mix.

    Args:
        optimizer: An optimizer for which `steps_parameterwise` is True.
        only_once: A second call resumes where the first one ended, and steps run in one piece until one of them runs
            out of memory.
        ooms: Counts the out-of-memory errors inside steps.
    """

    def __init__(self, optimizer: Optimizer, *, only_once: bool, ooms: OomCount | None = None) -> None:
        self._optimizer, self._only_once = optimizer, only_once
        self._ooms = ooms or OomCount()
        self._work: list[_Work] | None = None
        self._journal: StepJournal | None = None
        self._num_before = 0  # parameters that were stepped in one piece
        self._chunk_bytes = 0
        self._is_open = self._ran_out_of_memory = self._hooks_have_begun = self._hooks_have_ended = False
        self._handles: list[RemovableHandle] = []
        self._own: Any = None
        self._stand_in: types.MethodType | None = None

    @property
    def num_stepped(self) -> int:
        """Number of parameters stepped."""
        return self._num_before + sum(len(each.parameters) for each in self._work or () if each.is_done)

    @property
    def is_done(self) -> bool:
        """Whether all parameters are stepped."""
        return self._work is not None and all(each.is_done for each in self._work)

    @property
    def was_in_hooks(self) -> bool:
        """Whether the last step ended in the middle of the user's hooks, before or after it."""
        return self._hooks_have_begun and not self._hooks_have_ended

    def forget(self) -> None:
        """Forget how the last step ended."""
        self._work, self._num_before = None, 0
        self._hooks_have_begun = self._hooks_have_ended = False

    def open(self) -> None:
        """Replace the optimizer's own step."""
        optimizer = self._optimizer
        own = vars(optimizer).get("step")  # a scheduler's wrapper, which counts the calls
        if self._stand_in is None or own is not self._own:
            self._own = own
            # torch's own hook and profiler wrapper around it; attributes and signature are those of the replaced step.
            # It refers weakly: otherwise a dropped trainer would hold model and optimizer until a garbage collection.
            alive = weakref.ref(self)
            hooked = Optimizer.profile_hook_step(functools.partial(self._run, alive))
            once = functools.partial(self._unless_ended, alive, hooked) if self._only_once else hooked
            self._stand_in = types.MethodType(functools.update_wrapper(once, optimizer.step), optimizer)
        self._is_open = True
        if self._only_once and has_step_hooks(optimizer):
            self._handles = [call_first(optimizer, self._note_begin), optimizer.register_step_post_hook(self._note_end)]
        optimizer.step = self._stand_in  # type: ignore[method-assign]  # until `close`

    def close(self) -> None:
        """Restore the optimizer's own step."""
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        if self._stand_in is None or vars(self._optimizer).get("step") is not self._stand_in:
            return  # already restored, or wrapped by a scheduler made in the block; `_run` then does a plain step
        if self._own is None:
            del self._optimizer.step  # the class's own step is visible again
        else:
            self._optimizer.step = self._own  # type: ignore[method-assign]

    def _note_begin(self, *_: object) -> None:
        self._hooks_have_begun = True

    def _note_end(self, *_: object) -> None:
        self._hooks_have_ended = True

    @staticmethod
    def _unless_ended(
        alive: Callable[[], ChunkedStep | None],
        step: Callable[..., Any],
        optimizer: Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self = alive()
        return None if self is not None and self._hooks_have_ended else step(optimizer, *args, **kwargs)

    @staticmethod
    def _run(
        alive: Callable[[], ChunkedStep | None], optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Run as ``optimizer.step(closure)`` inside the block, beneath its hooks."""
        self = alive()
        if self is None or not self._is_open:
            return own_step(optimizer)(optimizer, closure)
        mark_stepped(optimizer)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if not self._only_once:
            self.forget()
            with deferred_signals():
                self._step(optimizer)
        else:  # a caller that steps several optimizers defers signals for all of them
            self._step(optimizer)
        return result

    def _step(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        try:
            if self._work is None:
                self._begin(optimizer)
            if self._work:  # else everything was stepped in one piece
                self._step_chunks(self._work)
                self._num_before, self._work = self.num_stepped, []  # others may take their places before the next step
        except Exception:
            raise
        except BaseException:  # an interrupt not raised by a signal
            optimizer.param_groups = groups
            if self.num_stepped or any(each.progress for each in self._work or ()):
                self._step_chunks(self._work or [])
            raise
        finally:
            optimizer.param_groups = groups

    def _begin(self, optimizer: Optimizer) -> None:
        """Step in one piece where an interrupted step can be resumed; otherwise plan the chunks."""
        if self._only_once and not self._ran_out_of_memory:
            journal = self._journal
            if journal is None or not journal.begin(optimizer):
                journal = self._journal = StepJournal.of(optimizer)
                if journal is not None:
                    journal.begin(optimizer)
            if journal is not None:
                self._step_whole(optimizer, journal)
                return
        self._work = self._plan()

    def _step_whole(self, optimizer: Optimizer, journal: StepJournal) -> None:
        try:
            step = own_step(optimizer)
            watched = journal.watched
            outcome = attempt(step, optimizer) if watched is None else attempt(watched.run, step, optimizer)
            if isinstance(outcome, Done):
                self._num_before, self._work = journal.num_parameters, []
            else:
                self._ooms.num += 1
                self._ran_out_of_memory = True  # from now on in chunks, whose old values are kept
                self._work = self._rest(journal)
        except BaseException:  # an interrupt may come at any line
            self._work = self._rest(journal)
            raise

    def _rest(self, journal: StepJournal) -> list[_Work]:
        """Return the remaining work of an interrupted step."""
        done, interrupted = journal.cut_off(self._optimizer)
        self._num_before = len(done)
        begun = [_Work(each.group, [each.parameter], progress=each.progress) for each in interrupted]
        return begun + self._plan({id(each) for each in (*done, *(each.parameters[0] for each in begun))})

    def _plan(self, without: Collection[int] = ()) -> list[_Work]:
        groups = self._optimizer.param_groups
        total_bytes = sum(_num_bytes(parameter) for group in groups for parameter in group["params"])
        self._chunk_bytes = max(_SMALLEST_CHUNK_BYTES, total_bytes // _NUM_CHUNKS)
        return [_Work(group, chunk) for group in groups for chunk in self._chunks(group, without)]

    def _chunks(self, group: Group, without: Collection[int]) -> Iterator[list[torch.Tensor]]:
        """Yield a group's parameters that have gradients, one chunk at a time."""
        chunk, num_bytes = list[torch.Tensor](), 0
        for parameter in group["params"]:
            if parameter.grad is None or id(parameter) in without:
                continue
            if chunk and num_bytes + _num_bytes(parameter) > self._chunk_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(parameter)
            num_bytes += _num_bytes(parameter)
        if chunk:
            yield chunk

    def _step_chunks(self, work: list[_Work]) -> None:
        """Do the remaining work; split chunks that run out of memory into halves."""
        number = 0
        while number < len(work):
            chunk = work[number]
            if chunk.is_done:
                number += 1
            elif self._has_slices(chunk):
                self._step_slices(chunk)
            elif len(chunk.parameters) == 1:
                self._step_single(chunk)
            elif not isinstance(self._attempt(_step_or_undo, self._optimizer, chunk), Done):
                work[number : number + 1] = chunk.halves()

    def _attempt(self, run: Callable[..., None], *args: Any) -> Done[None] | Failure:
        outcome = attempt(run, *args)
        if not isinstance(outcome, Done):
            self._ooms.num += 1
        return outcome

    def _step_single(self, chunk: _Work) -> None:
        """Step one parameter; after two failures, step it in slices if it is half stepped, else give up."""
        outcome = self._attempt(_step_or_undo, self._optimizer, chunk)
        if not isinstance(outcome, Done):
            outcome = self._attempt(_step_or_undo, self._optimizer, chunk)
        if isinstance(outcome, Done):
            return
        if chunk.progress and _may_be_sliced(self._optimizer, chunk.group, chunk.parameters[0]):
            self._step_slices(chunk)
        else:
            self._refuse(outcome.error, "; one more is half stepped" if chunk.progress else "")

    def _has_slices(self, chunk: _Work) -> bool:
        """Return whether a chunk is a single large parameter that may be stepped slice by slice."""
        first = chunk.parameters[0]
        is_large = len(chunk.parameters) == 1 and _num_bytes(first) > self._chunk_bytes
        return is_large and _may_be_sliced(self._optimizer, chunk.group, first)

    def _step_slices(self, chunk: _Work) -> None:
        """Step one parameter slice by slice along its longest dimension."""
        group, parameter = chunk.group, chunk.parameters[0]
        before = dict(self._optimizer.state.get(parameter, {}))
        try:
            insist(lambda: create_state(self._optimizer, group, [parameter]), "making the optimizer's state")
        except MemkitOutOfMemoryError as error:
            self._refuse(error.__cause__ or error)
        dim = max(range(parameter.dim()), key=lambda each: parameter.shape[each])
        size, elements = parameter.shape[dim], parameter.numel() // parameter.shape[dim]
        length = min(size, max(1, self._chunk_bytes // (elements * parameter.element_size())))
        smallest, num_failures = max(1, min(length, _SMALLEST_SLICE // elements)), 0
        while chunk.start < size:
            part = chunk.part
            if part is not None and part.is_done and part.stop > chunk.start:
                chunk.start, num_failures = part.stop, 0
                continue
            is_torn = part is not None and bool(part.progress) and part.stop > chunk.start
            stop = min(chunk.start + length, part.stop if is_torn and part is not None else size)
            progress = part.progress if is_torn and part is not None else dict(chunk.progress)
            part = chunk.part = _Slice(self._optimizer, parameter, dim, (chunk.start, stop), progress)
            outcome = self._attempt(part.step, group)
            if isinstance(outcome, Done):
                continue
            num_failures = num_failures + 1 if length == smallest else 0
            if num_failures > 1:
                if not chunk.start and not chunk.progress:
                    put_state(self._optimizer, parameter, before)
                torn = f"; one more is stepped in {chunk.start} of its {size} rows" if chunk.start else ""
                torn = torn or ("; one more is half stepped" if chunk.progress else "")
                self._refuse(outcome.error, torn)
            length = max(smallest, length // 2)
        assert chunk.part is not None  # noqa: S101 - the last one
        insist(chunk.part.keep_counters, "optimizer.step()")
        chunk.is_done = True

    def _refuse(self, error: BaseException, torn: str = "") -> NoReturn:
        total = self._num_before + sum(len(each.parameters) for each in self._work or ())
        whole = f"{self.num_stepped} of {total} parameters are stepped, each of them whole with its state{torn}"
        state = (
            ""
            if self._ran_out_of_memory
            else "call memkit.train.materialize_state(optimizer) before the first forward, and "
        )
        raise MemkitOutOfMemoryError(
            "optimizer.step()",
            got=f"out of memory inside it, even in the smallest parts: {describe_error(error)}; "
            + (whole if self.num_stepped or torn else "parameters and state are as they were before the step"),
            expected="memory for the optimizer's state, and a little for temporary results",
            fix=f"{state}free more memory{'; resume from the last checkpoint' if torn else ''}.",
        ) from error


@dataclass(slots=True, eq=False)
class _Work:
    """Parameters of a group that are stepped together, and their progress.

    Attributes:
        progress: In-place operators already applied to the single parameter whose step was interrupted.
    """

    group: Group
    parameters: list[torch.Tensor]
    is_done: bool = False
    progress: Progress = field(default_factory=dict)
    start: int = 0  # rows of a sliced parameter that are stepped
    part: _Slice | None = None  # its latest slice

    def halves(self) -> list[_Work]:
        half = len(self.parameters) // 2
        return [_Work(self.group, self.parameters[:half]), _Work(self.group, self.parameters[half:])]


class _Slice:
    """A stand-in for a part of a parameter: views of the parameter, its gradient and its state."""

    def __init__(
        self, optimizer: Optimizer, parameter: torch.Tensor, dim: int, rows: tuple[int, int], progress: Progress
    ) -> None:
        start, self.stop = rows
        length = self.stop - start
        self.is_done, self.progress = False, progress
        self._optimizer, self._state = optimizer, optimizer.state[parameter]
        self._whole = (parameter.shape, dim, start, length)
        self._own: dict[str, torch.Tensor] = {}
        self._stand_in = parameter.detach().narrow(dim, start, length).requires_grad_()
        gradient = parameter.grad
        assert gradient is not None  # noqa: S101 - only parameters with a gradient are stepped
        if gradient.dtype != parameter.dtype:
            assign_gradient_dtype(self._stand_in, gradient.dtype)
        self._stand_in.grad = gradient.narrow(dim, start, length)

    def step(self, group: Group) -> None:
        """Step the slice, or leave it unchanged."""
        shape, dim, start, length = self._whole
        self._own = {
            name: value.narrow(dim, start, length) if value.shape == shape else value.clone()
            for name, value in self._state.items()
        }
        work = _Work(group, [self._stand_in], progress=self.progress)
        counters = {name: self.progress.get(name, 0) for name, value in self._own.items() if value.dim() == 0}
        try:
            self._optimizer.state[self._stand_in] = self._own
            _step_or_undo(self._optimizer, work)
        finally:
            if self.progress:
                self.progress |= counters  # each attempt starts from fresh copies of the counters
            self.is_done = work.is_done
            self._optimizer.state.pop(self._stand_in, None)

    def keep_counters(self) -> None:
        """Copy the counters of the last slice into the whole parameter's state."""
        for name, value in self._own.items():
            if value.dim() == 0:
                self._state[name].copy_(value)


class _Undo:
    """Old values of parameters and their state, and of their gradients if the step writes to them.

    Of a table with a sparse gradient they are the rows that the gradient has, where the step changes no others. A
    registered optimizer may also draw random numbers, drop gradients, or give a tensor another storage (`p.data =
    new`, `p.set_(new)`).
    """

    def __init__(self, optimizer: Optimizer, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._random = None if known_kind(optimizer) in PARAMETERWISE else random_state.capture()
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters}
        tensors, self._rows = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        for parameter, state in self._states.items():
            own = [parameter, *(value for value in state.values() if isinstance(value, torch.Tensor))]
            rows = _changed_rows(optimizer, group, parameter)
            for each in own:
                if rows is None or each.shape != parameter.shape:
                    tensors.append(each)
                else:
                    self._rows.append((each.detach(), rows, each.detach().index_select(0, rows)))
        if writes_gradients(optimizer, group):
            tensors += [parameter.grad for parameter in parameters if parameter.grad is not None]
        # Writing to a sparse tensor gives it other parts, which an alias of it does not get.
        aliases = [each.detach() if each.layout is torch.strided else each for each in tensors]
        self._tensors, self._places = tensors, list(map(local_part, aliases))
        self._values = foreach.clone(self._places)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place; this needs no memory, and may be repeated."""
        for tensor, place, value in zip(self._tensors, self._places, self._values, strict=True):
            put_back(tensor, place)
            place.copy_(value)
        for table, rows, values in self._rows:
            table.index_copy_(0, rows, values)  # a row that is there twice has the same values
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._random is not None:
            random_state.restore(self._random)
        for parameter, state in self._states.items():
            put_state(self._optimizer, parameter, state)


@torch.no_grad()
def _step_or_undo(optimizer: Optimizer, work: _Work) -> None:
    """Step parameters together; on error restore them, or record the progress, unless they are done."""
    if work.progress:
        go_on(optimizer, work.group, work.parameters[0], work.progress)
        work.is_done = True
        return
    with lent_state(optimizer, work.parameters):
        undo = _Undo(optimizer, work.group, work.parameters)
        try:
            step_group(optimizer, work.group, work.parameters)
            work.is_done = True
        except BaseException:
            if not work.is_done:
                insist(undo.restore, "undoing a part of optimizer.step()")
            raise


def changes_rows_alone(optimizer: Optimizer, group: Group) -> bool:
    """Return whether steps with a sparse gradient change only its rows of a parameter and of its state."""
    kind = known_kind(optimizer)
    return kind in (optim.SparseAdam, optim.Adagrad) or (kind is optim.SGD and not group["momentum"])


def _changed_rows(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the rows of a table that a step changes; None if these are all, or as many."""
    gradient = parameter.grad
    is_sparse = gradient is not None and gradient.layout == torch.sparse_coo and gradient.sparse_dim() > 0
    if gradient is None or not is_sparse or not changes_rows_alone(optimizer, group):
        return None
    rows = strided_parts(gradient)[0][0]  # not made unique: their number would depend on data
    return rows if len(rows) < len(parameter) else None


def _num_bytes(parameter: torch.Tensor) -> int:
    return local_part(parameter.detach()).nbytes


def _may_be_sliced(optimizer: Optimizer, group: Group, parameter: torch.Tensor) -> bool:
    """Return whether a parameter may be stepped slice by slice."""
    if known_kind(optimizer) not in ELEMENTWISE or type(parameter) not in {torch.Tensor, torch.nn.Parameter}:
        return False
    if known_kind(optimizer) is optim.SGD and group["momentum"] != 0 and group["dampening"] != 0:
        return False  # its state starts from the first gradient
    dense = parameter.grad is not None and parameter.grad.layout == torch.strided
    return dense and parameter.dim() > 0 and parameter.numel() > 1
