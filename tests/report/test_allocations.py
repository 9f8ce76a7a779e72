"""Allocations of snapshots and trackers: read piece by piece, summed exactly, and drawn on a page of bounded size."""

import itertools
import json
import pickle
import random
import re
import tracemalloc

import numpy as np
import pytest
import torch

import memkit as mk
from benchmarks.long_snapshot import write_snapshot
from memkit._core.errors import FileFormatError, InputError
from memkit._events.reader import read_memory_events
from memkit._events.snapshot_rooms import find_room
from memkit._events.snapshot_rows import ActionTrace
from memkit._events.snapshot_stream import SnapshotStream
from memkit.recipes.report import write_report
from memkit.report import allocation_view
from memkit.report.allocation_view import view_of
from tests.helpers import assert_refused
from tests.report.foreign import frame, save, snapshot

MIB = 2**20


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "long.pickle"
    write_snapshot(path, 4_000_000)
    return path


@pytest.fixture(scope="module")
def long_one(long_file):
    """The snapshot as pickle itself reads it, and its allocations."""
    (found,) = read_memory_events(long_file).allocations
    return pickle.loads(long_file.read_bytes()), found


def chunks_of(data, size):
    return (data[start : start + size] for start in range(0, len(data), size))


def trace_of(data, size=2**20):
    """The actions of the first GPU as dicts again."""
    stream = SnapshotStream(chunks_of(data, size))
    (trace, *_) = stream.load()["device_traces"]
    assert isinstance(trace, ActionTrace)
    stacks = [[tuple(stream.stacks.frames[each]) for each in stack] for stack in stream.stacks.stacks]
    return [
        (trace.kinds[kind], address, num_bytes, time, stacks[stack])
        for kind, address, num_bytes, time, stack in zip(*(column.tolist() for column in trace.columns()), strict=True)
    ]


def plain(trace):
    """The same of what pickle itself reads."""
    return [
        (
            each["action"],
            each.get("addr", 0),
            each["size"],
            each.get("time_us", -1),
            [(frame["filename"], frame["line"], frame["name"]) for frame in each.get("frames", [])],
        )
        for each in trace
    ]


# ---- the file


def test_generated_snapshot_matches_pickle(tmp_path):
    path = tmp_path / "log"
    num_actions = write_snapshot(path, 500_000)
    data = path.read_bytes()
    value = pickle.loads(data)
    assert pickle.dumps(value, protocol=4) == data
    assert len(value["device_traces"][0]) == num_actions
    write_snapshot(path, 500_000)
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", [2**10, pytest.param(2**20, marks=pytest.mark.slow)])
def test_actions_are_read_as_pickle_reads_them(long_file, long_one, size):
    assert trace_of(long_file.read_bytes(), size) == plain(long_one[0]["device_traces"][0])


def with_odd_actions():
    """Actions of every form in turn, so that no two in a row look alike."""
    chance, actions = random.Random(0), []
    frames = [frame(f"/p/{number % 7}.py", number, "f") for number in range(300)]
    shared = frames[:5]
    for number in range(2000):
        action = {"action": chance.choice(["alloc", "free_requested"]), "addr": chance.choice([0, 255, 2**16, 2**47])}
        action |= {"size": chance.choice([1, 300, 70_000, 2**31, 2**40]), "stream": chance.choice([0, 94_000_000_000])}
        if number % 3:
            action["time_us"] = 1_760_000_000_000_000 + number
        action |= chance.choice(
            [{}, {"pool_id": (0, 0)}, {"compile_context": f"{number % 4}/0"}, {"user_metadata": ""}]
        )
        kinds = [
            [],
            shared,
            [frames[number % 300]],
            chance.sample(frames, 20),
            [frame("/new.py", number, "g"), *shared],
        ]
        action |= chance.choice([{}, *({"frames": each} for each in kinds)])
        actions.append(action)
    return {"segments": [], "device_traces": [actions, actions[:0]]}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reader_matches_pickle_for_all_forms_and_protocols(protocol):
    value = with_odd_actions()
    expected = plain(value["device_traces"][0])
    assert trace_of(pickle.dumps(value, protocol=protocol)) == expected
    value["device_traces"] = [
        [dict(each) for each in value["device_traces"][0][:1]]
    ]  # lists of one are written otherwise
    assert trace_of(pickle.dumps(value, protocol=protocol)) == expected[:1]


@pytest.mark.slow
def test_reading_takes_a_fraction_of_object_memory(tmp_path):
    path = tmp_path / "log"
    write_snapshot(path, 12_000_000)
    size = path.stat().st_size
    tracemalloc.start()
    read_memory_events(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    pickle.loads(path.read_bytes())
    naive = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert naive > 4 * size
    assert peak < 2 * size  # 16 MB of buffers, and 0.4 times the file


@pytest.mark.slow
def test_a_cut_or_damaged_snapshot_is_read_or_refused(tmp_path):
    path = tmp_path / "log"
    write_snapshot(path, 12_000)
    data, chance, num_refused = path.read_bytes(), random.Random(0), 0
    for _ in range(3):
        path.write_bytes(data[: chance.randrange(2, len(data))])
        assert_refused(lambda: read_memory_events(path), FileFormatError)
    for _ in range(10):
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 3])):
            damaged[chance.randrange(2, len(data))] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            read_memory_events(path)
        except FileFormatError:
            num_refused += 1
    assert num_refused > 2


BODY = b"}\x94(h\x05h\x06h\x07K\x01h\x08K\x05"


def action_pickle(body, num=3):
    """A snapshot whose actions are written by hand."""
    begin = b"\x80\x04}\x94(\x8c\x0ddevice_traces\x94]\x94]\x94("
    whole = (
        b"}\x94(\x8c\x06action\x94\x8c\x05alloc\x94\x8c\x04addr\x94K\x01\x8c\x04size\x94K\x05\x8c\x06frames\x94]\x94u"
    )
    return begin + whole + body * num + b"eau."


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (BODY + b"h\x09]\x94(h\x63h\x64eu", "memo index 99"),
        (b"}\x94(h\x05h\x06h\x07\x8a\x01\xffh\x08K\x05u", "addr=-1"),
        (b"}\x94(h\x05h\x06h\x07J\xff\xff\xff\xffh\x08K\x05u", "addr=-1"),
        (BODY + b"uh\x04", "memo index 4"),  # an action that was read
        (b"}\x94(h\x05K\x03h\x07K\x01h\x08K\x05u", "action=3"),
        (b"}\x94(h\x05h\x04h\x07K\x01h\x08K\x05u", "memo index 4"),
        (b"}\x94(h\x05h\x06h\x07cos\nsystem\n", "does not occur in snapshots"),
        (b"}\x94(h\x05h\x06h\x07\x8a\x0a" + bytes(10), "a number of 10 bytes"),
        (b"(" * 10**6, "are almost all empty containers"),
    ],
    ids=itertools.count(),
)
def test_rejects_impossible_snapshots(tmp_path, body, text):
    path = tmp_path / "log"
    path.write_bytes(action_pickle(body))
    assert text in assert_refused(lambda: read_memory_events(path), FileFormatError).got


def test_actions_by_hand_are_read():
    """The other side of the test above."""
    assert trace_of(action_pickle(BODY + b"h\x09h\x0au")) == [("alloc", 1, 5, -1, [])] * 4


# ---- the history, against one action after the other


def replayed(value):
    """Live bytes before and after each action and what is live at the peak, slowly: back from the end, then forward."""
    used = [
        (block["address"], (block["size"], line_of(block["frames"])))
        for segment in value["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    live, sizes, trace = dict(used), {}, value["device_traces"][0]
    for index in range(len(trace) - 1, -1, -1):
        each = trace[index]
        rounded = -(-each["size"] // 512) * 512
        if each["action"] == "free_requested":
            live[each["addr"]] = rounded, "not recorded"
        elif each["action"] == "alloc":
            sizes[index] = max(rounded, live.pop(each["addr"], (0, ""))[0])
    level = sum(size for size, _ in live.values())
    levels, highest, at_peak = [level], level, dict(live)
    for index, each in enumerate(trace):
        if each["action"] in ("alloc", "free_requested"):
            level -= live.pop(each["addr"], (0, ""))[0]
        if each["action"] == "alloc":
            live[each["addr"]] = sizes[index], line_of(each["frames"])
            level += sizes[index]
            if level > highest:
                highest, at_peak = level, dict(live)
        levels.append(level)
    return levels, at_peak


def line_of(frames):
    own = [each for each in frames if each["filename"].endswith(".py") and "site-packages" not in each["filename"]]
    if own:
        return f"{'/'.join(own[0]['filename'].split('/')[-2:])}:{own[0]['line']} {own[0]['name']}"
    found = [re.search(r"at::_ops::(\w+)::", each["name"]) for each in frames]
    return next((f"aten::{each[1]}" for each in found if each), "not recorded")


def test_levels_and_the_peak_by_line_are_those_of_a_slow_replay(long_one):
    value, found = long_one
    levels, live = replayed(value)
    assert found.levels().tolist() == levels
    data = view_of(found)
    assert data["peakBytes"] == max(levels) == sum(size for size, _ in live.values())
    by_line = {}
    for size, line in live.values():
        by_line[line] = by_line.get(line, 0) + size
    lines, column = data["labels"]["line"], data["scopes"][0]["events"].index(data["peak"])
    shown = {name: sums[column] for name, sums in zip(lines["names"], lines["sums"][0], strict=True)}
    assert shown == {name: by_line.get(name, 0) for name in lines["names"]}
    assert sum(shown.values()) > 0.7 * data["peakBytes"]


def test_every_column_is_exact_and_the_highest_of_its_stretch(long_one):
    _, found = long_one
    levels, data = found.levels(), view_of(found)
    assert [len(scope["events"]) for scope in data["scopes"]] == [480, 480, 64]
    assert max(max(scope["totals"]) for scope in data["scopes"]) == levels.max()
    for number, scope in enumerate(data["scopes"]):
        assert scope["totals"] == levels[np.asarray(scope["events"]) + 1].tolist()
        for column in (0, 7, len(scope["events"]) // 2, scope["events"].index(data["peak"]), -1):
            is_live = found.is_live(scope["events"][column])
            assert scope["counts"][column] == is_live.sum()
            for name, label in data["labels"].items():
                codes, names = found.labels[name]
                held = np.zeros(len(names), dtype=np.int64)
                np.add.at(held, codes[found.origins[is_live]], found.sizes[is_live])
                sums = [sums[column] for sums in label["sums"][number]]
                assert sums == [held[names.index(each)] for each in label["names"]]
    whole = data["scopes"][0]
    edges = np.linspace(0, len(levels), 481, dtype=int)
    assert whole["totals"] == [int(levels[a:b].max()) for a, b in itertools.pairwise(edges)]
    assert whole["lows"] == [int(levels[a:b].min()) for a, b in itertools.pairwise(edges)]


def test_states_which_blocks_are_summed_up(long_one, monkeypatch):
    _, found = long_one
    monkeypatch.setattr(allocation_view, "MOST_BLOCKS", 100)
    monkeypatch.setattr(allocation_view, "MOST_NODES", 60)
    data = view_of(found)
    assert (data["numShown"], data["numBlocks"]) == (100, len(found.sizes))
    assert sum(data["sizes"][:50]) <= data["peakBytes"]
    assert data["largestLeft"] == found.sizes[~np.isin(found.births, data["births"])].max()
    assert len(data["nodes"][0]) < 120
    assert -1 in data["leaves"]
    at_peak = [
        size
        for size, birth, death in zip(data["sizes"], data["births"], data["deaths"], strict=True)
        if birth <= data["peak"] < death
    ]
    largest = np.sort(found.sizes[found.is_live(data["peak"])])[::-1][:50].tolist()
    assert sorted(at_peak, reverse=True)[:50] == largest


def test_stacks_lead_from_the_outermost_frame_to_the_innermost(long_one):
    _, found = long_one
    data = view_of(found)
    parents, frames = data["nodes"]
    for leaf, line in zip(data["leaves"], data["lines"], strict=True):
        stack, node = [], leaf
        while node >= 0:
            stack.append(data["frames"][frames[node]])
            node = parents[node]
        assert not any("_PyEval" in each or "torch::unwind" in each for each in stack)
        if ".py:" in line:
            place = next(each for each in stack if ".py:" in each and "torch/" not in each and "nn/" not in each)
            assert place.endswith(line)


# ---- segments


def test_segments_at_the_peak_are_found_backward(long_one):
    value, found = long_one
    peak = found.rooms[0]
    taken = {}
    for each in value["device_traces"][0][: peak.event + 1]:
        if each["action"] == "segment_alloc":
            taken[each["addr"]] = each["size"]
    assert sorted(size for size, _ in peak.segments) == sorted(taken.values())
    assert peak.reserved_bytes == found.reserved[peak.event + 1]
    assert peak.used_bytes == found.levels().max()
    assert sum(peak.gaps()) == peak.reserved_bytes - peak.used_bytes
    assert found.rooms[1].event == len(value["device_traces"][0]) - 1


def test_expandable_segments():
    """20 MiB at the end: 10 were mapped after the moment, and 6 of another place were given back after it."""
    changes = [(3, 10 * MIB, 10 * MIB, 1), (4, 100 * MIB, 6 * MIB, -1)]
    final = [type("Segment", (), {"address": 0, "num_bytes": 20 * MIB})]
    blocks = np.asarray([0, 101 * MIB]), np.asarray([4 * MIB, MIB])
    room = find_room(2, final, changes, *blocks)
    assert room.segments == (
        (10 * MIB, ((0, 4 * MIB),)),
        (6 * MIB, ((MIB, 2 * MIB),)),
    )
    assert (room.gaps(), room.empty_bytes) == ([6 * MIB, 4 * MIB, MIB], 0)
    assert find_room(5, final, changes, *blocks) is None  # a block outside of all segments: actions are missing


def test_reports_fragmentation(tmp_path):
    def block(address, size, state):
        return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}

    blocks = [block(MIB * at, MIB, ("active_allocated", "inactive")[at % 2]) for at in range(40)]
    segment = {"device": 0, "address": 0, "total_size": 40 * MIB, "segment_type": "large", "blocks": blocks}
    oom = {"action": "oom", "size": 8 * MIB, "device_free": 0}
    path = save(tmp_path, {"segments": [segment], "device_traces": [[oom]]})
    write_report(read_memory_events(path), tmp_path / "r.md")
    text = (tmp_path / "r.md").read_text("utf-8")
    assert "This is fragmentation" in text
    oom["size"] = 80 * MIB
    write_report(
        read_memory_events(save(tmp_path, {"segments": [segment], "device_traces": [[oom]]})), tmp_path / "r.md"
    )
    assert "This is fragmentation" not in (tmp_path / "r.md").read_text("utf-8")


# ---- the page


def data_of(path):
    page = path.read_text("utf-8")
    (text,) = re.findall(r'class="alloc".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(text)


def test_page_is_small_self_contained_and_has_the_peak(long_file, tmp_path):
    path = tmp_path / "page.html"
    log = read_memory_events(long_file)
    write_report(log, path)
    page, data = data_of(path)
    assert path.stat().st_size < 800_000
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert data["peakBytes"] == log.allocations[0].levels().max()
    assert max(event.allocated_bytes for event in log.events) == data["peakBytes"]
    assert f"{data['numBlocks'] - data['numShown']:,}" in page


def test_many_actions_become_few_events_with_peak(tmp_path):
    chance, trace, live = random.Random(0), [], []
    for number in range(100_000):
        if live and chance.random() < 0.5:
            trace.append({"action": "free_requested", "addr": live.pop(), "size": 512})
        else:
            live.append(number * 1024)
            trace.append({"action": "alloc", "addr": live[-1], "size": 512})
    trace.insert(50_001, {"action": "oom", "size": 7, "device_free": 1})
    log = read_memory_events(save(tmp_path, {"device_traces": [trace]}))
    levels = log.allocations[0].levels()
    assert len(log.events) < 9000
    assert max(event.allocated_bytes for event in log.events) == levels.max()
    assert min(event.allocated_bytes for event in log.events) == levels[1:].min()
    assert [event.note["oom"]["asked_bytes"] for event in log.events if "oom" in (event.note or {})] == [7]
    assert "the 100,001 actions of GPU 0 became" in log.problems[0]


@pytest.mark.parametrize("suffix", [".md", ".txt", ".json"])
def test_other_formats_have_the_largest_blocks(tmp_path, suffix):
    path = tmp_path / f"report{suffix}"
    write_report(read_memory_events(save(tmp_path, snapshot())), path)
    text = path.read_text("utf-8")
    assert "The largest of 3 blocks live at the peak" in text.replace("\\", "")
    assert "demo/train.py:7 forward" in text.replace("\\", "")


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_blocks_without_a_size_take_no_share_of_the_peak(tmp_path, suffix):
    """As in a damaged file, whose key is another word."""
    value = snapshot()
    for each in (*value["device_traces"][0], *(block for rows in value["segments"] for block in rows["blocks"])):
        del each["size"]
    path = tmp_path / f"report{suffix}"
    write_report(read_memory_events(save(tmp_path, value)), path)
    assert path.stat().st_size > 1000


def test_names_from_a_file_cannot_leave_their_place(tmp_path):
    value = snapshot()
    for each in value["device_traces"][0]:
        each["frames"] = [frame("/x/<\u202ei>.py", 1, "</script><b>")]
    write_report(read_memory_events(save(tmp_path, value)), tmp_path / "r.html")
    page, data = data_of(tmp_path / "r.html")
    assert page.replace("\n", "").isprintable()
    assert "</script><b>" not in page
    assert any("</script><b>" in each for each in data["frames"])


def test_two_gpus_have_two_sections(tmp_path):
    value = snapshot()
    value["segments"].append({**value["segments"][0], "device": 1})
    write_report(read_memory_events(save(tmp_path, value)), tmp_path / "r.html", language="zh")
    page = (tmp_path / "r.html").read_text("utf-8")
    assert page.count('class="alloc"') == 2
    assert page.count('querySelectorAll(".alloc")') == 1


# ---- trackers


def test_a_tracker_has_a_page_with_its_own_figures(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    with mk.Tracker(device="cpu") as tracker:
        for _ in range(2):
            model(torch.randn(32, 64)).square().mean().backward()
            tensor = torch.zeros(8)
            tensor.resize_(4096)
            model.zero_grad()
    write_report(tracker, tmp_path / "r.html")
    page, data = data_of(tmp_path / "r.html")
    assert data["peakBytes"] == tracker.peak_bytes
    assert data["numEvents"] == len(tracker.timeline)
    column = data["scopes"][0]["events"].index(data["peak"])
    levels = [0, *tracker.timeline.tolist()]
    assert data["scopes"][0]["totals"] == [levels[event + 1] for event in data["scopes"][0]["events"]]
    for name, split in (("category", tracker.peak_by_category), ("module", tracker.peak_by_module)):
        label = data["labels"][name]
        shown = {
            each: sums[column] for each, sums in zip(label["names"], label["sums"][0], strict=True) if sums[column]
        }
        assert shown == {each or "(none)": split[each] for each in split if (each or "(none)") in label["names"]}
    assert "peak in tensors" in page


def test_rejects_empty_tracker(tmp_path):
    with mk.Tracker(device="cpu") as tracker:
        pass
    assert_refused(lambda: write_report(tracker, tmp_path / "r.html"), InputError, "recorded no tensors on cpu")
