"""The search against exhaustive ones on made-up steps, and the order in which blocks are treated."""

import itertools

from hypothesis import given, settings, strategies as st

from memkit.predict.plan.search import fastest, micro_batch_counts, order_upgrades, search
from memkit.predict.plan.trial import Arrangement, BlockCost, Trial
from tests.predict.estimates import estimate_with

ROWS, FIXED_BYTES, LAUNCH = 32, 1000, 0.05


class Step:
    """A step whose memory and time add up: bytes and seconds of a row, per block."""

    def __init__(self, blocks):
        self.blocks = blocks  # name -> (bytes of a row, seconds of a row)
        self.runs = 0

    def run(self, arrangement, plain):
        self.runs += 1
        assert (plain is None) == (not arrangement.treatments)
        rows, count, treatments = (
            arrangement.micro_batch_size,
            arrangement.accumulation_steps,
            dict(arrangement.treatments),
        )
        costs = {name: self.costs(name, rows, count) for name in self.blocks}
        kept = sum(
            rows * row_bytes - (costs[name][treatments[name]].saved_bytes if name in treatments else 0)
            for name, (row_bytes, _) in self.blocks.items()
        )
        seconds = count * LAUNCH + sum(ROWS * 3 * row_seconds for _, row_seconds in self.blocks.values())
        seconds += sum(costs[name][treatment].seconds for name, treatment in treatments.items())
        return Trial(arrangement, estimate_with(other_bytes=FIXED_BYTES + kept), FIXED_BYTES + kept, seconds, costs)

    def costs(self, name, rows, count):
        row_bytes, row_seconds = self.blocks[name]
        return {
            "selective": BlockCost(rows * row_bytes // 2, ROWS * row_seconds / 8, 0.0),
            "full": BlockCost(rows * row_bytes * 9 // 10, ROWS * row_seconds, 0.0),
            "offload": BlockCost(rows * row_bytes, 0.0, ROWS * row_seconds * 3),
        }


def best_of_all(step, budget):
    """Every number of micro-batches with every treatment of every block."""
    names = list(step.blocks)
    fitting = []
    for count in micro_batch_counts(ROWS):
        plain = step.run(Arrangement(-(-ROWS // count), count, None), None)
        for choice in itertools.product((None, "selective", "full", "offload"), repeat=len(names)):
            treatments = tuple((name, each) for name, each in zip(names, choice, strict=True) if each)
            trial = step.run(Arrangement(-(-ROWS // count), count, None, treatments), plain) if treatments else plain
            if trial.required_bytes <= budget:
                fitting.append(trial.seconds)
    return min(fitting, default=None)


blocks = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(1, 1000), st.floats(0.0001, 0.01)), min_size=1, max_size=3
)


@settings(max_examples=12, deadline=None)
@given(blocks=blocks, share=st.floats(0.01, 1.2))
def test_finds_a_plan_near_the_best_of_all(blocks, share):
    step = Step(blocks)
    budget = int(FIXED_BYTES + share * ROWS * sum(row_bytes for row_bytes, _ in blocks.values()))
    best = best_of_all(step, budget)
    step.runs = 0
    trials = search(step.run, ROWS, micro_batch_counts(ROWS), [None], budget, slack=1.0)
    found = fastest(trials, budget)
    assert bool(found) == (best is not None)
    if found:
        # One block too many is treated at the most: they come whole.
        one_block = max(ROWS * row_seconds * 3 for _, row_seconds in blocks.values())
        assert found[0].seconds <= best + one_block + 1e-9
    assert step.runs <= 60  # of up to 704


def test_fitting_batch_stays_whole():
    step = Step({"a": (10, 0.001)})
    trials = search(step.run, ROWS, micro_batch_counts(ROWS), [None], 10**9, slack=1.0)
    assert fastest(trials, 10**9)[0].arrangement == Arrangement(ROWS, 1, None)
    assert step.runs == 3  # two that are slower, and no more


def test_takes_faster_listed_precision():
    step = Step({"a": (10, 0.001)})

    def run(arrangement, plain):
        trial = step.run(arrangement, plain)
        seconds = trial.seconds / 2 if arrangement.precision else trial.seconds
        return Trial(arrangement, trial.estimate, trial.required_bytes, seconds, trial.block_costs)

    trials = search(run, ROWS, [1], [None, "bf16-mixed"], 10**9, slack=1.0)
    assert fastest(trials, 10**9)[0].arrangement.precision == "bf16-mixed"


def test_upgrades_in_order_of_rate():
    costs = {
        "cheap": {"selective": BlockCost(100, 1.0, 0.0), "full": BlockCost(150, 2.0, 0.0)},
        "dear": {"selective": BlockCost(10, 5.0, 0.0), "full": BlockCost(160, 4.0, 0.0)},  # full is better and cheaper
    }
    order = [(each.block, each.treatment, each.saved_bytes, each.seconds) for each in order_upgrades(costs)]
    assert order == [("cheap", "selective", 100, 1.0), ("cheap", "full", 50, 1.0), ("dear", "full", 160, 4.0)]


def test_equal_blocks_are_treated_from_the_first_on():
    costs = {name: {"full": BlockCost(100, 1.0, 0.0)} for name in "xyz"}
    assert [each.block for each in order_upgrades(costs)] == ["x", "y", "z"]


@given(st.integers(1, 5000))
def test_micro_batch_counts_differ_in_size_and_cover_rows(num_rows):
    counts = micro_batch_counts(num_rows)
    sizes = [-(-num_rows // count) for count in counts]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] == num_rows
    assert sizes[-1] == 1
    assert all(size * count >= num_rows for size, count in zip(sizes, counts, strict=True))
