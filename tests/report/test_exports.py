"""A log for other programs: Chrome's trace format; nothing is replaced. `test_imports.py` reads exports back."""

import json

import pytest

from memkit._core.errors import InputError
from memkit._events.log import Event
from memkit.cli import main
from memkit.report.exports import export_log
from tests.report.pages import ALL, S1, STEP, T5, first_log, log_of


def test_a_trace_has_slices_counters_and_marks_at_their_times(tmp_path):
    log = log_of(
        Event("forward", phase="step/forward", wall_s=100.5, duration_ns=200_000_000, allocated_bytes=7, rank=1),
        Event("saved", wall_s=100.0, note={"file": "a"}),
    )
    export_log(log, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    assert [event["args"] for event in events if event["ph"] == "M"] == [{"name": "rank 0"}, {"name": "rank 1"}]
    (slice_,) = (event for event in events if event["ph"] == "X")
    assert (slice_["pid"], slice_["name"], slice_["dur"]) == (1, "forward", 200_000)
    assert slice_["ts"] == pytest.approx(300_000)
    (counter,) = (event for event in events if event["ph"] == "C")
    assert (counter["name"], counter["ts"], counter["args"]) == ("in tensors", 500_000, {"bytes": 7})
    (mark,) = (event for event in events if event["ph"] == "i")
    assert (mark["ts"], mark["s"], mark["args"]) == (
        0,
        "p",
        {"event": "saved", "wall_s": 100.0, "note": {"file": "a"}, "run": 0},
    )


def test_a_log_without_a_clock_keeps_its_order(tmp_path):
    export_log(first_log(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    counters = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C"]
    assert counters[:3] == [(0, 0), (1000, T5), (2000, ALL)]
    added = [event["args"].get("incremental_bytes") for event in events if event["ph"] == "i"]
    assert added == [None, None, None, STEP, STEP, STEP, STEP, None]


def test_nothing_is_replaced(tmp_path, capsys):
    assert main(["convert", str(S1), str(tmp_path / "events.csv")]) == 0
    assert main(["convert", str(S1), str(tmp_path / "events.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(InputError, match=r"got the suffix '\.xlsx'"):
        export_log(first_log(), tmp_path / "events.xlsx")
    assert [path.name for path in tmp_path.iterdir()] == ["events.csv"]
