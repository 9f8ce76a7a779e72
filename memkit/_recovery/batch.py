"""A batch on its way through a step: parts are tried one after the other; where memory runs out, with a remedy.

`BatchRun` is what is known of the batch under way. Who decides what is tried next is one of two: `Alone`, or the ranks
of a sharded model together (`memkit.train.sharded`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol

from memkit._core.errors import MemkitOutOfMemoryError, StateError
from memkit._gradients.loss import Loss
from memkit._machine.devices import release_cached_memory
from memkit._recovery.attempt import Caught, Failed, Kinds, OutOfMemory, insist
from memkit._recovery.plan import Part, Plan
from memkit._recovery.sizes import SizeEntry, SizeMemory

Failure = OutOfMemory | Failed
CutPart = Callable[[Part, int], list[Part]]


class Sums(Protocol):
    """Where the gradients of a batch's parts are added up."""

    is_torn: bool  # an error came in the middle of adding

    def discard(self) -> None:
        """Start anew."""


class Undo(Protocol):
    """All that a forward may change, at one instant."""

    def discover(self) -> AbstractContextManager[None]:
        """A context for a forward, which may change more than is known."""

    def learn(self) -> None:
        """Note what a forward that ran to its end has left alone."""

    def restore(self) -> None:
        """Put everything back."""


class RemedySource(Protocol):
    """What can be done about an out-of-memory before parts are made smaller."""

    @property
    def failures(self) -> Kinds:
        """Errors that a remedy may cause, and that it is then taken back for."""

    def around(self) -> AbstractContextManager[object] | None:
        """A context for forward, where there is one."""

    def improve(self, failure: Failure, what: str, *, is_last: bool = False) -> bool:
        """Take the next remedy; False where none is left."""

    def take_back(self) -> None:
        """Turn off what did not suffice."""

    def tell(self, kind: str, what: str, done: str) -> None:
        """Say once of each kind what was done."""


class Peers(Protocol):
    """Who decides what is tried next."""

    def num_parts(self, run: BatchRun, at_least: int) -> int:
        """Choose how many parts a batch is cut into."""

    def next_attempt(self, run: BatchRun) -> Attempt | None:
        """Return the next attempt; None when the batch is through."""

    def settle(self, run: BatchRun, attempt: Attempt) -> None:
        """Take note of how an attempt ended."""


@dataclass(frozen=True, slots=True)
class Means:
    """What recovery has at hand, for all batches of a model.

    Attributes:
        sizes: What is known of sizes.
        remedies: What is done about an out-of-memory; None lets it through.
        snapshot: Notes all that a forward may change.
        peers: Who decides.
        unit: What sizes count.
        call: What the user called, for messages.
    """

    sizes: SizeMemory
    remedies: RemedySource | None
    snapshot: Callable[[], Undo]
    peers: Peers
    unit: str = "rows"
    call: str = "MemoryEfficientTrainingWrapper"


class Attempt:
    """One try at one micro-batch: ``with attempt as micro: ...``. An out-of-memory ends the block without an error.

    Args:
        part: The micro-batch.
        batch_size: The size of the whole batch.
        remedies: What is done about an out-of-memory; None lets it through.
        rollback: Puts back what the block changes, where its size is not known to fit.
        watching: A further context for the block.

    Attributes:
        part: Its tensors.
        size: Its size, in rows or elements.
        is_check: False: its results are the step's.
        is_trial: Its size is not known to fit.
        is_added: Its gradient is in the sum.
        loss: Its loss, without a graph.
        terms: What the terms of its loss were divided by.
        failure: Why the block ended before its end; None where it did not.
    """

    is_check = False

    def __init__(
        self,
        part: Part,
        batch_size: int,
        *,
        remedies: RemedySource | None = None,
        rollback: Undo | None = None,
        watching: AbstractContextManager[None] | None = None,
    ) -> None:
        self.part, self.size, self.batch_size = part.data, part.size, batch_size
        self.rollback, self.is_trial = rollback, rollback is not None
        self.is_added = self._was_entered = False
        self.loss: Loss | None = None
        self.terms: tuple[Any, ...] = ()
        self.failure: Failure | None = None
        self._remedies, self._watching = remedies, watching
        self._around: contextlib.ExitStack | None = None

    def __enter__(self) -> Any:
        self._was_entered = True
        remedy = None if self._remedies is None else self._remedies.around()
        if self._watching is not None or self.rollback is not None or remedy is not None:
            self._around = contextlib.ExitStack()
            if self._watching is not None:
                self._around.enter_context(self._watching)
            if self.rollback is not None:
                self._around.enter_context(self.rollback.discover())
            if remedy is not None:
                self._around.enter_context(remedy)
        return self.part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._around is not None:
            self._around.close()
        if error is None:
            return False
        if self._remedies is not None:
            caught = Caught(self._remedies.failures)
            if caught.__exit__(kind, error, trace):
                self.failure = caught.failure
                return True
        note_part(error, self.size, self.batch_size)
        return False

    @property
    def counts(self) -> bool:
        """Whether its results are the step's: it ran to its end, and is in the sum."""
        return self.is_added and self.failure is None

    def check_used(self) -> None:
        """Refuse an attempt that has added nothing to the gradient."""
        if self.is_added:
            return
        raise StateError(
            "for attempt in trainer.microbatches(batch)",
            got="a micro-batch without trainer.backward()" if self._was_entered else "an attempt that was not entered",
            expected="`with attempt as micro:` around forward, loss and trainer.backward(loss)",
            fix="call trainer.backward(loss) once per attempt; pass count=0 for a micro-batch that weighs nothing.",
        )


def note_part(error: BaseException, size: int, batch_size: int) -> None:
    """Say with an error of the user's code that it met a part of the batch, which may be why."""
    if isinstance(error, Exception) and size < batch_size:
        error.add_note(
            f"memkit: this was a micro-batch of {size} of {batch_size}. All tensors of the batch are cut along "
            "dimension 0; keep one that belongs to all rows (a mask, a table) out of the batch, for instance in a "
            "variable that loss_fn uses, or pass split_fn=..."
        )


@dataclass(frozen=True, slots=True)
class Forced:
    """Memory has forced a batch apart, and not the user.

    Attributes:
        failure: The error; None where it came in an earlier step, or on another rank.
    """

    failure: Failure | None


class BatchRun:
    """The micro-batches of one batch.

    Args:
        batch: The batch of one optimizer step.
        size: Its rows, or elements.
        num_parts: Micro-batches that are asked for; more where the size memory says so.
        means: What recovery has at hand.
        sums: Where the gradients go.
        cut: ``cut(part, n)`` returns about n parts.
        key: Key under which sizes are stored.
        is_intact: Says whether the batch is as it came.

    Attributes:
        plan: The micro-batches that are to do, and those that are through.
        forced: Set where memory has forced the batch apart.
        is_cut_anew: Parts were made smaller, and nobody has looked yet whether they may be.
        num_ooms: Out-of-memory errors survived.
        is_complete: All micro-batches are through.
        was_cut: The micro-batches are not the batch as it came.
        done: The attempts that are through.
        rollback: Puts back what the forwards of the batch have changed; None where that is not noted.
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
        is_intact: Callable[[], bool] = lambda: True,
    ) -> None:
        self.batch, self.size, self.key, self.means, self.sums = batch, size, key, means, sums
        self._whole, self._cut, self._is_intact = Part(batch, size), cut, is_intact
        self.num_ooms = 0
        self.is_complete = self.is_cut_anew = self.was_cut = False
        self.forced: Forced | None = None
        self.done: list[Attempt] = []
        self._before_cut: tuple[Attempt, Plan, SizeEntry | None] | None = None
        self.rollback = self.take_rollback()
        self.plan = Plan((self._whole,))
        if num_parts > 1 or means.remedies is not None:
            num_chosen = means.peers.num_parts(self, num_parts)
            if num_chosen > min(num_parts, size):
                self.forced = Forced(None)
            if num_chosen > 1:
                self.cut_whole(num_chosen)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the micro-batches that are through, in order."""
        return tuple([each.size for each in self.done])

    def losses(self) -> tuple[Loss, ...]:
        """Losses of the micro-batches that are through, in order."""
        return tuple([each.loss for each in self.done if each.loss is not None])

    def next_attempt(self) -> Attempt | None:
        """Return the next attempt; None when all micro-batches are through.

        Raises:
            MemkitOutOfMemoryError: A rank ran out of memory with parts that cannot be smaller.
        """
        return self.means.peers.next_attempt(self)

    def settle(self, attempt: Attempt) -> None:
        """Take note of how an attempt ended, after its block. Where it ran out of memory, take a remedy or plan again.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory, no remedy is left, and it cannot be made smaller.
            StateError: The block was not entered, or did not call backward.
        """
        if attempt.failure is None:
            attempt.check_used()
        self.means.peers.settle(self, attempt)

    def undo(self) -> None:
        """Put back what the forwards so far have changed, where that was noted: random state, buffers, modes."""
        if self.rollback is not None:
            self.rollback.restore()

    def undo_cut(self) -> bool:
        """Where parts that were made smaller are to stay whole, take another remedy; False where none is left."""
        if self._before_cut is None:
            return False
        failed, plan, entry = self._before_cut
        if failed.failure is None or not self.improve(failed, failed.failure, is_last=True):
            return False
        self._take(plan)
        self.is_cut_anew, self.forced = False, None
        self.means.sizes.put_entry(self.key, entry)
        return True

    def go_on_smaller(self) -> bool:
        """Say that the batch goes on in smaller parts, which may be done; False where it stays whole."""
        if not self.is_cut_anew:
            return False
        self.is_cut_anew = False
        remedies = self.means.remedies
        if remedies is not None and self.forced is not None:
            remedies.take_back()
            done = f"the batch is cut into micro-batches of at most {max(self.plan.sizes)} {self.means.unit}."
            failure = self.forced.failure
            remedies.tell("split", f"out of memory ({failure.description if failure else 'on a rank'})", done)
        return True

    def check_complete(self) -> None:
        """Refuse to step with a batch that has micro-batches left."""
        if not self.is_complete:
            raise StateError(
                "trainer.step()",
                got="a batch with micro-batches left to do",
                expected="one step after all micro-batches of a batch",
                fix="call trainer.step() after the loop over trainer.microbatches(batch), not in it.",
            )

    # ------------------------------------------------------------------ for those who decide

    def take_rollback(self) -> Undo | None:
        """Note all that a forward may change, where there is recovery."""
        if self.means.remedies is None:
            return None
        return insist(self.means.snapshot, "copying the buffers that a forward changes")

    def cut_whole(self, num_parts: int) -> None:
        """Plan the whole batch in so many parts."""
        self._take(Plan(tuple(self._cut(self._whole, num_parts))))

    def finish_part(self, attempt: Attempt) -> None:
        """Note that an attempt is through."""
        if attempt.rollback is not None:
            attempt.rollback.learn()
            attempt.rollback = None
        self.done.append(attempt)
        self.plan = self.plan.advance()

    def start_over(self) -> None:
        """Go back to the start of the batch."""
        self.sums.discard()
        self.undo()
        self.plan = self.plan.restart()
        self.done.clear()

    def improve(self, failed: Attempt, failure: Failure, *, is_last: bool = False) -> bool:
        """Take the next remedy; False where none is left."""
        what = f"a micro-batch of {failed.size} {self.means.unit}"
        remedies = self.means.remedies
        return remedies is not None and remedies.improve(failure, what, is_last=is_last)

    def check_intact(self, failed: Attempt, failure: Failure) -> None:
        """Refuse to run again with tensors that the failed attempt, or one before, has changed in place."""
        if self._is_intact():
            return
        raise MemkitOutOfMemoryError(
            self.means.call,
            got=f"out of memory with a micro-batch of {failed.size} {self.means.unit}, whose forward changes the batch "
            f"in place, so that it cannot run again: {failure.description}",
            expected="a batch that stays as it is",
            fix="write `x = x / 255`, not `x /= 255`, in the model and in loss_fn; or do it before the step.",
        ) from failure.error

    def plan_smaller(self, failed: Attempt, failure: Failure) -> None:
        """Plan smaller parts in place of those that are not smaller than a failed one.

        Raises:
            MemkitOutOfMemoryError: One cannot be made smaller, and no remedy is left.
        """
        self._before_cut = failed, self.plan, self.means.sizes.entry(self.key)
        self.means.sizes.note_failure(self.key, failed.size)
        limit = min(self.means.sizes.largest(self.key) or 0, failed.size - 1)
        smaller = self.plan.shrink(limit, self._cut)
        if smaller is not None:
            self._take(smaller)
            self.is_cut_anew, self.forced = True, Forced(failure)
        elif not self.improve(failed, failure, is_last=True):
            self._refuse(failed, failure)

    def _take(self, plan: Plan) -> None:
        self.plan, self.was_cut = plan, plan.sizes != (self.size,)

    def _refuse(self, failed: Attempt, failure: Failure) -> NoReturn:
        raise MemkitOutOfMemoryError(
            self.means.call,
            got=f"out of memory with a micro-batch of {failed.size} {self.means.unit}: {failure.description}",
            expected="one micro-batch that fits",
            fix="set checkpoint='auto', a lower precision or a smaller model; if a batch is one packed item, "
            "give split_fn=... to cut it, or thin that item out.",
        ) from failure.error


class Alone:
    """This process decides by itself: a failed micro-batch is undone and runs again, with a remedy, or smaller."""

    def num_parts(self, run: BatchRun, at_least: int) -> int:
        """Choose how many parts a batch is cut into."""
        at_least = min(at_least, run.size)
        recovers = run.means.remedies is not None
        return run.means.sizes.num_parts(run.key, run.size, at_least) if recovers else at_least

    def next_attempt(self, run: BatchRun) -> Attempt | None:
        """Return the next attempt; None when the batch is through."""
        sizes, remedies = run.means.sizes, run.means.remedies
        if not run.plan.todo:
            run.is_complete = True
            if remedies is not None and run.num_ooms == 0:
                sizes.note_clean_step(run.key)
            return None
        part = run.plan.todo[0]
        rollback = None
        if remedies is not None and not sizes.is_proven(run.key, part.size):
            rollback = run.take_rollback() if run.done else run.rollback
        return Attempt(part, run.size, remedies=remedies, rollback=rollback)

    def settle(self, run: BatchRun, attempt: Attempt) -> None:
        """Take note of how an attempt ended; where it ran out of memory, undo it, and take a remedy or plan again.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory, no remedy is left, and it cannot be made smaller.
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
            run.start_over()  # it is in the gradients, or nobody noted its start
        else:
            attempt.rollback.restore()
        # Where a size is known to have failed, a larger one than fits was tried, to grow back.
        is_new = sizes.largest(run.key) is None
        if (is_new or isinstance(failure, Failed)) and run.improve(attempt, failure):
            return
        run.plan_smaller(attempt, failure)
