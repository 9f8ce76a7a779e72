"""Pictures: all marks inside their axes, text that is escaped, and the same marks as SVG and as PNG."""

from xml.etree import ElementTree as ET

import pytest

from memkit._charts.charts import Curve, Figure, Lines
from memkit._charts.pictures import to_png, to_svg

SVG = "{http://www.w3.org/2000/svg}"
GIB = 2**30


@pytest.fixture
def chart():
    dots = Curve("a < b", (10, 20), (GIB, 2 * GIB), style="points")
    crosses = Curve("a < b", (40,), (4 * GIB,), style="crosses")
    levels = [("small", 1.5 * GIB), ("next above", 6 * GIB), ("far away", 100 * GIB)]
    return Lines((dots, crosses), "edges", "title", "peak", levels=levels, scale="log")


def strokes(root, width):
    lines = [line for line in root.iter(f"{SVG}polyline") if line.get("stroke-width") == width]
    return [[tuple(map(float, place.split(","))) for place in line.get("points").split()] for line in lines]


def test_the_svg_has_every_mark_inside_its_axes(chart):
    root = ET.fromstring(to_svg(Figure("A & B", [chart, chart], ["note"])))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"A & B", "a < b", "edges", "peak (GiB)", "note", "next above"} <= set(texts)
    assert "far away" not in texts
    assert texts.count("a < b") == 2  # one entry in each legend, though two curves have the name
    frame, second = (places for places in strokes(root, "1") if len(places) == 5)
    (left, top), (right, bottom) = frame[0], frame[2]
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
    marks = [dot for dot in dots if dot[1] > top]  # the others are in the legend
    assert len(dots) - len(marks) == 2
    assert len(marks) == 4
    crosses = strokes(root, "2.5")
    assert len(crosses) == 2 * 2
    inside = [*marks[:2], *crosses[0], *crosses[1]]
    assert all(left < x < right and top < y < bottom for x, y in inside)
    assert all(second[0][0] < x < second[2][0] for x, _ in [*marks[2:], *crosses[2], *crosses[3]])
    assert marks[0][0] < marks[1][0]
    assert marks[0][1] > marks[1][1]


def test_long_legend_wraps_above_the_area():
    def tops(num):
        curves = [Curve(f"a curve with a long name, {n}", (1, 2), (1, 2)) for n in range(num)]
        root = ET.fromstring(to_svg(Figure("", [Lines(curves, "", "")])))
        entries = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("a curve")]
        (frame,) = (places for places in strokes(root, "1") if len(places) == 5)
        assert all(float(entry.get("y")) < frame[0][1] for entry in entries)
        assert all(float(entry.get("x")) + 6 * len(entry.text) < frame[1][0] + 16 for entry in entries)
        return {float(entry.get("y")) for entry in entries}

    assert len(tops(2)) == 1
    assert len(tops(6)) == 3


def test_the_png_is_the_svg_at_twice_its_size(chart):
    numpy, image = pytest.importorskip("numpy"), pytest.importorskip("matplotlib.image")
    from io import BytesIO

    figure = Figure("costs $5 and $6", [chart], ["note"])  # no formula
    png = to_png(figure)
    root = ET.fromstring(to_svg(figure))
    width, height = (2 * int(root.get(name)) for name in ("width", "height"))
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (width, height) == (1120, 860)
    pixels = image.imread(BytesIO(png))[..., :3]
    for dot in root.iter(f"{SVG}circle"):
        color = [int(dot.get("fill")[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        numpy.testing.assert_allclose(
            pixels[round(2 * float(dot.get("cy"))), round(2 * float(dot.get("cx")))], color, atol=0.01
        )


def test_failed_sweep_has_empty_picture():
    pytest.importorskip("matplotlib")
    figure = Figure("title", [], ["all failed"])
    assert "all failed" in to_svg(figure)
    assert to_png(figure).startswith(b"\x89PNG")
