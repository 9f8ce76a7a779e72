"""One plan for all kinds of batch of a loader: the plan for the largest, made stronger until every kind fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memkit.predict.plan.search import fastest, micro_batch_counts, search
from memkit.predict.plan.trial import Arrangement, PlannedTreatment, StepTrials, Trial
from memkit.predict.worst_batch import WorstBatch

_STRENGTH: dict[PlannedTreatment, int] = {"selective": 0, "full": 1, "offload": 2}


def suit_all(
    worst: WorstBatch,
    planned: Trial,
    trials_for: Callable[[Any], StepTrials],
    counts: Sequence[int],
    budget_bytes: int,
    *,
    treats_blocks: bool,
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

    Returns:
        The plan, with the time and the rows of the largest batch and the memory of the most demanding one, which does
        not fit if no plan for all was found; and the number of the most demanding batch.
    """
    largest = trials_for(worst.batches[worst.number])
    precision = planned.arrangement.precision
    while True:
        trials = {number: _rehearse(trials_for(each), planned.arrangement) for number, each in worst.batches.items()}
        most = max(trials, key=lambda number: trials[number].required_bytes)
        suited = replace(planned, estimate=trials[most].estimate, required_bytes=trials[most].required_bytes)
        if suited.required_bytes <= budget_bytes:
            tensors = planned.arrangement.tensors
            if tensors is not None:
                suited = replace(
                    suited, arrangement=replace(planned.arrangement, tensors=replace(tensors, is_for_all=True))
                )
            return suited, most
        if planned.arrangement.tensors is not None:
            planned = _plan(largest, counts, precision, budget_bytes, treats_blocks=treats_blocks)
            continue
        other = _plan(trials_for(worst.batches[most]), counts, precision, budget_bytes, treats_blocks=treats_blocks)
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
    trials: StepTrials, counts: Sequence[int], precision: str | None, budget_bytes: int, *, treats_blocks: bool
) -> Trial:
    """Plan for one batch; return the closest candidate if none fits."""
    num_rows = trials.num_rows
    allowed = micro_batch_counts(num_rows) if len(counts) > 1 else [min(counts[0], num_rows)]
    found = search(trials.run, num_rows, allowed, [precision], budget_bytes, slack=1.0, treats_blocks=treats_blocks)
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
