"""Micro-batch execution of one batch: parts run one after the other, with a remedy or a retry if memory runs out.

`BatchRun` is the state of the current batch. The next attempt is chosen either by `SingleProcess`, or jointly by the
ranks of a sharded model (`memkit.train.sharded`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch

from memkit._core.attributes import attributes_of
from memkit._core.errors import InputError, InputTypeError, MemkitError, MemkitOutOfMemoryError, StateError
from memkit._core.printable import list_some
from memkit._gradients.loss import Loss
from memkit._machine.devices import release_cached_memory
from memkit._recorder.attributes import Attributes, content_of
from memkit._recovery.attempt import Caught, Failed, Failure, OutOfMemory, insist
from memkit._recovery.errors import describe_error, is_out_of_memory
from memkit._recovery.inputs import Contents, InputWatch
from memkit._recovery.plan import Part, Plan
from memkit._recovery.sizes import SizeMemory
from memkit._recovery.snapshot import Rollback
from memkit._torch.pytree import children_of
from memkit._torch.tensors import are_unwritten, marks_of

CutPart = Callable[[Part, int], list[Part]]
_MOST_UNDONE = 4  # cuts of a batch: a remedy that a cut has made unnecessary comes again each time
_REQUIRES_GRAD = attrgetter("requires_grad")  # in no step of Python
_SIZE = attrgetter("size")
NO_WRITES = (  # the way out where a batch cannot run again
    "write `x = x / 255`, not `x /= 255`, in the model and in loss_fn, or change the batch before the step."
)
_TENSORS = frozenset({torch.Tensor})
CutKind = Literal["rows", "lists", "entries", "split_fn"]
_BY_ROWS = (
    "keep one that belongs to all rows (a mask, a table) out of the batch, for instance in a variable that loss_fn "
    "uses; put one that has a row for each sample (a hidden state) into the batch, with the rows in dimension 0, "
    "h.transpose(0, 1), and return the next one with mk.Loss(mean=loss, outputs=h.transpose(0, 1)); or pass "
    "split_fn=..."
)
_NOTES: dict[CutKind, str] = {
    "rows": "All tensors of the batch are cut along dimension 0, and no others. Way out, if that is the cause: "
    + _BY_ROWS,
    "lists": "Lists of the batch that have an entry for each sample are cut between their entries, its tensors along "
    "dimension 0. Way out, if that is the cause: " + _BY_ROWS,
    "entries": "The batch is a list of {batch_size} entries and was cut between them, as a list of samples. Way out: "
    "if they are columns, pass tuple(batch); if they are samples, let loss_fn take a list of any number of them.",
    "split_fn": "It is a part that split_fn has returned, counted in elements of its tensors. Way out, if that is the "
    "cause: return parts that loss_fn takes as it takes the batch; loss_fn(model, split_fn(batch, 2)[0]) shows one.",
}


class Sums(Protocol):
    """Accumulator for the gradients of a batch's parts."""

    is_torn: bool  # an error interrupted an addition

    def discard(self) -> None:
        """Drop the sums and start over."""

    def give_up(self, *, is_out: bool) -> None:
        """Tell the other ranks, if any, that this one will not reach its step: it ran out of memory, or has failed."""


class RemedySource(Protocol):
    """Remedies for an out-of-memory error to try before parts are made smaller."""

    def has_caused(self, error: BaseException) -> bool:
        """Whether an error is one that a remedy may cause, which is then reverted."""

    def around(self) -> AbstractContextManager[object] | None:
        """Return a context for forward, if there is one."""

    def improve(self, failure: Failure, what: str, *, is_last: bool = False) -> bool:
        """Apply the next remedy; False if none is left."""

    def ways_out(self) -> Sequence[str]:
        """Return the code of the remedies that the user may still apply, for messages."""

    def take_back(self) -> None:
        """Turn off the remedies that were not enough."""

    def tell(self, kind: str, what: str, done: str) -> None:
        """Report what was done, once per kind."""


class Peers(Protocol):
    """Strategy that chooses the next attempt."""

    def num_parts(self, run: BatchRun, at_least: int) -> int:
        """Choose the number of parts to cut a batch into."""

    def next_attempt(self, run: BatchRun) -> Attempt | None:
        """Return the next attempt; None when the batch is done."""

    def settle(self, run: BatchRun, attempt: Attempt) -> None:
        """Record the outcome of an attempt."""


@dataclass(frozen=True, slots=True)
class Means:
    """Resources for recovery, shared by all batches of a model.

    Attributes:
        sizes: Memory of the sizes that fit.
        remedies: Remedies for an out-of-memory error; None lets the error propagate.
        snapshot: Function that saves everything a forward may change.
        peers: Strategy that chooses the next attempt.
        inputs: Notes what batches contain.
        unit: Unit in which sizes are counted.
        call: The user's call, for messages.
    """

    sizes: SizeMemory
    remedies: RemedySource | None
    snapshot: Callable[..., Rollback]
    peers: Peers
    inputs: InputWatch
    unit: str = "rows"
    call: str = "MemoryEfficientTrainingWrapper"


class Attempt:
    """One attempt at one micro-batch: ``with attempt as micro: ...``. The block suppresses an out-of-memory error.

    Args:
        part: The micro-batch.
        batch_size: The size of the whole batch.
        remedies: Remedies for an out-of-memory error; None lets the error propagate.
        rollback: Restores everything that the block changes, if its size is not known to fit.
        watching: An additional context for the block.

    Attributes:
        part: Its tensors.
        size: Its size, in rows or elements.
        is_check: Whether its results are dropped, as of a rehearsal.
        is_trial: Whether its size is not known to fit.
        cut: What the batch is cut by, for errors that its part may have caused.
        is_added: Whether its gradient has been added to the sum.
        loss: Its loss, without a graph.
        terms: The divisor of its loss terms.
        failure: Why the block failed; None if it did not.
        refuse: Called with another error of the block, which the size of the part may have caused; None lets it
            propagate.
    """

    def __init__(
        self,
        part: Part,
        batch_size: int,
        *,
        remedies: RemedySource | None = None,
        rollback: Rollback | None = None,
        watching: AbstractContextManager[None] | None = None,
    ) -> None:
        self.part, self.size, self.batch_size = part.data, part.size, batch_size
        self.rollback, self.is_trial = rollback, rollback is not None
        self.is_added = self.is_check = self._was_entered = False
        self.cut: CutKind = "rows"
        self.loss: Loss | None = None
        self.terms: tuple[Any, ...] = ()
        self.failure: Failure | None = None
        self.refuse: Callable[[Attempt, Exception], NoReturn] | None = None
        self._remedies, self._watching = remedies, watching
        self._around: contextlib.ExitStack | None = None
        self._content: Attributes | None = None
        self._copy: list[Any] | dict[Any, Any] | None = None
        self._handled: BaseException | None = None

    def __enter__(self) -> Any:
        self._was_entered, self._handled = True, sys.exception()
        remedy = None
        if self._remedies is not None:
            remedy, part = self._remedies.around(), self.part
            kind = type(part)  # a model may write to its batch; nearly all are one of these, in no step of Python more
            if kind is tuple or kind is list:
                is_flat = _TENSORS.issuperset(map(type, part))
            else:
                is_flat = kind is torch.Tensor or (kind is dict and _TENSORS.issuperset(map(type, part.values())))
            if not is_flat:
                self._content = insist(functools.partial(content_of, part), "copying the contents of a batch")
            elif kind is list or kind is dict:
                self._copy = part.copy()
        if self._watching is not None or self.rollback is not None or remedy is not None:
            self._around = contextlib.ExitStack()
            try:
                if self._watching is not None:
                    self._around.enter_context(self._watching)
                if self.rollback is not None:
                    self._around.enter_context(self.rollback.discover())
                if remedy is not None:
                    self._around.enter_context(remedy)
            except BaseException:  # Ctrl-C, too: hooks on all modules would stay, since no __exit__ follows
                self._around.close()
                raise
        return self.part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        handled, self._handled = self._handled, None  # its frames may hold this object
        if self._around is not None:
            self._around.close()
        if error is None:
            return False
        if self._remedies is not None:
            caught = Caught((Exception,) if self._remedies.has_caused(error) else (), handled=handled)
            if caught.__exit__(kind, error, trace):
                self.failure = caught.failure
                self.restore_part()
                return True
        if self.refuse is not None and isinstance(error, Exception) and not isinstance(error, MemkitError):
            self.refuse(self, error)
        note_part(error, self.size, self.batch_size, self.cut, self.part)
        return False

    def restore_part(self) -> None:
        """Take out of the micro-batch what the attempt has put there."""
        if self._content is not None:
            self._content.restore()
        elif self._copy is not None:
            self.part.clear()
            (self.part.update if isinstance(self.part, dict) else self.part.extend)(self._copy)

    def __getitem__(self, _: object) -> NoReturn:
        refuse_as_batch()

    def __iter__(self) -> NoReturn:
        refuse_as_batch()

    @property
    def counts(self) -> bool:
        """Whether its results are part of the step: it completed, and its gradient is in the sum."""
        return self.is_added and self.failure is None and not self.is_check

    def refuse_unused(self) -> NoReturn:
        """Refuse an attempt that has added nothing to the gradient.

        Raises:
            StateError: Always.
        """
        raise StateError(
            "for attempt in trainer.microbatches(batch)",
            got="a micro-batch without trainer.backward()"
            if self._was_entered
            else "an attempt that was never entered",
            expected="`with attempt as micro:` around forward, loss and trainer.backward(loss)",
            fix="call trainer.backward(loss) once per attempt; pass count=0 for a micro-batch without valid items.",
        )


def refuse_as_batch() -> NoReturn:
    """Refuse an attempt that is used as if it were the micro-batch.

    Raises:
        StateError: Always.
    """
    raise StateError(
        "for attempt in trainer.microbatches(batch)",
        got="the attempt itself, used as a batch",
        expected="its micro-batch, which the attempt returns on entry",
        fix="write `with attempt as micro:` around forward, loss and trainer.backward(loss), and use micro there.",
    )


def note_part(error: BaseException, size: int, batch_size: int, cut: CutKind, part: object) -> None:
    """Add a note to an error of the user's code: it ran on only a part of the batch, which may be the cause.

    memkit's own errors say their cause.
    """
    if isinstance(error, Exception) and not isinstance(error, MemkitError) and size < batch_size:
        if "more than 1 value per channel" in str(error):  # torch's own words
            error.add_note(
                f"memkit: this was a micro-batch of {size} of {batch_size}, and BatchNorm in training mode needs at "
                "least two values. Ask for fewer micro-batches (accumulation_steps=, of SplitLoss num_microbatches=), "
                "set drop_last=True in the loader, or use GroupNorm; statistics over a part differ from those over the "
                "batch anyway."
            )
            return
        how = _NOTES[cut].format(batch_size=batch_size)
        if cut != "split_fn" and (names := list_some(list(_beside_fields(part, batch_size)))):
            how = (
                f"It has {names} whole: of a dataclass only the fields are cut. Way out, if that is the cause: declare "
                f"it a field, z: torch.Tensor = dataclasses.field(init=False), or compute it in loss_fn. {how}"
            )
        error.add_note(f"memkit: this was a micro-batch of {size} of {batch_size}. {how}")


def _beside_fields(node: object, num_rows: int) -> Iterator[str]:
    """Yield the tensors with so many rows that dataclasses in a batch have in other attributes than their fields."""
    if is_dataclass(node):
        names = {field.name for field in fields(node)}
        for name, value in attributes_of(node).items():
            if name not in names and isinstance(value, torch.Tensor) and value.dim() and len(value) == num_rows:
                yield f"{type(node).__name__}.{name}"
    for each in () if isinstance(node, torch.Tensor) else children_of(node) or ():
        yield from _beside_fields(each, num_rows)


@dataclass(frozen=True, slots=True)
class Forced:
    """Marks a batch that was split for lack of memory, not at the user's request.

    Attributes:
        failure: The error; None if it occurred in an earlier step, or on another rank, or was predicted.
        is_predicted: Whether the batch is predicted not to fit as a whole, and nothing was tried.
    """

    failure: Failure | None
    is_predicted: bool = False

    def __str__(self) -> str:
        if self.is_predicted:
            return "a batch that is predicted not to fit as a whole (memory=...)"
        return f"out of memory ({self.failure.description if self.failure else 'in an earlier step'})"


class _BeforeCut(NamedTuple):
    """A batch before it was cut: the attempt that failed, why, its plan, the known sizes, and how many parts it had."""

    failed: Attempt
    failure: Failure
    plan: Plan
    sizes: dict[str, Any]
    num_done: int


class Uncut(NamedTuple):
    """Why a batch cannot be cut, and the way out."""

    reason: str
    fix: str


class BatchRun:
    """The micro-batches of one batch.

    Args:
        batch: The batch of one optimizer step.
        size: Its number of rows, or of elements.
        num_parts: Requested number of micro-batches; more are used if the size memory says so.
        means: Resources for recovery.
        sums: Accumulator for the gradients.
        cut: ``cut(part, n)`` returns about n parts.
        key: Key under which sizes are stored.
        tensors: The tensors of the batch, which no forward may change before it runs again.
        is_predicted: Whether the number of micro-batches is that of a prediction, more than the user asked for.
        uncut: Why the batch cannot be cut; None if it can.
        given: The caller's own object, if it is not ``batch``.

    Attributes:
        given: The caller's own object.
        plan: The micro-batches to do, and those that are done.
        forced: Set if the batch was split for lack of memory.
        is_cut_anew: Parts were made smaller, and it has not been checked yet whether this is allowed.
        num_ooms: Number of out-of-memory errors survived.
        is_complete: All micro-batches are done.
        was_cut: The batch has been cut into micro-batches.
        done: The attempts that are done.
        rollback: Restores everything that the forwards of the batch have changed; None if that was not saved.
    """

    def __init__(
        self,
        batch: Any,
        size: int,
        num_parts: int,
        *,
        means: Means,
        sums: Sums,
        cut: CutPart,
        key: str = "",
        tensors: Sequence[torch.Tensor] = (),
        is_predicted: bool = False,
        uncut: Uncut | None = None,
        given: Any = None,
    ) -> None:
        self.given = batch if given is None else given
        self.batch, self.size, self.key, self.means, self.sums = batch, size, key, means, sums
        self._whole, self._cut, self._uncut = Part(batch, size), cut, uncut
        self.num_ooms = 0
        self.is_complete = self.is_cut_anew = self.was_cut = False
        self.forced = Forced(None, is_predicted=True) if is_predicted else None
        self.done: list[Attempt] = []
        self._before_cut: _BeforeCut | None = None  # before the first cut that was not checked
        self._num_undone = 0
        self._num_requested = num_parts
        self.rollback: Rollback | None = None
        self._contents: Contents | None = None
        if means.remedies is not None:
            self._marks, self.rollback = marks_of(tensors), self.take_rollback()
            self._trained = set(map(id, filter(_REQUIRES_GRAD, tensors)))
            self._contents = None if means.inputs.is_quiet else means.inputs.note(batch)
        self.plan = Plan((self._whole,))
        if num_parts > 1 or means.remedies is not None:
            num_chosen = means.peers.num_parts(self, num_parts)
            if num_chosen > min(num_parts, size):
                self.forced, self._num_requested = Forced(None), min(num_parts, size)
            if num_chosen > 1:
                self.cut_whole(num_chosen)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the micro-batches that are done, in order."""
        return tuple(map(_SIZE, self.done))

    def losses(self) -> tuple[Loss, ...]:
        """Return the losses of the micro-batches that are done, in order."""
        losses = []
        for each in self.done:
            if each.loss is not None:
                losses.append(each.loss)  # noqa: PERF401 - a comprehension enters a function before Python 3.12
        return tuple(losses)

    def settle(self, attempt: Attempt) -> None:
        """Record the outcome of an attempt, after its block. If it ran out of memory, apply a remedy or replan.

        Raises:
            MemkitOutOfMemoryError: The attempt ran out of memory, no remedy is left, and it cannot be made smaller.
            StateError: The block was not entered, or did not call backward.
        """
        if attempt.failure is None and not attempt.is_added:
            attempt.refuse_unused()
        self.means.peers.settle(self, attempt)

    def undo(self, *, is_rerun: bool = False) -> None:
        """Restore the state that the forwards so far have changed, if it was saved: random state, buffers, modes."""
        if self.rollback is not None:
            self.rollback.restore(is_rerun=is_rerun)

    def undo_cut(self) -> bool:
        """Revert a split that is not allowed by applying another remedy instead; False if none is left."""
        before = self._before_cut
        if before is None or self._num_undone == _MOST_UNDONE:
            return False
        if not self.improve(before.failed, before.failure, is_last=True):
            return False
        self._before_cut = None
        self._num_undone += 1
        if len(self.done) > before.num_done:  # parts that were cut without a check
            self.start_over()
            self._take(before.plan.restart())
        else:
            self._take(before.plan)
        self.is_cut_anew, self.forced = False, None
        self.means.sizes.load_state_dict(before.sizes)
        return True

    def try_larger(self) -> bool:
        """Revert a split that is not allowed, and that only an earlier step's error has caused; False if it was not."""
        is_old = self.forced is not None and self.forced.failure is None and not self.forced.is_predicted
        if not is_old or self.done or not isinstance(self.means.peers, SingleProcess):
            return False
        self.means.sizes.forget(self.key)
        self.forced = None
        if self._num_requested > 1:
            self.cut_whole(self._num_requested)
        else:
            self._take(Plan((self._whole,)))
        return True

    def go_on_smaller(self, *, is_checked: bool) -> bool:
        """Accept that the batch continues in smaller parts, and report it; False if the batch was not split again."""
        if not self.is_cut_anew:
            return False
        self.is_cut_anew = False
        if is_checked:
            self._before_cut = None
        remedies = self.means.remedies
        if remedies is not None and self.forced is not None:
            remedies.take_back()
            done = f"the batch is cut into micro-batches of at most {max(self.plan.sizes)} {self.means.unit}."
            failure = self.forced.failure
            remedies.tell("split", f"out of memory ({failure.description if failure else 'on a rank'})", done)
        return True

    def refuse_part(self, attempt: Attempt, error: Exception) -> NoReturn:
        """Refuse an error of a part that only lack of memory has made so small, without a check of such parts.

        Raises:
            MemkitOutOfMemoryError: Always.
        """
        self.means.sizes.forget(self.key)
        raise MemkitOutOfMemoryError(
            self.means.call,
            got=f"{self.forced}, and a micro-batch of {attempt.size} of {self.size} {self.means.unit}, into which the "
            f"batch was cut for that reason, raised {describe_error(error)}",
            expected="memory for the batch, or for micro-batches that the model accepts",
            fix=f"use {self._ways_out()}a lower precision or smaller batches.",
        ) from error

    def refusal_of(self, error: Exception) -> MemkitOutOfMemoryError | None:
        """Return the error to raise if memory ran out between parts, where smaller ones do not help; else None."""
        if not is_out_of_memory(error):
            return None
        return MemkitOutOfMemoryError(
            self.means.call,
            got=f"out of memory outside of the micro-batches, with {len(self.done)} of {len(self.plan.parts)} done: "
            f"{describe_error(error)}",
            expected="memory for a micro-batch, and for what is noted of each",
            fix=f"use {self._ways_out()}smaller batches or a smaller model, or free memory outside of the step.",
        )

    def refuse_incomplete(self) -> NoReturn:
        """Refuse a step on a batch that has micro-batches left.

        Raises:
            StateError: Always.
        """
        raise StateError(
            "trainer.step()",
            got="a batch with unfinished micro-batches",
            expected="one step after all micro-batches of a batch",
            fix="call trainer.step() once the loop over trainer.microbatches(batch) has ended by itself, not inside "
            "it, nor after a break.",
        )

    # ------------------------------------------------------------------ for the strategies

    def take_rollback(self, **how: bool) -> Rollback:
        """Save everything that a forward may change; `Rollback` describes how."""
        return insist(functools.partial(self.means.snapshot, **how), "copying the buffers that a forward changes")

    def cut_whole(self, num_parts: int) -> None:
        """Plan the whole batch in this many parts."""
        parts = insist(lambda: self._cut(self._whole, num_parts), "cutting the batch")
        self._take(Plan(tuple(parts)))

    def finish_part(self, attempt: Attempt) -> None:
        """Record that an attempt is done."""
        if attempt.rollback is not None:
            attempt.rollback.learn()
            attempt.rollback = None
        if self._contents is not None and self._contents.are_same():
            self._contents, self.means.inputs.is_quiet = None, True
        self.done.append(attempt)
        self.plan = self.plan.advance()

    def start_over(self) -> None:
        """Go back to the start of the batch."""
        self.sums.discard()
        self.undo(is_rerun=True)
        for each in self.done:
            each.restore_part()
        self.plan = self.plan.restart()
        self.done.clear()

    def improve(self, failed: Attempt, failure: Failure, *, is_last: bool = False) -> bool:
        """Apply the next remedy; False if none is left."""
        what = self._words_for(failed)
        remedies = self.means.remedies
        return remedies is not None and remedies.improve(failure, what, is_last=is_last)

    @property
    def is_intact(self) -> bool:
        """Whether no attempt has changed the batch's tensors in place, so that it can run again."""
        return are_unwritten(self._marks) and (self._contents is None or self._contents.are_same())

    def take_back_gradients(self, part: Any) -> None:
        """Undo an attempt's `requires_grad_` on tensors of a part: smaller parts would be no leaves."""
        tensors = [each for each in self.means.inputs.leaves_of(part) if isinstance(each, torch.Tensor)]
        for each in tensors:
            if each.requires_grad and each.is_leaf and id(each) not in self._trained:
                each.requires_grad_(False)  # noqa: FBT003 - torch's signature

    def check_intact(self, failed: Attempt, failure: Failure) -> None:
        """Reject a rerun with tensors that the failed attempt, or an earlier one, has changed in place."""
        if self.is_intact:
            self.take_back_gradients(failed.part)
            return
        raise MemkitOutOfMemoryError(
            self.means.call,
            got=f"out of memory with {self._words_for(failed)}, whose forward changes the batch in place and so cannot "
            f"run again: {failure.description}",
            expected="a forward that leaves the batch unchanged",
            fix=NO_WRITES,
        ) from failure.error

    def plan_smaller(self, failed: Attempt, failure: Failure) -> None:
        """Replace the parts that are at least as large as a failed one by smaller parts.

        Raises:
            MemkitOutOfMemoryError: A part cannot be made smaller, and no remedy is left; or the batch cannot be cut.
        """
        sizes = self.means.sizes.state_dict()
        self.means.sizes.note_failure(self.key, failed.size)
        limit = min(self.means.sizes.largest(self.key) or 0, failed.size - 1)
        try:
            smaller = self.plan.shrink(limit, self._cut)
        except (InputError, InputTypeError) as error:
            self.means.sizes.load_state_dict(sizes)  # a smaller size would not help
            raise MemkitOutOfMemoryError(
                self.means.call,
                got=f"out of memory with {failed.size} {self.means.unit}: {failure.description}; and a batch that "
                f"cannot be cut: {error.got}",
                expected=f"a batch that fits into memory, or {error.expected}",
                fix=f"use {self._ways_out()}split_fn=... to cut the batch; {error.fix}",
            ) from failure.error
        if smaller is not None:
            if self._before_cut is None:
                self._before_cut = _BeforeCut(failed, failure, self.plan, sizes, len(self.done))
            self._take(smaller)
            self.is_cut_anew, self.forced = True, Forced(failure)
        elif not self.improve(failed, failure, is_last=True):
            self._refuse(failed, failure)

    def _ways_out(self) -> str:
        """Return what remedies the user may still apply, to begin a list in a message."""
        remedies = self.means.remedies
        return "".join(f"{each}, " for each in remedies.ways_out()) if remedies is not None else ""

    def _take(self, plan: Plan) -> None:
        self.plan, self.was_cut = plan, plan.sizes != (self.size,)

    def _words_for(self, attempt: Attempt) -> str:
        return f"a micro-batch of {attempt.size} {self.means.unit}" if self._uncut is None else "the whole batch"

    def _refuse(self, failed: Attempt, failure: Failure) -> NoReturn:
        if self._uncut is not None:
            raise MemkitOutOfMemoryError(
                self.means.call,
                got=f"out of memory with the whole batch ({failure.description}), which cannot be cut: "
                f"{self._uncut.reason}",
                expected="a batch that fits into memory, or one that can be cut",
                fix=f"use {self._ways_out()}a lower precision or a smaller model; or, to cut the batch, "
                f"{self._uncut.fix}",
            ) from failure.error
        raise MemkitOutOfMemoryError(
            self.means.call,
            got=f"out of memory with a micro-batch of {failed.size} {self.means.unit}: {failure.description}",
            expected="a micro-batch that fits into memory",
            fix=f"use {self._ways_out()}a lower precision or a smaller model; if a batch is one packed item, pass "
            "split_fn=... to cut it, or reduce that item.",
        ) from failure.error


class SingleProcess:
    """Strategy of a single process: undo a failed micro-batch and run it again, with a remedy or in smaller parts."""

    def num_parts(self, run: BatchRun, at_least: int) -> int:
        """Choose the number of parts to cut a batch into."""
        at_least = min(at_least, run.size)
        recovers = run.means.remedies is not None
        return run.means.sizes.num_parts(run.key, run.size, at_least) if recovers else at_least

    def next_attempt(self, run: BatchRun) -> Attempt | None:
        """Return the next attempt; None when the batch is done."""
        sizes, remedies = run.means.sizes, run.means.remedies
        plan = run.plan
        if plan.num_done == len(plan.parts):
            run.is_complete = True
            if remedies is not None and run.num_ooms == 0:
                sizes.note_clean_step(run.key)
            return None
        part = plan.parts[plan.num_done]
        rollback = None
        if remedies is not None and not sizes.is_proven(run.key, part.size):
            rollback = run.take_rollback() if run.done else run.rollback
        return Attempt(part, run.size, remedies=remedies, rollback=rollback)

    def settle(self, run: BatchRun, attempt: Attempt) -> None:
        """Record the outcome of an attempt; if it ran out of memory, undo it, and apply a remedy or replan.

        Raises:
            MemkitOutOfMemoryError: The attempt ran out of memory, no remedy is left, and it cannot be made smaller.
        """
        failure, sizes = attempt.failure, run.means.sizes
        if failure is None:
            if run.means.remedies is not None:
                sizes.note_success(run.key, attempt.size)
            run.finish_part(attempt)
            return
        run.num_ooms += isinstance(failure, OutOfMemory)
        release_cached_memory()
        run.check_intact(attempt, failure)
        if run.sums.is_torn or attempt.is_added or attempt.rollback is None:
            run.start_over()  # it is in the gradients, or its initial state was not saved
        else:
            attempt.rollback.restore()
        # If a size is known to have failed, this was a trial of a larger size, to grow back.
        is_new = sizes.largest(run.key) is None
        if (is_new or isinstance(failure, Failed)) and run.improve(attempt, failure):
            return
        run.plan_smaller(attempt, failure)
