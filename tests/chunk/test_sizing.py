"""Chunk sizes by trial: larger while that pays and fits, graphs kept with what the budget leaves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memkit as mk
from memkit.chunk.sizing import Measurement, choose_plan


class Function:
    """Takes `row_bytes` a row and `fixed_bytes`; a call costs `call_s`, a row `row_s`, and more beyond `cache` rows."""

    def __init__(self, *, row_bytes=1000, fixed_bytes=5000, cache=4096, jump_at=10**9):
        self.row_bytes, self.fixed_bytes, self.cache, self.jump_at = row_bytes, fixed_bytes, cache, jump_at
        self.tried = []

    def take(self, num_rows):
        peak = self.fixed_bytes + self.row_bytes * num_rows
        return peak * (28 if num_rows >= self.jump_at else 1)

    def __call__(self, num_rows):
        self.tried.append(num_rows)
        seconds = 1e-3 + num_rows * (1e-6 if num_rows <= self.cache else 1.2e-6)
        return Measurement(num_rows, self.take(num_rows), self.row_bytes * num_rows // 2, seconds)


def choose(function, num_rows=10**6, budget=None, may_keep=True):
    return choose_plan(function, num_rows, budget, call="chunked(fn)", may_keep=may_keep)


def test_without_a_budget_the_size_stops_where_it_no_longer_pays():
    function = Function()
    plan = choose(function)
    assert plan.chunk_size in (4096, 8192, 16384)
    assert function.tried == sorted(function.tried)
    assert len(function.tried) <= 10
    assert plan.num_kept == 0
    assert plan.num_chunks == -(-(10**6) // plan.chunk_size)


def test_few_rows_are_one_chunk():
    assert choose(Function(), num_rows=50).num_chunks == 1
    assert choose(Function(), num_rows=50).chunk_size == 50
    assert choose(Function(), num_rows=0).num_chunks == 1


def test_a_kernel_that_jumps_is_not_believed_to_grow_in_proportion():
    """Sizes are measured, not extrapolated: from 1024 rows on another kernel takes 28 times the memory."""
    budget = 2_000_000
    function = Function(jump_at=1024)
    plan = choose(function, budget=budget, may_keep=False)
    assert 1024 in function.tried
    assert plan.chunk_size == 512
    assert function.take(plan.chunk_size) <= budget


def test_a_budget_smaller_than_the_first_size_goes_down():
    plan = choose(Function(), budget=20_000)
    assert plan.chunk_size <= 15
    assert plan.predicted_peak_bytes <= 20_000


def test_a_budget_for_not_even_one_row_is_refused():
    with pytest.raises(mk.ConfigError, match=r"one row takes 5.86 KiB.*raise memory_budget"):
        choose(Function(), budget=5000)


@given(
    budget=st.integers(10_000, 10**9),
    num_rows=st.integers(1, 10**6),
    row_bytes=st.integers(1, 5000),
    fixed_bytes=st.integers(0, 4000),
)
def test_a_budget_is_never_exceeded_and_used_where_time_can_be_bought(budget, num_rows, row_bytes, fixed_bytes):
    function = Function(row_bytes=row_bytes, fixed_bytes=fixed_bytes)
    plan = choose(function, num_rows, budget)
    kept = plan.num_kept * (row_bytes * plan.chunk_size // 2)
    assert plan.measured_peak_bytes == function.take(plan.chunk_size)
    assert plan.predicted_peak_bytes == plan.measured_peak_bytes + kept <= budget
    if plan.num_kept < plan.num_chunks and kept:
        assert plan.predicted_peak_bytes >= 0.97 * budget - row_bytes * plan.chunk_size // 2 - 1
