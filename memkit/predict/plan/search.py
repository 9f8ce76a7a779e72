"""Find the fastest arrangement that fits: micro-batches first, then blocks in the order of bytes saved per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memkit.predict.plan.trial import Arrangement, BlockCost, PlannedTreatment, Trial

_MOST_TRIALS = 5  # of treatments for one size of micro-batches
_PATIENCE = 2  # sizes in a row that are slower than the best, after which smaller ones are not looked at
RunArrangement = Callable[[Arrangement, Trial | None], Trial]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """One block's next treatment: what it saves and costs more than the treatment before."""

    block: str
    treatment: PlannedTreatment
    saved_bytes: int
    seconds: float


def micro_batch_counts(num_rows: int) -> list[int]:
    """Numbers of micro-batches to look at: powers of two, these times 1.5, and single rows, without equal sizes."""
    counts = sorted({1, num_rows, *(count for power in range(31) for count in (2**power, 3 * 2**power))})
    sizes: dict[int, int] = {}
    for count in counts:
        if count <= num_rows:
            sizes.setdefault(-(-num_rows // count), count)
    return list(sizes.values())


def order_upgrades(costs: Mapping[str, Mapping[PlannedTreatment, BlockCost]]) -> list[Upgrade]:
    """Order what can be done to blocks by bytes saved per second, the best first; earlier blocks before equal ones.

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
) -> list[Trial]:
    """Try what may be the fastest arrangement that fits.

    Args:
        run: Tries an arrangement; is given the trial without treatments where the arrangement has some.
        num_rows: Rows of the batch.
        counts: Numbers of micro-batches to look at, ascending.
        precisions: Precisions to look at.
        budget_bytes: What a trial may require.
        slack: Times the fastest one's seconds up to which others are worth a trial; 1 where seconds are to be trusted.

    Returns:
        All trials in their order; the first is the whole batch at once, untreated, where that is allowed.
    """
    trials: list[Trial] = []

    def tried(arrangement: Arrangement, plain: Trial | None = None) -> Trial:
        trials.append(run(arrangement, plain))
        return trials[-1]

    def limit_seconds() -> float:
        fitting = [each.seconds for each in trials if each.required_bytes <= budget_bytes]
        return slack * min(fitting, default=float("inf"))

    too_large: list[Trial] = []
    for precision in precisions:
        num_slower = 0
        for count in counts:
            limit = limit_seconds()
            plain = tried(Arrangement(-(-num_rows // count), count, precision))
            num_slower = num_slower + 1 if plain.seconds >= limit else 0
            if num_slower == _PATIENCE:
                break
            if plain.required_bytes > budget_bytes:
                too_large.append(plain)
    for plain in sorted(too_large, key=lambda each: each.seconds):
        _treat(tried, plain, budget_bytes, limit_seconds())
    return trials


def fastest(trials: Sequence[Trial], budget_bytes: int) -> list[Trial]:
    """The fastest trial that fits of each number of micro-batches and precision, fastest first."""
    best: dict[tuple[int, str | None], Trial] = {}
    for trial in sorted(trials, key=lambda each: each.seconds):
        if trial.required_bytes <= budget_bytes:
            best.setdefault((trial.arrangement.accumulation_steps, trial.arrangement.precision), trial)
    return list(best.values())


def _treat(
    tried: Callable[[Arrangement, Trial | None], Trial], plain: Trial, budget_bytes: int, limit_seconds: float
) -> None:
    """Try to find the fewest upgrades with which a trial fits, by what the upgrades save and what the trials hold."""
    upgrades = order_upgrades(plain.block_costs)
    saved = [0, *accumulate(each.saved_bytes for each in upgrades)]
    seconds = [plain.seconds, *(plain.seconds + more for more in accumulate(each.seconds for each in upgrades))]
    low, high = 0, len(upgrades) + 1  # that many do not fit; that many fit, or nobody knows
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
