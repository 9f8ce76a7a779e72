"""Rehearsals of a plan: it is made stronger until all kinds of a loader fit; other batches and steps are told."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from memkit._core.errors import warn_user
from memkit._recovery.loss_key import SWITCHES, LossParts, parts_of_loss
from memkit.predict.batch_kinds import Path, tensors_of
from memkit.predict.plan.search import fastest, micro_batch_counts, search
from memkit.predict.plan.speeds import Untimed
from memkit.predict.plan.trial import Arrangement, PlannedTreatment, StepTrials, Trial
from memkit.predict.worst_batch import WorstBatch
from memkit.train.split import batch_fingerprint
from memkit.train.step_kinds import ParameterMarks, state_of_step, wording_of

_Sizes: TypeAlias = dict[Path, tuple[torch.dtype, tuple[int, ...]]]
_STRENGTH: dict[PlannedTreatment, int] = {"selective": 0, "full": 1, "offload": 2}


class RehearsedBatches:
    """The batches that a plan was rehearsed with, by their shapes. The first one that is none of them is told.

    A plan for one batch holds for smaller ones, too. A loader shows all batches there are: equal shapes are of a kind.

    Args:
        batches: The batches.
        is_loader: Whether they are all kinds of a loader.
    """

    def __init__(self, batches: Iterable[Any], *, is_loader: bool) -> None:
        self._sizes, self._is_loader, self._is_told = list(map(_sizes_of, batches)), is_loader, False
        self._last: object = None  # the fingerprint of a batch that is one of them

    def look_at(self, batch: Any) -> None:
        """Warn, once, of a batch that may take more memory than the plan."""
        if self._is_told:
            return
        _, fingerprint = batch_fingerprint(batch)
        if fingerprint is not None and fingerprint == self._last:
            return
        sizes = _sizes_of(batch)
        if sizes in self._sizes or (not self._is_loader and _is_within(sizes, self._sizes[0])):
            self._last = fingerprint
            return
        self._is_told = True
        known = {each for sizes in self._sizes for each in sizes.items()}
        new = [shape for path, (dtype, shape) in sizes.items() if (path, (dtype, shape)) not in known]
        shapes = ", ".join(map(str, new[:3])) or "in another combination"
        warn_user(
            f"prepare(...): no batch of these shapes ({shapes}) was rehearsed, and this one may take more memory than "
            "the budget. The gradient is the same. Way out: plan with a loader of all kinds of batch, or "
            "make batches of fewer shapes, such as lengths padded to multiples of 64."
        )


class RehearsedStep:
    """The loss function and the parameters that a plan was rehearsed with. The first step with others is told.

    A plan holds, too, when some of the parameters are no longer trained, and for a loss function of the same text and
    with the same switches.

    Args:
        loss_fn: The loss function.
        model: The model.
        optimizers: Its optimizers.
    """

    def __init__(self, loss_fn: object, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers, self._is_told = model, optimizers, False
        self._loss = parts_of_loss(loss_fn)
        self._wording = _wording_of(self._loss)
        self._parameters, _ = state_of_step(model, optimizers)

    def look_at(self, loss_fn: object = None) -> None:
        """Warn, once, of a step that may take more memory than the plan.

        Args:
            loss_fn: Its loss function; None if the caller owns the loop.
        """
        if self._is_told:
            return
        changes = []
        if callable(loss_fn) and (loss := parts_of_loss(loss_fn)) != self._loss:
            self._loss = loss
            if _wording_of(loss) != self._wording:
                changes.append("it has another loss function")
        parameters, _ = state_of_step(self._model, self._optimizers)
        if parameters != self._parameters and not _take_no_more(parameters, self._parameters):
            changes.append("parameters have other sizes or dtypes, or are trained that were not")
        if not changes:
            return
        self._is_told = True
        warn_user(
            f"prepare(...): the step is not the one that was planned: {', and '.join(changes)}. It may take more "
            "memory than the budget. Way out: plan it as it is now, trainer.close(); trainer = mk.prepare(model, "
            "optimizer, batch, loss_fn, budget=...)."
        )


def _wording_of(loss: LossParts) -> tuple[object, ...]:
    """Return the text of a loss function, and its switches; a number may be that of the step."""
    lines, _, values = loss
    return wording_of(lines), *[each for each in values if isinstance(each, SWITCHES)]


def _take_no_more(parameters: ParameterMarks | None, planned: ParameterMarks | None) -> bool:
    """Return whether parameters are those of a plan, with some of them no longer trained."""
    if parameters is None or planned is None or len(parameters) != len(planned):
        return False
    return all(now[:2] == then[:2] and now[2] <= then[2] for now, then in zip(parameters, planned, strict=True))


def _sizes_of(batch: Any) -> _Sizes:
    return {path: (tensor.dtype, tuple(tensor.shape)) for path, tensor in tensors_of(batch)}


def _is_within(sizes: _Sizes, largest: _Sizes) -> bool:
    """Return whether a batch has the same tensors, none of them larger; lists may be shorter."""
    for path, (dtype, shape) in sizes.items():
        known_dtype, most = largest.get(path, (None, ()))
        if dtype != known_dtype or len(shape) != len(most) or any(map(operator.gt, shape, most)):
            return False
    return all(path in sizes or any(isinstance(name, int) for name in path) for path in largest)


def suit_all(
    worst: WorstBatch,
    planned: Trial,
    trials_for: Callable[[Any], StepTrials],
    counts: Sequence[int],
    budget_bytes: int,
    *,
    treats_blocks: bool,
    settled: Callable[[Trial, Any], Trial],
) -> tuple[Trial, int]:
    """Rehearse a plan with every kind of batch; if one does not fit, add the parts and treatments of a plan for it.

    The largest batch may have many rows, and another one a few long rows, which cannot be split into as many parts.
    Decisions on saved tensors depend on one batch's operators and cannot be combined: then blocks are treated instead.

    Args:
        worst: The kinds of batch.
        planned: The plan for the largest.
        trials_for: Prepares the trials of a batch.
        counts: The numbers of micro-batches that were allowed for the largest; a single one if the user fixed it.
        budget_bytes: The most that a step may require.
        treats_blocks: Whether blocks may be treated.
        settled: Returns a trial with the batch's workspace, if that was to be measured.

    Returns:
        The plan, with the time and the rows of the largest batch and the memory of the most demanding one, which does
        not fit if no plan for all was found; and the number of the most demanding batch.
    """
    largest = trials_for(worst.batches[worst.number])
    plan = partial(
        _plan,
        counts=counts,
        precision=planned.arrangement.precision,
        budget_bytes=budget_bytes,
        treats_blocks=treats_blocks,
        settled=settled,
    )
    while True:
        trials = {
            number: settled(_rehearse(replace(trials_for(each), speeds=Untimed()), planned.arrangement), each)
            for number, each in worst.batches.items()
        }
        most = max(trials, key=lambda number: trials[number].required_bytes)
        suited = replace(planned, estimate=trials[most].estimate, required_bytes=trials[most].required_bytes)
        if suited.required_bytes <= budget_bytes:
            tensors = planned.arrangement.tensors
            if tensors is not None:
                rehearsed = frozenset().union(*(each.forwards for each in trials.values()))
                tensors = replace(tensors, rehearsed=rehearsed)
                suited = replace(suited, arrangement=replace(planned.arrangement, tensors=tensors))
            return suited, most
        if planned.arrangement.tensors is not None:
            planned = plan(largest)
            continue
        other = plan(trials_for(worst.batches[most]))
        stronger = _combined(planned.arrangement, other.arrangement)
        if stronger == planned.arrangement:
            return suited, most
        planned = _rehearse(largest, stronger, plain=_rehearse(largest, replace(stronger, treatments=())))
        rows = planned.arrangement.micro_batch_size
        planned = replace(planned, arrangement=replace(stronger, micro_batch_size=rows))


def _rehearse(trials: StepTrials, arrangement: Arrangement, plain: Trial | None = None) -> Trial:
    """Try an arrangement with a batch; as in the wrapper, one with fewer rows than parts has one part per row."""
    num_steps = min(trials.num_rows, arrangement.accumulation_steps)
    rows = -(-trials.num_rows // num_steps)
    return trials.run(replace(arrangement, micro_batch_size=rows, accumulation_steps=num_steps), plain)


def _plan(
    trials: StepTrials,
    *,
    counts: Sequence[int],
    precision: str | None,
    budget_bytes: int,
    treats_blocks: bool,
    settled: Callable[[Trial, Any], Trial],
) -> Trial:
    """Plan for one batch; return the closest candidate if none fits."""
    num_rows = trials.num_rows
    allowed = micro_batch_counts(num_rows) if len(counts) > 1 else [min(counts[0], num_rows)]
    found = search(trials.run, num_rows, allowed, [precision], budget_bytes, slack=1.0, treats_blocks=treats_blocks)
    found = [settled(each, trials.batch) for each in found]
    fitting = fastest(found, budget_bytes)
    return fitting[0] if fitting else min(found, key=lambda each: each.required_bytes)


def _combined(a: Arrangement, b: Arrangement) -> Arrangement:
    """Return the first arrangement with the larger number of parts, and the stronger treatment of each block."""
    treatments = dict(a.treatments)
    for name, treatment in b.treatments:
        if name not in treatments or _STRENGTH[treatment] > _STRENGTH[treatments[name]]:
            treatments[name] = treatment
    num_steps = max(a.accumulation_steps, b.accumulation_steps)
    return replace(a, accumulation_steps=num_steps, treatments=tuple(treatments.items()))
