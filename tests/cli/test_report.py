"""The `memkit report` and `memkit compare` commands, as typed in a shell."""

import json
import sys

import pytest

from benchmarks.cases import report_pages
from memkit._events.reader import read_memory_events
from memkit.cli import main
from memkit.recipes.report import write_report
from memkit.report.words import texts
from tests.cli.commands import assert_error, assert_wrong_usage
from tests.report.foreign import save, snapshot
from tests.report.pages import S1, markdown_rows


def test_report_keeps_its_default_path(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--log", str(S1)]) == 0
    *lines, path = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert text.startswith("Nothing wrong found, but the log cannot show whether memory grows; peak 23.15 GiB")
    assert "Peak 23.15 GiB in tensors, first seen at inference_end; " in text
    assert path == "memory_analysis_report.md"
    assert (tmp_path / path).read_text("utf-8").startswith("<!-- memkit.report/1 -->\n# Nothing wrong found")


def test_the_log_may_stand_alone(capsys, tmp_path):
    assert main(["report", str(S1), "--output", str(tmp_path / "r.md")]) == 0
    assert "\nPeak 23.15 GiB in tensors" in capsys.readouterr().out
    for arguments in ([], [str(S1), "--log", str(S1)]):
        assert_wrong_usage(capsys, ["report", *arguments], "usage: memkit report")


def test_an_earlier_report_is_replaced_on_demand_only(capsys, tmp_path):
    for command in (["report", str(S1)], ["compare", str(S1), str(S1)]):
        arguments = [*command, "--output", str(tmp_path / f"{command[0]}.md")]
        assert main(arguments) == 0
        capsys.readouterr()
        assert_error(capsys, arguments, "got an earlier report at this path; expected a new path. Way out: add --force")
        assert main([*arguments, "--force"]) == 0


def test_baseline_card_and_language(capsys, tmp_path):
    arguments = ["--baseline", str(S1), "--gpu", "5090", "--language", "zh", "--output", str(tmp_path / "r.json")]
    assert main(["report", "--log", str(S1), *arguments]) == 0
    record = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert record["language"] == "zh"
    assert record["figures"]["rating"]["points"] == 85
    assert {change["presence"] for change in record["figures"]["changes"]} == {"both"}
    assert "张量峰值" in capsys.readouterr().out


def test_compare_reports_changes_and_fails_on_request(capsys, tmp_path):
    larger = tmp_path / "larger.json"
    larger.write_text(S1.read_text().replace("24860109824", "26103115315"))
    assert main(["compare", str(S1), str(larger), "--max-growth", "5.1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Peak +5.0% (23.15 GiB → 24.31 GiB)\n")
    assert "+1.16 GiB" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["compare", str(S1), str(larger), "--max-growth", "4.9"]) == 1
    assert main(["compare", str(larger), str(S1), "--max-growth", "0", "--output", str(tmp_path / "c.md")]) == 0
    assert "-1.16 GiB" in (tmp_path / "c.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["report", "--log", "none.json"], "no file at this path"),
        (["report", "--log", str(S1), "--output", "report.pdf"], "print it to PDF in a browser"),
        (["report", "--log", str(S1), "--output", str(S1)], "an existing file that is not a memkit report"),
        (["report", "--log", str(S1), "--language", "de"], "expected one of 'en', 'zh'"),
        (["compare", str(S1), str(S1), "--language", "de"], "memkit compare: got language='de'"),
        (["report", "--log", str(S1), "--gpu", "none"], "an unknown GPU"),
        (["compare", str(S1), "none.json"], "no file at this path"),
        (["compare", str(S1), str(S1), "--output", "x.pdf"], "the report 'x.pdf': got the suffix"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    assert_error(capsys, arguments, text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["nan", "inf", "5%"])
def test_a_growth_that_is_no_number_is_wrong_usage(capsys, text):
    assert_wrong_usage(capsys, ["compare", str(S1), str(S1), "--max-growth", text], "--max-growth")


def test_snapshots_are_accepted_like_logs(capsys, tmp_path):
    log = save(tmp_path, snapshot())
    larger = snapshot()
    for index in (2, 3):
        larger["device_traces"][0][index]["size"] *= 2
    after = save(tmp_path / "after", larger)
    page = tmp_path / "page.html"
    assert main(["report", "--log", str(log), "--baseline", str(after), "--output", str(page)]) == 0
    assert "demo/train.py:7 forward" in page.read_text("utf-8")
    assert main(["compare", str(log), str(after), "--max-growth", "50"]) == 1


@pytest.mark.parametrize("language", ["en", "zh"])
def test_snapshot_page_has_snapshot_details(tmp_path, language):
    page = tmp_path / "page.md"
    log = save(tmp_path, snapshot())
    assert main(["report", "--log", str(log), "--output", str(page), "--language", language]) == 0
    text = page.read_text("utf-8")
    for key in ("layer_requested", "layer_rounding", "layer_cache", "segments_large", "form_snapshot"):
        assert texts()[key][language] in text
    at_least = texts()["size_at_least"][language].format(size="324 B")
    assert markdown_rows(text)[texts()["layer_rounding"][language]][0] == at_least
    assert "80.00 MiB" in text  # what was asked for where memory ran out


def test_damaged_logs_give_a_report_or_one_line():
    counts = report_pages.fuzz(300, seed=1)
    assert counts["anything else"] == 0
    assert min(counts["reports"], counts["one line"]) > 50


def num_calls(log, target):
    """Count the calls of Python functions that read a log and report it."""
    count = 0

    def watch(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        write_report(read_memory_events(log), target)
    finally:
        sys.setprofile(None)
    return count


def test_an_event_costs_few_calls(tmp_path):
    counts = []
    for num_events in (50, 4_000, 8_000):  # the first report imports what all need
        report_pages.save_log(tmp_path / "log.jsonl", num_events)
        counts.append(num_calls(tmp_path / "log.jsonl", tmp_path / "report.html"))
    assert (counts[2] - counts[1]) / 4_000 < 24  # 32 before checks of single events became one pass over all
