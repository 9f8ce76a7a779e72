"""Valid events and headers can be written; a killed or forked writer, or a full disk, costs at most one line."""

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from memkit._core.errors import FileFormatError, InputError, InputTypeError, MemkitWarning, StateError
from memkit._events.log import EVENT_KEYS, Event, LoggedDevice, LogHeader, Origin, event_of
from memkit._events.reader import read_memory_events
from memkit._events.writer import EventWriter, rank_path, save_events
from tests.forked import run_python_forked
from tests.helpers import assert_refused

ROOT = Path(__file__).parents[1]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- records


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"allocated_bytes": True}, InputTypeError, "allocated_bytes=True; expected an integer from 0 to 2**63 - 1"),
        ({"allocated_bytes": 1.0}, InputTypeError, "allocated_bytes=1.0"),
        ({"peak_bytes": -1}, InputError, "peak_bytes=-1"),
        ({"peak_bytes": 2**63}, InputError, "peak_bytes=an integer of 64 bits"),
        ({"peak_bytes": 10**5000}, InputError, "peak_bytes=an integer of 16610 bits"),
        ({"step": "3"}, InputTypeError, "step='3'"),
        ({"event": ""}, InputError, "event=''; expected text that is not empty"),
        ({"event": None}, InputTypeError, "event=None"),
        ({"phase": b"train"}, InputTypeError, "phase=b'train'"),
        ({"kind": "guessed"}, InputError, "kind='guessed'; expected one of measured, predicted, sampled"),
        ({"kind": ["measured"]}, InputTypeError, "kind="),
        ({"source": ""}, InputError, "source=''"),
        ({"wall_s": float("nan")}, InputError, "wall_s=nan"),
        ({"wall_s": time.time_ns()}, InputError, "expected seconds since 1970"),
        ({"wall_s": True}, InputTypeError, "wall_s=True"),
        ({"note": ["a"]}, InputTypeError, "note=['a']; expected a dict"),
        ({"note": {"a": {"b": [float("inf")]}}}, InputError, "note['a']['b']=inf; expected finite numbers"),
        ({"note": {"a": 2**64}}, InputError, "note['a']=an integer of 65 bits"),
        ({"note": {"a": object}}, InputTypeError, "expected plain JSON values"),
        ({"note": {1: "a"}}, InputTypeError, "a key in note=1; expected text keys"),
    ],
)
def test_a_wrong_value_makes_no_event(values, error, text):
    assert_refused(lambda: Event(**{"event": "e", **values}), error, text)


def test_an_event_of_a_record_is_the_event():
    values = dict.fromkeys((each for each in EVENT_KEYS if each.endswith(("_bytes", "_ns", "step", "rank"))), 7)
    values |= {"event": "forward", "phase": "a/b", "component": "c", "wall_s": 1.5, "note": {"x": [1]}, "run": 0}
    values |= {"source": "allocator", "kind": "measured"}
    assert {*values} == {*EVENT_KEYS, "run"}
    for names in (values, ["event"]):
        some = {name: values[name] for name in names}
        found, expected = event_of(some), Event(**some)
        assert (found, found.run) == (expected, expected.run)
    assert_refused(lambda: event_of({"event": "x", "step": -1}), InputError, "step")
    assert_refused(lambda: event_of({"step": 1}), InputTypeError, "event")


def test_self_containing_note_terminates():
    note = {}
    note["again"] = note
    assert_refused(lambda: Event("e", note=note), InputError, "at most 32 levels")


def test_a_note_is_copied():
    note = {"tags": ("a", "b")}
    event = Event("e", note=note)
    note["tags"] = None
    assert event.note == {"tags": ["a", "b"]}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2; expected a rank below world_size=2"),
        ({"rank": -1}, "rank=-1"),
        ({"fields": {"allocated": Origin()}}, "fields='allocated'; expected names among allocated_bytes"),
        ({"fields": {"peak_bytes": "nvml"}}, "fields['peak_bytes']='nvml'; expected an Origin"),
        ({"device": "cuda"}, "expected a LoggedDevice"),
        ({"argv": [1]}, "expected a tuple of text"),
        ({"versions": {"torch": 2}}, "package names and versions as text"),
        ({"config": {"model": object()}}, "config['model']="),
    ],
)
def test_a_wrong_value_makes_no_header(values, text):
    assert_refused(lambda: LogHeader.new(**values), (InputError, InputTypeError), text)


def test_a_header_does_not_tell_the_command_line_unasked(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "--token=hunter2"])
    path = tmp_path / "log.jsonl"
    save_events(path, LogHeader.new(), [])
    assert "hunter2" not in path.read_text()
    save_events(path, LogHeader.new(argv=sys.argv), [])
    assert lines_of(path)[0]["argv"] == ["train.py", "--token=hunter2"]


# ---- the file


def test_line_format(tmp_path):
    path = tmp_path / "log.jsonl"
    header = LogHeader(
        run_id="r1",
        wall_s=2.5,
        rank=1,
        world_size=2,
        device=LoggedDevice("Räder X", backend="cuda"),
        fields={"peak_bytes": Origin("cuda_allocator", "measured")},
    )
    with EventWriter(path, header) as writer:
        writer.write(Event("fwd", step=0, peak_bytes=0, note={"ok": None}))
    assert path.read_bytes().decode() == (
        '{"schema":"memkit.events/1","run_id":"r1","wall_s":2.5,"rank":1,"world_size":2,'
        '"device":{"name":"Räder X","backend":"cuda"},"versions":{},'
        '"fields":{"peak_bytes":{"source":"cuda_allocator","kind":"measured"}},"units":"bytes"}\n'
        '{"event":"fwd","step":0,"peak_bytes":0,"note":{"ok":null}}\n'
    )


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    path = tmp_path / "log.jsonl"
    save_events(path, LogHeader.new(argv=["\udcff.py"]), [Event("\ud800x", note={"\ud800": "\udfff"})])
    log = read_memory_events(path)
    assert log.headers[0].argv == ("?.py",)
    assert (log.events[0].event, log.events[0].note) == ("?x", {"?": "?"})


def test_each_event_is_in_the_file_when_write_returns(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventWriter(path, LogHeader.new()) as writer:
        for step in range(5):
            writer.write(Event("step", step=step))
            assert lines_of(path)[-1]["step"] == step


CHILD = """
import itertools, sys
from memkit._events.log import Event, LogHeader
from memkit._events.writer import EventWriter
with EventWriter(sys.argv[1], LogHeader.new()) as writer:
    for step in itertools.count():
        writer.write(Event("märk", step=step, peak_bytes=2**40 + step, note={"text": "é" * 100}))
        sys.stdout.write(f"{step}\\n")
        sys.stdout.flush()
"""


def test_kill_while_writing_loses_no_written_line(tmp_path):
    """Eight processes append to one log, each killed at a random instant: every acknowledged event is there."""
    path = tmp_path / "log.jsonl"
    chance = random.Random(3)
    acknowledged = []
    for _ in range(8):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, env=environment)
        first = child.stdout.readline()
        time.sleep(chance.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        said = (first + child.stdout.read()).split(b"\n")[:-1]
        child.stdout.close()
        child.wait()
        acknowledged.append(len(said))
    log = read_memory_events(path)
    assert len(log.headers) == 8
    for run, count in enumerate(acknowledged):
        steps = [event.step for event in log.events if event.run == run]
        assert steps == list(range(len(steps)))
        assert len(steps) >= count > 0


def test_threads_do_not_tear_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventWriter(path, LogHeader.new()) as writer:

        def write(name):
            for step in range(300):
                writer.write(Event(name, step=step, note={"text": name * 500}))

        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = read_memory_events(path).events
    for name in "abcd":
        assert [event.step for event in events if event.event == name] == list(range(300))


def test_a_full_disk_warns_once_and_the_run_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventWriter(path, LogHeader.new()) as writer:
        for step in range(3):
            writer.write(Event("step", step=step))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))  # room for part of a line
        try:
            with pytest.warns(MemkitWarning, match="cannot be written any more .*File too large") as caught:
                list(map(writer.write, [Event("step", step=step) for step in range(3, 6)]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert len(caught) == 1
        assert caught[0].filename == __file__
        writer.write(Event("step", step=6))  # room again, but a log with a hole in it would mislead
        assert [event.step for event in writer.unwritten] == [3, 4, 5, 6]
    log = read_memory_events(path)
    assert [event.step for event in log.events] == [0, 1, 2]
    assert len(log.problems) == 1
    assert log.problems[0].startswith(f"{path}: line 5: invalid JSON at character")


def test_full_disk_stops_no_run(tmp_path):
    path = tmp_path / "log.jsonl"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
    try:
        with pytest.warns(MemkitWarning, match="cannot be written any more"):
            writer = EventWriter(path, LogHeader.new())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    with writer:
        writer.write(Event("step"))
    assert [event.event for event in writer.unwritten] == ["step"]
    assert read_memory_events(path).events == ()


def test_a_forked_process_is_refused(tmp_path):
    script = (
        "import os, sys\n"
        "from memkit._events.log import Event, LogHeader\n"
        "from memkit._events.writer import EventWriter\n"
        "with EventWriter(sys.argv[1], LogHeader.new()) as writer:\n"
        "    child = os.fork()\n"
        "    writer.write(Event('parent' if child else 'child'))\n"
        "os.waitpid(child, 0)\n"
    )
    path = tmp_path / "log.jsonl"
    assert "StateError: EventWriter.write(event): got a call in process" in run_python_forked(script, path).stderr
    assert [event.event for event in read_memory_events(path).events] == ["parent"]


def test_a_closed_writer_is_refused(tmp_path):
    writer = EventWriter(tmp_path / "log.jsonl", LogHeader.new())
    writer.close()
    writer.close()
    assert_refused(lambda: writer.write(Event("late")), StateError, "got a closed writer")


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"event":"a"}\n', b"results\n", b'{"schema":"other/1"}\n', b"\n\n", b"\x00" * 40]
)
def test_leaves_foreign_files_alone(tmp_path, content):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    words = "a new file, or an event log to continue", "nothing was changed"
    assert_refused(lambda: EventWriter(path, LogHeader.new()), FileFormatError, *words)
    assert path.read_bytes() == content


def test_never_writes_unreadable_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with EventWriter(path, LogHeader.new()) as writer:
        assert_refused(lambda: writer.write(Event("x" * 2**24)), InputError, r"a line of \d{8} bytes")
        writer.write(Event("next"))
    assert [event.event for event in read_memory_events(path).events] == ["next"]


def test_save_replaces_a_log_as_a_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    save_events(path, LogHeader.new(), [Event("old")] * 3)
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        save_events(path, LogHeader.new(), (Event("new", step=1 // step) for step in (1, 0)))
    assert path.read_bytes() == before
    save_events(path, LogHeader.new(), [Event("new")])
    assert [event.event for event in read_memory_events(path).events] == ["new"]


@pytest.mark.parametrize(
    ("path", "rank", "world_size", "expected"),
    [
        ("runs/memory_events.jsonl", 3, 4, "runs/memory_events.rank3.jsonl"),
        ("runs/memory_events.jsonl", 0, 1, "runs/memory_events.jsonl"),
        ("a.b/log", 0, 2, "a.b/log.rank0"),
    ],
)
def test_rank_path(path, rank, world_size, expected):
    assert rank_path(path, rank, world_size) == Path(expected)


def test_rank_path_rejects_missing_rank():
    assert_refused(lambda: rank_path("log", 4, 4), InputError, "rank_path('log', rank=4, world_size=4): got rank=4")


def test_records_and_errors_travel_between_processes(tmp_path):
    path = tmp_path / "log.jsonl"
    save_events(path, LogHeader.new(fields={"peak_bytes": Origin("nvml", "sampled")}), [Event("e", peak_bytes=1)])
    log = pickle.loads(pickle.dumps(read_memory_events(path)))
    assert log.origin(log.events[0], "peak_bytes") == Origin("nvml", "sampled")
    with pytest.raises(FileNotFoundError) as caught:
        read_memory_events(tmp_path / "missing.jsonl")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
