"""Charts as text: rows of blocks for curves, a field for points."""

from memkit._charts.charts import Bars, Curve, Lines
from memkit._charts.text import align, chart_lines, in_columns, wrap

GIB = 2**30


def test_bars_are_as_long_as_their_share():
    half, none = chart_lines(Bars((("显存", GIB), ("b", 0)), "", 2 * GIB))
    assert half == f"显存  {'█' * 14}{'░' * 14}     1.00 GiB  50.0%"
    assert none == f"b     {'░' * 28}          0 B   0.0%"


def test_curves_are_rows_of_cell_maxima():
    rising = Curve("rising", tuple(range(600)), tuple(n * GIB // 100 for n in range(600)))
    low = Curve("low", (0, 300, 301, 599), (0, 6 * GIB, 0, 0))
    name, first, _, second, below, level = chart_lines(Lines((rising, low), "step", "", levels=[("limit", GIB)]))
    assert name == "rising: 0 B .. 5.99 GiB"
    assert list(first) == sorted(first)
    assert (first[0], first[-1], len(first)) == ("▁", "█", 72)
    assert second == f"▁{' ' * 35}█{' ' * 34}▁"
    assert below == "0 .. 599: step"
    assert level == "- limit"


def test_distinguishes_curves_with_equal_names():
    law, dots = Curve("a", (1, 2), (1, 2)), Curve("a", (1, 2), (1, 2), style="points")
    assert chart_lines(Lines((law, dots), "", ""))[:4:2] == ["a, line: 1 B .. 2 B", "a, points: 1 B .. 2 B"]


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


def test_texts_are_broken_at_a_width_and_figures_stay_whole():
    assert wrap("one two three", "- ", 9) == ["- one two", "  three"]
    assert wrap("it takes 12.50 MiB, or so", width=12) == ["it takes", "12.50 MiB,", "or so"]
    assert wrap("显存随步数增长", width=8) == ["显存随步", "数增长"]
    assert wrap("https://a.very/long/word", width=8) == ["https://a.very/long/word"]
    assert wrap("") == [""]


def test_text_columns_shrink():
    rows = [("what to do", "saves"), ("a long advice " * 4, "12.50 MiB"), ("x" * 50, "1 B")]
    lines = in_columns(rows, [False, True], 40)
    assert max(map(len, lines)) <= 40
    assert sum("12.50 MiB" in line for line in lines) == 1
    assert "".join(line.split()[0] for line in lines if line.startswith("x")) == "x" * 50
    assert in_columns([("a", "b")], [False, True]) == ["a  b"]
