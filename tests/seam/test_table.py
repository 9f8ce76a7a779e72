"""The counts in the table of versions, and the explanations that it accepts."""

from benchmarks.cases.torch_versions import outcome, unexplained

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
