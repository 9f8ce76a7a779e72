"""Find the fastest arrangement that fits: micro-batches first, then blocks in the order of bytes saved per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memkit._core.errors import ConfigError, MemkitError, StateError
from memkit._core.units import format_bytes, parse_budget
from memkit.predict.plan.tensors import TensorChoice, TensorChoices
from memkit.predict.plan.trial import Arrangement, BlockCost, PlannedTreatment, Trial

_MOST_TRIALS = 5  # of treatments for one micro-batch size
_WELL_USED = 0.98  # of a budget: nothing better is looked for
_MARGIN = 0.005  # of a budget, more with each choice of tensors that did not fit: allocators take steps
_NUM_ON_CURVE = 8
_PATIENCE = 2  # consecutive sizes slower than the best, after which smaller ones are skipped
RunArrangement = Callable[[Arrangement, Trial | None], Trial]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """One block's next treatment, with its extra savings and cost over the previous treatment."""

    block: str
    treatment: PlannedTreatment
    saved_bytes: int
    seconds: float


def micro_batch_counts(num_rows: int) -> list[int]:
    """Return the micro-batch counts to try: powers of two, 1.5 times these, and single rows; no size twice."""
    counts = sorted({1, num_rows, *(count for power in range(31) for count in (2**power, 3 * 2**power))})
    sizes: dict[int, int] = {}
    for count in counts:
        if count <= num_rows:
            sizes.setdefault(-(-num_rows // count), count)
    return list(sizes.values())


def order_upgrades(costs: Mapping[str, Mapping[PlannedTreatment, BlockCost]]) -> list[Upgrade]:
    """Order the blocks' upgrades by bytes saved per second, best first; ties go to the earlier block.

    Within a block each upgrade saves more than the one before, at a worse rate.
    """
    upgrades = [upgrade for block, options in costs.items() for upgrade in _upgrades(block, options)]
    return sorted(upgrades, key=lambda each: -each.saved_bytes / max(each.seconds, 1e-12))


def _upgrades(block: str, options: Mapping[PlannedTreatment, BlockCost]) -> Iterator[Upgrade]:
    now = BlockCost(0, 0.0, 0.0)
    while True:
        better = {
            treatment: Upgrade(block, treatment, cost.saved_bytes - now.saved_bytes, cost.seconds - now.seconds)
            for treatment, cost in options.items()
            if cost.saved_bytes > now.saved_bytes
        }
        if not better:
            return
        best = max(better.values(), key=lambda each: (each.saved_bytes / max(each.seconds, 1e-12), each.saved_bytes))
        yield best
        now = options[best.treatment]


def search(
    run: RunArrangement,
    num_rows: int,
    counts: Sequence[int],
    precisions: Sequence[str | None],
    budget_bytes: int,
    *,
    slack: float,
    choices_of: Callable[[Arrangement], TensorChoices] | None = None,
    treats_blocks: bool = True,
    has_curve: bool = False,
    refused: Callable[[int, Exception], None] | None = None,
) -> list[Trial]:
    """Try the arrangements that may be the fastest that fits.

    Args:
        run: Tries an arrangement; for one with treatments it also receives the trial without treatments.
        num_rows: Rows of the batch.
        counts: Micro-batch counts to try, ascending.
        precisions: Precisions to try.
        budget_bytes: The most that a trial may require.
        choices_of: Finds what can be done with the tensors that an arrangement's micro-batches save; None leaves them.
        treats_blocks: Whether blocks may be treated.
        has_curve: Whether to try choices of tensors for all budgets, beside those for this one.
        slack: Arrangements up to this multiple of the fastest time are worth a trial; 1 if the times can be trusted.
        refused: Called with rows and error if the user's code fails on micro-batches of a size, though not on the whole
            batch; None lets the error propagate.

    Returns:
        All trials in order; the first is the whole batch at once, untreated, if that is allowed.
    """
    trials: list[Trial] = []

    def tried(arrangement: Arrangement, plain: Trial | None = None) -> Trial:
        trials.append(run(arrangement, plain))
        return trials[-1]

    def limit_seconds() -> float:
        fitting = [each.seconds for each in trials if each.required_bytes <= budget_bytes]
        return slack * min(fitting, default=float("inf"))

    too_large = _untreated(tried, num_rows, counts, precisions, budget_bytes, limit_seconds, refused)
    for plain in sorted(too_large, key=lambda each: each.seconds):
        if choices_of is not None:
            _treat_tensors(tried, choices_of, plain, budget_bytes, limit_seconds())
        if treats_blocks:
            _treat_blocks(tried, plain, budget_bytes, limit_seconds())
    if has_curve and choices_of is not None:
        choices = choices_of(trials[0].arrangement)
        for choice in _spread(choices.choices):
            tried(replace(trials[0].arrangement, tensors=choices.plan(choice)), trials[0])
    return trials


def _untreated(
    tried: Callable[[Arrangement], Trial],
    num_rows: int,
    counts: Sequence[int],
    precisions: Sequence[str | None],
    budget_bytes: int,
    limit_seconds: Callable[[], float],
    refused: Callable[[int, Exception], None] | None,
) -> list[Trial]:
    """Try micro-batches of each size, until smaller ones are only slower; return the trials that do not fit."""
    too_large: list[Trial] = []
    for precision in precisions:
        num_slower = 0
        for count in counts:
            limit, num_each = limit_seconds(), -(-num_rows // count)
            try:
                plain = tried(Arrangement(num_each, count, precision))
            except Exception as error:
                # A StateError is the code's own too, as of a loss that zeroes the gradients of earlier micro-batches.
                is_own = not isinstance(error, MemkitError) or isinstance(error, StateError)
                if refused is None or count == 1 or counts[0] > 1 or not is_own:
                    raise
                refused(num_each, error)
                continue
            num_slower = num_slower + 1 if plain.seconds >= limit else 0
            if num_slower == _PATIENCE:
                break
            if plain.required_bytes > budget_bytes:
                too_large.append(plain)
    return too_large


def fastest(trials: Sequence[Trial], budget_bytes: int) -> list[Trial]:
    """Return the fastest trial that fits for each micro-batch count and precision, fastest first."""
    best: dict[tuple[int, str | None], Trial] = {}
    for trial in sorted(trials, key=lambda each: each.seconds):
        if trial.required_bytes <= budget_bytes:
            best.setdefault((trial.arrangement.accumulation_steps, trial.arrangement.precision), trial)
    return list(best.values())


def search_activations(
    run: RunArrangement,
    choices_of: Callable[[Arrangement], TensorChoices],
    num_rows: int,
    count: int,
    precisions: Sequence[str | None],
    activation_budget: int | str | float,
) -> list[Trial]:
    """Try, in each precision, the choice of saved tensors that runs the fewest FLOPs again within a budget for them.

    Args:
        run: As for `search`.
        choices_of: As for `search`.
        num_rows: Rows of the batch.
        count: Number of micro-batches.
        precisions: Precisions to try.
        activation_budget: The most that a forward may leave for its backward: a size, or a share of what it saves.

    Returns:
        The trials in each precision, without and with treatment.

    Raises:
        ConfigError: More has to wait for backward, or the budget is not above zero.
    """
    trials: list[Trial] = []
    for precision in precisions:
        plain = run(Arrangement(-(-num_rows // count), count, precision), None)
        choices = choices_of(plain.arrangement)
        most = parse_budget(activation_budget, choices.saved_bytes, name="activation_budget")
        choice = choices.fewest_flops(most)
        if choice is None:
            least = choices.by_flops.least_bytes
            raise ConfigError(
                f"activation_budget={activation_budget!r}",
                got=f"a forward that leaves at least {format_bytes(least)} for its backward, whatever runs again",
                expected=f"a plan that leaves at most {format_bytes(most)}",
                fix=f"pass activation_budget='{least}B', or a smaller micro_batch_size.",
            )
        trials += plain, run(replace(plain.arrangement, tensors=choices.plan(choice)), plain)
    return trials


def _spread(choices: Sequence[TensorChoice]) -> list[TensorChoice]:
    """Return some choices from the one that saves least to the one that saves most, at like distances in memory."""
    most, least = choices[0].peak_bytes, choices[-1].peak_bytes
    if most - least < _MARGIN * most:  # there is no curve
        return [*choices[1:]][-1:]
    marks = [most - (most - least) * number // _NUM_ON_CURVE for number in range(1, _NUM_ON_CURVE + 1)]
    found = [next(each for each in choices if each.peak_bytes <= mark) for mark in marks]
    return [each for each in dict.fromkeys(found) if each is not choices[0]]


def _treat_tensors(
    tried: Callable[[Arrangement, Trial | None], Trial],
    choices_of: Callable[[Arrangement], TensorChoices],
    plain: Trial,
    budget_bytes: int,
    limit_seconds: float,
) -> None:
    """Search for the fastest choice of saved tensors that makes a trial fit: by the sums, corrected by the trials."""
    if plain.seconds >= limit_seconds:
        return
    choices = choices_of(plain.arrangement)
    num_steps = plain.arrangement.accumulation_steps
    more_bytes = plain.required_bytes - choices.choices[0].peak_bytes  # than the sum says
    best_bytes, num_misses = 0, 0  # of a trial that fits; of those that do not
    seen: set[TensorChoice] = set()
    for number in range(_MOST_TRIALS):
        margin_bytes = round(num_misses * _MARGIN * budget_bytes)
        choice = choices.within(budget_bytes - more_bytes - margin_bytes) or choices.least
        if not best_bytes and (choice in seen or number == _MOST_TRIALS - 1):  # nothing has fit
            choice = choices.least
        if choice in seen or plain.seconds + num_steps * choice.seconds >= limit_seconds:
            break
        seen.add(choice)
        trial = tried(replace(plain.arrangement, tensors=choices.plan(choice)), plain)
        more_bytes = trial.required_bytes - choice.peak_bytes
        if trial.required_bytes <= budget_bytes:
            if trial.required_bytes <= best_bytes or trial.required_bytes >= _WELL_USED * budget_bytes:
                break
            best_bytes = trial.required_bytes
        else:
            num_misses += 1


def _treat_blocks(
    tried: Callable[[Arrangement, Trial | None], Trial], plain: Trial, budget_bytes: int, limit_seconds: float
) -> None:
    """Search for the fewest upgrades that make a trial fit, from the upgrades' savings and the trials' memory."""
    upgrades = order_upgrades(plain.block_costs)
    saved = [0, *accumulate(each.saved_bytes for each in upgrades)]
    seconds = [plain.seconds, *(plain.seconds + more for more in accumulate(each.seconds for each in upgrades))]
    low, high = 0, len(upgrades) + 1  # `low` upgrades do not fit; `high` fit, or that is unknown
    low_bytes, high_bytes = plain.required_bytes, None
    for _ in range(_MOST_TRIALS):
        if high - low <= 1:
            break
        share = 1.0 if high_bytes is None else (saved[high] - saved[low]) / max(low_bytes - high_bytes, 1)
        wanted_bytes = saved[low] + share * (low_bytes - budget_bytes)
        number = next((each for each in range(low + 1, high) if saved[each] >= wanted_bytes), high - 1)
        if seconds[number] >= limit_seconds:
            break
        trial = tried(replace(plain.arrangement, treatments=_treatments(upgrades[:number])), plain)
        if trial.required_bytes <= budget_bytes:
            high, high_bytes = number, trial.required_bytes
        else:
            low, low_bytes = number, trial.required_bytes


def _treatments(upgrades: Sequence[Upgrade]) -> tuple[tuple[str, PlannedTreatment], ...]:
    return tuple({each.block: each.treatment for each in upgrades}.items())
