"""The counts in the table of versions, and the explanations that it accepts."""

from benchmarks.cases.torch_versions import outcome, unexplained
from benchmarks.tables import peaks_on_a_card, peaks_that_differ

LOG = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails">
<failure message="File &quot;/home/me/x/spawn.py&quot;, line 3&#10;boom"/></testcase>
<testcase classname="tests.a" name="breaks"><error message="in setup"/></testcase>
<testcase classname="tests.a" name="named"><skipped message="PyTorch has no torch.optim.Muon (the test)"/></testcase>
<testcase classname="tests.a" name="other"><skipped message="too slow today"/></testcase>
<testcase classname="tests.a" name="usual"><skipped message="no triton"/></testcase>
</testsuite></testsuites>"""


def test_a_log_is_counted_without_paths_of_the_machine(tmp_path):
    (tmp_path / "log.xml").write_text(LOG)
    row = outcome(tmp_path / "log.xml")
    assert row["num_passed"] == 1
    assert row["failed"] == {"tests.a::fails": 'File "spawn.py", line 3 boom', "tests.a::breaks": "in setup"}
    assert set(row["skipped"]) == {"tests.a::named", "tests.a::other", "tests.a::usual"}
    figures = {"2.8.0": row, "2.13.0": {"skipped": {"tests.a::usual": "no triton"}}}
    assert unexplained(figures, "2.8.0") == ["skipped without naming what is lacking: tests.a::other: too slow today"]


def test_peaks_are_compared_where_both_versions_have_them():
    rows = {
        "2.8.0": {"cpu": {"a": 1, "b": 2}, "RTX 4090": {"a": 5, "b": 6, "c": "refused"}},
        "2.13.0": {"cpu": {"a": 1, "b": 3}, "RTX 4090": {"a": 4, "b": 6, "c": 7}},
        "2.15.0": {"cpu": {"a": 1, "new": 9}, "RTX 4090": {"a": 1, "new": 9}},
    }
    result = {"figures": {version: {"peak_bytes": peaks} for version, peaks in rows.items()}}
    assert [row["model"] for row in peaks_that_differ(result)] == ["b"]
    assert list(peaks_on_a_card(result)) == [
        {"version": "2.8.0", "num": 2, "equal": 1, "least": 0, "most": 1},
        {"version": "2.15.0", "num": 1, "equal": 0, "least": -3, "most": -3},
    ]
