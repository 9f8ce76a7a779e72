"""Out-of-memory recovery for a sharded model (FSDP2): all ranks finish a batch, or all restart it."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from torch import nn

from memkit._core.errors import InputError, MemkitOutOfMemoryError
from memkit._machine.devices import release_cached_memory
from memkit._recovery.attempt import Failure
from memkit._recovery.batch import NO_WRITES, Attempt, BatchRun, Forced, Peers, SingleProcess
from memkit._recovery.plan import Part
from memkit._recovery.snapshot import Rollback
from memkit.train.gradient_sum import GradientSum
from memkit.train.lockstep import Lockstep
from memkit.train.models import may_recover_alone
from memkit.train.samples import unmark_samples
from memkit.train.split import SplitFn, copied, take_rows

# All ranks must split their batches into the same number of parts, for any shapes of their batches. So the
# remembered size is a share of the batch, under one key; a number with many divisors represents the whole.
_KEY = "share of the batch"
_WHOLE = 720_720
_NUM_ROWS = 2  # of the rehearsal; one row can take another path (BatchNorm refuses it)


def choose_peers(
    model: nn.Module,
    sums: GradientSum,
    split_fn: SplitFn | None,
    cleanup: contextlib.ExitStack,
    *,
    recovers: bool,
) -> tuple[bool, Peers]:
    """Choose how a batch recovers from out-of-memory: alone, together with the other shards, or not.

    Args:
        model: The model.
        sums: The sum that its gradients are added to.
        split_fn: Splits a packed batch; it might cut differently on each rank, so that shards cannot recover.
        cleanup: Collects the callbacks that undo changes at the end.
        recovers: Whether recovery is wanted.

    Returns:
        Whether recovery is possible, and the peers that decide on it.
    """
    shards = sums.shards
    if recovers and split_fn is None and shards is not None:
        lockstep = Lockstep.find(model, shards)
        if lockstep is not None:
            cleanup.callback(lockstep.close)
            return True, Together(lockstep, sums)
    num_ranks = 1 if sums.ranks is None else sums.ranks.num_ranks
    return recovers and may_recover_alone(model, num_ranks, is_sharded=shards is not None), SingleProcess()


class Together:
    """Joint decisions of a sharded model's ranks.

    A failing rank joins the collectives of the rest of the batch, without computing. One small all_reduce at the end
    tells whether all succeeded; if not, all restart with smaller parts, from zeroed gradients.

    Args:
        lockstep: The model's collectives.
        sums: The sum that the gradients are added to.
    """

    def __init__(self, lockstep: Lockstep, sums: GradientSum) -> None:
        self._lockstep, self._sums = lockstep, sums
        self._num_parts = 0
        self._is_shortened = False  # to fewer parts than planned, because a rank has too few rows
        self._failure: Failure | None = None

    def num_parts(self, run: BatchRun, at_least: int) -> int:
        """Choose how many parts to split a batch into, and begin it."""
        self._lockstep.begin_batch()
        self._failure, self._is_shortened = None, False
        self._num_parts = run.means.sizes.num_parts(_KEY, _WHOLE, at_least)
        return self._num_parts

    def next_attempt(self, run: BatchRun) -> Attempt | None:
        """Return the next attempt; None when all micro-batches are done on all ranks.

        Raises:
            MemkitOutOfMemoryError: A rank ran out of memory with parts that cannot be smaller; raised on all ranks.
        """
        lockstep = self._lockstep
        if not lockstep.is_rehearsed:
            num_rows = min(_NUM_ROWS, run.size)
            self._sums.agree_on_weight(num_rows)  # otherwise its collective would come in the middle
            few = copied(unmark_samples(take_rows(run.batch, 0, num_rows, num_rows=run.size)))
            rollback = run.take_rollback(is_trial=True)
            rehearsal = self._attempt(run, lockstep.rehearsal(), Part(few, num_rows), rollback)
            rehearsal.is_check = True
            return rehearsal
        if self._failure is not None or (lockstep.is_steady and run.size < self._num_parts):
            for _ in range(self._num_parts - len(run.done) - (self._failure is not None)):
                lockstep.join()
        elif run.plan.num_done < len(run.plan.parts):
            part = run.plan.parts[run.plan.num_done]
            return self._attempt(run, lockstep.microbatch(), part, run.rollback)
        run.is_complete = self._agree(run)
        return None if run.is_complete else self.next_attempt(run)

    def settle(self, run: BatchRun, attempt: Attempt) -> None:
        """Record how an attempt ended; if it ran out of memory, stay in step with the other ranks.

        Raises:
            MemkitOutOfMemoryError: It ran out of memory, and this rank cannot stay in step with the others.
        """
        lockstep, failure = self._lockstep, attempt.failure
        if failure is None:
            if not lockstep.is_rehearsed:
                self._learn(run, attempt)
            else:
                lockstep.end_microbatch()
                attempt.rollback = None  # the batch's rollback stays
                run.finish_part(attempt)
            return
        if not (lockstep.is_rehearsed and lockstep.is_steady):
            raise MemkitOutOfMemoryError(
                "MemoryEfficientTrainingWrapper",
                got=f"out of memory with {attempt.size} rows, at a point where this rank cannot know which "
                f"collective the others wait for: {failure.description}",
                expected="two rows that fit into memory, and micro-batches that all run the same collectives",
                fix="end this run on all ranks; then set checkpoint='auto', a lower precision or a smaller model.",
            ) from failure.error
        self._failure = failure
        lockstep.drop_out()
        release_cached_memory()
        lockstep.join_rest()

    def _attempt(
        self,
        run: BatchRun,
        watching: contextlib.AbstractContextManager[None],
        part: Part,
        rollback: Rollback | None,
    ) -> Attempt:
        remedies = run.means.remedies if self._lockstep.is_steady else None
        return Attempt(part, run.size, remedies=remedies, rollback=rollback, watching=watching)

    def _learn(self, run: BatchRun, rehearsal: Attempt) -> None:
        assert rehearsal.loss is not None  # noqa: S101 - its backward was called
        assert rehearsal.rollback is not None  # noqa: S101 - it was given one
        weight = float(rehearsal.loss.weight) / max(1, rehearsal.size)
        rehearsal.rollback.learn()
        rehearsal.rollback.restore()
        self._sums.discard()
        run.rollback = run.take_rollback()  # now with the modules that the rehearsal has found outside of the model
        self._lockstep.end_rehearsal()
        self._sums.agree_on_weight(weight * run.size / self._num_parts)

    def _agree(self, run: BatchRun) -> bool:
        """Return whether all ranks are done; if not, prepare a restart. The only extra collective of a clean batch."""
        lockstep, sizes, num_parts = self._lockstep, run.means.sizes, self._num_parts
        answers = [self._failure is not None, not lockstep.is_steady, -max(1, run.size), not run.is_intact]
        has_failed, is_unsteady, negative_rows, is_written = lockstep.shards.max([float(each) for each in answers])
        if is_unsteady:
            lockstep.give_up("its micro-batches do not all run the same collectives")
        fewest_rows = -int(negative_rows)
        is_short = lockstep.is_steady and fewest_rows < num_parts
        if is_written and (has_failed or is_short):
            self._refuse_written(fewest_rows, has_failed=bool(has_failed))
        if has_failed:
            run.num_ooms += 1
            if num_parts >= fewest_rows:
                self._refuse(fewest_rows)
            sizes.note_failure(_KEY, _WHOLE // num_parts)
            run.is_cut_anew, run.forced = True, Forced(self._failure)
            self._restart(run, min(fewest_rows, sizes.num_parts(_KEY, _WHOLE, num_parts + 1)))
        elif is_short:
            self._is_shortened = True
            self._restart(run, fewest_rows)
        else:
            if not self._is_shortened:
                sizes.note_success(_KEY, _WHOLE // num_parts)
            if run.num_ooms == 0:
                sizes.note_clean_step(_KEY)
            return True
        return False

    def _restart(self, run: BatchRun, num_parts: int) -> None:
        self._failure, self._num_parts = None, num_parts
        run.start_over()
        run.take_back_gradients(run.batch)
        run.cut_whole(num_parts)

    def _refuse_written(self, fewest_rows: int, *, has_failed: bool) -> NoReturn:
        where = self._failure.description if self._failure else "on another rank"
        why = f"out of memory: {where}" if has_failed else f"a rank has {fewest_rows} rows for {self._num_parts} parts"
        raise (MemkitOutOfMemoryError if has_failed else InputError)(
            "MemoryEfficientTrainingWrapper",
            got=f"a batch that all ranks must start over ({why}), while a forward, here or on another rank, has "
            "changed it in place",
            expected="a forward that leaves the batch unchanged",
            fix=NO_WRITES,
        ) from (self._failure.error if self._failure else None)

    def _refuse(self, fewest_rows: int) -> NoReturn:
        where = self._failure.description if self._failure else "on another rank"
        raise MemkitOutOfMemoryError(
            "MemoryEfficientTrainingWrapper",
            got=f"out of memory with {self._num_parts} micro-batches: {where}",
            expected=f"micro-batches that fit; the smallest batch of all ranks has {fewest_rows} rows",
            fix="set checkpoint='auto', a lower precision or a smaller model; give all ranks batches of the same "
            "size (drop_last=True).",
        ) from (self._failure.error if self._failure else None)
