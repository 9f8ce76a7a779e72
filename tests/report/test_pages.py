"""Pages: the same in every format, in both languages, safe with any name, small, self-contained, never half written."""

import ast
import json
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cases.log_fuzz import header, typical_event
from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._events.log import Event
from memkit._events.reader import EventLog
from memkit.recipes.report import make_report, write_report
from memkit.report import words as words_module
from memkit.report.nodes import Bars, Bullets, Curve, Lines, Paragraph, Section, Share, Size, Table
from memkit.report.thin import thin
from memkit.report.words import Words, texts
from memkit.report.write import MARK, render_report
from tests.helpers import assert_not_imported, assert_refused
from tests.report.pages import S1, Page, first_log, log_of

ROOM = Path(words_module.__file__).parent
EVIL = "<script>alert(1)</script>|`x`\n# [a](javascript:b) ![i](http://e.vil/i.png) \x1b[31m\u202e </script><!-- https://e.vil"


# ---- words


def test_every_text_is_in_both_languages_with_the_same_places():
    for key, pair in texts().items():
        assert set(pair) == {"en", "zh"}, key
        english, chinese = (
            sorted(name for _, name, _, _ in string.Formatter().parse(text) if name) for text in pair.values()
        )
        assert english == chinese, key
        assert pair["en"].replace("→", "").isascii(), key


def test_texts_exist_and_are_used():
    code = "\n".join(path.read_text("utf-8") for path in ROOM.glob("*.py"))
    tree = ast.parse(code.replace("from __future__ import annotations", ""))
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    starts = tuple(re.findall(r'(?:words\(f"|f"(?=col_))([a-z_]+_)\{', code))  # a table's columns are keys, too
    unused = {key for key in texts() if key not in constants and not key.startswith(starts)}
    assert not unused
    asked = set(re.findall(r'(?:words|self)\("([a-z_]+)"|"(?=col_)([a-z_]+)"', code))
    asked = {key for pair in asked for key in pair if key}
    assert asked <= set(texts())


def test_chinese_has_the_same_figures(tmp_path):
    english, chinese = (render_report(make_report(first_log(), language=each), ".txt") for each in ("en", "zh"))
    numbers = re.compile(r"[\d,.]+ (?:B|KiB|MiB|GiB)\b|\d+\.\d%")
    assert sorted(numbers.findall(english)) == sorted(numbers.findall(chinese))
    assert "显存报告" in chinese
    assert "未记录" in chinese
    assert "recorded" not in chinese
    path, words = tmp_path / "r.md", "expected one of 'en', 'zh'"
    assert_refused(lambda: write_report(first_log(), path, language="de"), ConfigError, words)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (Size.of(None), "not recorded"),
        (Size.of(0), "0 B"),
        (Size(None, 2**30), "at most 1.00 GiB"),
        (Size(2**30, None), "at least 1.00 GiB"),
        (Size(2**30, 2**31), "1.00 GiB to 2.00 GiB"),
        (Size.of(-9, is_change=True), "-9 B"),
        (Size.of(2**21, is_change=True), "+2.00 MiB"),
        (Size.of(0, is_change=True), "0 B"),
        (Size.of(-(2**29), is_change=True), "-512.00 MiB"),
    ],
)
def test_sizes(size, text):
    assert Words("en").size(size) == text


def test_a_curve_below_zero_stays_in_its_chart():
    sizes = (-3, 5, 1, -1)
    curve = Curve("a", (1.0, 2.0, 3.0, 4.0), tuple(size * 2**29 for size in sizes), ("",) * 4)
    own = Section("Own", (Lines((curve,), "step", "changes"),))
    page = render_report(make_report(log_of(Event("a")), sections=[lambda log, language: own]), ".html")
    _, points = re.findall(r'<polyline class="l0" points="([^"]*)"', page)
    assert [float(point.split(",")[1]) for point in points.split()] == [300 * (3 - size / 2) / 5 for size in sizes]
    ticks = re.findall(r'<span style="top:([\d.]+)%">([-\d.]+) GiB</span>', page)
    assert ticks == [(f"{100 * (3 - tick) / 5:.2f}", str(tick)) for tick in range(-2, 4)]


def test_a_page_draws_curves_of_every_style_and_scale():
    curves = [
        Curve("law", (1, 10, 100), (2**20, 10 * 2**20, 100 * 2**20)),
        Curve("theory", (1, 100), (2**19, 50 * 2**20), style="dashed"),
        Curve("law", (10,), (10 * 2**20,), style="points"),
        Curve("law", (100,), (100 * 2**20,), style="crosses"),
    ]
    levels = [("card <24>", 50 * 2**20)]
    chart = Lines(curves, "n", "By size", "peak", "MiB", levels, "log")
    page = render_report(make_report(log_of(Event("a")), sections=[lambda *_: Section("Own", (chart,))]), ".html")
    law, theory = re.findall(r'<polyline class="([^"]*)" points="([^"]*,[^"]*,[^"]*)"', page)[2:]
    assert (law[0], theory[0]) == ("l0 line", "l1 dashed")
    lows, highs = zip(*(place.split(",") for place in law[1].split()), strict=True)
    assert float(lows[1]) == pytest.approx(500)  # ten is halfway between one and a hundred
    (dot,) = re.findall(r'<span class="l0 points" style="left:([\d.]+)%;top:([\d.]+)%"></span>', page)
    assert [float(each) for each in dot] == pytest.approx([50, float(highs[1]) / 3], abs=0.1)
    assert re.findall(r'<span class="l0 crosses" style="left:([\d.]+)%', page) == [f"{float(lows[2]) / 10:.2f}"]
    assert '<span class="level" style="top:' in page
    assert ">card &lt;24&gt;</span>" in page
    assert ">100 MiB</span>" in page
    assert page.count("<li><svg") == 2  # an entry for each name


def test_survived_errors_are_counted():
    marks = [Event("oom", note={"num_ooms": number, "sizes": [2, 2]}) for number in (2, 1)]
    log = log_of(*marks, Event("oom", note={"num_ooms": "many"}), Event("mark", note={"num_ooms": 5}))
    assert "Out-of-memory errors that the run recovered from: 3;" in render_report(make_report(log), ".txt")


# ---- names that come from a file


def evil_log():
    return log_of(
        Event(EVIL, peak_bytes=5, phase=f"a/{EVIL}", wall_s=1.0),
        Event(f"{EVIL}_loaded", allocated_bytes=7, component=EVIL, wall_s=2.0),
        Event("step_1", step=1, allocated_bytes=7, peak_total_bytes=9, note={"peak_by_module": {EVIL: 4, "b": 3}}),
        config={EVIL: EVIL},
    )


def test_names_stay_text_in_html():
    page = Page(render_report(make_report(evil_log(), baseline=first_log()), ".html"))
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert scripts == [*[{"type": "application/json"}] * (len(scripts) - 1), {}]
    assert not {tag for tag, _ in page.tags} & {"img", "iframe", "object", "form", "base"}
    assert "\x1b" not in "".join(page.texts)
    assert any("<script>alert(1)</script>" in text for text in page.texts)


def test_names_stay_text_in_markdown_and_on_a_terminal():
    report = make_report(evil_log(), baseline=first_log())
    text = render_report(report, ".md")
    bare = re.sub(r"\\.", "", "\n".join(line for line in text.splitlines() if not line.startswith("    ")))
    assert not re.search(r"<(?!!-- memkit|/?details|/?summary)", bare)
    assert "](" not in bare
    assert "https://" not in bare
    for plain in (text, render_report(report, ".txt")):
        assert all(line.isprintable() for line in plain.splitlines())
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for rule in (index for index, line in enumerate(tables) if line.startswith("|---")):
        assert len(set(re.findall(r"(?<!\\)\|", tables[rule]))) == 1
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert all(widths[n] == widths[n - 1] for n, line in enumerate(tables) if line.startswith("|---"))


def test_page_is_self_contained_with_valid_links():
    page = Page(render_report(make_report(first_log()), ".html"))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    for tag, attributes in page.tags:
        assert "src" not in attributes
        if "href" in attributes:
            assert attributes["href"] == "data:," if tag == "link" else attributes["href"][1:] in ids
    policies = [each["content"] for _, each in page.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0].startswith("default-src 'none'; ")


# ---- size and truth of charts


def test_long_log_makes_small_page_with_peak():
    events = [typical_event(step) for step in range(30_000)]
    spike = 24_824_987_648 + 12_345
    events[17_321] = replace(events[17_321], allocated_bytes=spike)
    events += [Event(f"name {n} {'x' * 200}", peak_bytes=n, wall_s=1.75e9 + 100) for n in range(3_000)]
    text = render_report(make_report(EventLog((header(),), tuple(replace(each, run=0) for each in events))), ".html")
    assert len(text.encode()) < 300_000
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    held = next(line for line in json.loads(data)["lines"] if line["n"] == "in tensors")
    assert max(held["y"]) == spike
    assert 400 < len(held["y"]) <= 482


def test_clock_set_back_breaks_no_chart():
    events = [Event(f"e{n}", wall_s=1.75e9 - 1000 * n, allocated_bytes=n + 1) for n in range(3)]
    report = make_report(log_of(*events))
    assert "0 .. 2000: seconds since the first event" in render_report(report, ".txt")
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', render_report(report, ".html"))
    assert json.loads(data)["lines"][0]["x"] == [0.0, 1000.0, 2000.0]


def test_thin_keeps_each_bucket_within_its_ends():
    places = [float(n ^ 1) for n in range(5_000)]  # the clock is set back at every other point
    sizes = [None if n % 50 == 7 else (n * 7919) % 1000 for n in range(5_000)]
    labels = [str(n) for n in range(5_000)]
    points = {each for each in zip(places, sizes, labels, strict=True) if each[1] is not None}
    line = thin("a", places, sizes, labels)
    assert list(line.x) == sorted(line.x)
    assert (line.x[0], line.x[-1]) == (0.0, 4_999.0)
    assert set(zip(line.x, line.y, line.labels, strict=True)) < points
    few = thin("b", places[:480], sizes[:480], labels[:480])
    assert set(zip(few.x, few.y, few.labels, strict=True)) == {each for each in points if each[0] < 480}


# ---- sections of one's own


def own_section(log, language):
    rows = (("a|b", 3, Size.of(2**30), Share(0.5), None),)
    return Section(
        f"Batch <{language}>",
        (
            Paragraph("# 1. no heading"),
            Bullets(("- no list",), is_numbered=True),
            Table(("name", "count", "size", "share", "none"), rows, "A table"),
            Bars((("a", 3), ("b", 0)), "Bars"),
            Lines((Curve("c", (0.0, 1.0), (1, 2), ("x", "y")),), "step", "A curve"),
        ),
    )


def test_sections_of_ones_own():
    report = make_report(first_log(), sections=[own_section, lambda log, language: None])
    text = render_report(report, ".md")
    assert "## Batch &lt;en&gt;" in text
    assert "| a\\|b | 3 | 1.00 GiB | 50.0% | not recorded |" in text
    assert "\n\\# 1. no heading" in text
    assert "\n1. \\- no list" in text
    assert "Batch <en>" in Page(render_report(report, ".html")).texts
    with pytest.raises(InputTypeError, match=r"got a str; expected a memkit\.report\.nodes\.Section"):
        make_report(first_log(), sections=[lambda log, language: "text"])


# ---- files


def test_only_a_report_is_replaced(tmp_path):
    for suffix in (".md", ".html", ".txt", ".json"):
        path = tmp_path / f"report{suffix}"
        write_report(first_log(), path)
        write_report(first_log(), path)
        assert MARK in path.read_text("utf-8")[:4096]
    notes = tmp_path / "notes.md"
    notes.write_text("mine")
    assert_refused(lambda: write_report(first_log(), notes), InputError, "an existing file that is not a memkit report")
    assert notes.read_text() == "mine"
    words = "print it to PDF in a browser"
    assert_refused(lambda: write_report(first_log(), tmp_path / "report.pdf"), InputError, words)
    (tmp_path / "d.md").mkdir()
    assert_refused(lambda: write_report(first_log(), tmp_path / "d.md"), InputError, "got a directory")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"report.md", "report.html", "report.txt", "report.json", "notes.md", "d.md"}


def test_rejects_files_without_log(tmp_path):
    assert_refused(
        lambda: write_report(S1, tmp_path / "r.md"), InputTypeError, "write_report(mk.report.read_memory_events"
    )
    assert_refused(lambda: write_report(EventLog((), ()), tmp_path / "r.md"), InputError, "got a log without events")
    assert not list(tmp_path.iterdir())


def test_needs_no_torch(tmp_path):
    arguments = ["report", "--log", str(S1), "--output", str(tmp_path / "r.html")]
    code = f"from memkit.cli import main; assert main({arguments}) == 0"
    assert_not_imported({"torch", "numpy", "pydantic"}, code)
