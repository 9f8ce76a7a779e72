"""Files that are written for others: nothing hidden in them, and nothing written through a link."""

import json
import os

import pytest

from memkit._core.errors import InputError
from memkit._events.log import Event, LoggedDevice, LogHeader
from memkit._events.reader import EventLog
from memkit.recipes.report import write_report
from tests.helpers import assert_refused

HIDDEN = "a\u202eb\x1b[31mc\x9bd\x7fe\u2066f\ng\u0085h\u200ei\u061cj\u2028k\ufeffl\U000e0041m\u00adn"


def log():
    header = LogHeader(
        run_id=HIDDEN, wall_s=1.75e9, rank=0, argv=(HIDDEN,), versions={HIDDEN: HIDDEN},
        config={HIDDEN: {HIDDEN: [HIDDEN]}},
        device=LoggedDevice(HIDDEN, 10**10, "cuda"),
    )  # fmt: skip
    numbers = {"allocated_bytes": 10**6, "peak_bytes": 2 * 10**6, "peak_total_bytes": 2 * 10**6, "rank": 0, "run": 0}
    notes = {HIDDEN: HIDDEN, "peak_by_line": {HIDDEN: 1000}}
    events = [
        Event(HIDDEN, step=step, phase=HIDDEN, component=HIDDEN, wall_s=1.75e9 + step, note=notes, **numbers)
        for step in range(4)
    ]
    return EventLog(
        (header,), (*events, Event("oom", rank=0, run=0, note=notes, wall_s=1.75e9 + 5)), problems=(HIDDEN,)
    )


@pytest.mark.parametrize("suffix", [".json", ".md", ".txt", ".html"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_report_hides_no_characters(tmp_path, suffix, language):
    path = tmp_path / f"report{suffix}"
    write_report(log(), path, language=language, baseline=log())
    assert path.read_text("utf-8").replace("\n", "").isprintable()
    if suffix == ".json":
        assert "\\u202e" in path.read_text("utf-8")
        json.loads(path.read_text("utf-8"))


def test_a_report_is_not_written_through_a_link_to_nowhere(tmp_path):
    elsewhere = tmp_path / "elsewhere.json"
    (tmp_path / "report.json").symlink_to(elsewhere)
    assert_refused(lambda: write_report(log(), tmp_path / "report.json"), InputError, "a link to a missing file")
    assert not elsewhere.exists()
    os.mkfifo(tmp_path / "pipe.md")
    assert_refused(lambda: write_report(log(), tmp_path / "pipe.md"), InputError, "not a regular file")
    write_report(log(), elsewhere)
    write_report(log(), tmp_path / "report.json")  # now it leads to an earlier report
    assert (tmp_path / "report.json").is_symlink()
