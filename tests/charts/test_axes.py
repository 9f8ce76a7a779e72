"""Axes: round ticks within their range, levels that are in view, and records that cannot be drawn."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from memkit._charts.axes import linear_ticks, log_ticks, short_number, shown_levels, x_axis, y_axis
from memkit._charts.charts import Curve, Lines
from memkit._core.errors import InputError
from tests.helpers import assert_refused

GIB = 2**30


@given(st.floats(1e-6, 1e9), st.floats(3, 1e8))
def test_ticks_of_a_logarithmic_axis_are_round_and_within(low, ratio):
    places = log_ticks(low, low * ratio)
    assert 1 <= len(places) <= 13 or ratio < 10
    assert all(low <= place <= low * ratio for place in places)
    assert {f"{place:e}"[0] for place in places} <= set("125")
    assert all(before < after for before, after in pairwise(places))


@given(st.floats(-1e9, 0), st.floats(1e-6, 1e9))
def test_linear_ticks_are_even_few_and_enclose_the_values(low, high):
    places = linear_ticks(low, high)
    assert 5 <= len(places) <= 9
    assert 0 in places
    assert places[0] <= low * (1 - 1e-9)
    assert places[-1] >= high * (1 - 1e-9)
    step = (places[-1] - places[0]) / (len(places) - 1)
    assert [b - a for a, b in pairwise(places)] == pytest.approx([step] * (len(places) - 1))


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_ticks_of_time_are_round_and_within(start, length):
    axis = x_axis(Lines((Curve("a", (start, start + length), (1, 2)),), "", ""))
    places = [place for place, _ in axis.ticks]
    assert 2 <= len(places) <= 9
    assert all(start * (1 - 1e-9) <= place <= (start + length) * (1 + 1e-9) for place in places)


def test_steps_have_whole_ticks_with_all_their_digits():
    texts = lambda *x: [text for _, text in x_axis(Lines((Curve("a", x, x),), "", "")).ticks]  # noqa: E731
    assert texts(1, 3) == ["1", "2", "3"]
    assert texts(1, 7) == ["2", "4", "6"]
    assert texts(1, 60) == ["15", "30", "45", "60"]
    assert texts(100_000, 100_900) == ["100,000", "100,250", "100,500", "100,750"]
    assert texts(0.0, 0.35) == ["0", "0.1", "0.2", "0.3"]
    assert texts(5) == ["5"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (5.0, "5"), (62_500, "62.5k"), (10_954, "11k"), (1e6, "1M"), (2.5e6, "2.5M"), (0.0, "0")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


def test_a_vertical_axis_is_in_its_unit():
    axis = y_axis(Lines((Curve("a", (1, 2), (0, 7 * 2**20)),), "", "", unit="MiB"))
    assert [text for _, text in axis.ticks] == ["0", "2", "4", "6", "8"]
    assert axis.place(2 * 2**20) == pytest.approx(1 / 4)


def test_levels_up_to_the_next_one_above_are_in_view():
    levels = [("small", 1.5 * GIB), ("next above", 6.0 * GIB), ("far away", 100.0 * GIB)]
    chart = Lines((Curve("a", (10, 20), (GIB, 4 * GIB)),), "", "", levels=levels, scale="log")
    axis = y_axis(chart)
    assert [name for name, _ in shown_levels(chart, axis)] == ["small", "next above"]
    assert axis.low < GIB
    assert axis.high > 6 * GIB


def test_few_points_are_their_own_ticks():
    place = lambda chart: [tick for tick, _ in x_axis(chart).ticks]  # noqa: E731
    dots, crosses = Curve("a", (10, 20), (1.0, 2.0), style="points"), Curve("", (40,), (4.0,), style="crosses")
    assert place(Lines((dots, crosses), "", "", scale="log")) == [10, 20, 40]
    many = Curve("", range(1, 10), range(1, 10), style="points")
    assert place(Lines((many,), "", "", scale="log")) == [1, 2, 5, 10]


@pytest.mark.parametrize(
    ("curves", "scale", "message"),
    [
        ((), "linear", "got no curves; expected at least one curve"),
        ((Curve("a", (), ()),), "linear", "got 0 x and 0 y in 'a'"),
        ((Curve("a", (1, 2), (1,)),), "linear", "got 2 x and 1 y in 'a'"),
        ((Curve("a", (1, 2), (1, 0)),), "log", "got 0 in 'a'; expected numbers above zero on a logarithmic axis"),
        ((Curve("a", (-3, 2), (1, 0)),), "log-x", "got -3 in 'a'"),
    ],
)
def test_rejects_undrawable_chart(curves, scale, message):
    assert_refused(lambda: Lines(curves, "n", "peaks", scale=scale), InputError, f"^the chart 'peaks'.*{message}")
