"""One batch on its way through a step: its micro-batches, the attempts at them, and what happens when one fails."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Protocol

from memkit._device import release_cached_memory
from memkit._errors import MemkitOutOfMemoryError, StateError
from memkit._loss import Loss
from memkit._recovery.attempt import Caught, Failed, OutOfMemory, insist
from memkit._recovery.snapshot import Rollback, StateWatch
from memkit.train.divisors import Note
from memkit.train.remedies import Remedies
from memkit.train.sizes import Entry, SizeMemory
from memkit.train.split import SplitFn, cut_batch, list_tensors, measure_batch, shape_key


class Sums(Protocol):
    """Where the gradients of a window's micro-batches are added up."""

    is_torn: bool  # an error came in the middle of adding

    def discard(self) -> None:
        """Start anew."""


class Attempt:
    """One try at one micro-batch: ``with attempt as micro: ...``. An out-of-memory ends the block without an error.

    Args:
        part: The micro-batch.
        size: Its size, in rows or elements.
        batch_size: The size of the whole batch.
        remedies: What is done about an out-of-memory; None lets it through.
    """

    is_check = False  # its results are the step's

    def __init__(self, part: Any, size: int, batch_size: int, remedies: Remedies | None) -> None:
        self.part = part
        self.size = size
        self.batch_size = batch_size
        self.is_trial = False
        self.rollback: Rollback | None = None
        self.was_entered = False
        self.is_added = False  # its gradient is in the sum
        self.loss: Loss | None = None
        self.note: Note | None = None
        self._remedies = remedies
        self._caught = Caught(remedies.failures if remedies is not None and remedies.recomputed else ())
        self._discovery = contextlib.ExitStack()

    @property
    def failure(self) -> OutOfMemory | Failed | None:
        """Why the block ended before its end; None where it did not."""
        return self._caught.failure

    def __enter__(self) -> Any:
        self.was_entered = True
        if self.rollback is not None:
            self._discovery.enter_context(self.rollback.discover())
        if self._remedies is not None:
            self._discovery.enter_context(self._remedies.around())
        return self.part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._discovery.close()
        if error is None:
            return False
        if self._remedies is not None and self._caught.__exit__(kind, error, trace):
            return True
        note_part(error, self.size, self.batch_size)
        return False


@dataclass(frozen=True, slots=True)
class Forced:
    """Memory has forced a batch apart, and not the user.

    Attributes:
        failure: The error; None where it came in an earlier step, or on another rank.
    """

    failure: OutOfMemory | Failed | None


def note_part(error: BaseException, size: int, batch_size: int) -> None:
    """Say with an error of the user's code that it met a part of the batch, which may be why."""
    if isinstance(error, Exception) and size < batch_size:
        error.add_note(
            f"memkit: this was a micro-batch of {size} of {batch_size}. All tensors of the batch are cut along "
            "dimension 0; keep one that belongs to all rows (a mask, a table) out of the batch, for instance in a "
            "variable that loss_fn uses, or pass split_fn=..."
        )


class Window:
    """The micro-batches of one batch.

    Args:
        batch: The batch of one optimiser step.
        num_parts: Micro-batches that are asked for; more where the size memory says so.
        accumulator: Where the gradients go.
        watch: The watch of the model.
        sizes: What is known of sizes.
        remedies: What is done about an out-of-memory; None lets it through.
        split_fn: Splits a packed batch; None splits rows.
        call: What the user called, for messages.
    """

    def __init__(
        self,
        batch: Any,
        num_parts: int,
        *,
        accumulator: Sums,
        watch: StateWatch,
        sizes: SizeMemory,
        remedies: Remedies | None,
        split_fn: SplitFn | None,
        call: str = "MemoryEfficientTrainingWrapper",
    ) -> None:
        self._accumulator = accumulator
        self._watch = watch
        self._sizes = sizes
        self._remedies = remedies
        self.is_cut_anew = False  # since somebody has looked
        self._before_cut: tuple[Attempt | None, deque[tuple[Any, int]], Entry | None] = None, deque(), None
        self._split_fn, self._call = split_fn, call
        recovers = remedies is not None
        self._key = "" if not recovers else "packed" if split_fn else shape_key(batch)
        self.size = measure_batch(batch, split_fn, may_cut=recovers or num_parts > 1)
        self.num_ooms = 0
        self.is_complete = False
        self._done: list[Attempt] = []
        tensors = [each for each in list_tensors(batch) if not each.is_inference()] if recovers else []
        self._versions = [(each, each._version) for each in tensors]  # noqa: SLF001 - no public form
        self._rollback = self._take_rollback()
        self.batch = batch
        num_chosen = self._choose_num_parts(num_parts)
        self.forced = Forced(None) if num_chosen > min(num_parts, self.size) else None
        self._todo = self._cut(num_chosen)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the micro-batches that are through, in order."""
        return tuple(attempt.size for attempt in self._done)

    @property
    def num_left(self) -> int:
        """How many micro-batches are still to do."""
        return len(self._todo)

    @property
    def was_cut(self) -> bool:
        """Whether the micro-batches are not the batch as it came."""
        return self.all_sizes != (self.size,)

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """Sizes of all micro-batches, those that are through and those to do."""
        return (*self.sizes, *(size for _, size in self._todo))

    @property
    def stays_whole(self) -> bool:
        """Whether no parts were made smaller since somebody has looked."""
        return not self.is_cut_anew

    def notes(self) -> list[Note]:
        """Weights of the micro-batches that are through, and what their losses were divided by."""
        return [attempt.note for attempt in self._done if attempt.note is not None]

    def losses(self) -> tuple[Loss, ...]:
        """Losses of the micro-batches that are through, in order."""
        return tuple(attempt.loss for attempt in self._done if attempt.loss is not None)

    def undo(self) -> None:
        """Put back what the forwards so far have changed, where that was noted: random state, buffers, modes."""
        if self._rollback is not None:
            self._rollback.restore()

    def go_on_smaller(self) -> None:
        """Say that the batch goes on in smaller parts, which may be done."""
        self.is_cut_anew = False
        if self._remedies is not None and self.forced is not None:
            self._remedies.take_back()
            done = f"the batch is cut into micro-batches of at most {max(self.all_sizes)} {self._unit}."
            failure = self.forced.failure
            self._remedies.tell("split", f"out of memory ({failure.description if failure else 'on a rank'})", done)

    def check_complete(self) -> None:
        """Refuse to step with a batch that has micro-batches left."""
        if not self.is_complete:
            raise StateError(
                "trainer.step()",
                got="a batch with micro-batches left to do",
                expected="one step after all micro-batches of a batch",
                fix="call trainer.step() after the loop over trainer.microbatches(batch), not in it.",
            )

    def next_attempt(self) -> Attempt | None:
        """Return the next attempt; None when all micro-batches are through."""
        if not self._todo:
            self.is_complete = True
            if self.num_ooms == 0:
                self._sizes.note_clean_step(self._key)
            return None
        part, size = self._todo[0]
        attempt = Attempt(part, size, self.size, self._remedies)
        if self._remedies is not None and not self._sizes.is_proven(self._key, size):
            attempt.is_trial = True
            attempt.rollback = self._take_rollback() if self._done else self._rollback
        return attempt

    def settle(self, attempt: Attempt) -> None:
        """Take note of how an attempt ended, after its block. Where it ran out of memory, take a remedy or plan again.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory, no remedy is left, and it cannot be made smaller.
            StateError: The block was not entered, or did not call backward.
        """
        failure = attempt.failure
        if failure is None:
            check_used(attempt)
            if attempt.rollback is not None:
                attempt.rollback.learn()
                attempt.rollback = None
            self._sizes.note_success(self._key, attempt.size)
            self._done.append(attempt)
            self._todo.popleft()
            return
        self.num_ooms += isinstance(failure, OutOfMemory)
        release_cached_memory()
        self._check_batch(attempt, failure)
        if self._accumulator.is_torn or attempt.is_added or attempt.rollback is None:
            self._start_over()
        else:
            attempt.rollback.restore()
        # Where a size is known to have failed, a larger one than fits was tried, to grow back.
        is_new = self._sizes.largest(self._key) is None
        if (is_new or isinstance(failure, Failed)) and self._improve(attempt, failure):
            return
        self._before_cut = attempt, deque(self._todo), self._sizes.entry(self._key)
        self._sizes.note_failure(self._key, attempt.size)
        self._plan_smaller(attempt, failure)

    def undo_cut(self) -> bool:
        """Where parts that were made smaller are to stay whole, take another remedy; False where none is left."""
        failed, todo, entry = self._before_cut
        if failed is None or failed.failure is None or not self._improve(failed, failed.failure, is_last=True):
            return False
        self._todo, self.is_cut_anew, self.forced = todo, False, None
        self._sizes.put_entry(self._key, entry)
        return True

    def _improve(self, failed: Attempt, failure: OutOfMemory | Failed, *, is_last: bool = False) -> bool:
        what = f"a micro-batch of {failed.size} {self._unit}"
        return self._remedies is not None and self._remedies.improve(failure, what, is_last=is_last)

    def _check_batch(self, failed: Attempt, failure: OutOfMemory | Failed) -> None:
        """Refuse to run again with tensors that the failed attempt, or one before, has changed in place."""
        if all(tensor._version == version for tensor, version in self._versions):  # noqa: SLF001 - no public form
            return
        raise MemkitOutOfMemoryError(
            self._call,
            got=f"out of memory with a micro-batch of {failed.size} {self._unit}, whose forward changes the batch in "
            f"place, so that it cannot run again: {failure.description}",
            expected="a batch that stays as it is",
            fix="write `x = x / 255`, not `x /= 255`, in the model and in loss_fn; or do it before the step.",
        ) from failure.error

    def _start_over(self) -> None:
        """Go back to the start of the window: the failed attempt is in the gradients, or nobody noted its start."""
        self._accumulator.discard()
        if self._rollback is not None:
            self._rollback.restore()
        self._todo.extendleft((each.part, each.size) for each in reversed(self._done))
        self._done.clear()

    def _plan_smaller(self, failed: Attempt, failure: OutOfMemory | Failed) -> None:
        limit = min(self._sizes.largest(self._key) or 0, failed.size - 1)
        todo: list[tuple[Any, int]] = []
        for part, size in self._todo:
            if size < failed.size and size <= limit:
                todo.append((part, size))
                continue
            num_parts = max(2, math.ceil(size / limit)) if limit else 1
            smaller = cut_batch(part, num_parts, size=size, split_fn=self._split_fn)
            smaller = [(each, its_size) for each, its_size in smaller if its_size > 0]
            if max((its_size for _, its_size in smaller), default=size) >= size:  # it could not be split
                if self._improve(failed, failure, is_last=True):
                    return
                raise MemkitOutOfMemoryError(
                    self._call,
                    got=f"out of memory with a micro-batch of {size} {self._unit}: {failure.description}",
                    expected="one micro-batch that fits",
                    fix="set checkpoint='auto', a lower precision or a smaller model; if a batch is one packed item, "
                    "give split_fn=... to cut it, or thin that item out.",
                ) from failure.error
            todo.extend(smaller)
        self._todo = deque(todo)
        self.is_cut_anew, self.forced = True, Forced(failure)

    @property
    def _unit(self) -> str:
        return "elements" if self._split_fn else "rows"

    def _choose_num_parts(self, at_least: int) -> int:
        return self._sizes.num_parts(self._key, self.size, min(at_least, self.size))

    def _cut(self, num_parts: int) -> deque[tuple[Any, int]]:
        return deque(cut_batch(self.batch, num_parts, size=self.size, split_fn=self._split_fn))

    def _take_rollback(self) -> Rollback | None:
        if self._remedies is None:
            return None
        return insist(lambda: Rollback(self._watch), "copying the buffers that a forward changes")


def refuse_unstepped() -> NoReturn:
    """Refuse a batch while the one before it waits for its step."""
    raise StateError(
        "trainer.microbatches(batch)",
        got="a batch that was not stepped yet",
        expected="one step() after the micro-batches of each batch",
        fix="call trainer.step() after the loop over micro-batches.",
    )


def check_used(attempt: Attempt) -> None:
    """Refuse an attempt that has added nothing to the gradient."""
    if attempt.is_added:
        return
    raise StateError(
        "for attempt in trainer.microbatches(batch)",
        got="a micro-batch without trainer.backward()" if attempt.was_entered else "an attempt that was not entered",
        expected="`with attempt as micro:` around forward, loss and trainer.backward(loss)",
        fix="call trainer.backward(loss) once per attempt; pass count=0 for a micro-batch that is to weigh nothing.",
    )
