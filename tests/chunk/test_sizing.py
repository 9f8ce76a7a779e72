"""Chunk sizes by trial: within the budget at every trial, and the budget used where that saves time."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import memkit as mk
from memkit.chunk.sizing import Measurement, Sizer
from tests.helpers import assert_refused

MIB = 1 << 20


class Problem:
    """A call whose chunks take so many bytes a row in the forward and in the backward, and a power of their rows."""

    name = "chunked(fn)"
    is_on_cpu = True
    elsewhere = ""

    def __init__(
        self, num_rows, *, forward=600, backward=1000, kept=500, products=0, base=0, held=(0, 0), power=1,
        jump_at=10**9, kind=0,
    ):  # fmt: skip
        self.num_rows, self.held, self._kind = num_rows, held, kind
        self.forward, self.backward, self.kept, self.products, self.base = forward, backward, kept, products, base
        self.power, self.jump_at = power, jump_at
        self.tried = []

    def kind(self):
        return self._kind

    def held_bytes(self, found):
        return self.held

    def take(self, num_rows):
        """Peak of a call with chunks of so many rows, no graph kept."""
        rows = num_rows**self.power * (28 if num_rows >= self.jump_at else 1)
        return max(self.held[0] + self.forward * rows, self.held[1] + self.base + self.backward * rows)

    def measure(self, num_rows):
        self.tried.append(num_rows)
        rows = num_rows**self.power * (28 if num_rows >= self.jump_at else 1)
        return Measurement(
            num_rows,
            self.forward * rows,
            self.base + self.backward * rows,
            self.kept * rows,
            product_bytes=self.products * rows,
        )


def peak_of(problem, plan):
    """Memory of a call with these chunks: simulated chunk by chunk, in the engine's order."""
    full, last = plan.chunk_size, problem.num_rows - (plan.num_chunks - 1) * plan.chunk_size
    lengths = [full] * (plan.num_chunks - 1) + [last]
    are_kept = [number >= plan.num_chunks - plan.num_kept for number in range(plan.num_chunks)]
    are_partly = [0 < number <= plan.num_partly_kept and not are_kept[number] for number in range(plan.num_chunks)]
    kept = [
        length * (problem.kept if is_kept else problem.products if is_partly else 0)
        for length, is_kept, is_partly in zip(lengths, are_kept, are_partly, strict=True)
    ]
    peak = 0
    for number, length in enumerate(lengths):
        peak = max(peak, problem.held[0] + sum(kept[:number]) + problem.forward * length)
    order = sorted(range(plan.num_chunks), key=lambda number: (not are_kept[number], -number))
    graphs = sum(kept)
    for number in order:
        graphs -= kept[number] if are_kept[number] else 0  # a backward's peak counts its own graph, and no products
        peak = max(peak, problem.held[1] + graphs + problem.base + problem.backward * lengths[number])
        graphs -= 0 if are_kept[number] else kept[number]
    return peak


def test_without_a_budget_a_chunk_is_as_large_as_a_cache():
    problem = Problem(10**6)
    plan = Sizer(None).plan(problem)
    assert 4 * MIB < plan.chunk_size * 1000 <= 16 * MIB
    assert peak_of(problem, plan) <= 16 * MIB
    assert sum(problem.tried) < 2 * plan.chunk_size


def test_half_of_the_budget_holds_the_products_of_all_rows_or_none():
    """Chunks of a cache's size are as fast as larger ones; larger ones save more than the products of some rows."""
    all_rows = Sizer(24 * MIB).plan(Problem(11_000, forward=2500, backward=5000, kept=4000, products=1000))
    assert 8 * MIB < all_rows.chunk_size * 5000 <= 12 * MIB
    assert all_rows.num_kept + all_rows.num_partly_kept == all_rows.num_chunks - 1
    for budget, num_rows in ((24 * MIB, 13_000), (24 * MIB, 60_000), (4 * MIB, 17_000)):
        some = Sizer(budget).plan(Problem(num_rows, forward=2500, backward=5000, kept=4000, products=1000))
        assert some.chunk_size * 5000 > 0.6 * budget
        assert some.num_partly_kept == 0


def test_small_calls_are_one_chunk_and_keep_its_graph():
    for num_rows in (0, 1, 50, 5000):
        plan = Sizer(None).plan(Problem(num_rows))
        assert (plan.num_chunks, plan.num_kept) == (1, 1)


def test_without_a_budget_a_row_may_take_more():
    plan = Sizer(None).plan(Problem(100, forward=60 * MIB, backward=100 * MIB, kept=50 * MIB))
    assert (plan.chunk_size, plan.num_kept) == (1, 1)


def test_nonlinear_kernel_is_not_extrapolated():
    """Sizes are measured, not extrapolated: from 4096 rows on another kernel takes 28 times the memory."""
    problem = Problem(10**6, jump_at=4096)
    plan = Sizer(8 * MIB).plan(problem)
    assert 4096 in problem.tried
    assert plan.chunk_size < 4096
    assert peak_of(problem, plan) <= 8 * MIB


def test_detects_superlinear_growth_early():
    """A line through two small trials foresees a third of a quadratic function's peak."""
    problem = Problem(10**6, power=2, kept=0)
    plan = Sizer(64 * MIB).plan(problem)
    assert max(map(problem.take, problem.tried)) <= 64 * MIB
    assert problem.take(2 * plan.chunk_size) > 64 * MIB / 8  # and not out of fear
    line = problem.take(16) + (problem.take(16) - problem.take(4)) / 12 * (plan.chunk_size - 16)
    assert line < problem.take(plan.chunk_size) / 2


def test_rejects_budget_below_one_row():
    with pytest.raises(mk.errors.ConfigError, match=r"leaves 3.76 KiB.*1 row takes 4.88 KiB.*besides 1000 B.*at least"):
        Sizer("5kB").plan(Problem(100, backward=5000, held=(0, 1000)))


def test_the_way_out_of_the_refusal_works():
    problem = Problem(100, backward=5000, held=(0, 1000))
    refused = assert_refused(lambda: Sizer("5kB").plan(problem), mk.errors.ConfigError)
    assert Sizer(str(refused).rsplit("at least ", 1)[1].rstrip(".")).plan(problem).chunk_size >= 1


def test_measurements_are_reused_for_other_row_counts_only():
    sizer = Sizer(8 * MIB)
    sizer.plan(Problem(10**6))
    again = [Problem(num_rows) for num_rows in (10**6, 10**6 + 1, 700_001, 31_000)]
    for problem in again:
        assert peak_of(problem, sizer.plan(problem)) <= 8 * MIB
    assert [problem.tried for problem in again] == [[], [], [], []]
    other = Problem(10**6, kind=1)
    sizer.plan(other)
    assert other.tried


def test_stops_measuring_ever_new_small_row_counts():
    sizer = Sizer(8 * MIB)
    problems = [Problem(num_rows) for num_rows in range(3000, 3500, 7)]
    for problem in problems:
        assert peak_of(problem, sizer.plan(problem)) <= 8 * MIB
    assert sum(len(problem.tried) for problem in problems[10:]) <= 3


@given(
    budget=st.integers(2 * MIB, 300 * MIB),
    num_rows=st.integers(1, 10**6),
    forward=st.integers(1, 5000),
    more=st.integers(0, 5000),
    share=st.floats(0.1, 1),
    base=st.integers(0, MIB // 4),
    held=st.tuples(st.integers(0, MIB), st.integers(0, MIB)),
    products=st.floats(0, 1),
)
@example(
    budget=64 * MIB, num_rows=100_000, forward=3000, more=1300, share=1.0, base=200_000, held=(0, 200_000), products=0.0
)  # the edge MLP
@example(
    budget=16 * MIB, num_rows=21_564, forward=3300, more=1300, share=1.0, base=200_000, held=(0, 200_000), products=0.3
)  # EdgeConv
def test_budget_is_never_exceeded_and_spent_on_time(budget, num_rows, forward, more, share, base, held, products):
    kept = int(forward * share) or 1
    problem = Problem(
        num_rows,
        forward=forward,
        backward=forward + more,
        kept=kept,
        products=int(kept * products),
        base=base,
        held=held,
    )
    plan = Sizer(budget).plan(problem)
    assert all(problem.take(size) <= budget for size in problem.tried)
    peak = peak_of(problem, plan)
    assert peak <= plan.predicted_peak_bytes <= budget
    if plan.num_kept + plan.num_partly_kept < plan.num_chunks - 1 and max(held) + base < 0.1 * budget:
        assert peak >= 0.85 * budget


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True, None, "all"])
def test_chunk_sizes(chunk_size):
    with pytest.raises(mk.errors.ConfigError, match=r"chunk_size.*whole number of rows.*'auto'"):
        mk.ChunkedProcessor(abs, chunk_size=chunk_size)


def test_sizes_of_numpy_are_sizes():
    x = torch.ones(10, 3)
    assert mk.chunked_map(torch.sin, x, chunk_size=np.int64(4)).shape == (10, 3)
    assert mk.ChunkedProcessor(torch.sin, memory_budget=np.int64(2**20))(x).shape == (10, 3)


@pytest.mark.parametrize(
    ("budget", "error"), [(0.5, mk.errors.InputTypeError), (0, mk.errors.ConfigError), ("0B", mk.errors.ConfigError)]
)
def test_invalid_budget_error_names_the_call(budget, error):
    """There is no share of a device here."""
    with pytest.raises(error, match=r"ChunkedProcessor\(abs\).*memory_budget=") as refused:
        mk.ChunkedProcessor(abs, memory_budget=budget)
    assert "device" not in str(refused.value)


def test_a_budget_needs_a_size_to_choose():
    with pytest.raises(mk.errors.ConfigError, match=r"memory_budget='1MiB' with chunk_size=16.*omit chunk_size"):
        mk.ChunkedProcessor(abs, chunk_size=16, memory_budget="1MiB")
    assert_refused(lambda: mk.ChunkedProcessor(abs, memory_budget=0), mk.errors.ConfigError, "budget")
