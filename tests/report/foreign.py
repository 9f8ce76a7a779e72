"""What the tests of imports and exports share: a small snapshot, and the keys and types that real files have."""

import json
import pickle
from pathlib import Path

SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "foreign_schemas.json").read_text("utf-8"))
MIB = 2**20
OWN = {"memkit"}  # our own key of a snapshot, which viewers pass over


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


def snapshot():
    """Two segments; a history in which a block of 21 MiB comes and goes, and memory runs out."""
    python = [frame("/x/site-packages/torch/nn/linear.py", 3, "forward"), frame("/project/demo/train.py", 7, "forward")]
    backward = [
        frame("??", 0, "torch::unwind::unwind()"),
        frame("Mul.cpp", 0, "at::_ops::mul_Tensor::call(at::Tensor)"),
    ]
    start = 1_750_000_000_000_000

    def action(kind, address, size, seconds, frames=()):
        time = {"time_us": start + seconds * 10**6}
        return {"action": kind, "addr": address, "size": size, "stream": 0, "frames": list(frames), **time}

    def block(address, size, requested, state="inactive", frames=()):
        sizes = {"address": address, "size": size, "requested_size": requested}
        return {**sizes, "state": state, "frames": list(frames)}

    def segment(address, size, *blocks):
        used = [each for each in blocks if each["state"] == "active_allocated"]
        sizes = [sum(each[name] for each in used) for name in ("size", "size", "requested_size")]
        names = ("allocated_size", "active_size", "requested_size")
        common = {"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
        place = {"address": address, "total_size": size, "frames": []}
        return {**common, **place, **dict(zip(names, sizes, strict=True)), "blocks": list(blocks)}

    oom = action("oom", 0, 80 * MIB, 5, [frame("/project/demo/train.py", 9, "step")])
    return {
        "segments": [
            segment(
                0,
                20 * MIB,
                block(0, 3 * MIB, 3 * MIB, "active_allocated"),
                block(3 * MIB, 1024, 700, "active_allocated", python),
                block(3 * MIB + 1024, 17 * MIB - 1024, 0),
            ),
            segment(2**30, 22 * MIB, block(2**30, 22 * MIB, 0)),
        ],
        "device_traces": [
            [
                action("alloc", 3 * MIB, 700, 0, python),
                action("segment_alloc", 2**30, 22 * MIB, 1),
                action("alloc", 2**30, 21 * MIB, 2, backward),
                action("free_requested", 2**30, 21 * MIB, 3),
                action("free_completed", 2**30, 21 * MIB, 3),
                oom | {"device_free": 5 * MIB},
            ]
        ],
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1},
        "external_annotations": [
            {"stage": "START", "name": "step", "device": 0, "time_us": start + 2 * 10**6},
            {"stage": "END", "name": "step", "device": 0, "time_us": start + 4 * 10**6},
        ],
    }


def profile_of_a_card():
    """A trace of torch.profiler in which a block comes and goes on a card, and one on the CPU."""

    def act(time_us, change, total, device=(1, 0)):
        args = {"Device Type": device[0], "Device Id": device[1], "Bytes": change, "Total Allocated": total, "Addr": 64}
        return {
            "ph": "i",
            "name": "[memory]",
            "ts": time_us,
            "pid": 1,
            "tid": 1,
            "args": args | {"Total Reserved": 4096},
        }

    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_750_000_000_000_000_000,
        "deviceProperties": [{"id": 0, "name": "Tesla V100", "totalGlobalMem": 34_084_028_416}],
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "pid": 1, "tid": 1},
            act(1, 512, 1512),
            act(2, 10**9, 10**9, device=(0, -1)),
            act(9, -512, 1000),
        ],
    }


def save(folder, value):
    folder.mkdir(exist_ok=True)
    path = folder / "log"
    path.write_bytes(pickle.dumps(value, protocol=4))
    return path


def judge(kind, level, record, extra=frozenset()):
    """Check that a record has the keys that all real ones have, and no key or type that none has."""
    known = SCHEMAS[kind]["levels"][level]
    assert {name for name, rule in known.items() if rule["always"]} <= record.keys(), (level, record)
    for name, value in record.items():
        if name not in extra:
            assert type(value).__name__ in known[name]["types"], (level, name, value)


def judge_snapshot(data):
    rules = SCHEMAS["snapshot"]
    judge("snapshot", "snapshot", data, OWN)
    frames = []
    for segment in data["segments"]:
        judge("snapshot", "segment", segment)
        assert segment["segment_type"] in rules["segment_types"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        for block in segment["blocks"]:
            judge("snapshot", "block", block)
            assert block["state"] in rules["states"]
            frames += block["frames"]
    for trace in data["device_traces"]:
        for action in trace:
            judge("snapshot", "action", action, {"device_free"})
            # The four that the public files do not show stand in torch's own docstring of the format.
            assert action["action"] in {*rules["actions"], "oom", "segment_map", "segment_unmap"}
            frames += action["frames"]
    for each in frames:
        judge("snapshot", "frame", each)
    for name, value in data.get("allocator_settings", {}).items():
        assert type(value).__name__ in rules["levels"]["settings"][name]["types"]
