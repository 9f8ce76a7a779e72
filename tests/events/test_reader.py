"""A log is read whatever a kill left of it, and gives back what was written, from all ranks and all runs."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from benchmarks.cases import log_fuzz
from memkit._core.errors import FileFormatError, InputError
from memkit._events import file
from memkit._events.log import BYTE_FIELDS, Event, LogHeader, Origin
from memkit._events.reader import EventLog, read_memory_events
from memkit._events.writer import EventWriter, rank_path, save_events
from tests.helpers import assert_not_imported

ROOT = Path(__file__).parents[1]
START = b'{"schema":"memkit.events/1","run_id":"r","wall_s":1.0}\n'


def with_rank(events, rank=0):
    return tuple(replace(event, rank=rank) if event.rank is None else event for event in events)


# ---- cuts


def one_run(path, names):
    """Append a run with short lines, long characters and a nested note."""
    with EventWriter(path, LogHeader.new(config={"név": "ő😀"})) as writer:
        for step, name in enumerate(names):
            writer.write(Event(name, step=step, peak_bytes=2**33 + step, note={"é": [step]}))


def expected_after(data):
    """Count the whole lines of a cut log by its bytes alone: events, and whether its last line is cut."""
    rows = data.split(b"\n")
    whole = [row for row in rows if row.endswith(b"}") and row.count(b"{") == row.count(b"}")]
    num_events = sum(row.startswith(b'{"event"') for row in whole)
    return num_events, len(whole) - num_events, rows[-1] not in (*whole, b"")


def test_cut_at_every_byte(tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    one_run(whole, ["init", "märk", "😀" * 3])
    one_run(whole, ["init", "ende"])
    data = whole.read_bytes()
    events = read_memory_events(whole).events
    assert len(events) == 5
    cuts = 0
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        log = read_memory_events(path)
        num_events, num_runs, is_cut = expected_after(data[:size])
        assert log.events == events[:num_events]
        assert len(log.headers) == num_runs
        assert any("incomplete" in problem for problem in log.problems) == is_cut
        assert any("before its header" in problem for problem in log.problems) == (num_runs == 0)
        cuts += is_cut
    assert cuts > 0.9 * len(data)


def test_a_log_cut_at_every_byte_is_continued_and_cut_again(tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    one_run(whole, ["init", "märk"])
    data = whole.read_bytes()
    events = read_memory_events(whole).events
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        one_run(path, ["init"])
        num_events, num_runs, is_cut = expected_after(data[:size])
        # Less than the header's first word says nothing: it is written over.
        is_noted = is_cut and size >= len(b'{"schema":"memkit.events/')
        for end in (path.stat().st_size, path.stat().st_size - 3):
            path.write_bytes(path.read_bytes()[:end])
            log = read_memory_events(path)
            assert len(log.headers) == num_runs + 1
            assert log.events[:num_events] == events[:num_events]
            assert sum("incomplete" in problem for problem in log.problems) == is_noted + (
                len(log.events) == num_events
            )


@pytest.mark.parametrize("data", [b"", b"\n", b"{", b'{"schema":"memkit.events/1","run', START[:-3]])
def test_a_log_without_a_header_is_empty_and_says_so(tmp_path, data):
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    log = read_memory_events(path)
    assert (log.headers, log.events, log.is_legacy) == ((), (), False)
    assert log.problems[-1] == f"{path}: the run ended before its header line was written: there are no events"


# ---- what is read is what was written

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
sizes = st.none() | st.integers(0, 2**63 - 1)
names = st.text(min_size=1)
events_lists = st.lists(
    st.builds(
        Event,
        names,
        time_ns=sizes,
        wall_s=st.none() | st.floats(0, 1e11),
        phase=st.none() | names,
        component=st.none() | names,
        step=sizes,
        rank=sizes,
        duration_ns=sizes,
        **dict.fromkeys(BYTE_FIELDS, sizes),
        source=st.none() | names,
        kind=st.sampled_from([None, "measured", "predicted", "sampled"]),
        note=st.none() | st.dictionaries(st.text(), json_values, max_size=3),
    ),
    max_size=4,
)
headers = st.builds(
    LogHeader.new,
    rank=st.integers(0, 3),
    world_size=st.just(4),
    versions=st.dictionaries(names, st.text()),
    argv=st.none() | st.lists(st.text()),
    git_commit=st.none() | names,
    config=st.none() | st.dictionaries(st.text(), json_values, max_size=3),
    fields=st.dictionaries(
        st.sampled_from(BYTE_FIELDS), st.builds(Origin, names, st.sampled_from(["measured", "predicted", "sampled"]))
    ),
)


@given(headers, events_lists)
def test_round_trip(tmp_path_factory, header, events):
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl"
    path.unlink(missing_ok=True)
    with EventWriter(path, header) as writer:
        for event in events:
            writer.write(event)
    log = read_memory_events(path)
    assert log.headers == (header,)
    assert log.events == with_rank(events, header.rank)


@pytest.mark.parametrize("key", ["traceEvents", "schemaVersion"])
def test_config_with_trace_keys_is_still_a_log(tmp_path, key):
    path = tmp_path / "log.jsonl"
    save_events(path, LogHeader.new(config={key: 1}), [Event("step")])
    assert [event.event for event in read_memory_events(path).events] == ["step"]


def test_origin_of_a_number(tmp_path):
    path = tmp_path / "log.jsonl"
    for source in ("cuda_allocator", "nvml"):
        with EventWriter(path, LogHeader.new(fields={"peak_bytes": Origin(source, "measured")})) as writer:
            writer.write(Event("fwd", peak_bytes=1, reserved_bytes=2))
            writer.write(Event("fwd", peak_bytes=1, source="fake", kind="predicted"))
            writer.write(Event("fwd", peak_bytes=1, kind="sampled"))
    log = read_memory_events(path)
    assert [log.origin(event, "peak_bytes") for event in log.events] == [
        Origin("cuda_allocator", "measured"),
        Origin("fake", "predicted"),
        Origin("cuda_allocator", "sampled"),
        Origin("nvml", "measured"),
        Origin("fake", "predicted"),
        Origin("nvml", "sampled"),
    ]
    assert log.origin(log.events[0], "reserved_bytes") == Origin()  # nobody says
    assert log.origin(log.events[1], "reserved_bytes") == Origin()  # there is no number
    with pytest.raises(InputError, match="got the name 'step'; expected one of allocated_bytes"):
        log.origin(log.events[0], "step")


def test_reads_newer_minor_version_and_names_additions(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"schema":"memkit.events/1.2","run_id":"r","wall_s":1,"cloud":"x","device":{"name":"X","power":3},'
        '"fields":{"peak_bytes":{"source":"a","unit":"B"},"power_bytes":{"source":"b"}}}\n'
        '{"event":"a","watts":5,"peak_bytes":7}\n{"event":"b","watts":{"deep":[1]}}\n'
    )
    log = read_memory_events(path)
    assert [(event.event, event.peak_bytes) for event in log.events] == [("a", 7), ("b", None)]
    assert log.headers[0].device.name == "X"
    assert log.headers[0].fields == {"peak_bytes": Origin("a")}
    assert log.problems == (
        f"{path}: 6 values under 5 unknown names were ignored: 'cloud', 'power', 'power_bytes', 'unit', 'watts'",
    )


def test_windows_endings_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "log.jsonl"
    one_run(path, ["init", "märk"])
    events = read_memory_events(path).events
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    log = read_memory_events(path)
    assert log.events == events
    assert log.problems == (f"{path}: a byte order mark at its start was ignored",)


def test_reports_repeated_lines_and_runs(tmp_path):
    path = tmp_path / "log.jsonl"
    one_run(path, ["init"])
    data = path.read_bytes()
    event = data.splitlines(keepends=True)[1]
    path.write_bytes(data + event + data)
    log = read_memory_events(path)
    assert log.problems == (
        f"{path}: it contains 2 runs, one after the other",
        f"{path}: 1 lines are exact copies of an earlier line of their run",
        f"run {log.headers[0].run_id} of rank 0 occurs 2 times in the log: its events are counted each time",
    )


# ---- blocks: lines that are parsed together are read as each alone


def what_is_read(path):
    try:
        return read_memory_events(path)
    except FileFormatError as error:
        return str(error)


@pytest.mark.slow
def test_damaged_lines_of_a_block_are_read_as_each_alone(tmp_path, monkeypatch):
    chance, path = random.Random(0), tmp_path / "log.jsonl"
    save_events(path, log_fuzz.header(), [*log_fuzz.some_events(), *map(log_fuzz.typical_event, range(200))])
    logs = [path.read_bytes(), path.read_bytes().replace(b"\n", b" \n", 5)]
    seen, num_together = set(), 0

    def together(lines, parse=file._parse_events):
        nonlocal num_together
        found = parse(lines)
        num_together += found is not None
        return found

    for _ in range(300):
        path.write_bytes(log_fuzz.damaged(logs, chance))
        monkeypatch.setattr(file, "_parse_events", together)
        found = what_is_read(path)
        monkeypatch.setattr(file, "_parse_events", lambda lines: None)
        assert found == what_is_read(path)
        seen.add(type(found))
    assert seen == {EventLog, str}
    assert num_together > 100


@pytest.mark.parametrize(
    "lines",
    [
        ['{"event":"a"', '"step":1}'],  # one value over two lines
        ['[{"event":"a"}', '{"event":"b"}]'],
        ['{"event":"a', '"}'],
        ['{"event":"a"', '"step":1}', '{"event":"b"}],[{"event":"c"}'],  # and two in the next, so that the number fits
        ['{"event":"a"}],[{"event":"b"}'],
        ['{"event":"a"}]', '[{"event":"b"}'],
        ['{"event":"a"},{"event":"b"}'],
        ['{"event":"a","event":"b"}'],
        ['["event"]'],
    ],
)
def test_no_value_goes_on_in_the_next_line(tmp_path, lines):
    path = tmp_path / "log.jsonl"
    path.write_bytes(START + "".join(f"{line}\n" for line in ['{"event":"x"}', *lines, '{"event":"y"}']).encode())
    with pytest.raises(FileFormatError, match=r"got .*line 3"):
        read_memory_events(path)


def test_a_defect_is_named_by_its_line_in_any_block(tmp_path):
    path = tmp_path / "log.jsonl"
    save_events(path, log_fuzz.header(), map(log_fuzz.typical_event, range(1000)))
    rows = path.read_bytes().splitlines(keepends=True)
    for at in (2, 500, 997):
        path.write_bytes(b"".join([*rows[:at], rows[at].replace(b'"step":', b'"step":-'), *rows[at + 1 :]]))
        with pytest.raises(FileFormatError, match=rf"line {at + 1}, event 'forward': step=-{at - 1}"):
            read_memory_events(path)


# ---- ranks


def write_rank(base, rank, world_size, seconds):
    with EventWriter(rank_path(base, rank, world_size), LogHeader.new(rank=rank, world_size=world_size)) as writer:
        for step, second in enumerate(seconds):
            writer.write(Event("step", step=step, wall_s=second))


@pytest.mark.parametrize("form", ["base", "directory", "list"])
def test_ranks_are_merged_by_wall_time_and_each_keeps_its_order(tmp_path, form):
    base = tmp_path / "memory_events.jsonl"
    now = 4e9
    write_rank(base, 0, 3, [now + 1, now + 5, now + 6])
    write_rank(base, 1, 3, [now + 4, now + 2, now + 7])  # its clock was set back
    write_rank(base, 2, 3, [now + 1, None, now + 9])  # the second without a time stays behind the first
    path = {"base": base, "directory": tmp_path, "list": [rank_path(base, rank, 3) for rank in range(3)]}[form]
    log = read_memory_events(path)
    merged = [(event.rank, event.step) for event in log.events]
    assert merged == [(0, 0), (2, 0), (2, 1), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (2, 2)]
    assert [log.headers[event.run].rank for event in log.events] == [event.rank for event in log.events]
    assert log.problems == ()


def test_orders_ranks_numerically_and_reports_missing_ones(tmp_path):
    base = tmp_path / "log.jsonl"
    for rank in (0, 2, 10, 11):
        write_rank(base, rank, 12, [])
    log = read_memory_events(base)
    assert [header.rank for header in log.headers] == [0, 2, 10, 11]
    assert log.problems == ("8 of 12 ranks are missing, the first of them rank 1",)
    assert read_memory_events(rank_path(base, 2, 12)).problems == (
        "11 of 12 ranks are missing, the first of them rank 0",
    )


def test_reports_leftovers_of_older_run(tmp_path):
    base = tmp_path / "log.jsonl"
    for rank, world_size in ((0, 2), (1, 2), (2, 3)):
        write_rank(base, rank, world_size, [])
    assert read_memory_events(base).problems == (
        "the files are from runs with 2, 3 ranks: some may be left from an older run",
    )
    write_rank(base, 0, 1, [])
    assert read_memory_events(base).problems == (f"{base}: 3 files of single ranks beside it are not read",)


# ---- the older form


def test_the_older_form_with_its_real_values(tmp_path):
    path = tmp_path / "memory_events.json"
    path.write_text(json.dumps(log_fuzz.LEGACY))
    log = read_memory_events(path)
    assert log.is_legacy
    assert (log.headers, log.problems) == ((), ())
    read = [(event.event, event.peak_total_bytes, event.incremental_bytes) for event in log.events]
    assert read == [
        ("init", 0, None),
        ("t5_loaded", 11_362_869_248, None),
        ("model_loaded", 24_824_987_648, None),
        ("step_2", None, 35_122_176),
        ("step_10", None, 35_122_176),
        ("inference_end", 24_860_109_824, None),
    ]
    assert all(event.peak_bytes is None and event.allocated_bytes is None for event in log.events)
    assert log.origin(log.events[1], "peak_total_bytes") == Origin()


def test_reports_two_runs_in_an_array(tmp_path):
    path = tmp_path / "memory_events.json"
    path.write_text(json.dumps(log_fuzz.LEGACY * 2, indent=2))
    assert read_memory_events(path).problems == (
        f"{path}: the event 'init' occurs 2 times: the file may contain several runs",
        f"{path}: peak_memory falls at some event: the counter was reset, or the file contains several runs",
    )


# ---- the rest


def test_logs_need_no_torch(tmp_path):
    code = (
        "import sys\n"
        "from memkit._events.log import Event, LogHeader\n"
        "from memkit._events.reader import read_memory_events\n"
        "from memkit._events.writer import EventWriter\n"
        "with EventWriter(sys.argv[1], LogHeader.new()) as writer:\n"
        "    writer.write(Event('a'))\n"
        "assert len(read_memory_events(sys.argv[1]).events) == 1\n"
    )
    assert_not_imported({"torch", "numpy", "pydantic", "psutil"}, code, tmp_path / "log.jsonl")


def test_saved_and_appended_logs_are_the_same(tmp_path):
    saved, appended = tmp_path / "saved.jsonl", tmp_path / "appended.jsonl"
    header, events = log_fuzz.header(), log_fuzz.some_events()
    save_events(saved, header, iter(events))
    with EventWriter(appended, header) as writer:
        for event in events:
            writer.write(event)
    assert saved.read_bytes() == appended.read_bytes()
    assert read_memory_events(str(saved)).events == with_rank(events)
