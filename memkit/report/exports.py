"""Export a log for other programs: a trace, a table, JSON lines, or a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from memkit._core.errors import InputError
from memkit._core.printable import printable, printable_json
from memkit._events.file import OWN
from memkit._events.log import EVENT_KEYS, Event, LogHeader
from memkit._events.reader import EventLog
from memkit._events.writer import header_record, run_lines
from memkit._machine.files import write_bytes
from memkit.report.blocks import snapshot_of

_COUNTERS = {
    "allocated_bytes": "in tensors",
    "requested_bytes": "asked for",
    "peak_bytes": "peak of the stage",
    "peak_total_bytes": "record of the run",
    "reserved_bytes": "held by the allocator",
    "device_used_bytes": "used on the device",
    "host_rss_bytes": "host memory",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet reads a cell that begins with one of these as a formula


def export_log(log: EventLog, path: str | os.PathLike[str]) -> None:
    """Export a log for other programs; the file is written atomically.

    `read_memory_events` can read the traces, the JSON lines and the snapshots back: from traces and JSON lines every
    value, from a snapshot the curve of ``allocated_bytes``.

    Args:
        log: The log that `read_memory_events` returned.
        path: A new file. ``.json`` is a trace in Chrome's format, for ui.perfetto.dev and chrome://tracing: phases as
            slices, sizes as counters, other events as marks, one process per rank. Events of a log without a clock are
            placed a millisecond apart. ``.csv`` is a table with one row per event, sizes in bytes; text that a
            spreadsheet would read as a formula is prefixed with an apostrophe, and control and direction characters are
            escaped. ``.jsonl`` is memkit's own format. ``.pickle`` is a snapshot for pytorch.org/memory_viz and
            ``torch.cuda._memory_viz``: a log has totals but no blocks, so each growth of ``allocated_bytes`` becomes
            one block named after its event, and a fall frees the youngest blocks.

    Raises:
        InputError: The suffix is not supported; the path already exists; or a snapshot is requested of a log without
            ``allocated_bytes``.
        OSError: The file cannot be written.

    Example:
        >>> import json, pathlib, tempfile
        >>> from memkit._events.reader import EventLog
        >>> from memkit._events.log import Event
        >>> from memkit.report.exports import export_log
        >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
        >>> export_log(EventLog((), (Event("t5_loaded", peak_total_bytes=11_362_869_248),)), path)
        >>> [event["ph"] for event in json.loads(path.read_text())["traceEvents"]]
        ['M', 'C', 'i']
    """
    target = check_new(path)
    write_bytes(target, _WRITERS[target.suffix.lower()](log))


def check_new(path: str | os.PathLike[str]) -> Path:
    """Refuse a path that no export can be written to.

    Raises:
        InputError: Its suffix is not a known format, or the path already exists.
    """
    target = Path(path)
    call = f"the export {str(target)!r}"
    if target.suffix.lower() not in _WRITERS:
        fix = "write for example 'trace.json' or 'events.csv'."
        raise InputError(call, got=f"the suffix {target.suffix!r}", expected=f"one of {', '.join(_WRITERS)}", fix=fix)
    if os.path.lexists(target):
        raise InputError(call, got="a path that already exists", expected="a new path", fix="pass another path.")
    return target


def _trace(log: EventLog) -> bytes:
    ranks = sorted({event.rank or 0 for event in log.events})
    names = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]
    own = {"form": log.form, "headers": [header_record(header) for header in log.headers]}
    trace = {
        "traceEvents": [*names, *_trace_events(log)],
        "displayTimeUnit": "ms",
        "otherData": {OWN: own},
    }
    return f"{printable_json(json.dumps(trace, ensure_ascii=False))}\n".encode(errors="replace")


def _trace_events(log: EventLog) -> Iterator[dict[str, Any]]:
    walls = [event.wall_s for event in log.events if event.wall_s is not None]
    start = min(walls, default=0.0)
    has_clock = len(walls) == len(log.events)
    for index, event in enumerate(log.events):
        end_us = 1e6 * ((event.wall_s or 0.0) - start) if has_clock else 1e3 * index
        common = {"pid": event.rank or 0, "tid": 0}
        for field, name in _COUNTERS.items():
            if (value := getattr(event, field)) is not None:
                yield {"ph": "C", "name": name, "ts": end_us, **common, "args": {"bytes": value}}
        details = {"args": _values(event), "name": event.event, "cat": OWN, **common}
        if event.duration_ns is None:
            yield {"ph": "i", "s": "p", "ts": end_us, **details}
        else:
            duration_us = event.duration_ns / 1e3
            yield {"ph": "X", "ts": end_us - duration_us, "dur": duration_us, **details}


def _values(event: Event) -> dict[str, Any]:
    """Return all values of an event."""
    values = {name: getattr(event, name) for name in (*EVENT_KEYS, "run")}
    return {name: value for name, value in values.items() if value is not None}


def _lines(log: EventLog) -> bytes:
    """Return the runs one after another; a log in the older format is one run with an unknown start."""
    headers = log.headers or (LogHeader(run_id="imported", wall_s=None),)
    runs: list[list[Event]] = [[] for _ in headers]
    for event in log.events:
        runs[event.run or 0].append(event)
    return b"".join(line for header, events in zip(headers, runs, strict=True) for line in run_lines(header, events))


def _table(log: EventLog) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(EVENT_KEYS)
    for event in log.events:
        writer.writerow([_entry(getattr(event, name)) for name in EVENT_KEYS])
    return file.getvalue().encode(errors="replace")


def _entry(value: object) -> object:
    if isinstance(value, dict):
        return printable_json(json.dumps(value, ensure_ascii=False))
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if value.startswith(_FORMULA) else shown


_WRITERS: Final[dict[str, Callable[[EventLog], bytes]]] = {
    ".json": _trace,
    ".csv": _table,
    ".jsonl": _lines,
    ".pickle": snapshot_of,
}
