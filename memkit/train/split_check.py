"""Check on a few rows, before a real step, whether splitting a batch keeps its gradient; it always gives a verdict."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.units import MIB
from memkit._core.words import guided
from memkit._gradients.loss import Loss, LossFn, call_loss_fn, check_loss_fn
from memkit._gradients.streamed import without_hooks
from memkit._machine.devices import host_memory, release_cached_memory
from memkit._recorder.attributes import HeldBuffer, HeldGradient, HeldNumber
from memkit._recorder.ranked import RowLimit
from memkit._recorder.rehearsal import Rehearsal, Span
from memkit._recovery.attempt import Done, attempt
from memkit._torch.tensors import assign_gradient_dtype, gradient_dtype, hooks_of
from memkit.train.backward_steps import hooks_of_others
from memkit.train.check_attempt import Attempts, CheckAttempt
from memkit.train.divisors import divisors, have_unequal_weights
from memkit.train.gradients import has_reentrant_checkpoint
from memkit.train.models import device_of
from memkit.train.part_gradients import TIMES_ROUNDING, PartGradient, errors_of, find_weights, is_one_sided, summed
from memkit.train.ranks import without_buffer_sync
from memkit.train.row_mixers import freezing, is_norm, normalizes_over_rows, scan_modules, silence
from memkit.train.samples import mark_samples, unmark_samples
from memkit.train.sketches import Vector, sketches, sketches_of_backward
from memkit.train.split import SplitFn, map_leaves
from memkit.train.split_verdict import SplitVerdict
from memkit.train.split_ways import CutBatch, Way, interleaved, reordered, ways_to_cut

# Relative error per parameter that passes without further runs; larger errors are compared with rounding.
_QUICK_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}
_TOLERANCE = 1e-5
_MOST_ROUNDED = 4
_CLEAR = 1e-2  # relative error of a parameter that is hardly rounding
_SMALL_BYTES = 2**20  # of a buffer that is compared
_BUFFER_TOLERANCE = 1e-3
_ROUNDED = 4  # units in the last place by which a buffer may differ
_LOSS_TOLERANCE = 1e-3  # of the losses of more rows than gradients were compared of
_FEWEST_TELLING = 3  # rows whose gradient shows whether a loss compares rows
_OTHER_LOSS = (
    "the loss of {whole} rows is not the mean of their parts' losses, though the gradients of {compared} rows are equal"
)
_NOT_FINITE = "the gradient of the rows that were checked is not finite"
_WITHOUT_SCALE = (
    f"{_NOT_FINITE}, also without the loss scale: a forward or a backward overflows in half precision, or the rows "
    "hold values that are not finite"
)
_NO_LOSS = "the loss of the rows that were compared is not finite"
_FROM_A_PLACE = (
    "the step takes rows from place {place} of the batch on, and the {compared} rows that were compared end before it. "
    "Where rows are of two kinds, let the batch say of each row which it is"
)
_ALL_SELECTED = (
    "the step selects rows by their values, a fixed number of them or all if there are fewer, and of the {compared} "
    "rows that were compared it took all. Where it is to select among the rows of the whole batch, keep the batch "
    "whole, or select by a threshold"
)
_MAX_HALF_BYTES = 256 * MIB  # of half-precision parameters that are checked in float32
_LARGE = 1e-3  # relative error that is told of where rounding explained it and another comparison met noise
_NOTHING_TO_TRAIN = "the model has no parameter to train"
_ONLY_IN_ORDER = (
    "parts of the batch in its own order have the gradient of the whole, parts of the same rows in another order do "
    "not: the loss, or the model, compares or mixes rows, and either the rows that belong together were in one part, "
    "or the gradients are equal by accident"
)
_PERMUTED = (
    "the step permutes the rows at random (mixup, SMOTE, a codebook that begins with rows of the batch), which parts "
    "of the batch cannot repeat: do that before the split; where only the first forward does it, run one before "
    "training"
)
_UNREPEATABLE = (
    "the same rows, run twice from the same state, have different gradients: the loss depends on something that memkit "
    "does not restore (an iterator or a loader that it draws from, a variable of another program part, the time)"
)
_UNEVEN = (
    "the losses of the parts were divided by numbers that are not in proportion to their sizes (valid tokens, class "
    "weights), and the rows that were checked do not show why"
)

_Held = HeldBuffer | HeldGradient | HeldNumber
_State = tuple[_Held, Tensor]  # with its value at one instant


@dataclass(frozen=True, slots=True)
class Computation:
    """How gradients are computed, as far as the split check needs to know.

    Attributes:
        parameters: Returns the trained parameters.
        is_mixed: Whether forwards run under autocast.
        scale: Returns the factor that keeps gradients in float16 from underflowing.
        adds_up: Whether the losses of the parts add up to the batch's.
        with_hooks: Whether hooks on parameters see the gradient of each part.
        with_sum_hooks: Whether, then, hooks on accumulated gradients see the sum after each part; those of ranks
            belong to their library.
        is_tight: Whether memory is known to be short.
        unchecked: Why a split cannot be checked; empty if it can.
    """

    parameters: Callable[[], Sequence[nn.Parameter]]
    is_mixed: Callable[[], bool] = lambda: False
    scale: Callable[[], float | Tensor] = lambda: 1.0
    adds_up: bool = False
    with_hooks: bool = True
    with_sum_hooks: bool = True
    is_tight: bool = False
    unchecked: str = ""


class Examination:
    """The check of one batch: a series of attempts, to be run by the caller, and the verdict.

    Memory cost: activations of the checked rows; at most 2 kB of host memory per parameter and run; a copy of the
    state that a forward changes. Time cost: for each way that is tried, its rows go forward and backward twice, once
    together and once in parts; more often if the gradients differ.

    Args:
        model: The model, as the user calls it.
        how: How the step computes its gradients; autocast is off for a check in full precision.
        roots: Other objects whose state a run may change: the loss function.
        ways: Ways to split, cheapest first; the next one is tried if one fails or sees no gradient.
        num_parts: Number of parts that the step has.
        is_uneven: Whether losses were divided by something not proportional to the parts' rows; real parts are checked.
        around_whole: Context for runs of the whole, to compare two ways to compute it; no cause is then searched for.
    """

    def __init__(
        self,
        model: nn.Module,
        how: Computation,
        roots: Sequence[object],
        ways: Sequence[Way],
        *,
        num_parts: int = 1,
        is_uneven: bool = False,
        around_whole: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self._around_whole = around_whole
        self._model, self._how = model, how
        self._parameters: list[nn.Parameter] | None = None  # known after the first forward, which may freeze some
        self._ways, self._adds_up = ways, how.adds_up
        # Rounding in half precision hides small differences.
        self._in_full_precision = how.is_mixed() or 0 < _half_bytes(model) <= _MAX_HALF_BYTES
        self._suspects = scan_modules(model)
        self._roots = [model, *roots]
        self._left: tuple[str, ...] = ()  # buffers and statistics with other values after the parts
        self._shown_only: set[str] = set()  # what was found to be no statistic
        self._prepare: Callable[[], None] = _leave
        self._failure, self._is_uneven, self._scale = "", is_uneven, float(how.scale())
        self._not_finite = _NOT_FINITE
        self._kind: tuple[tuple[str, ...], ...] = ()
        self._doubt: SplitVerdict | None = None
        self._num_compared, self._only_losses = 0, False
        self._num_parts, self._has_exact_weights, self._unit = num_parts, False, 1.0
        self._not_reached: list[RowLimit] = []  # that were not reached in the comparison of the most rows
        self._ranked: tuple[CutBatch | None, list[tuple[float, ...]]] = None, []  # of the last comparison
        self._has_count = self._has_weights = False
        self._has_run_out = self._has_branches = self._has_compared = self._was_unequal_sorted = self._were_real = False
        self._with_hooks = self._is_sum_changed = False
        self._are_sums_seen = not (how.with_hooks and how.with_sum_hooks)
        self._rounding: Vector = np.zeros(0)
        self._attempt: CheckAttempt
        self._rehearsal: Rehearsal
        self._where: CutBatch
        self.verdict = SplitVerdict(None, modules=self._suspects, reason="it was not finished")

    def attempts(self) -> Iterator[CheckAttempt]:
        """Yield attempts to be run; sets `verdict` at the end."""
        try:
            yield from self._examine()
        finally:
            self._close()
            # Both refer back to this object, which holds the model: a dropped model is to be freed at once.
            self._prepare, self._ranked = _leave, (None, [])
            vars(self).pop("_attempt", None)
        self.verdict = replace(
            self.verdict,
            has_branches=self._has_branches,
            kind=self._kind,
            has_count=self._has_count,
            has_weights=self._has_weights,
        )

    def _close(self) -> None:
        rehearsal = getattr(self, "_rehearsal", None)
        if rehearsal is not None:
            rehearsal.close()
            self._has_branches = self._has_branches or rehearsal.has_branches

    def _examine(self) -> Attempts:
        verdict = SplitVerdict(None, modules=self._suspects, reason="the batch has a single row")
        is_out_of_memory = False
        for number, way in enumerate(self._ways):
            if way.only_losses or way.is_smaller != is_out_of_memory or not self._is_worthwhile(way, verdict):
                continue
            parts = self._made(way.make)
            if parts is None:
                is_out_of_memory = is_out_of_memory or bool(self._failure)
                continue
            found = yield from self._judge(parts, self._compare_whole_and_parts)
            self._has_compared = True
            self._note_equal(parts, found)
            self._were_real = self._were_real or (way.is_real and found.exact is not None)
            verdict = self._together(verdict, found, way)
            self._was_unequal_sorted = self._was_unequal_sorted or (way.is_sorted and found.loss == "rows")
            is_equal = verdict.exact and not any(each.is_further for each in self._ways[number + 1 :])
            if self._is_decided(verdict, way, is_equal=bool(is_equal)):
                break
            is_out_of_memory = is_out_of_memory or self._attempt.is_out_of_memory
            if self._attempt.is_out_of_memory:
                self._close()
                release_cached_memory()
        if verdict.exact is None and self._failure:
            verdict = SplitVerdict(None, modules=self._suspects, reason=self._failure, is_out_of_memory=True)
        if self._is_uneven and not self._were_real and (verdict.exact or verdict.is_uninformative):
            verdict = SplitVerdict(None, modules=self._suspects, reason=_UNEVEN)
        verdict = self._doubt if verdict.exact and self._doubt is not None else verdict
        if verdict.exact and self._around_whole is None:
            verdict = yield from self._compare_ranked(verdict)
        if verdict.exact and self._around_whole is None:
            verdict = yield from self._look_at_losses(verdict, has_run_out=is_out_of_memory)
            verdict = self._with_sums(self._within_limits(verdict))
        self.verdict = replace(verdict, buffers=self._left) if verdict.exact and self._left else verdict

    def _compare_ranked(self, verdict: SplitVerdict) -> Attempts:
        """Compare rows whose parts differ the most in what an operator selects by, if one selects among all rows.

        The hardest half of four rows, for one, is that of two parts of them two times in three.
        """
        where, all_ranked = self._ranked
        if where is None or not where.has_rows:
            return verdict
        for values in all_ranked:
            order = sorted(range(where.size), key=values.__getitem__, reverse=True)
            way = Way(functools.partial(reordered, where, order), is_sorted=True)
            parts = self._made(way.make)
            if parts is not None and verdict.exact:
                found = yield from self._judge(parts, self._compare_whole_and_parts)
                verdict = self._together(verdict, found, way)
        return verdict

    def _is_worthwhile(self, way: Way, verdict: SplitVerdict) -> bool:
        """Return whether another comparison can tell more than the previous ones."""
        if way.after_errors:
            return verdict.exact is None and self._has_compared and bool(self._attempt.error)
        if way.is_further and self._has_compared:
            return verdict.exact is True or verdict.is_uninformative
        return not (way.is_sorted and self._was_unequal_sorted)

    def _together(self, verdict: SplitVerdict, found: SplitVerdict, way: Way) -> SplitVerdict:
        """Combine the verdicts of two comparisons."""
        if found.exact is None:
            if verdict.exact and (verdict.error or 0.0) > _LARGE and not self._attempt.is_out_of_memory:
                self._doubt = found  # a large error that rounding explained, and a comparison that met noise
            return found if verdict.exact is None else verdict
        if way.is_sorted and verdict.exact and found.loss == "rows":
            return SplitVerdict(None, modules=self._suspects, reason=_ONLY_IN_ORDER)
        if not (found.exact and verdict.exact is False):
            return found
        if way.is_smaller:  # too few rows to overrule a larger comparison
            return verdict
        # Real parts may each have one of the longest rows; those of the next batch need not.
        if self._was_unequal_sorted or (way.is_real and verdict.loss == "rows"):
            return SplitVerdict(None, modules=self._suspects, reason=_ONLY_IN_ORDER)
        return found

    def _is_decided(self, verdict: SplitVerdict, way: Way, *, is_equal: bool) -> bool:
        if verdict.exact and not is_equal:
            return False  # another comparison follows
        if verdict.reason == _ONLY_IN_ORDER:
            return True
        if way.is_real and (verdict.exact is not None or not (self._attempt.error or verdict.is_uninformative)):
            return True
        # A loss that compares rows is refused, so check twice, in the batch's own order. Same for real parts that were
        # seen to be uneven.
        return (is_equal and not self._is_uneven) or (verdict.exact is False and verdict.loss != "rows")

    def _made(self, make: Callable[[], CutBatch | None]) -> CutBatch | None:
        """Build the inputs of a comparison; None if there is no memory for them."""
        outcome = attempt(make)
        if isinstance(outcome, Done):
            return outcome.result
        self._failure = outcome.description
        return None

    def _look_at_losses(self, verdict: SplitVerdict, *, has_run_out: bool) -> Attempts:
        """Compare the losses of more rows, whose gradients do not fit.

        Two rows cannot tell whether a loss compares rows: distances over their sum, for one, are constant then. And few
        rows cannot tell of a limit that more of them reach, such as the number of labeled rows.
        """
        for way in self._ways:
            is_due = way.only_losses and (
                way.is_real or (self._num_compared < _FEWEST_TELLING and (has_run_out or not way.is_smaller))
            )
            parts = self._made(way.make) if is_due else None
            if parts is not None and parts.size > self._num_compared:
                found = yield from self._judge(parts, self._compare_losses)
                if found.exact is False:
                    reason = _OTHER_LOSS.format(whole=parts.size, compared=self._num_compared)
                    return SplitVerdict(None, modules=self._suspects, reason=reason)
                self._note_equal(parts, found)
                verdict = replace(verdict, is_partial=verdict.is_partial or (way.is_real and found.is_out_of_memory))
        return verdict

    def _note_equal(self, parts: CutBatch, found: SplitVerdict) -> None:
        """Note how many rows were found equal, and the limits that they do not reach, though all rows may."""
        if found.exact and parts.has_rows and parts.size > self._num_compared:
            self._num_compared = parts.size
            self._not_reached = [
                each
                for each in (self._rehearsal.limits if parts.num_left_out else ())
                if each.place is None or each.place < parts.size + parts.num_left_out
            ]

    def _within_limits(self, verdict: SplitVerdict) -> SplitVerdict:
        """Return the verdict unless the loss has a limit that the rows that were compared do not reach."""
        if not verdict.exact or not self._not_reached:
            return verdict
        place = self._not_reached[0].place
        reason = (_ALL_SELECTED if place is None else _FROM_A_PLACE).format(place=place, compared=self._num_compared)
        return SplitVerdict(None, modules=self._suspects, reason=reason)

    def _with_sums(self, verdict: SplitVerdict) -> SplitVerdict:
        """Return the verdict unless hooks change the sum so far, where the gradients of the parts add up."""
        return SplitVerdict(exact=False, loss="hooks") if verdict.exact and self._is_sum_changed else verdict

    def _judge(self, parts: CutBatch, compare: Callable[[CutBatch], Attempts]) -> Attempts:
        """Compare one way to split; in the model's own precision if full precision is not possible."""
        if self._in_full_precision:
            with contextlib.ExitStack() as stack:
                in_float32 = self._made(lambda: stack.enter_context(_in_float32(self._model, parts)))
                if in_float32 is not None:
                    stack.callback(self._close)  # while the parameters are those that it knows
                    verdict = yield from compare(in_float32)
                    failed = verdict.exact is None and not verdict.is_uninformative
                    if not failed or self._attempt.is_between_ranks or self._attempt.is_out_of_memory:
                        return verdict
            self._in_full_precision = False  # no memory, or the model needs its own precision: it casts to half itself
        return (yield from compare(parts))

    def _compare_losses(self, parts: CutBatch) -> Attempts:
        """Run whole and parts without a graph; the verdict is that of their losses."""
        self._close()
        self._rehearsal, self._where, self._prepare = self._new_rehearsal(), parts, _leave
        self._only_losses = True
        try:
            whole = yield from self._run_whole()
            found = None if whole is None else (yield from self._run_parts())
            if found is None or not whole.count or not math.isfinite(whole.loss):
                return self._not_checked()
            _, separate = found
            if self._has_equal_loss(whole, separate) or self._rehearsal.has_unmatched_draws:
                return SplitVerdict(exact=True)
            independent = yield from self._run_apart()  # a loss that counts its calls is judged by its gradient
            is_equal = independent is None or self._has_equal_loss(whole, independent[0])
            return SplitVerdict(exact=is_equal, loss=None if is_equal else "rows")
        finally:
            self._only_losses = False

    def _has_equal_loss(self, whole: PartGradient, parts: list[PartGradient]) -> bool:
        scale = max(abs(each.mean_loss) for each in (whole, *parts) if each.count)
        return abs(whole.mean_loss - summed(parts).mean_loss) <= _LOSS_TOLERANCE * scale

    def _compare_whole_and_parts(self, parts: CutBatch) -> Attempts:
        self._has_run_out = False
        verdict = yield from self._compare(parts)
        is_overflow = verdict.reason == self._not_finite or verdict.error == math.inf
        if is_overflow and self._scale != 1.0 and not self._in_full_precision:
            # A scaler that is still looking for its scale begins with one that is too large.
            self._scale, self._not_finite = 1.0, _WITHOUT_SCALE
            verdict = yield from self._compare(parts)
        if verdict.exact is False and self._has_run_out:  # a run that identifies rounding, noise or a cause is missing
            reason = "memory ran out while the cause of a difference was searched for"
            return SplitVerdict(None, modules=self._suspects, reason=reason, is_out_of_memory=True)
        return verdict

    def _compare(self, parts: CutBatch) -> Attempts:
        self._close()
        self._rehearsal, self._where, self._prepare = self._new_rehearsal(), parts, _leave
        self._has_exact_weights = False
        whole = yield from self._run_whole()
        if whole is None:
            return self._not_checked()
        if not whole.count:
            return self._uninformative("the count of the rows that were checked is zero")
        if not whole.is_finite:
            return (yield from self._judge_not_finite())
        self._ranked = parts, list(self._rehearsal.ranked)
        after_whole = self._written_state()
        found = yield from self._run_parts()
        if not whole.norm and (found is None or not found[0].norm):
            return self._uninformative("the gradient of the rows that were checked is zero")
        if found is None:
            if self._suspects and not self._attempt.is_out_of_memory:  # such as BatchNorm, which refuses a single row
                return SplitVerdict(exact=False, modules=self._suspects)
            return self._not_checked()
        together, separate = found
        yield from self._note_left(after_whole)
        if not self._is_close(*errors_of(whole, together)) and (yield from self._is_unrepeatable(whole)):
            return self._not_checked(_UNREPEATABLE)
        error, is_equal = yield from self._weigh(whole, together)
        if self._around_whole is not None:
            return SplitVerdict(exact=is_equal, error=error)
        if is_equal:
            return (yield from self._judge_losses(whole, separate, error))
        return (yield from self._judge_unequal(parts, whole, separate, error))

    def _written_state(self) -> list[_State]:
        """Return the small state beside the gradients compared that the last runs have written, copied.

        That is: buffers, also those of a criterion outside of the model; statistics that are kept elsewhere; and
        gradients of others, such as a critic's where loss_fn runs its backward too.
        """
        own = set(map(id, self._trained()))
        written: list[_Held] = [*self._rehearsal.changed_buffers()]
        written += self._rehearsal.changed_numbers()
        written += [each for each in self._rehearsal.changed_gradients() if id(each.parameter) not in own]
        return _copied(written)

    def _note_left(self, after_whole: Sequence[_State]) -> Attempts:
        """Note the state that the parts leave with other values than the whole.

        Outside of buffers stand also values that were last seen and are only displayed (a loss, a map of attention),
        and times. So of these only a statistic counts: one that depends on the parts before the last one, and that the
        same rows, run again, leave as it was.
        """
        if self._left:
            return
        differing = [(each, then) for each, then in after_whole if not _is_about(each.now, then)]
        numbers: dict[_Held, Tensor] = {
            each: then
            for each, then in differing
            if isinstance(each, HeldNumber) and each.shown not in self._shown_only
        }
        self._shown_only |= {each.shown for each in numbers}
        after_parts = dict(_copied(numbers))
        # A cache for the rows of a run has their shape.
        numbers = {each: numbers[each] for each, now in after_parts.items() if now.shape == numbers[each].shape}
        if numbers:
            yield from self._run_last_apart()
            numbers = {each: then for each, then in numbers.items() if not _is_about(each.now, after_parts[each])}
        if numbers:
            yield from self._run_whole()
            numbers = {each: then for each, then in numbers.items() if _is_about(each.now, then)}
        left = [each for each, _ in differing if not isinstance(each, HeldNumber) or each in numbers]
        self._left = tuple(dict.fromkeys(each.shown for each in left))

    def _judge_losses(self, whole: PartGradient, separate: list[PartGradient], error: float) -> Attempts:
        """If gradients are equal but losses are not, find out whether forwards change state.

        A loss may count its calls (a weight that warms up) without affecting the gradient of these rows; a later
        step's would be. State without effect, such as a value that is only displayed, is ignored.
        """
        if not math.isfinite(whole.loss):
            return SplitVerdict(None, modules=self._suspects, error=error, reason=_NO_LOSS)
        if not all(math.isfinite(each.loss) for each in separate):
            reason = "the loss of a part is not finite, though that of its rows among others is"
            return SplitVerdict(None, modules=self._suspects, error=error, reason=reason)
        differs = abs(whole.mean_loss - summed(separate).mean_loss)
        if not differs > _TOLERANCE * abs(whole.mean_loss):
            return SplitVerdict(exact=True, error=error)
        independent = yield from self._run_apart()
        if independent is None:
            return SplitVerdict(exact=True, error=error)
        parts, names = independent
        if abs(whole.mean_loss - summed(parts).mean_loss) > differs / TIMES_ROUNDING:
            return SplitVerdict(exact=True, error=error)
        return SplitVerdict(exact=False, error=error, state=names, loss="state")

    def _judge_unequal(
        self, parts: CutBatch, whole: PartGradient, separate: list[PartGradient], error: float
    ) -> Attempts:
        if (yield from self._is_noise(whole)):
            # Row-by-row draws match the whole's if the parts continue the random stream.
            for which in ("host", "all"):
                found = yield from self._run_parts(random_goes_on=which)
                if found is not None and (yield from self._weigh(whole, found[0]))[1]:
                    return SplitVerdict(exact=True, error=error)
            return (yield from self._judge_without_noise(parts))
        return (yield from self._explain(whole, separate, error))

    # ------------------------------------------------------------------ runs

    def _new_rehearsal(self) -> Rehearsal:
        # A forward creates more bytes than it holds at once, so all of the available memory is a cautious limit.
        return Rehearsal(self._roots, room_bytes=host_memory().available_bytes)

    def _run(self, part: Any, size: int, span: Span | None, *, is_whole: bool = False, **how: Any) -> Attempts:
        """Run the user's code once; return its gradient, or None if it failed."""

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            in_whole = self._around_whole() if is_whole and self._around_whole else contextlib.nullcontext()
            grad_mode = torch.no_grad() if self._only_losses else contextlib.nullcontext()
            with self._rehearsal.run(span, **how), without_buffer_sync(self._model), in_whole, grad_mode:
                if not how.get("goes_on"):
                    self._prepare()
                yield

        take = functools.partial(self._take, is_whole=is_whole)
        self._attempt = CheckAttempt(part, size, take, around(), in_full_precision=self._in_full_precision)
        yield self._attempt
        self._has_run_out = self._has_run_out or self._attempt.is_out_of_memory
        return self._attempt.gradient if not self._attempt.error else None

    def _run_whole(self, **how: Any) -> Attempts:
        size = self._where.size
        span = None if how.get("other_noise") else Span(0, size, size)
        return (yield from self._run(self._where.whole, size, span, is_whole=True, **how))

    def _span(self, start: int, size: int, number: int) -> Span:
        return Span(start, start + size, self._where.size) if self._where.has_rows else Span(number=number)

    def _run_parts(self, **how: Any) -> Attempts:
        """Run the parts one after the other, as a step does; return their sum and the single gradients."""
        separate: list[PartGradient] = []
        total, start = None, 0
        for number, (part, size) in enumerate(self._where.parts):
            span = self._span(start, size, number)
            follows = {"goes_on": True, **how} if number else {}
            gradient = yield from self._run(part, size, span, **follows)
            if gradient is None:
                return None
            separate.append(gradient)
            total = gradient if total is None else total + gradient
            start += size
        return total, separate

    def _run_apart(self) -> Attempts:
        """Run each part from the batch's initial state; return their gradients and the names of changed state."""
        gradients, start = list[PartGradient](), 0
        names: tuple[str, ...] = ()
        for number, (part, size) in enumerate(self._where.parts):
            gradient = yield from self._run(part, size, self._span(start, size, number))
            if gradient is None:
                return None
            names = names or tuple(self._rehearsal.changed()[:5])
            gradients.append(gradient)
            start += size
        return gradients, names

    def _run_last_apart(self) -> Attempts:
        """Run the last part from the batch's initial state."""
        number = len(self._where.parts) - 1
        part, size = self._where.parts[-1]
        return (yield from self._run(part, size, self._span(self._where.size - size, size, number)))

    def _take(self, loss: Loss, size: int, *, is_whole: bool) -> PartGradient:
        """Run backward and return its gradient, sketching each parameter's as soon as backward has it."""
        self._rehearsal.end_forward()
        parameters, self._has_count = self._trained(), loss.count is not None
        adds_up = self._adds_up and loss.count is None
        if loss.count is None:
            slope, count = (1.0, 1.0) if adds_up else (float(size), float(size))
        else:
            count = float(loss.count)
            slope = count if loss.reduction == "mean" else 1.0
        if not adds_up:
            unit = self._unit_of(count, is_whole=is_whole)
            slope, count = slope / unit, count / unit
        root = loss.value.reshape(())
        if self._only_losses:
            return PartGradient([], count, float(root.detach().real) * slope if slope else 0.0, adds_up)
        if not self._kind:
            terms = divisors(loss.value)
            self._kind, self._has_weights = tuple(each.operators for each in terms), have_unequal_weights(terms)
        if not count and not (slope and root.requires_grad):  # the mean, or the sum, of nothing
            return PartGradient([None] * len(parameters), 0.0, float(root.detach().real) if slope else 0.0)
        # Those that a loss freezes itself, such as those of a GAN's other network, get no gradient.
        places = [index for index, each in enumerate(parameters) if each.requires_grad]
        wanted = [parameters[index] for index in places]
        if not wanted:
            raise InputError(
                "loss_fn",
                got=_NOTHING_TO_TRAIN,
                expected="parameters with requires_grad=True after the forward",
                fix="unfreeze them before: model.requires_grad_(True).",
            )
        if not root.requires_grad:
            raise InputError(
                "loss_fn",
                got="a loss without a graph",
                expected="a loss computed with gradients enabled",
                fix="do not detach the loss, and do not compute it under torch.no_grad().",
            )
        scale = 1.0 if self._in_full_precision else self._scale
        slopes = torch.full_like(root, slope, dtype=torch.float32 if root.dtype in _HALF else root.dtype) * scale
        slopes, count = slopes.to(root.dtype), count * scale
        value = float((root.detach() * slopes).real)
        vectors: list[Vector | None] = [None] * len(parameters)
        look = functools.partial(self._look_at_sums, self._scale / count if count else 0.0)
        if has_reentrant_checkpoint(root):
            found = sketches_of_backward(root, slopes, wanted, look)
        else:
            with contextlib.nullcontext() if self._with_hooks else without_hooks(wanted):
                found = sketches(root, slopes, wanted, look)
        self._are_sums_seen = True
        for index, vector in zip(places, found, strict=True):
            vectors[index] = vector
        return PartGradient(vectors, count, value, adds_up)

    def _look_at_sums(self, factor: float, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Note whether hooks on an accumulated gradient make something else of parts than of their sum.

        A mask, and a projection, do not. The parts are multiples of the gradient of the rows that run first.
        """
        hooks = [] if self._are_sums_seen or self._is_sum_changed else hooks_of_others(parameter)
        if not hooks:
            return
        gradient = gradient.detach() * factor
        gradient = gradient if gradient.layout is torch.strided else gradient.coalesce()
        part = gradient.clone()
        entries = part if part.layout is torch.strided else part.values()
        # Entries not all alike: a hook that only rescales would leave a multiple as it is.
        entries *= 2 - 3 * (torch.arange(entries.numel(), device=part.device) % 2).view(entries.shape)
        once = _after_hooks(hooks, parameter, [gradient])
        twice = _after_hooks(hooks, parameter, [part, gradient - part])
        limit = gradient.norm() * (_CLEAR if gradient.dtype in _HALF else _TOLERANCE)
        self._is_sum_changed = once is None or twice is None or bool((once - twice).norm() > limit)

    def _unit_of(self, weight: float, *, is_whole: bool) -> float:
        """Return what a run's weight is divided by, so that its backward starts at the scale of the step's.

        A whole batch's mean has a slope of about 1, and each part of it its share. Only where counts weigh the parts,
        the step has to begin without knowing their total, so its parts start at up to as many times their share as
        there are parts: a backward that is not linear shows then. Powers of two round nothing.
        """
        if is_whole:
            self._unit = _power_of_two(weight)
        is_share = is_whole or not self._has_count or self._has_exact_weights
        return self._unit if is_share else self._unit / _power_of_two(self._num_parts)

    def _trained(self) -> list[nn.Parameter]:
        """Return the parameters that are compared: those that are trained after the first forward."""
        if self._parameters is None:
            self._parameters = list(self._how.parameters())
            self._with_hooks = self._how.with_hooks and any(hooks_of(each) for each in self._parameters)
        return self._parameters

    # ------------------------------------------------------------------ judgment

    def _weigh(self, whole: PartGradient, parts: PartGradient) -> Attempts:
        """Return the largest relative error of a parameter, and whether rounding explains all of them."""
        errors, norms = errors_of(whole, parts)
        error = float(np.max(errors / np.where(norms > 0, norms, 1.0), initial=0.0)) if len(errors) else 0.0
        if not np.isfinite(errors).all():
            return math.inf, False
        if self._is_close(errors, norms):
            return error, True
        limits = self._limits()
        generator = torch.Generator(device_of(self._model)).manual_seed(0)
        self._rounding = np.zeros(len(errors))
        for _ in range(_MOST_ROUNDED):
            rounded = yield from self._run_whole(rounding=generator)
            if rounded is None or not rounded.is_finite:
                return error, False
            self._rounding = np.maximum(self._rounding, errors_of(whole, rounded)[0])
            most = np.maximum(limits * norms, TIMES_ROUNDING * self._rounding)
            if (errors <= most).all():
                return error, True
            if ((errors > most) & (errors > _CLEAR * norms)).any():
                break  # otherwise a gradient of few elements may have rounded alike by chance
        return error, False

    def _limits(self) -> Vector:
        """Return the relative errors of the parameters that pass without further runs."""
        # A sum of many terms is rounded at each of them, and the parts add in a different order.
        of_sums = math.sqrt(self._rehearsal.most_elements) * torch.finfo(torch.float32).eps
        return np.array([_QUICK_TOLERANCE.get(each.dtype, max(_TOLERANCE, of_sums)) for each in self._trained()])

    def _is_close(self, errors: Vector, norms: Vector, *, times: float = 1.0) -> bool:
        return bool((errors <= times * self._limits() * norms).all())

    def _is_unrepeatable(self, whole: PartGradient) -> Attempts:
        """Return whether the same rows, run again, have another gradient: its difference is not rounding's."""
        again = yield from self._run_whole()
        if again is None or not again.is_finite:
            return False
        return not self._is_close(*errors_of(whole, again), times=TIMES_ROUNDING)

    def _is_noise(self, whole: PartGradient) -> Attempts:
        """Return whether random draws that could not be repeated per row affect the gradient."""
        other = yield from self._run_whole(other_noise=True)
        if other is None:
            return False
        errors, norms = errors_of(whole, other)
        if (errors <= _TOLERANCE * norms).all():
            return False
        rehearsal = self._rehearsal
        if rehearsal.has_unmatched_draws or rehearsal.has_several_per_row or rehearsal.has_fewer_draws:
            return True
        # All of torch's draws were repeated. Without them, do NumPy's and Python's still change the gradient?
        hosts = yield from self._run(
            self._where.whole, self._where.size, Span(0, self._where.size, self._where.size), other_host_noise=True
        )
        if hosts is None:
            return False
        errors, norms = errors_of(whole, hosts)
        return bool((errors > _TOLERANCE * norms).any())

    def _judge_without_noise(self, parts: CutBatch) -> Attempts:
        """Compare with dropout disabled, for when its draws cannot be repeated row by row."""
        reason = "the gradient depends on random numbers that cannot be repeated for each row"
        self._rehearsal.close()
        self._rehearsal, self._where = self._new_rehearsal(), parts
        self._prepare = functools.partial(silence, self._model)
        whole = yield from self._run_whole()
        if whole is None or not whole.is_finite or not whole.norm:
            return self._not_checked(reason)
        if (yield from self._is_noise(whole)):
            return self._not_checked(reason)
        found = yield from self._run_parts()
        if found is None:
            return self._not_checked()
        together, separate = found
        error, is_equal = yield from self._weigh(whole, together)
        if is_equal:
            return SplitVerdict(exact=True, error=error)
        if (yield from self._is_noise(whole)):  # of draws other than dropout's, which only the parts' runs show
            return self._not_checked(reason)
        return (yield from self._explain(whole, separate, error))

    def _judge_not_finite(self) -> Attempts:
        """If the whole's gradient is not finite, accept parts that are not finite either."""
        found = yield from self._run_parts()
        if found is not None and found[0].is_finite:
            return SplitVerdict(exact=False, error=math.inf, loss="rows")
        return self._uninformative(self._not_finite)

    def _explain(self, whole: PartGradient, in_order: list[PartGradient], error: float) -> Attempts:
        """Find out whether the parts differ only because counts weigh them; if not, find the cause."""
        if self._has_count and not self._has_exact_weights:
            self._has_exact_weights = True  # for the other causes, too
            again = yield from self._run_parts()
            if again is not None and (yield from self._weigh(whole, again[0]))[1]:
                return SplitVerdict(exact=False, error=error, loss="scale")
            in_order = in_order if again is None else again[1]
        return (yield from self._find_cause(whole, in_order, error))

    def _find_cause(self, whole: PartGradient, in_order: list[PartGradient], error: float) -> Attempts:
        """Find the cause by elimination."""
        prepare = self._prepare
        found = yield from self._run_apart()
        independent, names = found or (in_order, ())
        is_equal = (yield from self._weigh(whole, summed(independent)))[1]
        if is_equal:
            return SplitVerdict(exact=False, error=error, state=names, loss="state")
        if self._with_hooks:
            self._with_hooks = False
            if (yield from self._is_equal_again()):
                return SplitVerdict(exact=False, error=error, loss="hooks")
        other = find_weights(whole, independent, self._rounding)
        if other == "weights" and self._where.has_rows and is_one_sided(independent):
            self._where = interleaved(self._where)
            mixed, its_parts = yield from self._again()
            if mixed is not None and its_parts is not None:
                other = find_weights(mixed, its_parts, self._rounding) or other
        if other:
            return SplitVerdict(exact=False, error=error, modules=self._suspects, loss=other)
        if self._suspects and (found := (yield from self._judge_frozen(error))) is not None:
            return found
        if names := (yield from self._find_first_values()):
            return SplitVerdict(exact=False, error=error, modules=self._suspects, state=names, loss="rows")
        return (yield from self._find_modules(prepare, error))

    def _find_modules(self, prepare: Callable[[], None], error: float) -> Attempts:
        """Return a verdict that names the modules at fault beside the suspects, or else of rows that are compared."""
        if outside := (yield from self._find_outside(prepare)):
            return SplitVerdict(exact=False, error=error, modules=(*self._suspects, *outside))
        unknown = yield from self._find_by_mode(prepare)
        if unknown:
            names = tuple(name or type(self._model).__name__ for name in unknown)
            mixing = tuple(name for name, module in zip(names, unknown.values(), strict=True) if not is_norm(module))
            return SplitVerdict(exact=False, error=error, modules=(*self._suspects, *names), mixing=mixing)
        return SplitVerdict(exact=False, error=error, modules=self._suspects, loss="rows")

    def _judge_frozen(self, error: float) -> Attempts:
        """Return a verdict if freezing batch norms explains everything, or everything but weights; else None."""
        prepare = self._prepare
        self._prepare = freezing([self._model.get_submodule(name) for name in self._suspects], prepare)
        whole, parts = yield from self._again()
        if whole is None or parts is None:
            return None
        if (yield from self._weigh(whole, summed(parts)))[1]:
            return SplitVerdict(exact=False, error=error, modules=self._suspects)
        other = find_weights(whole, parts, self._rounding)
        return other and SplitVerdict(exact=False, error=error, modules=self._suspects, loss=other)

    def _find_first_values(self) -> Attempts:
        """Name what the first forward sets from its rows, if whole and parts are equal after it; () if there is none.

        A layer that sets its parameters so, as Glow's ActNorm, does it in evaluation mode too.
        """
        before_first = self._rehearsal
        with before_first.run():
            self._prepare()
        others = set(before_first.changed())
        if (yield from self._run_whole()) is None or not (names := before_first.changed()):
            return ()
        self._rehearsal = self._new_rehearsal()  # whose initial state is that after the first forward
        try:
            is_equal = yield from self._is_equal_again()
            others |= set(self._rehearsal.changed())  # by each forward
        finally:
            self._rehearsal.close()
            self._rehearsal = before_first
        return tuple(each for each in names if each not in others)[:5] if is_equal else ()

    def _again(self) -> Attempts:
        """Run whole and parts again, each from the initial state."""
        whole = yield from self._run_whole()
        if whole is None or not whole.norm:
            return None, None
        found = yield from self._run_apart()
        return whole, found and found[0]

    def _find_outside(self, prepare: Callable[[], None]) -> Attempts:
        """Name batch norms of other modules, such as a generator that the loss function runs, if they mix the rows."""
        own, others = set(self._model.modules()), self._rehearsal.modules() - set(self._model.modules())
        inner = {child for each in others for child in each.children()}
        norms = {
            f"{path} of {type(top).__name__}" if path else type(top).__name__: module
            for top in others - inner
            for path, module in top.named_modules()
            if module not in own and normalizes_over_rows(module)
        }
        self._prepare = freezing(list(norms.values()), prepare)
        return sorted(norms) if norms and (yield from self._is_equal_again()) else []

    def _find_by_mode(self, prepare: Callable[[], None]) -> Attempts:
        """Return, by name, modules that mix rows only in training mode and that the scan missed.

        One class at a time is put back into training mode, so a deep model takes no more runs than a shallow one.
        """
        by_class: dict[type[nn.Module], list[str]] = {}
        for name, module in self._model.named_modules():
            if module.training:
                by_class.setdefault(type(module), []).append(name)

        def only(names: Sequence[str]) -> Callable[[], None]:
            def set_modes() -> None:
                prepare()
                for name, module in self._model.named_modules():
                    module.training = module.training and name in names

            return set_modes

        self._prepare = only(())
        if not (yield from self._is_equal_again()):
            return {}
        found: dict[str, nn.Module] = {}
        for names in by_class.values():
            self._prepare = only(names)
            if not (yield from self._is_equal_again()):
                found.update((name, self._model.get_submodule(name)) for name in names)
        return found

    def _is_equal_again(self) -> Attempts:
        whole, parts = yield from self._again()
        if whole is None or parts is None:
            return False
        return (yield from self._weigh(whole, summed(parts)))[1]

    def _not_checked(self, reason: str = "") -> SplitVerdict:
        is_out_of_memory = not reason and self._attempt.is_out_of_memory
        is_permuted = not reason and self._rehearsal.has_permutations and not is_out_of_memory
        reason = f"{_PERMUTED} ({self._attempt.error})" if is_permuted else reason or self._attempt.error
        return SplitVerdict(
            None,
            modules=self._suspects,
            reason=reason,
            is_out_of_memory=is_out_of_memory,
            is_permuted=is_permuted,
        )

    def _uninformative(self, reason: str) -> SplitVerdict:
        return SplitVerdict(None, modules=self._suspects, reason=reason, is_uninformative=True)


@guided(words={"num_parts": "accumulation_steps num_microbatches"})
def check_split(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    parameters: Sequence[nn.Parameter] | None = None,
    split_fn: SplitFn | None = None,
    num_parts: int = 2,
) -> SplitVerdict:
    """Compare the gradient of a few rows together with that of the same rows in parts.

    The user's own model and loss function run, in place and in their own precision, without side effects: parameters,
    gradients, buffers, attributes, modes and random state are restored. Random draws are the same for the whole and
    its parts, row by row. Only effects outside of Python objects, such as lines in a log, cannot be undone.

    Args:
        model: The model, on any device.
        batch: A batch with rows in dimension 0 of its tensors, or one that ``split_fn`` splits.
        loss_fn: ``loss_fn(model, micro_batch)`` returns the mean loss over rows, or a `Loss`.
        parameters: The parameters to compare; None uses the model's.
        split_fn: ``split_fn(batch, n)`` returns a list of about n parts.
        num_parts: Number of parts that training splits the batch into.

    Returns:
        The verdict; ``exact`` is None if the check was not possible, and ``reason`` says why.

    Raises:
        InputTypeError: ``model`` is not a module, ``loss_fn`` or ``split_fn`` is not a function, ``parameters`` holds
            something else, or an argument does not exist.
        ConfigError: ``num_parts`` is not an int of 1 or more, or ``parameters`` is not a list.

    Memory cost: activations of at most 32 rows, instead of a step's, or of two parts without a graph. Time cost: 8 rows
    go forward and backward twice, four times in a larger batch, then parts that are within 32 rows together; two parts
    go forward twice; more often if the gradients differ.

    Example:
        >>> import torch
        >>> from memkit.train.split_check import check_split
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        >>> verdict = check_split(model, torch.randn(16, 4), lambda model, x: model(x).pow(3).mean())
        >>> verdict.exact, verdict.modules
        (False, ('1',))
    """
    Checker("check_split").instance(model, nn.Module, "the model first", "write check_split(model, batch, loss_fn)")
    check_loss_fn(loss_fn, batch, call="check_split", before="model, ")
    check = Checker("check_split(...)")
    check.whole("num_parts", num_parts, 1)
    if split_fn is not None:
        check.function("split_fn", split_fn)
    given = list(model.parameters()) if parameters is None else _checked_parameters(check, parameters)
    if not given:
        return SplitVerdict(None, modules=scan_modules(model), reason=_NOTHING_TO_TRAIN)
    try:
        marked = batch if split_fn is not None else mark_samples(batch)
        ways = ways_to_cut(marked, num_parts=num_parts, split_fn=split_fn, adds_parts=True)
    except InputError as error:
        return SplitVerdict(None, modules=scan_modules(model), reason=str(error))
    how = Computation(lambda: [each for each in given if each.requires_grad])
    examination = Examination(model, how, [loss_fn], ways, num_parts=num_parts)
    for run in examination.attempts():
        run.part = unmark_samples(run.part)
        with run as micro:
            run.backward(call_loss_fn(loss_fn, model, micro, call="loss_fn"))
    return examination.verdict


def _checked_parameters(check: Checker, parameters: Any) -> list[nn.Parameter]:
    found = list(check.series("parameters", parameters))
    for each in found:
        if not isinstance(each, Tensor) or not each.is_leaf:  # one parameter alone has rows, which are no leaves
            got = f"parameters=a {type(parameters).__name__} of {type(each).__name__}"
            fix = "write check_split(model, batch, loss_fn, parameters=model.parameters())."
            raise InputTypeError(check.call, got=got, expected="a list of parameters", fix=fix)
    return found


_HALF = (torch.float16, torch.bfloat16)


def _half_tensors(model: nn.Module) -> list[Tensor]:
    return [each for each in (*model.parameters(), *model.buffers()) if each.dtype in _HALF]


def _half_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in _half_tensors(model))


@contextlib.contextmanager
def _in_float32(model: nn.Module, parts: CutBatch) -> Iterator[CutBatch]:
    """Run a model with half-precision parameters and its batch in float32."""
    before = [(each, each.data, gradient_dtype(each), each.grad) for each in _half_tensors(model)]

    def widen(batch: Any) -> Any:
        return map_leaves(
            lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf, batch
        )

    try:
        for tensor, data, *_ in before:
            tensor.data, tensor.grad = data.float(), None
            assign_gradient_dtype(tensor, torch.float32)  # sums in float32 have fixed it to the parameter's own
        if before:
            parts = replace(
                parts, whole=widen(parts.whole), parts=tuple((widen(part), size) for part, size in parts.parts)
            )
        yield parts
    finally:
        for tensor, data, dtype, gradient in before:
            tensor.data = data
            assign_gradient_dtype(tensor, dtype)
            tensor.grad = gradient


@torch.no_grad()
def _after_hooks(
    hooks: Sequence[Callable[..., object]], parameter: nn.Parameter, parts: Sequence[Tensor]
) -> Tensor | None:
    """Return what hooks on an accumulated gradient leave of the sum of the parts, running after each."""
    before = parameter.grad
    try:
        parameter.grad = None
        for each in parts:
            parameter.grad = each.clone() if parameter.grad is None else parameter.grad + each
            for hook in hooks:
                hook(parameter)
        return parameter.grad
    finally:
        parameter.grad = before


def _power_of_two(weight: float) -> float:
    return 2.0 ** math.ceil(math.log2(weight)) if 0 < weight < math.inf else 1.0


def _copied(state: Iterable[_Held]) -> list[_State]:
    """Return those of the state that are small tensors of floating-point numbers now, with copies of these."""
    values = [(each, each.now) for each in state]
    return [
        (each, now.detach().clone())
        for each, now in values
        if now is not None and now.is_floating_point() and now.nbytes <= _SMALL_BYTES
    ]


def _is_about(now: Tensor | None, then: Tensor) -> bool:
    if now is None or now.shape != then.shape:
        return False
    rounding = _ROUNDED * torch.finfo(then.dtype).eps  # outside of buffers, half precision stays so in float32
    return torch.allclose(now.to(then), then, rtol=max(_BUFFER_TOLERANCE, rounding), atol=1e-6, equal_nan=True)


def _leave() -> None:
    """Do nothing to the model."""
