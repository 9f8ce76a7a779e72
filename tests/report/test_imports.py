"""Files of other programs as logs: CUDA memory snapshots, traces of torch.profiler."""

import copy
import gzip
import itertools
import json
import os
import pickle
import random
import struct
import tracemalloc
from collections import Counter

import pytest
import torch

from memkit._core.errors import FileFormatError
from memkit._events.log import Event
from memkit._events.reader import read_memory_events
from memkit.recipes.report import make_report
from memkit.report.figures import Shortage, read_figures
from tests.helpers import assert_refused
from tests.report.foreign import frame, judge_snapshot, profile_of_a_card, save, snapshot

MIB = 2**20


# ---- snapshots


def test_snapshot_yields_timeline_by_line(tmp_path):
    log = read_memory_events(save(tmp_path, snapshot()))
    assert log.form == "snapshot"
    assert [
        (event.event, event.allocated_bytes, event.requested_bytes, event.reserved_bytes) for event in log.events
    ] == [
        ("demo/train.py:7 forward", 3 * MIB + 1024, 3 * MIB + 700, 20 * MIB),
        ("segment_alloc", 3 * MIB + 1024, 3 * MIB + 700, 42 * MIB),
        ("aten::mul_Tensor", 24 * MIB + 1024, 24 * MIB + 700, 42 * MIB),
        ("free", 3 * MIB + 1024, 3 * MIB + 700, 42 * MIB),
        ("demo/train.py:9 step", 3 * MIB + 1024, 3 * MIB + 700, 42 * MIB),
        ("snapshot", 3 * MIB + 1024, 3 * MIB + 700, 42 * MIB),
    ]
    peak = log.events[2]
    assert peak.note == {
        "peak_by_line": {"not recorded": 3 * MIB, "demo/train.py:7 forward": 1024, "aten::mul_Tensor": 21 * MIB}
    }
    assert [event.phase for event in log.events[:5]] == [None, None, "step", "step", None]
    assert log.headers[0].wall_s == pytest.approx(1.75e9)
    figures = read_figures(log, None)
    assert (figures.peak.num_bytes, figures.peak.event, figures.peak.is_exact) == (
        24 * MIB + 1024,
        "aten::mul_Tensor",
        False,
    )
    assert figures.layers.requested_bytes == 24 * MIB + 700
    assert figures.shortages == (Shortage("demo/train.py:9 step", 80 * MIB, 5 * MIB, 3 * MIB + 1024),)
    small, large = figures.segments
    assert (small.num_segments, large.num_segments, large.num_blocks) == (0, 2, 2)
    assert (large.requested_bytes, large.allocated_bytes) == (3 * MIB + 700, 3 * MIB + 1024)
    assert (large.reserved_bytes, large.largest_free_bytes) == (42 * MIB, 22 * MIB)


@pytest.mark.parametrize("level", ["snapshot", "segment", "block", "action"])
def test_every_field_may_be_missing(tmp_path, level):
    whole = snapshot()
    parts = {
        "snapshot": [whole],
        "segment": whole["segments"],
        "block": [block for segment in whole["segments"] for block in segment["blocks"]],
        "action": whole["device_traces"][0],
    }[level]
    needed = {"action"} if level == "action" else set()
    for key in sorted({key for part in parts for key in part} - needed):
        kept = [part.pop(key, None) for part in parts]
        log = read_memory_events(save(tmp_path, whole))
        assert all(event.allocated_bytes >= 0 for event in log.events)
        for part, value in zip(parts, kept, strict=True):
            if value is not None:
                part[key] = value


def test_blocks_before_the_history_can_be_the_peak(tmp_path):
    later = [("free_requested", 1, 1000 * MIB), ("free_completed", 1, 1000 * MIB), ("alloc", 2, MIB)]
    history = [{"action": action, "addr": address, "size": size} for action, address, size in later]
    log = read_memory_events(save(tmp_path, {"device_traces": [history]}))
    assert [(event.event, event.allocated_bytes) for event in log.events] == [
        ("history begins", 1000 * MIB),
        ("free", 0),
        ("alloc", MIB),
    ]
    assert log.events[0].note == {"peak_by_line": {"not recorded": 1000 * MIB}}
    assert read_figures(log, None).peak.num_bytes == 1000 * MIB


def test_two_cards_are_two_runs_and_segments_a_snapshot(tmp_path):
    two = snapshot()
    two["segments"].append({**two["segments"][0], "device": 1})
    log = read_memory_events(save(tmp_path, two))
    assert [event.run for event in log.events if event.event == "snapshot"] == [0, 1]
    assert len({header.run_id for header in log.headers}) == 2
    (event,) = read_memory_events(save(tmp_path, snapshot()["segments"])).events
    assert (event.allocated_bytes, event.reserved_bytes) == (3 * MIB + 1024, 42 * MIB)


def test_missing_actions_leave_reserved_unknown(tmp_path):
    cut = snapshot()
    trace = cut["device_traces"][0]
    trace += [dict(each) for _ in range(39) for each in trace]  # more segments than there are
    log = read_memory_events(save(tmp_path, cut))
    assert {event.reserved_bytes for event in log.events} == {None, 42 * MIB}


def bombs():
    deep = []
    deep.append(deep)
    blocks = [{"size": 1}] * 2000
    yield "a call", b"cos\nsystem\n(S'true'\ntR.", "does not occur in snapshots"
    yield "a call", pickle.dumps(os.getcwd), "does not occur in snapshots"
    yield "a class", pickle.dumps(Event("x")), "does not occur in snapshots"
    yield "an index", b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b".", "for a snapshot"
    yield "a length", b"\x80\x04\x96" + struct.pack("<Q", 2**40) + b".", "does not occur in snapshots"
    yield "a text", b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".", "for a snapshot"
    yield "a cut", pickle.dumps(snapshot(), protocol=4)[:-300], "a truncated pickle"
    yield "no stack", b"\x80\x04tu.", "cannot be loaded"
    yield "recursion", pickle.dumps({"segments": deep}), "segments[0]"
    yield "sharing", pickle.dumps({"segments": [{"blocks": blocks}] * 2000}), "repeated ones"
    yield "another pickle", pickle.dumps({"epoch": 3}), "a pickle of {'epoch': 3}"
    yield "containers", b"\x80\x04(" + b"}" * 10**6 + b"l.", "almost all empty containers"
    yield "nothing", pickle.dumps({"segments": []}), "without segments or history"
    yield "a sign", pickle.dumps({"segments": [{"blocks": [{"size": -1}]}]}), "size=-1"
    yield "a type", pickle.dumps({"device_traces": [[{"action": 3}]]}), "action=3"


@pytest.mark.parametrize(("data", "text"), [pytest.param(data, text, id=name) for name, data, text in bombs()])
def test_no_pickle_runs_code_or_takes_much_memory(tmp_path, data, text):
    path = tmp_path / "log"
    path.write_bytes(data if data.startswith(b"\x80") else b"\x80\x02" + data)
    error = assert_refused(lambda: read_memory_events(path), FileFormatError)
    assert text in error.got
    assert len(str(error)) < 1000


NASTY = (None, True, -1, 1.5, float("nan"), 2**63, "", "\x00", [], {}, [[]], {"a": 1}, [None], b"", {1: 2})


def spots(value):
    """Every place in lists and dicts where something stands."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from spots(value[key])


@pytest.mark.slow
def test_wrong_values_anywhere_are_read_or_refused(tmp_path):
    chance, outcomes = random.Random(0), Counter()
    for _ in range(300):
        is_pickle = chance.random() < 0.6
        data = snapshot() if is_pickle else profile_of_a_card()
        for _ in range(chance.choice((1, 1, 2))):
            place, key = chance.choice(list(spots(data)))
            place[key] = copy.deepcopy(chance.choice(NASTY))
        path = save(tmp_path, data)
        if not is_pickle:
            path.write_text(json.dumps(data, default=str))
        try:
            log = read_memory_events(path)
        except FileFormatError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert not log.events or make_report(log).sections
    assert min(outcomes.values()) > 60


# ---- traces


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """A real profile of two steps."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as found:
        for number in (1, 2):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):  # as a schedule names them
                with torch.profiler.record_function("forward pass"):
                    loss = model(torch.randn(256, 64)).square().mean()
                loss.backward()
                model.zero_grad()
    path = tmp_path_factory.mktemp("profile") / "whatever"
    found.export_chrome_trace(str(path))
    return path


def test_profile_yields_timeline_by_operator(profile):
    log = read_memory_events(profile)
    acts = [each["args"] for each in json.loads(profile.read_text())["traceEvents"] if each["name"] == "[memory]"]
    assert log.form == "trace"
    assert (log.headers[0].device.backend, log.problems) == ("cpu", ())
    blocks = [event for event in log.events if event.event != "step"]
    levels = list(itertools.accumulate(act["Bytes"] for act in acts))
    assert [event.allocated_bytes for event in blocks] == [level - min(0, *levels) for level in levels]
    best = max(blocks, key=lambda event: event.allocated_bytes)
    assert sum(best.note["peak_by_operator"].values()) == max(levels)
    assert best.note["peak_by_operator"]["aten::addmm"] >= 256 * 256 * 4
    assert "forward pass" in {event.phase for event in blocks}
    assert [event.step for event in log.events if event.event == "step"] == [1, 2]
    assert max(event.peak_bytes for event in log.events if event.event == "step") == best.allocated_bytes


def test_a_trace_may_be_packed_and_a_bomb_is_not_unpacked(profile, tmp_path, monkeypatch):
    packed = tmp_path / "log"
    packed.write_bytes(gzip.compress(profile.read_bytes()))
    assert read_memory_events(packed).events == read_memory_events(profile).events
    packed.write_bytes(packed.read_bytes()[:-100])
    assert_refused(lambda: read_memory_events(packed), FileFormatError, "a truncated gzip file")
    monkeypatch.setattr("memkit._events.file._LARGEST_WHOLE_BYTES", 10**6)
    packed.write_bytes(gzip.compress(bytes(10**8)))
    assert_refused(lambda: read_memory_events(packed), FileFormatError, "more than 1000000 bytes in a gzip file")


def bomb(unit, head=b'{"traceEvents":[', tail=b"]}"):
    """24 MB of one part over and over, which a gzip file holds in 24 kB."""
    return gzip.compress(head + unit * (24 * MIB // len(unit)) + unit.strip(b",") + tail)


BOMBS = {
    "empty events": (bomb(b"{},"), "nearly empty"),
    "events of one entry": (bomb(b'{"a":1},'), "nearly empty"),
    "events that are none": (bomb(b"[[]],"), "without a list of traceEvents"),
    "one event": (bomb(b"{},", b'{"traceEvents":[{"args":[', b"]}]}"), "containers in"),
    "beside the events": (bomb(b"{},", b'{"others":[', b'],"traceEvents":[]}'), "containers in"),
    "nested": (bomb(b"[", b'{"traceEvents":[{"args":', b"}]}"), "nested too deeply"),
    "digits": (bomb(b"1"), "Exceeds the limit"),
    "text": (bomb(b"x", b'{"traceEvents":[{"name":"', b'"}]}'), "bytes of a gzip file"),
    "spaces": (gzip.compress(b" " * 16 * MIB), "invalid JSON at character 16777216"),
    "many in little": (
        gzip.compress(b'{"traceEvents":[' + b'{"ph":"M"},' * 40 + b" " * 2**26 + b"]}"),
        "bytes of a gzip file",
    ),
    "two files": (gzip.compress(b"{}") * 2, "data after the end of a gzip file"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_reading_a_trace_holds_only_kept_events(tmp_path, name):
    data, text = BOMBS[name]
    path = tmp_path / "log"
    path.write_bytes(data)
    tracemalloc.start()
    error = assert_refused(lambda: read_memory_events(path), FileFormatError)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text in error.got
    assert peak < 200 * MIB


def act(time_us, **more):
    args = {"Bytes": 512, "Addr": 64, "Device Type": 0, "Device Id": -1}
    return {"ph": "i", "name": "[memory]", "ts": time_us, "pid": 1, "tid": 1, "args": args, **more}


def piece(name, thread):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 100, "pid": 1, "tid": thread}


def test_rejects_quadratic_slices(tmp_path):
    path = tmp_path / "log"
    for pieces, text in (
        ([piece("op", 1) for _ in range(1100)], "1100 nested slices"),
        ([piece(f"ProfilerStep#{thread}", thread) for thread in range(1100)], "1100 steps that overlap"),
    ):
        events = [*pieces, act(50), act(51)]
        path.write_text(json.dumps({"traceEvents": events}))
        assert_refused(lambda: read_memory_events(path), FileFormatError, text)


def test_of_an_accelerator_the_allocators_own_totals_count(tmp_path):
    path = tmp_path / "log"
    path.write_text(json.dumps(profile_of_a_card()))
    log = read_memory_events(path)
    assert [(each.event, each.allocated_bytes, each.reserved_bytes) for each in log.events] == [
        ("aten::mm", 1512, 4096),
        ("free", 1000, 4096),
    ]
    (header,) = log.headers
    assert (header.device.name, header.device.total_bytes, header.device.backend) == (
        "Tesla V100",
        34_084_028_416,
        "cuda",
    )
    assert header.wall_s == pytest.approx(1.75e9)
    assert "CPU's memory events are left out" in log.problems[0]


# ---- and back


def test_the_judge_of_schemas_can_say_no():
    wrong = snapshot()
    wrong["segments"][0]["blocks"][0]["size"] = 1.5
    with pytest.raises(AssertionError):
        judge_snapshot(wrong)
    judge_snapshot(snapshot())
    assert frame("a.py", 1, "f").keys() == {"filename", "line", "name"}
