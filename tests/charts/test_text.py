"""Charts as text: rows of blocks for curves, a field for points."""

from memkit._charts.charts import Bars, Curve, Lines
from memkit._charts.text import align, chart_lines

GIB = 2**30


def test_bars_are_as_long_as_their_share():
    half, none = chart_lines(Bars((("显存", GIB), ("b", 0)), "", 2 * GIB))
    assert half == f"显存  {'█' * 15}{'░' * 15}     1.00 GiB  50.0%"
    assert none == f"b     {'░' * 30}     0.00 GiB   0.0%"


def test_curves_are_rows_and_each_cell_has_the_largest_of_its_values():
    rising = Curve("rising", tuple(range(600)), tuple(n * GIB // 100 for n in range(600)))
    low = Curve("low", (0, 300, 301, 599), (0, 6 * GIB, 0, 0))
    first, second, below, level = chart_lines(Lines((rising, low), "step", "", levels=[("limit", GIB)]))
    assert first.startswith("rising  ▁")
    assert list(first[8:68]) == sorted(first[8:68])
    assert first[8:68][-1] == "█"
    assert first.endswith("0.00 GiB .. 5.99 GiB")
    assert second[8:68] == f"▁{' ' * 29}█{' ' * 28}▁"
    assert below == f"{' ' * 8}0 .. 599: step"
    assert level == f"{' ' * 8}- limit"


def test_curves_of_one_name_are_told_apart():
    law, dots = Curve("a", (1, 2), (1, 2)), Curve("a", (1, 2), (1, 2), style="points")
    assert [line[:9] for line in chart_lines(Lines((law, dots), "", ""))[:2]] == ["a, line  ", "a, points"]


def test_points_stand_in_a_field_with_its_levels():
    chosen, others = (
        Curve("chosen", (1,), (2 * GIB,), style="points"),
        Curve("b", (1, 2), (2 * GIB, GIB), style="points"),
    )
    large = Curve("large", (1.5,), (4 * GIB,), style="crosses")
    *rows, axis, key = chart_lines(Lines((chosen, others, large), "time", "", levels=[("budget", 3 * GIB)]))
    assert len(rows) == 13
    assert rows[0] == f"4 GiB |{' ' * 30}x"
    assert rows[3] == f"3 GiB |{'-' * 60}"
    assert rows[6] == "2 GiB |*"  # the first curve lies on top
    assert rows[9] == f"1 GiB |{' ' * 59}o"
    assert rows[12] == "0 GiB |"
    assert axis.split() == ["1", "time", "2"]
    assert key.strip().split("   ") == ["* chosen", "o b", "x large", "- budget"]


def test_columns_are_as_wide_as_their_widest_cell():
    assert align([("a", "1"), ("显存", "20")], [False, True]) == ["a      1", "显存  20"]
