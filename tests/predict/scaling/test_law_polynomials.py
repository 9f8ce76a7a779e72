"""Exact integer polynomials, against trying every size."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import given, strategies as st

# All that `structural` takes from there is tested here.
from memkit.predict.scaling.polynomials import (
    beyond_roots,
    envelope,
    interpolation,
    minus,
    switches,
    trimmed,
    undominated,
    value,
)

coefficients = st.integers(-50, 50)
polynomials = st.lists(coefficients, max_size=4).map(trimmed)
REACH = 200


@given(st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=5), st.data())
def test_interpolation_is_exact_far_away(values, data):
    sizes = data.draw(st.lists(st.integers(1, 10**6), min_size=len(values), max_size=len(values), unique=True))
    basis, scale = interpolation(sizes)
    through = trimmed(
        sum(each * part[power] for each, part in zip(values, basis, strict=True)) for power in range(len(sizes))
    )
    for size, expected in zip(sizes, values, strict=True):
        assert value(through, size) == expected * scale
    n = 10**9 + 7  # against Lagrange's formula in fractions
    expected = Fraction(0)
    for i, x in enumerate(sizes):
        term = Fraction(values[i])
        for other in (*sizes[:i], *sizes[i + 1 :]):
            term *= Fraction(n - other, x - other)
        expected += term
    assert Fraction(value(through, n), scale) == expected


@given(polynomials, st.integers(-REACH, REACH), st.integers(0, REACH))
def test_switches_are_those_found_by_trying(polynomial, low, length):
    high = low + length
    expected = [n for n in range(low + 1, high + 1) if (value(polynomial, n) > 0) != (value(polynomial, n - 1) > 0)]
    assert switches(polynomial, low, high) == expected


@given(polynomials)
def test_no_breakpoints_beyond_the_roots(polynomial):
    start = beyond_roots(polynomial)
    assert len({value(polynomial, n) > 0 for n in range(start, start + REACH)}) == 1
    assert start > 0


@given(st.lists(polynomials, min_size=1, max_size=6))
def test_the_envelope_is_the_first_of_the_highest(candidates):
    stretches = envelope(candidates)
    at = {}
    for start, index in stretches:
        at |= dict.fromkeys(range(start, REACH), index)
    for n in range(1, REACH):
        heights = [value(each, n) for each in candidates]
        assert value(candidates[at[n]], n) == max(heights)
    changes = [start for start, _ in stretches]
    assert changes[0] == 1
    assert changes == sorted(set(changes))
    for (_, before), (start, after) in pairwise(stretches):
        assert value(candidates[after], start) > value(candidates[before], start)


@given(st.lists(polynomials, min_size=1, max_size=8))
def test_dropped_polynomials_are_never_the_highest(candidates):
    kept = undominated(candidates)
    assert kept == sorted(set(kept))
    for n in range(REACH):
        assert max(value(candidates[k], n) for k in kept) == max(value(each, n) for each in candidates)


@given(polynomials, polynomials, st.integers(-REACH, REACH))
def test_minus(a, b, n):
    assert value(minus(a, b), n) == value(a, n) - value(b, n)
