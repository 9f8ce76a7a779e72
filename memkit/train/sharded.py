"""One batch on its way through a step of a sharded model (FSDP2): all ranks get through, or all start over."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from memkit._device import release_cached_memory
from memkit._errors import MemkitOutOfMemoryError
from memkit._recovery.attempt import Failed, OutOfMemory
from memkit.train.accumulate import GradientAccumulator
from memkit.train.lockstep import Lockstep
from memkit.train.models import may_recover_alone
from memkit.train.split import SplitFn, take_rows
from memkit.train.window import Attempt, Forced, Window, check_used

# All ranks must cut their batches into equally many parts, whatever the shapes of their batches. So the size that is
# remembered is a share of the batch, under one key; a number with many divisors stands for the whole.
_KEY = "share of the batch"
_WHOLE = 720_720
_NUM_ROWS = 2  # of the rehearsal; one row alone can take another path: BatchNorm refuses it


def choose_window(
    model: nn.Module,
    accumulator: GradientAccumulator,
    split_fn: SplitFn | None,
    cleanup: contextlib.ExitStack,
    *,
    recovers: bool,
) -> tuple[bool, Callable[..., Window]]:
    """Choose how a batch recovers from out-of-memory: alone, together with the other shards, or not.

    Args:
        model: The model.
        accumulator: Where its gradients go.
        split_fn: Splits a packed batch; it might cut differently on each rank, so that shards cannot recover.
        cleanup: Gets what is to be undone in the end.
        recovers: Whether it is to recover.

    Returns:
        Whether it can, and what makes a window.
    """
    if recovers and split_fn is None and accumulator.shards is not None:
        lockstep = Lockstep.find(model, accumulator.shards)
        if lockstep is not None:
            cleanup.callback(lockstep.close)
            return True, functools.partial(ShardedWindow, lockstep)
    is_sharded = accumulator.shards is not None
    return recovers and may_recover_alone(model, accumulator.num_ranks, is_sharded=is_sharded), Window


class ShardedWindow(Window):
    """The micro-batches of one batch, in step with the other ranks.

    A rank that fails takes part in the collectives of all that is left of the batch, without computing. One small
    all_reduce at the end tells whether all got through; else all start over with smaller parts, from zeroed gradients.

    Args:
        lockstep: The model's collectives.
        *args: As for `Window`.
        **kwargs: As for `Window`; there are remedies, and no ``split_fn``.
    """

    _accumulator: GradientAccumulator

    def __init__(self, lockstep: Lockstep, *args: Any, **kwargs: Any) -> None:
        self._lockstep = lockstep
        self._num_parts = 0
        self._is_shortened = False  # to fewer parts than planned, as a rank has not enough rows
        self._failure: OutOfMemory | Failed | None = None
        lockstep.begin_batch()
        kwargs["watch"].changes_attributes = False  # FSDP changes its own, and puts them back itself
        super().__init__(*args, **kwargs)

    def next_attempt(self) -> Attempt | None:
        """Return the next attempt; None when all micro-batches are through on all ranks.

        Raises:
            MemkitOutOfMemoryError: A rank ran out of memory with parts that cannot be smaller; on all ranks alike.
        """
        lockstep = self._lockstep
        if not lockstep.is_rehearsed:
            num_rows = min(_NUM_ROWS, self.size)
            self._accumulator.agree_on_weight(num_rows)  # else its collective would come in the middle
            few = take_rows(self.batch, 0, num_rows, num_rows=self.size)
            return self._attempt(lockstep.rehearsal(), few, num_rows)
        if self._failure is not None or (lockstep.is_steady and self.size < self._num_parts):
            for _ in range(self._num_parts - len(self._done) - (self._failure is not None)):
                lockstep.walk()
        elif self._todo:
            return self._attempt(lockstep.microbatch(), *self._todo[0])
        self.is_complete = self._agree()
        return None if self.is_complete else self.next_attempt()

    def settle(self, attempt: Attempt) -> None:
        """Take note of how an attempt ended, after its block; keep the others company where it ran out of memory.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory, and this rank cannot keep the others company.
            StateError: The block was not entered, or did not call backward.
        """
        lockstep, failure = self._lockstep, attempt.failure
        if failure is None:
            check_used(attempt)
            if not lockstep.is_rehearsed:
                self._learn(attempt)
            else:
                lockstep.end_microbatch()
                self._done.append(attempt)
                self._todo.popleft()
            return
        if not (lockstep.is_rehearsed and lockstep.is_steady):
            raise MemkitOutOfMemoryError(
                "MemoryEfficientTrainingWrapper",
                got=f"out of memory with {attempt.size} rows, where this rank does not know what the others wait for: "
                f"{failure.description}",
                expected="two rows that fit, and micro-batches that exchange the same",
                fix="end this run on all ranks; set checkpoint='auto', a lower precision or a smaller model.",
            ) from failure.error
        self._failure = failure
        lockstep.drop_out()
        release_cached_memory()
        lockstep.walk_on()

    def _attempt(self, watching: AbstractContextManager[None], part: Any, size: int) -> Attempt:
        can_walk = self._lockstep.is_steady
        attempt = _WatchedAttempt(watching, part, size, self.size, self._remedies if can_walk else None)
        attempt.rollback = self._rollback
        return attempt

    def _learn(self, rehearsal: Attempt) -> None:
        assert rehearsal.loss is not None  # noqa: S101 - its backward was called
        assert rehearsal.rollback is not None  # noqa: S101 - it was given one
        weight = float(rehearsal.loss.weight) / max(1, rehearsal.size)
        rehearsal.rollback.learn()
        self._start_over()
        self._lockstep.end_rehearsal()
        self._accumulator.agree_on_weight(weight * self.size / self._num_parts)

    def _agree(self) -> bool:
        """Say whether all ranks are through; else prepare to start over. The one collective of a clean batch."""
        lockstep = self._lockstep
        answers = [self._failure is not None, not lockstep.is_steady, -max(1, self.size)]
        has_failed, is_unsteady, negative_rows = lockstep.shards.max([float(answer) for answer in answers])
        if is_unsteady:
            lockstep.give_up("its micro-batches do not all exchange the same")
        num_parts, fewest_rows = self._num_parts, -int(negative_rows)
        if has_failed:
            self.num_ooms += 1
            if num_parts >= fewest_rows:
                where = self._failure.description if self._failure else "on another rank"
                raise MemkitOutOfMemoryError(
                    "MemoryEfficientTrainingWrapper",
                    got=f"out of memory with {num_parts} micro-batches: {where}",
                    expected=f"micro-batches that fit; the smallest batch of all ranks has {fewest_rows} rows",
                    fix="set checkpoint='auto', a lower precision or a smaller model; "
                    "give all ranks batches of one size (drop_last=True).",
                ) from (self._failure.error if self._failure else None)
            self._sizes.note_failure(_KEY, _WHOLE // num_parts)
            self.is_cut_anew, self.forced = True, Forced(self._failure)
            self._todo = self._restart(min(fewest_rows, self._choose_num_parts(num_parts + 1)))
        elif lockstep.is_steady and fewest_rows < num_parts:
            self._is_shortened = True
            self._todo = self._restart(fewest_rows)
        else:
            if not self._is_shortened:
                self._sizes.note_success(_KEY, _WHOLE // num_parts)
            if self.num_ooms == 0:
                self._sizes.note_clean_step(_KEY)
            return True
        return False

    def _restart(self, num_parts: int) -> deque[tuple[Any, int]]:
        self._failure = None
        self._start_over()
        return self._cut(num_parts)

    def _choose_num_parts(self, at_least: int) -> int:
        return self._sizes.num_parts(_KEY, _WHOLE, at_least)

    def _cut(self, num_parts: int) -> deque[tuple[Any, int]]:
        self._num_parts = num_parts
        return super()._cut(num_parts)


class _WatchedAttempt(Attempt):
    """An attempt whose collectives are watched."""

    def __init__(self, watching: AbstractContextManager[None], *args: Any) -> None:
        super().__init__(*args)
        self._watching = watching

    def __enter__(self) -> Any:
        self._discovery.enter_context(self._watching)
        return super().__enter__()
