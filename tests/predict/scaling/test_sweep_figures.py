"""Plots as data and as SVG: round ticks, levels that are in view, text that is escaped."""

from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, strategies as st

from memkit.predict.scaling.figures import Figure, Panel, Series, short_number, ticks, to_png, to_svg

SVG = "{http://www.w3.org/2000/svg}"


@given(st.floats(1e-6, 1e9), st.floats(3, 1e8))
def test_ticks_of_a_logarithmic_axis_are_round_and_within(low, ratio):
    places = ticks(low, low * ratio, is_log=True)
    assert 1 <= len(places) <= 13 or ratio < 10
    assert all(low <= place <= low * ratio for place in places)
    assert {f"{place:e}"[0] for place in places} <= set("125")
    assert all(before < after for before, after in pairwise(places))


@given(st.floats(1e-6, 1e9))
def test_ticks_of_a_linear_axis_are_even_and_few(high):
    places = ticks(0.0, high, is_log=False)
    assert 3 <= len(places) <= 9
    assert places[0] == 0
    assert places[-1] <= high * (1 + 1e-9)
    assert [place / places[1] for place in places] == pytest.approx(range(len(places)))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (5.0, "5"), (62_500, "62.5k"), (10_954, "11k"), (1e6, "1M"), (2.5e6, "2.5M"), (0.0, "0")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.fixture
def panel():
    dots, crosses = Series("a < b", (10, 20), (1.0, 2.0), 0, "points"), Series("", (40,), (4.0,), 0, "oom")
    levels = [("small", 1.5), ("next above", 6.0), ("far away", 100.0)]
    return Panel("title", "edges", "GiB", [dots, crosses], levels)


def test_levels_up_to_the_next_one_above_are_in_view(panel):
    assert [name for name, _ in panel.shown_levels] == ["small", "next above"]
    low, high = panel.y_range
    assert low < 1.0
    assert high > 6.0


def test_few_points_are_their_own_ticks(panel):
    assert panel.x_ticks == [10, 20, 40]
    many = Panel("", "", "", [Series("", range(1, 10), range(1, 10), 0, "points")])
    assert many.x_ticks == [1, 2, 5, 10]


def test_the_svg_has_every_mark_inside_its_axes(panel):
    root = ET.fromstring(to_svg(Figure("A & B", [panel, panel], ["note"])))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"A & B", "a < b", "edges", "GiB", "note", "next above"} <= set(texts)
    assert "far away" not in texts
    frame = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == "none")
    left, top, width, height = (float(frame.get(name)) for name in ("x", "y", "width", "height"))
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
    marks = [dot for dot in dots if dot[1] > top]  # the others are in the legend
    assert len(dots) - len(marks) == 2
    assert len(marks) == 4
    assert all(left < x < left + width and top < y < top + height for x, y in marks)
    assert marks[0][0] < marks[1][0]
    assert marks[0][1] > marks[1][1]
    assert len(list(root.iter(f"{SVG}path"))) == 2  # the crosses


def test_the_png_has_the_size_that_was_asked_for(panel):
    pytest.importorskip("matplotlib")
    png = to_png(Figure("title", [panel], ["note"]))
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (7 * 160, round(5.4 * 160))


def test_a_sweep_that_failed_from_the_start_has_an_empty_picture():
    pytest.importorskip("matplotlib")
    figure = Figure("title", [], ["all failed"])
    assert "all failed" in to_svg(figure)
    assert to_png(figure).startswith(b"\x89PNG")
