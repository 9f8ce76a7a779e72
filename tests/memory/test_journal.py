"""The manager's events: bounded in memory, complete in the file, alive after a kill, one writer for each process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch

import memkit as mk
from memkit._core.printable import printable_json
from tests.forked import run_python_forked
from tests.helpers import assert_refused


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


def names(path):
    log = mk.report.read_memory_events(path)
    assert not [problem for problem in log.problems if "ranks are missing" not in problem]
    return [event.event for event in log.events]


def test_memory_is_bounded_and_the_file_is_not(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    with mk.MemoryManager("cpu", max_events=3, log=path) as memory:
        for number in range(10):
            memory.mark(f"mark {number}")
        memory.events.save(tmp_path / "saved.jsonl")
        assert (len(memory.events), memory.events.num_dropped) == (3, 7)
    assert names(path) == [f"mark {number}" for number in range(10)]
    saved = mk.report.read_memory_events(tmp_path / "saved.jsonl").events
    assert saved[0].note == {"num_dropped": 7}
    assert [event.event for event in saved[1:]] == ["mark 7", "mark 8", "mark 9"]


def test_no_events_at_all():
    memory = mk.MemoryManager("cpu", max_events=0)
    memory.mark("a")
    assert (list(memory.events), memory.events.num_dropped) == ([], 1)
    with pytest.raises(mk.errors.ConfigError, match=r"got max_events=-1; .*0 or more"):
        mk.MemoryManager("cpu", max_events=-1)


def test_file_matches_events_in_memory(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    with mk.MemoryManager("cpu", log=path) as memory:
        memory.mark("loaded", component="vae", note={"layers": [1, 2]})
        with memory.track(), memory.phase("step"):
            with memory.phase("forward"):
                torch.ones(1000)
            memory.step()
        events = list(memory.events)
    log = mk.report.read_memory_events(path)
    assert list(log.events) == [replace(event, rank=0) for event in events]
    assert all(e.host_rss_bytes is None or e.host_rss_bytes <= e.host_peak_bytes for e in events)
    forward, step = log.events[1], log.events[2]
    assert (forward.phase, forward.peak_bytes, forward.allocated_bytes) == ("step/forward", 4000, 0)
    assert (step.event, step.step, step.phase) == ("step_1", 1, "step")
    assert forward.reserved_bytes is forward.peak_total_bytes is None  # the CPU has no such counters
    assert forward.host_peak_bytes > 2**20
    origin = log.origin(forward, "peak_bytes")
    assert (origin.source, origin.kind) == ("dispatch", "measured")
    assert log.origin(forward, "host_peak_bytes").source == "rss"
    assert log.headers[0].device.total_bytes == memory.snapshot().total_bytes
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)


def test_lines_of_the_manager_are_the_encoders_own(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    with mk.MemoryManager("cpu", log=path) as memory, memory.track():
        with contextlib.suppress(ZeroDivisionError), memory.phase('a "quoted"\\name, é\n\u2028'):
            1 / 0  # noqa: B018
        memory.step()
        memory.mark("m", note={"text": ["é", 1e-300, 0.1, True, None, {"deep": -5}]})
    _, *lines = path.read_text().split("\n")[:-1]
    assert len(lines) == 4  # the last one is the tracker's peak
    for line in lines:
        assert line == printable_json(json.dumps(json.loads(line), ensure_ascii=False, separators=(",", ":")))
    assert "é" in lines[0]
    assert "\\u2028" in lines[0]  # an end of line to others


def test_a_note_of_a_loss_that_diverged_does_not_end_the_training(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    with mk.MemoryManager("cpu", log=path) as memory:
        memory.mark("step", note={"loss": float("nan"), "norms": (float("inf"), -float("inf"), 1.5)})
    (event,) = mk.report.read_memory_events(path).events
    assert event.note == {"loss": "nan", "norms": ["inf", "-inf", 1.5]}


def test_every_number_of_an_accelerator_has_an_origin():
    from memkit._events.log import BYTE_FIELDS
    from memkit.memory.journal import header_of

    header = header_of(torch.device("cpu"), None)
    assert {origin.kind for origin in header.fields.values()} == {"measured"}
    assert set(header.fields) <= set(BYTE_FIELDS)


def test_a_file_survives_a_kill_in_the_middle_of_a_phase(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    script = (
        "import os, signal, time, memkit as mk\n"
        f"memory = mk.MemoryManager('cpu', log={str(path)!r})\n"
        "with memory.phase('first'): time.sleep(0.6)\n"
        "memory.mark('now')\n"
        "with memory.phase('second'):\n"
        "    with memory.phase('inner'): time.sleep(0.6)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run_python_forked(script, expected=-signal.SIGKILL)
    assert names(path) == ["first", "now", "inner"]


@pytest.mark.slow
def test_flushes_at_exit_and_after_errors(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    script = (
        "import memkit as mk\n"
        f"memory = mk.MemoryManager('cpu', log={str(path)!r})\n"
        "for _ in range(3):\n"
        "    with memory.phase('quick'): pass\n"
        "    memory.step()\n"
    )
    done = run(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert names(path) == ["quick", "step_1", "quick", "step_2", "quick", "step_3"]
    path.unlink()
    run(script + "import os\nwith memory.phase('wrong'):\n    try:\n        with memory.phase('inner'): 1 / 0\n"
                 "    except ZeroDivisionError: os._exit(1)\n")  # fmt: skip
    assert names(path)[-1] == "inner"


def test_each_rank_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    script = f"import memkit as mk\nmemory = mk.MemoryManager('cpu', log={str(path)!r})\nmemory.mark('up')\n"
    for rank in range(2):
        run_python_forked(script + "memory.close()\n", RANK=str(rank), WORLD_SIZE="2")
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "memory_events.rank0.jsonl",
        "memory_events.rank1.jsonl",
    ]
    assert sorted(event.rank for event in mk.report.read_memory_events(path).events) == [0, 1]


def test_one_log_has_one_manager_at_a_time(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    with mk.MemoryManager("cpu", log=path) as memory:
        memory.mark("first")
        held = path.read_bytes()
        with pytest.raises(mk.errors.StateError, match=r"another writer has open.* choose another path"):
            mk.MemoryManager("cpu", log=path)
        script = f"import memkit as mk\nmk.MemoryManager('cpu', log={str(path)!r})\n"
        done = run_python_forked(script, expected=1)  # another process, as a rank that nobody numbered
        assert "StateError: EventWriter(" in done.stderr
        assert path.read_bytes() == held
        worker = os.fork()  # has the file open for longer than the manager, and holds nothing
        if worker == 0:
            time.sleep(30)
            os._exit(0)
    with mk.MemoryManager("cpu", log=path) as memory:
        memory.mark("second")
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert [event.event for event in mk.report.read_memory_events(path).events] == ["first", "second"]


def test_a_killed_managers_log_is_free_at_once(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    script = (
        f"import os, memkit as mk\nmemory = mk.MemoryManager('cpu', log={str(path)!r})\nmemory.mark('killed')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run_python_forked(script, expected=-signal.SIGKILL)
    with mk.MemoryManager("cpu", log=path) as memory:
        memory.mark("next")
    assert [event.event for event in mk.report.read_memory_events(path).events] == ["killed", "next"]


def test_rejects_missing_directory(tmp_path):
    for log, text in (
        (tmp_path / "not there" / "memory_events.jsonl", "which is not a directory.*create it first: os.makedirs"),
        (tmp_path, "got a directory.*add a file name"),
    ):
        with pytest.raises(mk.errors.InputError, match=text):
            mk.MemoryManager("cpu", log=log)
        with pytest.raises(mk.errors.InputError, match=text):
            mk.MemoryManager("cpu").events.save(log)


def test_after_close_events_stay_in_memory(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    memory = mk.MemoryManager("cpu", log=path)
    with memory.phase("open while it closes"):
        memory.close()
    memory.mark("later")
    memory.step()
    memory.close()
    assert [event.event for event in memory.events] == ["open while it closes", "later", "step_1"]
    assert names(path) == []


def test_forked_process_writes_nothing_and_warns_once(tmp_path):
    path = tmp_path / "memory_events.jsonl"
    memory = mk.MemoryManager("cpu", log=path)
    memory.mark("parent")
    pid = os.fork()
    if pid == 0:  # as a DataLoader worker whose data set uses the manager
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    with memory.phase("worker"):
                        pass
                    memory.mark("worker mark")
            is_right = len(caught) == 1 and "forked" in str(caught[0].message)
            is_right &= memory.phases["worker"].num_calls == 3 and len(memory.events) == 7
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    memory.mark("parent again")
    memory.close()
    assert names(path) == ["parent", "parent again"]


@pytest.mark.parametrize("note", [{"loss": torch.ones(1)}, {1: 2}, [1]])
def test_mark_rejects_non_plain_values(note):
    memory = mk.MemoryManager("cpu")
    assert_refused(lambda: memory.mark("a", note=note), mk.errors.InputTypeError)
    assert_refused(lambda: memory.mark(""), mk.errors.InputError, "mark('')")
    error = assert_refused(lambda: memory.mark("a", note={"x": object()}), mk.errors.InputTypeError)
    assert error.call == "memory.mark(...)"
    assert list(memory.events) == []
