"""A log in forms that other programs open: a trace for Perfetto and Chrome, a table for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memkit._atomic import write_text
from memkit._errors import InputError
from memkit._eventlog import EventLog
from memkit._events import EVENT_KEYS, Event
from memkit.report.nodes import clean

_COUNTERS = {
    "allocated_bytes": "in tensors",
    "peak_bytes": "peak of the stage",
    "peak_total_bytes": "record of the run",
    "reserved_bytes": "held by the allocator",
    "device_used_bytes": "used on the device",
    "host_rss_bytes": "host memory",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for a formula when a cell begins with it


def export_log(log: EventLog, path: str | os.PathLike[str]) -> None:
    """Write a log for other programs; the file appears whole or not at all.

    Args:
        log: What `read_memory_events` returned.
        path: A new file. ``.json`` is a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open:
            phases as slices, sizes as counters, other events as marks, one process for each rank. A log without a
            clock has its events a millisecond apart. ``.csv`` is a table with a row for each event, sizes in bytes; a
            text that a spreadsheet would take for a formula gets an apostrophe before it.

    Raises:
        InputError: The suffix is another one, or something is there already.
        OSError: The file cannot be written.

    Example:
        >>> import json, pathlib, tempfile
        >>> from memkit._eventlog import EventLog
        >>> from memkit._events import Event
        >>> from memkit.report.exports import export_log
        >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
        >>> export_log(EventLog((), (Event("t5_loaded", peak_total_bytes=11_362_869_248),)), path)
        >>> [event["ph"] for event in json.loads(path.read_text())["traceEvents"]]
        ['M', 'C', 'i']
    """
    target = Path(path)
    call = f"export_log(path={str(target)!r})"
    if target.suffix not in (".json", ".csv"):
        fix = "write for example 'trace.json' or 'events.csv'."
        raise InputError(call, got=f"the suffix {target.suffix!r}", expected=".json or .csv", fix=fix)
    if target.exists():
        raise InputError(call, got="a path where something is", expected="a new path", fix="choose another name.")
    write_text(target, _table(log) if target.suffix == ".csv" else _trace(log))


def _trace(log: EventLog) -> str:
    ranks = sorted({event.rank or 0 for event in log.events})
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks]
    events = [*names, *_trace_events(log)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False) + "\n"


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
        details = {"args": _details(event), "name": clean(event.event), "cat": "memkit", **common}
        if event.duration_ns is None:
            yield {"ph": "i", "s": "p", "ts": end_us, **details}
        else:
            duration_us = event.duration_ns / 1e3
            yield {"ph": "X", "ts": end_us - duration_us, "dur": duration_us, **details}


def _details(event: Event) -> dict[str, Any]:
    values = {name: getattr(event, name) for name in ("phase", "component", "step", "incremental_bytes", "note")}
    return {name: value for name, value in values.items() if value is not None}


def _table(log: EventLog) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(EVENT_KEYS)
    for event in log.events:
        writer.writerow([_entry(getattr(event, name)) for name in EVENT_KEYS])
    return file.getvalue()


def _entry(value: object) -> object:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
