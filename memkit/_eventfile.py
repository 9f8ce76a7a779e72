"""Parse one memory log file, whatever a kill left of it: JSON lines, or the older JSON array."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from memkit._errors import FileFormatError, InputError, InputTypeError
from memkit._events import BYTE_FIELDS, EVENT_KEYS, Event, LoggedDevice, LogHeader, Origin, require_count, short
from memkit._eventwriter import LONGEST_LINE_BYTES, looks_like_log

_LARGEST_ARRAY_BYTES = 2**28  # the older form has to be held whole: some 4 million events
_SCHEMA = re.compile(r"memkit\.events/1(\.\d+)?", re.ASCII)  # a minor version only adds keys
_LEGACY_KEYS = {"peak_memory": "peak_total_bytes", "incremental_memory": "incremental_bytes"}
_LEGACY_NAMES = frozenset({"event", *_LEGACY_KEYS})
_HEADER_KEYS, _DEVICE_KEYS, _ORIGIN_KEYS = (
    frozenset(each.name for each in fields(record)) for record in (LogHeader, LoggedDevice, Origin)
)
_EVENT_KEYS = frozenset(EVENT_KEYS)
_BYTE_FIELDS = frozenset(BYTE_FIELDS)


class EventFile:
    """What one file holds; it is read by the constructor.

    Attributes:
        headers: One for each run.
        events: The events in the file's order; `Event.run` counts ``num_runs_before`` in.
        seconds: For each event the wall time at which it stands among other files' events: it never falls.
        is_legacy: Whether it is the older JSON array.
        problems: One sentence each.

    Args:
        path: The file.
        num_runs_before: Number of headers in the files before this one.

    Raises:
        FileFormatError: The file is no log, or a part of it is wrong.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, num_runs_before: int) -> None:
        self.path = path
        self.headers: list[LogHeader] = []
        self.events: list[Event] = []
        self.seconds: list[float] = []
        self.is_legacy = False
        self.problems: list[str] = []
        self._num_runs_before = num_runs_before
        self._unknown: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._num_repeats = 0
        with self.path.open("rb") as file:
            start = file.read(4096)
            has_mark = start.startswith(codecs.BOM_UTF8)
            file.seek(len(codecs.BOM_UTF8) if has_mark else 0)
            if has_mark:
                self._note("a byte order mark at its start was passed over")
            self.is_legacy = start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
            if self.is_legacy:
                self._read_array(file)
            else:
                self._read_lines(file)
        if self._unknown:
            names = ", ".join(short(name) for name in sorted(self._unknown)[:5])
            self._note(
                f"{self._unknown.total()} values under {len(self._unknown)} unknown names were passed over: {names}"
            )

    def _read_lines(self, file: BinaryIO) -> None:
        cut = ""  # what is wrong with the line before, if it may have been cut
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE_BYTES + 1), b""), start=1):
            where = f"line {number}"
            if len(line) > LONGEST_LINE_BYTES:
                self._fail(f"{where}, longer than {LONGEST_LINE_BYTES} bytes", "an event log")
            if line.isspace():
                continue
            record = self._parse_line(where, line)
            is_header = isinstance(record, dict) and "schema" in record
            if cut and not is_header:
                self._fail(cut, "JSON; only the last line of a run may be cut")
            if is_header:
                self._end_run(cut)
                self._add_header(where, record)
                cut = ""
            elif isinstance(record, _NotWholeError):
                cut = f"{where}: {record}"
            else:
                self._add_event(where, line, record)
        self._end_run(cut)
        self._note_ends()

    def _parse_line(self, where: str, line: bytes) -> Any:
        """Return the line's JSON value, or, where it may have been cut, what is wrong with it."""
        try:
            return _parse(line)
        except _NotWholeError as error:
            if not self.headers and not looks_like_log(line):
                self._fail(f"{where}: {error}", "the header line of an event log, or a JSON array of events")
            return error
        except ValueError as error:
            self._fail(f"{where}: {error}", "values that JSON has, each key once")

    def _end_run(self, cut: str) -> None:
        if cut:
            self._note(f"{cut}: not whole, as when the process was killed while writing it; left out")

    def _note_ends(self) -> None:
        if not self.headers:
            self._note("the run ended before its header line was written: there are no events")
        if len(self.headers) > 1:
            self._note(f"{len(self.headers)} runs stand in it, one after the other")
        if self._num_repeats:
            self._note(f"{self._num_repeats} lines repeat an earlier line of their run word by word")

    def _add_header(self, where: str, record: dict[str, Any]) -> None:
        schema = record.pop("schema")
        if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
            self._fail(
                f"{where}: schema={short(schema)}",
                "the schema 'memkit.events/1'",
                "a newer memkit wrote this log: update memkit.",
            )
        if record.pop("units", "bytes") != "bytes":
            self._fail(f"{where}: units that are not bytes", "units='bytes'")
        try:
            self.headers.append(LogHeader(**_known(_header_values(record, self._unknown), _HEADER_KEYS, self._unknown)))
        except (InputError, InputTypeError) as error:
            self._fail(f"{where}, the run's header: {error.got}", error.expected)
        self._seen.clear()

    def _add_event(self, where: str, line: bytes, record: object) -> None:
        if not self.headers or not isinstance(record, dict):
            self._fail(f"{where}: {short(record)}", "a header line first, then one JSON object for each event")
        header = self.headers[-1]
        values = _known(record, _EVENT_KEYS, self._unknown)
        values.setdefault("event", None)
        if values.get("rank") is None:
            values["rank"] = header.rank
        values["run"] = self._num_runs_before + len(self.headers) - 1
        event = self._make_event(where, values)
        self.events.append(event)
        # A clock that is set back must not turn the file's own order round.
        before = self.seconds[-1] if self.seconds else -math.inf
        self.seconds.append(max(before, header.wall_s if event.wall_s is None else event.wall_s))
        mark = hash(line)
        self._num_repeats += mark in self._seen
        self._seen.add(mark)

    def _read_array(self, file: BinaryIO) -> None:
        data = file.read(_LARGEST_ARRAY_BYTES + 1)
        if len(data) > _LARGEST_ARRAY_BYTES:
            self._fail(f"more than {_LARGEST_ARRAY_BYTES} bytes", "a JSON array of events")
        try:
            records = _parse(data)
        except ValueError as error:
            self._fail(str(error), "a whole JSON array of events")
        for index, record in enumerate(records):
            self._add_legacy(f"index {index}", record)
        self._note_legacy()

    def _add_legacy(self, where: str, record: object) -> None:
        form = '{"event": NAME} with either "peak_memory" or "incremental_memory" in bytes'
        if not isinstance(record, dict):
            self._fail(f"{where}: {short(record)}", form)
        named = f"{where}, event {short(record.get('event'))}"
        values = _known(record, _LEGACY_NAMES, self._unknown)
        event = values.pop("event", None)
        if len(values) != 1:
            self._fail(f"{named}: {'both numbers' if values else 'no number'}", form)
        ((key, value),) = values.items()
        try:
            require_count("", key, value)
        except (InputError, InputTypeError) as error:
            self._fail(f"{named}: {error.got}", error.expected)
        self.events.append(self._make_event(where, {"event": event, _LEGACY_KEYS[key]: value}))

    def _note_legacy(self) -> None:
        name, count = Counter(event.event for event in self.events).most_common(1)[0] if self.events else ("", 0)
        if count > 1:
            self._note(f"the event {short(name)} stands there {count} times: several runs may be in the file")
        peaks = [event.peak_total_bytes for event in self.events if event.peak_total_bytes is not None]
        if peaks != sorted(peaks):
            self._note("peak_memory falls at some event: the counter was reset, or several runs are in the file")

    def _make_event(self, where: str, values: dict[str, Any]) -> Event:
        try:
            return Event(**values)
        except (InputError, InputTypeError) as error:
            self._fail(f"{where}, event {short(values['event'])}: {error.got}", error.expected)

    def _note(self, problem: str) -> None:
        self.problems.append(f"{self.path}: {problem}")

    def _fail(
        self, got: str, expected: str, fix: str = "check what wrote the file, or take that part out."
    ) -> NoReturn:
        raise FileFormatError(f"read_memory_events({str(self.path)!r})", got=got, expected=expected, fix=fix) from None


class _NotWholeError(ValueError):
    """The text is no JSON, so that it may be the beginning of some."""


def _parse(data: bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        _NotWholeError: The text may have been cut.
        ValueError: The text is whole, but repeats a key, is nested too deeply, or holds what JSON does not have.
    """
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeError:
        raise _NotWholeError("text that is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _NotWholeError(f"no JSON at character {error.pos} ({error.msg})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if "\\u" in text and not _is_unicode(value):
        raise ValueError("text that is no Unicode: half of a surrogate pair")
    return value


def _is_unicode(value: object) -> bool:
    """Say whether UTF-8 can hold every text in a JSON value: an escape can spell half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(repeated)} twice in one object")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no JSON number")


def _known(record: dict[str, Any], names: frozenset[str], unknown: Counter[str]) -> dict[str, Any]:
    """Return the values under known names and count the others."""
    values = {name: value for name, value in record.items() if name in names}
    if len(values) != len(record):
        unknown.update(record.keys() - names)
    return values


def _header_values(record: dict[str, Any], unknown: Counter[str]) -> dict[str, Any]:
    """Make records of the parts of a header that are records; what has another form is left for the header's check."""
    values = {"run_id": None, "wall_s": None} | {name: value for name, value in record.items() if value is not None}
    if isinstance(values.get("argv"), list):
        values["argv"] = tuple(values["argv"])
    if isinstance(values.get("device"), dict):
        values["device"] = LoggedDevice(**_known(values["device"], _DEVICE_KEYS, unknown))
    if isinstance(values.get("fields"), dict):
        origins = _known(values["fields"], _BYTE_FIELDS, unknown)
        values["fields"] = {
            name: Origin(**_known(origin, _ORIGIN_KEYS, unknown)) if isinstance(origin, dict) else origin
            for name, origin in origins.items()
        }
    return values
