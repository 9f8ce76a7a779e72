"""Damaged memory logs: each is read, or refused with one typed error that says where; and the cost of an event.

Logs (one run, two runs, a minor version ahead, both forms of the older array), snapshots and traces are damaged: as
a disk, an editor or another program would. `tests/events/test_faults.py` runs a part of it.

Run: python -m benchmarks.cases.log_fuzz   (1 minute)
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.result import write_result
from memkit._core.errors import FileFormatError
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin
from memkit._events.reader import EventLog, read_memory_events
from memkit._events.writer import EventWriter, save_events
from tests.report.foreign import profile_of_a_card, snapshot

NUM_LOGS = 100_000
NUM_TIMED_EVENTS = 20_000
# Real values of a video diffusion model's log.
LEGACY = [
    {"event": "init", "peak_memory": 0},
    {"event": "t5_loaded", "peak_memory": 11_362_869_248},
    {"event": "model_loaded", "peak_memory": 24_824_987_648},
    {"event": "step_2", "incremental_memory": 35_122_176},
    {"event": "step_10", "incremental_memory": 35_122_176},
    {"event": "inference_end", "peak_memory": 24_860_109_824},
]
NASTY_VALUES = (
    b"NaN", b"-Infinity", b"true", b"null", b"-1", b"-0", b"1.5", b"1e400", b"9223372036854775807",
    b"9223372036854775808", b"1" * 5000, b'""', b'"12"', b'"\\ud800"', b'"\\u0000"', b'"\xc3\xa9"', b"[]", b"{}",
    b"[" * 3000, b'{"a":' * 2000, b'{"a":1,"a":2}', b'"' + b"x" * 70_000 + b'"', b"0x10", b"1_000", b"01", b"'a'",
)  # fmt: skip
NASTY_BYTES = (
    b"\x00", b"\x00" * 512, b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x1f\x8b", b'"',
    b"{", b"}", b"[", b"]", b",", b":", b"\\", b" " * 5000, b"\n{}\n", b"\n[]\n", b"\n1\n",
    b'{"schema":"memkit.events/1"}\n', b'{"schema":"memkit.events/2"}\n', b"\n\n\n",
)  # fmt: skip
VALUE = re.compile(rb'(?<=[:\[,])\s*("(?:[^"\\]|\\.)*"|-?[0-9.]+|null|true|false)')
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


def header(run_id: str = "5e1f") -> LogHeader:
    """A header with fixed values, so that the same seed damages the same bytes."""
    return LogHeader(
        run_id=run_id,
        wall_s=1.75e9,
        time_ns=10**15,
        host="node7",
        device=LoggedDevice("Räder X", 25_393_692_672, "cuda"),
        versions={"python": "3.11.7", "memkit": "0.1"},
        argv=("train.py",),
        config={"a": [1]},
        fields={"allocated_bytes": Origin("cuda_allocator", "measured"), "host_rss_bytes": Origin("rss", "sampled")},
    )


def typical_event(step: int) -> Event:
    """Ten values beside the name."""
    return Event(
        "forward",
        time_ns=10**15 + 1_000 * step,
        wall_s=1.75e9 + step / 1_000,
        phase="train/forward",
        step=step,
        duration_ns=84_123_456,
        allocated_bytes=11_362_869_248 + step,
        peak_bytes=23_000_000_000,
        peak_total_bytes=24_824_987_648,
        reserved_bytes=24_931_991_552,
        host_rss_bytes=3_211_264_000,
    )


def some_events() -> list[Event]:
    events = [typical_event(step) for step in range(4)]
    events.append(Event("märk", note={"lr": 1e-3, "tags": ["a", None, True]}, component="vae", rank=1))
    events.append(Event("estimate", peak_bytes=2**40, source="fake", kind="predicted"))
    return events


def real_logs(folder: Path) -> list[bytes]:
    one, two = folder / "one.jsonl", folder / "two.jsonl"
    save_events(one, header(), some_events())
    for run_id in ("a0", "b1"):
        with EventWriter(two, header(run_id)) as writer:
            for event in some_events()[:3]:
                writer.write(event)
    ahead = one.read_bytes().replace(b"events/1", b"events/1.3").replace(b'"step"', b'"later":[1],"step"')
    return [
        one.read_bytes(),
        two.read_bytes(),
        ahead,
        json.dumps(LEGACY).encode(),
        json.dumps(LEGACY, indent=2).encode(),
    ]


def foreign_files() -> list[bytes]:
    """Files of other programs: snapshots and traces."""
    profile = json.dumps(profile_of_a_card()).encode()
    snapshots = (pickle.dumps(snapshot(), protocol=protocol) for protocol in (2, 4))
    return [*snapshots, profile, gzip.compress(profile)]


# ---- damage


def flip(data: bytes, chance: random.Random, _: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def cut(data: bytes, chance: random.Random, _: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def remove(data: bytes, chance: random.Random, _: bytes) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.randint(1, 40) :]


def insert(data: bytes, chance: random.Random, _: bytes) -> bytes:
    at = chance.choice((0, len(data), chance.randrange(len(data))))
    return data[:at] + chance.choice(NASTY_BYTES) + data[at:]


def splice(data: bytes, chance: random.Random, other: bytes) -> bytes:
    return data[: chance.randrange(len(data))] + other[chance.randrange(len(other)) :]


def repeat(data: bytes, chance: random.Random, _: bytes) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start : start + chance.randint(1, 300)] + data[start:]


def lines(data: bytes, chance: random.Random, other: bytes) -> bytes:
    """Leave out, repeat, move or bring in whole lines."""
    rows = data.splitlines(keepends=True)
    row = rows.pop(chance.randrange(len(rows)))
    for _ in range(chance.randrange(3)):
        rows.insert(chance.randint(0, len(rows)), chance.choice((row, chance.choice(other.splitlines(keepends=True)))))
    return b"".join(rows)


def value(data: bytes, chance: random.Random, _: bytes) -> bytes:
    """Put a value in another's place that is legal JSON or nearly so."""
    found = chance.choice(list(VALUE.finditer(data)) or [re.match(b"", data)])
    return data[: found.start()] + chance.choice(NASTY_VALUES) + data[found.end() :]


def swap(data: bytes, chance: random.Random, _: bytes) -> bytes:
    """Put one text, such as a key, in another's place."""
    texts = list(STRING.finditer(data)) or [re.match(b"", data)]
    target = chance.choice(texts)
    return data[: target.start()] + chance.choice(texts)[0] + data[target.end() :]


def line_ends(data: bytes, _: random.Random, __: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


DAMAGE: tuple[Callable[[bytes, random.Random, bytes], bytes], ...] = (
    flip, cut, remove, insert, splice, repeat, lines, value, value, swap, line_ends,
)  # fmt: skip


def damaged(logs: list[bytes], chance: random.Random) -> bytes:
    data = chance.choice(logs)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if data:
            data = chance.choice(DAMAGE)(data, chance, chance.choice(logs))
    return data


# ---- the law


def judge(path: Path) -> EventLog | FileFormatError:
    """Read a log; anything but a log that can be written again, or one typed error with four parts, goes through."""
    try:
        log = read_memory_events(path)
    except FileFormatError as error:
        judge_refusal(path, error)
        return error
    assert all(event.run is None or 0 <= event.run < len(log.headers) for event in log.events)
    copy = path.with_suffix(".copy")
    copy.unlink(missing_ok=True)
    with EventWriter(copy, log.headers[0] if log.headers else header()) as writer:
        for event in log.events:
            writer.write(event)
    again = read_memory_events(copy)
    assert again.events == tuple(
        replace(event, rank=again.headers[0].rank if event.rank is None else event.rank) for event in log.events
    )
    return log


WHERE = re.compile(
    r"line \d|index \d|^invalid JSON at character \d|^the key|^text that|^JSON that|^-?(NaN|Infinity)|^Exceeds"
)


def judge_refusal(path: Path, refusal: FileFormatError) -> None:
    assert type(refusal) is FileFormatError
    assert str(path) in refusal.call
    start = path.read_bytes()[:4096]
    is_foreign = start.startswith((b"\x80", b"\x1f\x8b")) or b'"traceEvents"' in start or b'"schemaVersion"' in start
    assert is_foreign or WHERE.search(refusal.got), refusal.got
    assert refusal.expected
    assert refusal.fix
    assert len(str(refusal).encode()) < 1000


def fuzz(num_logs: int, seed: int = 0) -> dict[str, Any]:
    """Read damaged logs; the same seed gives the same logs."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    texts: set[str] = set()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        logs = [*real_logs(Path(folder)), *foreign_files()]
        path = Path(folder, "damaged.jsonl")
        for _ in range(num_logs):
            path.write_bytes(damaged(logs, chance))
            start = time.perf_counter()
            try:
                result = judge(path)
            except Exception as error:  # noqa: BLE001 - this is what must not happen; it is counted and shown
                counts["anything else"] += 1
                texts.add(repr(error)[:300])
            else:
                counts["refused" if isinstance(result, FileFormatError) else "read"] += 1
                counts["read with a note"] += isinstance(result, EventLog) and bool(result.problems)
                if isinstance(result, FileFormatError):
                    rules[result.expected] += 1
                    texts.add(re.sub(r"\d+|'[^']*'", "_", result.got))
            slowest = max(slowest, time.perf_counter() - start)
    return {
        "num_logs": num_logs,
        **{name: counts[name] for name in ("read", "read with a note", "refused", "anything else")},
        "num_distinct_refusals": len(texts),
        "refusals_by_rule": dict(rules.most_common()),
        "slowest_ms": slowest * 1e3,
    }


def microseconds() -> dict[str, float]:
    """Median of five: making an event, writing it, reading it back; and what a sync to the disk would add."""
    samples: dict[str, list[float]] = {"make": [], "write": [], "read": [], "fsync": []}
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(5):
            path = Path(folder, f"{attempt}.jsonl")
            times = [time.perf_counter()]
            events = [typical_event(step) for step in range(NUM_TIMED_EVENTS)]
            times.append(time.perf_counter())
            with EventWriter(path, header()) as writer:
                for event in events:
                    writer.write(event)
            times.append(time.perf_counter())
            assert len(read_memory_events(path).events) == NUM_TIMED_EVENTS
            times.append(time.perf_counter())
            for name, before, after in zip(samples, times, times[1:], strict=False):
                samples[name].append((after - before) / NUM_TIMED_EVENTS * 1e6)
            samples["fsync"].append(fsync_microseconds(path))
        size = len(path.read_bytes().rstrip()) / NUM_TIMED_EVENTS
    return {f"{name}_us": statistics.median(each) for name, each in samples.items()} | {"line_bytes": size}


def fsync_microseconds(path: Path) -> float:
    times = []
    with path.open("ab", buffering=0) as file:
        for _ in range(50):
            file.write(b" " * 270)
            start = time.perf_counter()
            os.fsync(file.fileno())
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    figures = {"event": microseconds(), "fuzz": fuzz(NUM_LOGS)}
    print(json.dumps(figures, indent=2))
    print(write_result("log_fuzz", figures))
    assert figures["fuzz"]["anything else"] == 0


if __name__ == "__main__":
    main()
