"""Straight lines through exact peaks: bounds that hold, and refusals where they would not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import memkit as mk
from memkit.predict.scaling.deterministic import fit_points
from tests.helpers import assert_refused

lines = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1000)), min_size=1, max_size=4)


@given(lines, st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True), st.integers(1, 4000))
def test_bounds_hold_for_the_highest_of_lines(curves, sizes, n):
    def truth(size):
        return max(1 + constant + factor * size for constant, factor in curves)

    law = fit_points(sizes, [truth(size) for size in sizes])
    if min(sizes) <= n <= 4 * max(sizes):
        low, high = law.interval(n)
        assert low <= truth(n)
        assert high is None or truth(n) <= high + 1
        if n > max(sizes):
            assert high is None
            assert law.predict(n) == low
        most = law.predict(n)
        if truth(min(sizes)) <= most and truth(max(sizes)) < most:  # what does not fit by the law does not fit
            assert truth(law.max_n(most) + 1) > most


def test_line_is_exact_and_power_law_is_not():
    # The peak is the higher of two straight lines: no power of n, and no constant, describes both.
    sizes = [1000, 2000, 4000, 8000]
    law = fit_points(sizes, [max(10_000_000 + 100 * n, 3000 * n) for n in sizes])
    assert law.predict(32_000) == 3000 * 32_000
    assert law.max_n(96_000_000) == 32_000
    assert law.held_out_error == pytest.approx(0.35)  # of 8000 from 2000 and 4000: the peak moved in between


def test_never_beyond_four_times_the_largest():
    law = fit_points([100, 200], [1000, 2000])
    assert law.predict(800) == 8000
    for ask in (lambda: law.predict(801), lambda: law.interval(801), lambda: law.max_n(8010)):
        assert_refused(
            ask, mk.errors.InputError, r"up to 4 times the largest known one, 200.*Way out: add a larger size"
        )
    assert_refused(lambda: law.predict(99), mk.errors.InputError, "a size of at least 100")


def test_does_not_extrapolate_concave_points():
    law = fit_points([100, 200, 400], [1000, 2000, 2100])
    assert law.predict(300) == 2050
    assert_refused(lambda: law.predict(500), mk.errors.InputError, "works in chunks")
    assert_refused(lambda: law.max_n(5000), mk.errors.InputError, "law.max_n(5000)")
    assert law.max_n(1500) == 150
    assert law.max_n(999) == 0


@pytest.mark.parametrize(
    ("peaks", "bounds"),
    [
        ([100, 180, 200], (140, 170)),  # downwards: the line on from the right lies above the one between
        ([100, 180, 400], (70, 140)),  # upwards: below
        ([100, 200, 300], (150, 150)),
    ],
)
def test_the_lower_bound_comes_first_whichever_way_the_peaks_bend(peaks, bounds):
    assert fit_points([100, 200, 300], peaks).interval(150) == bounds


def test_single_point_predicts_only_itself():
    law = fit_points([100], [1000])
    assert (law.predict(100), law.interval(100), law.held_out_error) == (1000, (1000, 1000), None)
    assert_refused(lambda: law.predict(101), mk.errors.InputError, "at least two known sizes")


@pytest.mark.parametrize(
    ("sizes", "peaks"), [([], []), ([1, 1], [5, 5]), ([0, 1], [5, 5]), ([1, 2], [5]), ([1, 2], [0, 5])]
)
def test_rejects_invalid_tables(sizes, peaks):
    assert_refused(lambda: fit_points(sizes, peaks), mk.errors.InputError, "fit_points")


def test_other_numbers_are_refused():
    assert_refused(lambda: fit_points([1.5, 2], [10, 20]), mk.errors.InputTypeError)


def test_numpy_numbers_do_not_overflow():
    sizes, peaks = np.array([1, 2**40, 2**41]), np.array([1, 2**40, 2**41])
    assert fit_points(sizes, peaks).predict(2**43) == 2**43
    law = fit_points([1, 2**62], [1, 2**62])
    assert law.predict(np.int64(2**62 - 1)) == 2**62 - 1
    assert type(law.interval(np.int64(3))[0]) is int
