"""When to check a split batch, and how to report the verdict: one warning per cause, or an error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from torch import nn

from memkit._core.errors import ConfigError, MemkitOutOfMemoryError, warn_user
from memkit._core.printable import list_some
from memkit._core.recent import keep_newest
from memkit._core.settings import Checker
from memkit._recovery.batch import BatchRun, Forced
from memkit._recovery.loss_key import LossKinds
from memkit._torch.dispatch import fake_mode
from memkit._torch.fake import FakeTensor
from memkit._torch.modules import training_flags
from memkit.train.part_gradients import take_workspace
from memkit.train.samples import mark_samples
from memkit.train.split import structure_of
from memkit.train.split_verdict import SplitVerdict

Probe = bool | Literal["require"]
_NUM_WITH_BRANCHES = 8
_NUMBER = r"\d+"
_PARTIAL = (
    "{call}: a few rows have shown that splitting the batch keeps its gradient; two of its parts together could not be "
    "checked, because memory ran out. A loss that compares rows which rarely belong together (of one user, or equal "
    "items in one batch) may have another gradient. Way out: pass probe=False if you know that the loss is a mean over "
    "independent rows; otherwise compare more rows once, where there is more memory: "
    "memkit.train.check_split(model, batch, loss_fn)."
)
_PATIENCE = 8  # checks in a row without a finite, nonzero gradient before a warning


@dataclass(slots=True)
class _Record:
    verdict: SplitVerdict
    is_known: bool = False
    is_refused: bool = False  # and so checked again in each step: whether it is wrong depends on the data
    too_large: int = 0  # the size of parts two of which did not fit together


class SplitWatch:
    """Decides which batches are checked.

    These are the first one that is split; later ones where the loss function, the mode of a module, the structure of
    the batch or the evenness of its parts is new, or whose losses were divided by something other than rows; those with
    smaller parts than the ones whose losses memory did not suffice to compare; the first one whose rows have weights
    that differ; and the 2nd, 4th, 8th ... split batch, since state and data change. If Python branches on values of
    tensors, all of the first eight are checked. A loss function is also another one if a variable of it has another
    value, until that variable has had five.

    Args:
        model: The model.
        probe: Whether to check; ``"require"`` refuses a split that could not be checked.
        call: The user's call, for messages.
        may_change: Whether splitting a batch for lack of memory may change its gradient, with a warning.
        adds_up: Whether losses of parts without a count are added up.
        ways_to_less: Returns what the user may still set to let the whole batch take less, for messages.

    Attributes:
        has_branches: Whether Python was seen to branch on values of tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        *,
        call: str,
        may_change: bool = False,
        adds_up: bool = False,
        ways_to_less: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        fix = "pass probe=True, probe=False or probe='require'."
        Checker(call).choice("probe", probe, (True, False, "require"), fix=fix)
        self._modules, self._may_change, self._adds_up = list(model.modules()), may_change, adds_up
        self._probe, self._call, self._ways_to_less = probe, call, ways_to_less
        self._key: tuple[object, ...] = ()  # the loss, modes, the batch's structure, evenness, divisors
        self._size = 0  # of the largest part
        self._records: dict[object, _Record] = {}
        self._losses = LossKinds()
        self._refused_kinds: dict[object, None] = {}
        self._warned: set[str] = set()
        self._trusted: dict[object, None] = {}  # losses, modes and structures that another check found exact
        self._weighed: dict[object, None] = {}  # keys of which rows with weights that differ were checked
        self._num_split = 0
        self._num_uninformative = 0
        self.has_branches = False
        self._deferred: SplitVerdict | None = None
        if probe:
            take_workspace()

    @property
    def is_on(self) -> bool:
        """Whether batches are checked at all."""
        return self._probe is not False

    @property
    def is_simulated(self) -> bool:
        """Whether the step is simulated, with no gradients to compare."""
        return fake_mode() is not None and any(isinstance(each, FakeTensor) for each in self._modules[0].parameters())

    def trust(self, batch: Any, loss_fn: object) -> None:
        """Skip checks of batches built like this one, in the current modes, unless the losses' divisors are uneven."""
        keep_newest(self._trusted, self._kind(mark_samples(batch), loss_fn), None)

    def _kind(self, batch: Any, loss_fn: object) -> tuple[object, ...]:
        return self._losses.kind_of(loss_fn), tuple(training_flags(self._modules)), structure_of(batch)

    def is_due(
        self,
        batch: Any,
        loss_fn: object,
        sizes: Sequence[int],
        *,
        is_uneven: bool = False,
        is_weighted: bool = False,
        is_again: bool = False,
    ) -> bool:
        """Return whether to check a batch; call it for each batch that is split.

        Args:
            batch: The batch.
            loss_fn: The loss function; None if the caller owns the loop.
            sizes: Sizes of the parts.
            is_uneven: Whether losses were visibly divided by something not proportional to the parts' weights.
            is_weighted: Whether the rows visibly had weights that differ, for the first time (`knows_weights`).
            is_again: Whether this is the second call for this batch.
        """
        if self._probe is False or self.is_simulated:
            return False
        self._num_split += not is_again
        kind = self._kind(batch, loss_fn)
        self._key, self._size = (*kind, len(set(sizes)) > 1, is_uneven), max(sizes)
        if is_weighted:
            keep_newest(self._weighed, self._key, None)
        if kind in self._trusted and not is_uneven:
            return False
        is_early = self.has_branches and self._num_split <= _NUM_WITH_BRANCHES
        is_time = not is_again and (is_early or self._num_split & (self._num_split - 1) == 0)
        record = self._records.get(self._key)
        return is_time or is_weighted or record is None or record.is_refused or self._is_open(record)

    @property
    def knows_weights(self) -> bool:
        """Whether such batches were checked with rows whose weights differ."""
        return self._key in self._weighed

    @property
    def is_new(self) -> bool:
        """Whether to check more rows: the current batch is the first of its kind, may branch, or has smaller parts."""
        record = self._records.get(self._key)
        is_early = self.has_branches and self._num_split <= _NUM_WITH_BRANCHES
        return is_early or record is None or self._is_open(record)

    def _is_open(self, record: _Record) -> bool:
        """Whether the current batch was not checked, or two of its parts may fit together, as larger ones did not."""
        return not record.is_known or self._size < record.too_large

    def report_deferred(self) -> None:
        """Report what an early check could not establish, now that the parts themselves have run."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self.report(deferred)
        record = self._records.get(self._key)
        if record is not None and record.too_large:  # not before: the parts may have become smaller
            self.say(_PARTIAL.format(call=self._call), _PARTIAL)

    def settle(self, verdict: SplitVerdict, run: BatchRun, *, is_last: bool) -> bool:
        """Act on a verdict: if lack of memory forced an inexact split, undo it where possible; otherwise report it.

        Args:
            verdict: The verdict.
            run: The batch.
            is_last: Whether the parts have run, so that there is no later check.

        Returns:
            False if there was not enough memory for the check: it must be repeated after the parts have run.
        """
        if self._adds_up and verdict.loss == "weights" and not run.forced:
            has_count = verdict.has_count
            raise ConfigError(
                self._call if has_count else f"{self._call}(reduction='sum')",
                got=f"losses of parts that do not add up to the batch's ({_describe(verdict)})",
                expected="means with their counts, or sums, which add up"
                if has_count
                else "a sum over rows, not divided by anything that depends on the part",
                fix=verdict.advice if has_count else "return mk.Loss(mean=loss, count=n) if it is a mean over n items.",
            )
        if verdict.has_weights:
            keep_newest(self._weighed, self._key, None)
        is_open = verdict.is_out_of_memory and run.forced is not None and not is_last
        if not verdict.is_out_of_memory:
            self._record(verdict).verdict = verdict
        if not verdict.exact and ((run.is_cut_anew and run.undo_cut()) or self._tries_larger(run)):
            return not is_open
        if not is_open:
            is_early = not is_last and not run.num_ooms
            self.report(verdict, num_ooms=run.num_ooms, is_early=is_early, forced=run.forced)
        return not is_open

    def settle_known(self, run: BatchRun) -> None:
        """Act on the stored verdict when no check is due, because such a batch was checked before.

        Raises:
            MemkitOutOfMemoryError: Same as for `report`.
        """
        record = self._records.get(self._key)
        if record is None or record.verdict.exact or not run.forced or not self.is_on:
            return
        if not (run.is_cut_anew and run.undo_cut()) and not self._tries_larger(run):
            self._check_forced(record.verdict, run.forced)

    def _record(self, verdict: SplitVerdict) -> _Record:
        """Return the record of the current key; a new one has this verdict."""
        record = self._records.get(self._key) or _Record(verdict)
        keep_newest(self._records, self._key, record)
        return record

    def _tries_larger(self, run: BatchRun) -> bool:
        """Whether a batch that only an earlier step's error has cut is tried as it came."""
        return not self._may_change and run.try_larger()

    def _check_forced(self, verdict: SplitVerdict, forced: Forced) -> None:
        if verdict.exact or self._may_change:
            return
        why = f"could not be checked: {verdict.reason.rstrip('.')}"
        if verdict.exact is False:
            why = "changes its gradient" + (f" by {verdict.error:.2g}" if _is_known(verdict.error) else "")
        advice = f"{verdict.advice} Otherwise use" if verdict.advice else "use"
        # Nothing was tried of what was only predicted, so remedies that keep the result are the user's to choose.
        tried, ways = ", and splitting it", [*self._ways_to_less(), "more memory=..."]
        if not forced.is_predicted:
            tried = ", the remedies that keep the result do not suffice, and splitting the batch"
            ways = ["a lower precision"]
        raise MemkitOutOfMemoryError(
            self._call,
            got=f"{forced}{tried} {why}",
            expected="memory for the batch, or a split that keeps its gradient",
            fix=f"{advice} {', '.join(ways)}, smaller batches or a smaller model; on_oom='inexact' splits anyway, and "
            "probe=False splits without the check.",
        ) from (forced.failure.error if forced.failure else None)

    def report(
        self,
        verdict: SplitVerdict,
        *,
        num_ooms: int = 0,
        is_early: bool = False,
        forced: Forced | None = None,
    ) -> None:
        """Report a verdict.

        Args:
            verdict: The verdict.
            num_ooms: Out-of-memory errors that led to the split.
            forced: Set if lack of memory, not the user, forces the split.
            is_early: Whether the parts are still to run. If an error stopped the check, they may raise it too, and no
                report is needed.

        Raises:
            ConfigError: The loss mixes the rows: parts of the batch would train something else. Or, with
                ``probe="require"``, it could not be checked.
            MemkitOutOfMemoryError: Memory forces the split, and it is not known to keep the gradient.

        Warns:
            MemkitWarning: Splitting changes the gradient in another way, or could not be checked.
        """
        self._deferred, self.has_branches = None, self.has_branches or verdict.has_branches
        self._note_size(verdict)
        if forced:
            self._check_forced(verdict, forced)
        if is_early and verdict.exact is None and not verdict.is_uninformative:
            self._deferred = verdict
            return
        if verdict.is_uninformative and not verdict.modules:
            self._num_uninformative += 1
            if self._num_uninformative < _PATIENCE and self._probe != "require":
                return  # the next batch is checked
        else:
            self._num_uninformative = 0
        because = " (memory ran out, so it was split)" if num_ooms else ""
        if verdict.loss == "rows" and not (forced and self._may_change):
            self._refuse_rows(verdict, because)
        if verdict.exact is None:
            self._report_unchecked(verdict)
        elif verdict.exact and (*self._key[:3], verdict.kind) in self._refused_kinds:
            text = (
                f"{self._call}: this split was refused on another batch, because the loss, or the model, compares or "
                "mixes the rows. The rows that were checked now do not show it: their gradients are equal by accident."
            )
            self.say(text, text)
        self._record(verdict).is_known = True  # also if memory prevented the check: nothing is proven
        if verdict.buffers:
            names = list_some(verdict.buffers, 3)
            text = (
                f"{self._call}: splitting the batch{because} keeps its gradient, but not what forward writes to "
                f"{names}: each micro-batch writes its own, the whole batch would write once. Way out: if the training "
                "reads them, update them, or run the backward() that adds to them, once per step, outside of loss_fn "
                "and forward, or keep the batch whole."
            )
            self.say(text, names)
        if verdict.advice:
            verb = "changes" if verdict.exact is False else "may change"
            text = f"{self._call}: splitting the batch{because} {verb} the gradient. {verdict.advice}"
            self.say(text, verdict.advice)

    def _refuse_rows(self, verdict: SplitVerdict, because: str) -> NoReturn:
        self._record(verdict).is_refused = True
        if not verdict.state:  # otherwise equal gradients are no accident, but due to a first forward since then
            keep_newest(self._refused_kinds, (*self._key[:3], verdict.kind), None)
        raise ConfigError(
            self._call,
            got=f"{_describe(verdict)} when the batch is split{because}",
            expected="a loss that adds up over the rows of the batch",
            fix=verdict.advice,
        )

    def _note_size(self, verdict: SplitVerdict) -> None:
        """Note whether two parts fitted together: if not, smaller ones are compared once more."""
        record = self._records.get(self._key)
        if verdict.is_partial:
            self._record(verdict).too_large = self._size
        elif record is not None and self._size < record.too_large:
            record.too_large = 0

    def _report_unchecked(self, verdict: SplitVerdict) -> None:
        fix = (
            "pass probe=False if you know that the loss is a mean over independent rows; otherwise check it once, "
            "outside of training: memkit.train.check_split(model, batch, loss_fn)."
        )
        if self._probe == "require":
            raise ConfigError(
                f"{self._call}(probe='require')",
                got=f"a split that could not be checked: {verdict.reason}",
                expected="a split whose gradient was compared with the whole batch's",
                fix=fix.replace("pass probe=False", "pass probe=True or probe=False"),
            )
        reason = verdict.reason.rstrip(".")
        text = f"{self._call}: could not check that splitting the batch keeps its gradient: {reason}. Way out: {fix}"
        self.say(text, f"not checked: {re.sub(_NUMBER, '', reason)}")  # an index that a model drew is no other cause

    def say(self, text: str, cause: str = "") -> None:
        """Warn, once for each cause."""
        cause = cause or text
        if cause not in self._warned:
            self._warned.add(cause)
            warn_user(text)


def _is_known(error: float | None) -> bool:
    return error is not None and math.isfinite(error)


def _describe(verdict: SplitVerdict) -> str:
    is_known = _is_known(verdict.error)
    return f"a gradient that is off by {verdict.error:.2g}" if is_known else "a gradient that is not finite"
