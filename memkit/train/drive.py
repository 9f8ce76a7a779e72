"""Runs batches through a step: split, check, run micro-batch by micro-batch, and recover from out-of-memory."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memkit._core.errors import InputError, MemkitError, MemkitOutOfMemoryError, warn_user
from memkit._core.printable import list_some
from memkit._core.recent import keep_newest
from memkit._gradients.loss import LossFn
from memkit._recovery.batch import Attempt, BatchRun, CutKind, Means, Peers, SingleProcess, Sums, Uncut
from memkit._recovery.inputs import InputWatch
from memkit._recovery.plan import Part
from memkit._recovery.sizes import SizeMemory
from memkit._recovery.snapshot import Rollback, StateWatch
from memkit.train.check_attempt import CheckAttempt
from memkit.train.divisors import DivisorWatch, divisors_of_sum
from memkit.train.models import has_lazy_parameters
from memkit.train.remedies import Remedies
from memkit.train.row_mixers import scan_modules
from memkit.train.samples import SampleList, doubt_of_columns, mark_samples, unmark_samples
from memkit.train.split import (
    SplitFn,
    Surveyor,
    added_names,
    check_batch,
    cut_batch,
    has_no_rows,
    list_arrays,
    list_tensors,
    names_in,
    rows_left_out,
    survey_packed,
)
from memkit.train.split_check import Computation, Examination
from memkit.train.split_verdict import SplitVerdict
from memkit.train.split_watch import SplitWatch
from memkit.train.split_ways import Way, once, ways_to_cut

_TENSORS = {torch.Tensor}
_ONLY_HERE = 2  # references to an attribute's value: the attribute's, and that of the function that counts them


class BatchDriver:
    """Runs one model's batches through their micro-batches.

    Args:
        model: The model.
        computation: How gradients are computed.
        split_watch: Decides which batches are checked.
        remedies: Remedies for an out-of-memory; None lets the error through.
        split_fn: Splits a packed batch; None splits rows.
        peers: Decides what is tried next, alone or together with other ranks.
        call: The user's call, for messages.

    Attributes:
        sizes: The remembered sizes that fit.
        state_watch: The state that a forward may change.
        current: The attempt that the caller is running.
    """

    def __init__(
        self,
        model: nn.Module,
        computation: Computation,
        *,
        split_watch: SplitWatch,
        remedies: Remedies | None,
        split_fn: SplitFn | None,
        peers: Peers | None = None,
        call: str = "MemoryEfficientTrainingWrapper",
    ) -> None:
        self._model, self._computation = model, computation
        self._split_watch, self._remedies, self._split_fn = split_watch, remedies, split_fn
        self._divisors, self._was_uneven, self._was_weighted = DivisorWatch(), False, False
        self._has_told_whole = False
        self._is_lazy = True  # until shown otherwise
        self._is_plain = True  # nothing can be written into the current batch
        # By a batch's `id`: its first tensor, which tells it from a later batch, and what was written into its parts.
        self._written: dict[int, tuple[list[weakref.ref[torch.Tensor]], list[str]]] = {}
        self._last_written: Any = None  # the last of these batches, until the next one has come: see `_tell_of_written`
        self._has_samples = False  # whether the current batch has lists of samples
        self._cut_by: CutKind = "split_fn" if split_fn else "rows"
        self.state_watch, self.sizes = StateWatch(model), SizeMemory()
        self.current: Attempt | CheckAttempt | None = None
        unit = "elements" if split_fn else "rows"
        self._call_of_split = f"{call}: splitting a batch"
        self._surveyor = Surveyor(self._call_of_split)
        snapshot = functools.partial(Rollback, self.state_watch)
        self._means = Means(
            self.sizes, remedies, snapshot, peers or SingleProcess(), InputWatch(list_arrays), unit, call
        )

    def open(self, batch: Any, num_parts: int, sums: Sums, *, is_predicted: bool = False) -> BatchRun:
        """Split a batch into at least this many micro-batches.

        Args:
            batch: The batch of one optimizer step.
            num_parts: Requested micro-batches; there are more if these are known not to fit.
            sums: Where the gradients go.
            is_predicted: Whether there are so many because the batch is predicted not to fit as a whole.

        Raises:
            InputError: The batch has no common number of rows, and is to be split.

        Warns:
            MemkitWarning: The batch has no common number of rows: it is trained whole.
        """
        uncut: Uncut | None = None
        kind, given = type(batch), batch
        self._is_plain = kind is torch.Tensor or (kind in (tuple, list) and _TENSORS.issuperset(map(type, batch)))
        if self._written:
            self._tell_of_written(batch)
        if self._split_fn is None:
            try:
                marked, size, key, tensors = self._surveyor.survey(batch)
            except InputError as error:
                marked = mark_samples(batch)
                check_batch(marked, call=self._means.call)
                if num_parts > 1:
                    raise
                if self._remedies is not None and not has_no_rows(marked):
                    self._tell_whole(error)
                # a batch that need not be split
                size, key, tensors, uncut = 1, "whole", list_tensors(marked), Uncut(error.got, error.fix)
            self._has_samples, batch = marked is not batch, marked
            is_list = type(marked) is SampleList
            self._cut_by = "entries" if is_list else "lists" if self._has_samples else "rows"
        else:
            key = "packed"
            size, tensors = survey_packed(batch)
        return BatchRun(
            batch,
            size,
            num_parts,
            means=self._means,
            sums=sums,
            cut=self._cut,
            key=key,
            tensors=tensors,
            is_predicted=is_predicted,
            uncut=uncut,
            given=given,
        )

    def attempts(self, run: BatchRun, loss_fn: LossFn | None = None) -> Iterator[Attempt | CheckAttempt]:
        """Yield attempts, to be run by the caller, until the batch is done.

        Args:
            run: The batch.
            loss_fn: The loss function; None if the user owns the loop.

        Raises:
            MemkitOutOfMemoryError: Even the smallest micro-batch does not fit, or smaller ones would change the result.
            ConfigError: The loss mixes the rows.
        """
        try:
            # A check before there are gradients takes less memory than a step; lazy modules need a first input before.
            self._is_lazy = self._is_lazy and has_lazy_parameters(self._model)
            is_checked = run.was_cut and not self._is_lazy
            if is_checked:
                is_checked = yield from self._check_split(run, loss_fn)
            peers = self._means.peers
            while (attempt := peers.next_attempt(run)) is not None:
                if self._remedies is not None and self._remedies.is_unproven:
                    yield from self._check_blocks(run, loss_fn)
                if run.is_cut_anew:
                    is_checked = yield from self._check_split(run, loss_fn)
                    if not run.go_on_smaller(is_checked=is_checked):
                        continue  # another remedy lets it stay whole
                self.current = attempt
                if self._has_samples:
                    attempt.part = unmark_samples(attempt.part)
                attempt.cut = self._cut_by
                attempt.refuse = run.refuse_part if run.forced is not None and not is_checked else None
                yield attempt
                self.current = None
                run.settle(attempt)
                if run.was_cut and not run.is_cut_anew and self._has_seen_enough(run, loss_fn):
                    self._split_watch.report_deferred()
                    self._note_parts(run)
                    if self._was_uneven or self._was_weighted or not is_checked:
                        yield from self._check_split(run, loss_fn, is_again=is_checked, is_last=True)
        except Exception as error:
            self._give_up(run, error)
            raise

    def _give_up(self, run: BatchRun, error: Exception) -> None:
        """End the batch after a refusal; memory that ran out here, not in the caller's code, is one too."""
        refusal = error if isinstance(error, MemkitError) else run.refusal_of(error)
        if refusal is None:
            return
        is_out = isinstance(refusal, MemkitOutOfMemoryError)
        if is_out:
            self.sizes.forget(run.key)  # memory may be back in the next step
        run.sums.give_up(is_out=is_out)  # else the other ranks would wait at their step
        if refusal is not error:
            raise refusal from error

    def _has_seen_enough(self, run: BatchRun, loss_fn: LossFn | None) -> bool:
        """Return whether all parts are done; in the user's own loop all but one, so that it ends with a real part."""
        num_parts = len(run.plan.parts)
        return num_parts - run.plan.num_done == (loss_fn is None and num_parts > 1)

    def _check_split(
        self, run: BatchRun, loss_fn: LossFn | None, *, is_again: bool = False, is_last: bool = False
    ) -> Generator[CheckAttempt, None, bool]:
        """Yield attempts at a few rows of the batch if its split is to be checked, then report the verdict.

        Returns:
            False if there was not enough memory for the check: it must be repeated after the parts have run.
        """
        watch, how, is_uneven, sizes = self._split_watch, self._computation, self._was_uneven, run.plan.sizes
        is_weighted, self._was_weighted = self._was_weighted, False
        if not watch.is_due(run.batch, loss_fn, sizes, is_uneven=is_uneven, is_weighted=is_weighted, is_again=is_again):
            watch.settle_known(run)
            return True
        self._was_uneven = False
        if how.unchecked:
            verdict = SplitVerdict(None, modules=scan_modules(self._model), reason=how.unchecked)
            return watch.settle(verdict, run, is_last=is_last)
        ways = ways_to_cut(
            run.batch,
            num_parts=len(sizes),
            sizes=sizes,
            split_fn=self._split_fn,
            is_first=watch.is_new and not is_again,
            is_tight=run.forced is not None or how.is_tight,
            has_branches=watch.has_branches,
            # Nothing runs out of a budget: more rows than were predicted to fit would only break it.
            may_run_out=loss_fn is not None and not (run.forced is not None and run.forced.is_predicted),
            is_widened=how.is_mixed(),
        )
        verdict = yield from self._examine(ways, loss_fn, num_parts=len(sizes), is_uneven=is_uneven)
        try:
            return watch.settle(verdict, run, is_last=is_last)
        except MemkitError as error:
            doubt, _ = doubt_of_columns(run.batch, is_checked=True)
            if doubt and verdict.loss == "rows":
                error.add_note(f"memkit: {doubt}")
            raise

    def _check_blocks(self, run: BatchRun, loss_fn: LossFn | None) -> Iterator[CheckAttempt]:
        """Yield attempts at a few rows, without and with recomputed blocks."""
        sizes, remedies = run.plan.sizes, self._remedies
        assert remedies is not None  # noqa: S101 - one of them is unproven
        if self._split_watch.is_simulated:
            remedies.settle(is_equal=True)
            return
        try:
            ways = ways_to_cut(run.batch, num_parts=len(sizes), sizes=sizes, split_fn=self._split_fn, is_tight=True)
        except InputError as error:  # an object that cannot be cut; it need not be, if another remedy suffices
            remedies.settle(is_equal=None, reason=f"a few rows cannot be taken of the batch: {error.got}")
            return
        verdict = yield from self._examine([once(each) for each in ways], loss_fn, around_whole=remedies.suspended)
        remedies.settle(is_equal=verdict.exact, reason=verdict.reason)

    def _examine(
        self,
        ways: Sequence[Way],
        loss_fn: LossFn | None,
        *,
        num_parts: int = 1,
        is_uneven: bool = False,
        around_whole: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> Generator[CheckAttempt, None, SplitVerdict]:
        roots = [] if loss_fn is None else [loss_fn]
        examination = Examination(
            self._model,
            self._computation,
            roots,
            ways,
            num_parts=num_parts,
            is_uneven=is_uneven,
            around_whole=around_whole,
        )
        try:
            for attempt in examination.attempts():
                self.current = attempt
                if self._has_samples:
                    attempt.part = unmark_samples(attempt.part)
                yield attempt
            return examination.verdict
        finally:
            self.current = None

    def _note_parts(self, run: BatchRun) -> None:
        """Note what was written into the parts, and whether their losses were divided by other than their weights."""
        if not self._is_plain:
            self._note_written(run)
        if self._split_watch.is_on and not self._computation.adds_up:
            notes = [
                (loss.weight, each.terms if loss.sum is None else divisors_of_sum(each.terms, loss.weight))
                for each in run.done
                if (loss := each.loss) is not None
            ]
            self._was_uneven = self._divisors.is_uneven(notes) or self._was_uneven
            self._was_weighted = self._divisors.has_unequal_weights and not self._split_watch.knows_weights

    def _tell_whole(self, error: InputError) -> None:
        """Warn, once, that a batch is not cut after an out-of-memory, since its tensors have different rows."""
        if not self._has_told_whole:
            self._has_told_whole = True
            warn_user(
                f"{self._means.call}: the batch cannot be cut: {error.got}. It is trained whole, and after an "
                f"out-of-memory only recomputing and offloading can help. Way out: {error.fix.rstrip('.')}; or, where "
                "no batch is ever to be cut, as with the one graph of a data set, pass () for the batch and let "
                "loss_fn hold the data."
            )

    def _note_written(self, run: BatchRun) -> None:
        """Note what was written into the parts of a batch."""
        names = list(dict.fromkeys(name for each in run.done for name in added_names(run.batch, each.part)))
        if names:
            self._last_written = run.given
            there = [*map(weakref.ref, list_tensors(run.batch)[:1])]
            keep_newest(self._written, id(run.given), (there, names))

    def _tell_of_written(self, batch: Any) -> None:
        """Warn, once, if an earlier step cut this batch, and wrote into its parts what this step may want to read."""
        # A dict cannot be referred to weakly. One that nobody else has by now is gone: a later dict around the same
        # tensors, though it may lie in the same place, is a new one.
        if sys.getrefcount(self._last_written) == _ONLY_HERE:
            self._written.pop(id(self._last_written), None)
        self._last_written = None
        there, names = self._written.get(id(batch), ([], []))
        if [id(each()) for each in there] != [id(each) for each in list_tensors(batch)[: len(there)]]:
            del self._written[id(batch)]  # another batch, in the memory of one that is gone
            return
        names = [each for each in names if each not in names_in(batch)]  # else the caller has put it there since
        if not names:
            return
        self._split_watch.say(
            f"{self._means.call}: the batch is that of an earlier step, in which a forward or a loss wrote "
            f"{list_some(names)} into it. It was cut then, and what is written into a part is lost with the part: if "
            "this step reads it, the result differs. Way out: compute it before the steps and put it into the batch, "
            "where it is cut with the other rows.",
            "written",
        )

    def _cut(self, part: Part, num_parts: int) -> list[Part]:
        if num_parts > 1 and isinstance(part.data, SampleList) and part.data.is_guess:
            self._split_watch.say(
                f"{self._means.call}: the batch is a list of entries of one kind and equal first dimensions. It is "
                "split between them, as a list of samples. If they are columns, pass tuple(batch)."
            )
        elif num_parts > 1 and type(part.data) is list:
            watch = self._split_watch
            doubt, is_due = doubt_of_columns(part.data, is_checked=watch.is_on or watch.is_simulated)
            if is_due and self._split_fn is None:
                self._split_watch.say(f"{self._means.call}: {doubt}", "columns")
        pieces = cut_batch(part.data, num_parts, size=part.size, split_fn=self._split_fn, call=self._call_of_split)
        if self._split_fn is not None and num_parts > 1:
            left_out = rows_left_out(part.data, [data for data, _ in pieces])
            if left_out:
                self._split_watch.say(
                    f"{self._means.call}: the parts that split_fn returns have {left_out}. Unless these are padding, "
                    "they are not trained on. Way out: return parts that together have all rows.",
                    "left out",
                )
        return [Part(data, size) for data, size in pieces]
