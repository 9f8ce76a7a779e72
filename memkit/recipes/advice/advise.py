"""`advise`: changes that reduce a step's memory, predicted without data, measured on copies, reported with both."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit._advice.suggest import Standing, rank
from memkit._core.errors import ConfigError, InputError, MemkitError, MemkitWarning, warn_user
from memkit._core.settings import Checker
from memkit._core.units import format_bytes
from memkit._core.words import guided
from memkit._gradients.loss import LossFn
from memkit._machine.devices import host_memory
from memkit._recovery.attempt import Done, OutOfMemory, attempt
from memkit._simulation.simulation import Gpu, Host, MakeOptimizer, Place, check_model
from memkit._simulation.tensors import check_selected_fraction
from memkit._torch.pytree import tree_leaves
from memkit.predict.estimate import warn_of_doubts
from memkit.predict.gpus import GPU, CapacityLike, capacity_bytes, look_up
from memkit.predict.words import ADVICE_WORDS
from memkit.recipes.advice.record import TOLERANCE, Advice, AdviceTable
from memkit.recipes.advice.remedies import AppliedRemedy, Case, find_remedies, in_turn, no_change, takes_foreach
from memkit.recipes.advice.step import AdvicePrecision, Observation, RealHost, StepChange, Training, observe_step
from memkit.train.models import unwrap_model
from memkit.train.split import SplitFn, check_batch, count_rows
from memkit.train.split_check import check_split

_WORTH_TELLING = 0.01  # of the peak
_WORTH_A_PAIR = 0.95  # of the smallest peak with one remedy
_PAIRED = 3  # of the best single remedies, tried pairwise
_LONGEST_REASON = 200  # characters
_MOST_ROUNDING = 0.5  # of the largest value, by which results of a change that rounds may differ
_FITS: dict[str | None, bool] = {"fits": True, "does not fit": False}
_SHARE_OF_HOST = 0.8  # of the available memory, for a run and the results that are kept


@guided(words=ADVICE_WORDS)
def advise(
    model: nn.Module,
    sample_batch: Any,
    loss_fn: LossFn,
    *,
    optimizer: str | MakeOptimizer | Optimizer | Sequence[Optimizer] = "adamw",
    precision: AdvicePrecision = None,
    target: str | GPU = "cpu",
    budget: CapacityLike | None = None,
    changes_model: bool = False,
    split_fn: SplitFn | None = None,
    fewer_edges: Callable[[Any], Any] | None = None,
    selected_fraction: float | None = None,
) -> AdviceTable:
    """Find changes that reduce a training step's memory, each with a predicted and a measured saving.

    The step is run on tensors without data, and its peak broken down. Each remedy that addresses a holder at the peak
    is applied, and the changed step is run again without data: that is the prediction. Then the plain and the changed
    step run for real, on copies in CPU memory; the allocator's events are recorded, operations counted, and gradients
    compared. A remedy is reported as failed if prediction and measurement differ by more than 2%, and as not run if it
    cannot run here.

    Afterwards model, optimizer, batch and random state are restored, even after an error. During the call the model
    holds stand-ins; do not use it in another thread.

    Args:
        model: The model.
        sample_batch: The batch of one optimizer step, as for `estimate_memory_usage`.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss over the rows, or a `Loss`.
        optimizer: As for `estimate_memory_usage`.
        precision: The precision that the plain step already uses.
        target: ``"cpu"``, or a GPU, by its name or as a `GPU`, for which figures are then predicted; measurements are
            always on the CPU.
        budget: Bytes, text such as ``"8GiB"``, or a GPU; None for the memory of the target, if that is a GPU.
        changes_model: Whether to suggest a smaller model too, which would have to be retrained.
        split_fn: Splits a packed batch, as for `MemoryEfficientTrainingWrapper`; None splits rows.
        fewer_edges: Removes edges from a batch, for example with `sample_edges`, and returns the new batch.
        selected_fraction: As for `estimate_memory_usage`.

    Returns:
        The advice, sorted by saving relative to the added operations; failed and not run last.

    Raises:
        InputTypeError: ``model`` is not a module, ``sample_batch`` no batch, the loss is not a tensor, or ``target`` or
            ``budget`` is not a GPU.
        InputError: A size depends on data; ``target`` is an unknown GPU; ``budget`` is neither a size nor a GPU.
        ConfigError: An option is invalid.

    Warns:
        MemkitWarning: The plain step's memory may depend on guessed values; or the batch cannot be cut.

    Memory cost: for the real runs, on the host, the step's own peak plus five times the parameters.

    Time cost: for each remedy, two steps without data and two real, recorded ones.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
        >>> batch = torch.randn(1024, 64), torch.randn(1024, 1)
        >>> advice = mk.advise(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
        >>> best = advice[0]
        >>> best.name, best.status, best.predicted_saved_bytes == best.measured_saved_bytes
        ('4 micro-batches', 'verified', True)
    """
    check_model("advise", model, sample_batch, optimizer)
    check_batch(sample_batch, call="advise", written="advise(model, {}, loss_fn)")
    if precision not in (None, "bf16-mixed"):
        is_mixed = "16" in str(precision)
        raise ConfigError(
            f"advise(..., precision={precision!r})",
            got=repr(precision),
            expected="None or 'bf16-mixed'",
            fix="write precision='bf16-mixed'." if is_mixed else "write precision=None: the step uses no autocast.",
        )
    check_selected_fraction("advise(...)", selected_fraction)
    for name, given in (("split_fn", split_fn), ("fewer_edges", fewer_edges)):
        if given is not None:
            Checker("advise").function(name, given)
    training = Training(model, sample_batch, loss_fn, optimizer, precision, selected_fraction, split_fn)
    trial = _Trial(training, target, budget)
    if trial.plain.estimate is not None:
        warn_of_doubts("advise", trial.plain.estimate)
    case = Case(training, trial.plain, trial.on_card, changes_model, fewer_edges)
    with _told_once_if_uncut(training):
        told = {remedy: advice for remedy in find_remedies(case) if (advice := trial.judge(remedy)) is not None}
        told |= trial.best_pair(told)
    return AdviceTable(
        target=target.name if isinstance(target, GPU) else target,
        peak_bytes=trial.plain.peak_bytes,
        peak_where=trial.peak_where,
        measured_peak_bytes=trial.real_plain.peak_bytes if trial.real_plain else None,
        items=tuple(told[remedy] for remedy in sorted(told, key=lambda remedy: trial.standing(remedy, told[remedy]))),
    )


@contextmanager
def _told_once_if_uncut(training: Training) -> Iterator[None]:
    """Warn of a batch that is tried whole, since it cannot be cut, in place of each trainer that takes it."""
    with warnings.catch_warnings():
        try:
            if training.split_fn is None and tree_leaves(training.batch):  # () says itself that nothing is to be cut
                count_rows(training.batch)
        except InputError as error:
            warn_user(
                f"advise(...): the batch cannot be cut: {error.got}. It is tried whole, without micro-batches. Way "
                "out: pass the wrapper's split_fn: advise(model, batch, loss_fn, split_fn=...)."
            )
            warnings.filterwarnings("ignore", ".*: the batch cannot be cut", MemkitWarning)
        yield


class _Trial:
    """The plain step of a training, and the evaluation of remedies against it.

    Attributes:
        plain: The plain step on the target, without data.
        real_plain: The same on the CPU, with data; None if it cannot run here.
    """

    def __init__(self, training: Training, target: str | GPU, budget: CapacityLike | None) -> None:
        self._training, self.on_card = training, target != "cpu"
        self._budget = target if self.on_card and budget is None else budget
        if self._budget is not None:
            capacity_bytes(self._budget, name="budget")  # refuses an invalid budget before any step runs
        self._make_place: Callable[[], Place] = Host
        if self.on_card:
            shown = target.name if isinstance(target, GPU) else repr(target)
            self._make_place = partial(Gpu, look_up(target, f"advise(..., target={shown})"))
        self.plain = observe_step(training, no_change, self._make_place)
        # On a GPU torch's optimizers process all parameters at once by default; on the CPU they must be told to.
        self._as_on_target: StepChange = takes_foreach if self.on_card else no_change
        self._plain_here = observe_step(training, self._as_on_target, Host) if self.on_card else self.plain
        self._is_without_data = any(each.is_meta for each in [*training.model.parameters(), *training.model.buffers()])
        cannot_run = bool(self._obstacle(self._plain_here))
        self.real_plain = None if cannot_run else self._observe_here(training, no_change, RealHost)

    @property
    def peak_where(self) -> str:
        """Where the plain step has its peak."""
        return "" if self.plain.estimate is None else self.plain.estimate.peak_where

    def judge(self, remedy: AppliedRemedy) -> Advice | None:
        """Predict and measure the effect of a remedy; None if it saves too little to report."""
        advice = Advice(
            name=remedy.entry.name,
            change=remedy.entry.full_code(self._training.precision, is_packed=self._training.split_fn is not None),
            effect=remedy.entry.effect,
            exact=remedy.entry.exact is True,
            status="verified",
        )
        if remedy.obstacle:
            return replace(advice, status=f"not run: {remedy.obstacle}")
        training = self._training if remedy.batch is None else replace(self._training, batch=remedy.batch)
        try:
            predicted = observe_step(training, remedy.change_step, self._make_place)
            expected = self._observe_here(training, remedy.change_step, Host) if self.on_card else predicted
        except Exception as error:  # noqa: BLE001 - a remedy may hit anything in the user's code
            return replace(advice, status=f"not run: {_reason(error)}")
        if self.plain.peak_bytes - predicted.peak_bytes < _WORTH_TELLING * self.plain.peak_bytes:
            return None
        estimate = predicted.estimate
        verdict = None if self._budget is None or estimate is None else str(estimate.verdict(self._budget))
        advice = replace(
            advice,
            predicted_peak_bytes=predicted.peak_bytes,
            predicted_saved_bytes=self.plain.peak_bytes - predicted.peak_bytes,
            predicted_flops_ratio=_ratio(predicted, self.plain),
            expected_peak_bytes=expected.peak_bytes,
            expected_saved_bytes=self._plain_here.peak_bytes - expected.peak_bytes,
            expected_flops_ratio=_ratio(expected, self._plain_here),
            fits=_FITS.get(verdict),
            budget_verdict=verdict,
        )
        if obstacle := self._obstacle(expected):
            return replace(advice, status=f"not run: {obstacle}")
        outcome = attempt(self._observe_here, training, remedy.change_step, RealHost, others=(Exception,))
        if isinstance(outcome, Done):
            return self._compared(advice, remedy, expected, outcome.result)
        status = "not run" if isinstance(outcome, OutOfMemory) else "failed"
        return replace(advice, status=f"{status}: {_reason(outcome.error)}")

    def best_pair(self, told: Mapping[AppliedRemedy, Advice]) -> dict[AppliedRemedy, Advice]:
        """Judge the best pair of remedies together, if it saves more than any single one."""
        good = [remedy for remedy, advice in told.items() if advice.is_verified and advice.exact]
        good.sort(key=lambda remedy: self.standing(remedy, told[remedy]))
        alone = [told[remedy].predicted_peak_bytes or 0 for remedy in good]
        best, least = None, _WORTH_A_PAIR * min(alone, default=0)
        for one, other in itertools.combinations(good[:_PAIRED], 2):
            pair = one.with_other(other)
            with suppress(Exception):  # they exclude each other
                peak_bytes = observe_step(self._training, pair.change_step, self._make_place).peak_bytes
                if peak_bytes < least:
                    best, least = pair, peak_bytes
        advice = None if best is None else self.judge(best)
        return {} if best is None or advice is None else {best: advice}

    def standing(self, remedy: AppliedRemedy, advice: Advice) -> Standing:
        """Return the sort key of a trial: by the predicted saving on a GPU, by the allocator's on the CPU."""
        return rank(
            exact=advice.exact,
            saved_bytes=advice.predicted_saved_bytes if self.on_card else advice.allocator_saved_bytes,
            is_verified=advice.is_verified,
            moves=remedy.entry.moves,
            flops_ratio=advice.predicted_flops_ratio,
        )

    def _observe_here(self, training: Training, change: StepChange, make_place: Callable[[], Place]) -> Observation:
        return observe_step(training, in_turn(self._as_on_target, change), make_place)

    def _obstacle(self, expected: Observation) -> str:
        """Say why a step cannot run here; empty if it can."""
        if self._is_without_data:
            return "the model has no data (meta device)"
        parameters_bytes = sum(each.nbytes for each in self._training.model.parameters())
        needed = 5 * parameters_bytes + (expected.estimate.required_bytes if expected.estimate else 0)
        available = int(_SHARE_OF_HOST * host_memory().available_bytes)
        return (
            ""
            if needed <= available
            else f"needs {format_bytes(needed)} here, but only {format_bytes(available)} may be used"
        )

    def _split_differs(self, num_parts: int) -> str:
        """Say why parts of the batch, on the same random numbers, lack its gradient; empty if they have it."""
        if num_parts == 1:
            return ""
        given = self._training
        verdict = check_split(
            unwrap_model(given.model), given.batch, given.loss_fn, split_fn=given.split_fn, num_parts=num_parts
        )
        if verdict.exact is None:
            return f"whether parts have the batch's gradient could not be checked: {verdict.reason}"
        return "" if verdict.exact else f"the parts have a different gradient. {verdict.advice}"

    def _compared(self, advice: Advice, remedy: AppliedRemedy, expected: Observation, measured: Observation) -> Advice:
        plain, estimate = self.real_plain, expected.estimate
        advice = replace(advice, measured_peak_bytes=measured.peak_bytes)
        if plain is not None:
            advice = replace(
                advice,
                measured_saved_bytes=plain.peak_bytes - measured.peak_bytes,
                measured_flops_ratio=_ratio(measured, plain),
                allocator_saved_bytes=(plain.allocator_peak_bytes or 0) - (measured.allocator_peak_bytes or 0),
            )
            if remedy.entry.redraws and plain.draws:
                advice = replace(advice, effect=f"{advice.effect}; random numbers are drawn in another order")
                if differs := self._split_differs(remedy.entry.settings.get("accumulation_steps", 1)):
                    return replace(advice, status=f"failed: {differs}")
            elif remedy.entry.compares is not None:
                ours, theirs = (getattr(each, remedy.entry.compares) for each in (measured, plain))
                advice = replace(advice, difference=_difference(ours, theirs))
        dtypes = {each.dtype for each in self._training.model.parameters()}
        tolerance = max(torch.finfo(each).eps for each in dtypes if each.is_floating_point or each.is_complex) ** 0.5
        if not advice.meets_expectations:
            return replace(advice, status=f"failed: {', '.join(advice.deviations)}")
        highest = (1 + TOLERANCE) * estimate.peak_interval[1] if estimate else 0
        if (measured.allocator_peak_bytes or 0) > highest:
            return replace(advice, status="failed: kernels need more workspace than predicted")
        if advice.allocator_saved_bytes is not None and advice.allocator_saved_bytes <= 0:
            return replace(advice, status="failed: with the kernels' workspace, nothing is saved on this CPU")
        if advice.exact and advice.difference is not None and not advice.difference <= tolerance:
            return replace(advice, status=f"failed: {remedy.entry.compares} differ by {advice.difference:.1e}")
        rounds = remedy.batch is None  # some of the edges give another gradient, which is on average the same
        if rounds and advice.difference is not None and not advice.difference <= _MOST_ROUNDING:
            what = f"{remedy.entry.compares} differ by {advice.difference:.1e} of the largest one"
            return replace(advice, status=f"failed: {what}, which is more than rounding")
        return advice


def _ratio(changed: Observation, plain: Observation) -> float:
    return changed.num_flops / plain.num_flops if plain.num_flops else 1.0


def _difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest difference relative to the largest value of the plain step; missing tensors count as zero."""
    largest = _largest(theirs.values())
    both = ours.keys() & theirs.keys()
    missing = [each for named in (ours, theirs) for name, each in named.items() if name not in both]
    difference = _largest([*(ours[name] - theirs[name] for name in both), *missing])
    return difference / largest if largest else difference


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value; NaN if there is one, which Python's `max` would drop."""
    dense = [each.coalesce().values() if each.layout is torch.sparse_coo else each for each in tensors]
    values = [float(each.abs().max()) for each in dense if each.numel()]
    return float(np.max(values, initial=0.0))


def _reason(error: BaseException) -> str:
    text = error.got if isinstance(error, MemkitError) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0][:_LONGEST_REASON]
