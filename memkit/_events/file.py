"""Parse one memory log file, even if truncated: JSON lines, the older JSON array, or another program's file.

The format is detected from the first bytes; the file name does not matter.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

from memkit._core.errors import FileFormatError, InputError, InputTypeError
from memkit._core.printable import short
from memkit._events.json_stream import JsonStream, NotWholeError, check_density
from memkit._events.log import BYTE_FIELDS, EVENT_KEYS, Event, LoggedDevice, LogHeader, Origin, event_of, require_count
from memkit._events.writer import LONGEST_LINE_BYTES, POST_MORTEM, looks_like_log

if TYPE_CHECKING:  # needs NumPy, which most logs do without
    from memkit._events.allocations import Allocations

_CHUNK_BYTES = 2**20
_BLOCK_BYTES = 2**15  # lines of a log that are parsed together
_LARGEST_WHOLE_BYTES = 2**28  # formats other than JSON lines are held whole: 4 million events in the older format
Form = Literal["lines", "array", "snapshot", "trace"]
_SNAPSHOT_START = b"\x80"  # of every pickle since protocol 2
_GZIP_START = b"\x1f\x8b"
_SCHEMA = re.compile(r"memkit\.events/1(\.\d+)?", re.ASCII)  # a minor version only adds keys
_SPACES = " \t\n\r"  # around a JSON value
_LEGACY_KEYS = {"peak_memory": "peak_total_bytes", "incremental_memory": "incremental_bytes"}
_LEGACY_NAMES = frozenset({"event", *_LEGACY_KEYS})
_HEADER_KEYS, _DEVICE_KEYS, _ORIGIN_KEYS = (
    frozenset(each.name for each in fields(record)) for record in (LogHeader, LoggedDevice, Origin)
)
_EVENT_KEYS = frozenset(EVENT_KEYS)
_BYTE_FIELDS = frozenset(BYTE_FIELDS)


class EventFile:
    """Contents of one file, which the constructor reads.

    Attributes:
        headers: One header for each run.
        events: The events in the file's order; `Event.run` includes ``num_runs_before``.
        seconds: For each event, the wall time for merging with other files' events; it never decreases.
        form: Format of the file.
        problems: Problems found, one sentence each.
        allocations: All blocks of each run, where another program's file has them.

    Args:
        path: The file.
        num_runs_before: Number of headers in the files before this one.

    Raises:
        FileFormatError: The file is not a log, or a part of it is invalid.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path, num_runs_before: int) -> None:
        self.path = path
        self.headers: list[LogHeader] = []
        self.events: list[Event] = []
        self.seconds: list[float] = []
        self.form: Form = "lines"
        self.problems: list[str] = []
        self.allocations: list[Allocations] = []
        self._num_runs_before = num_runs_before
        self._unknown: Counter[str] = Counter()
        self._second = -math.inf  # the latest so far
        self._seen: set[int] = set()
        self._num_repeats = self._crc = 0
        with self.path.open("rb") as file:
            start = file.read(4096)
            has_mark = start.startswith(codecs.BOM_UTF8)
            file.seek(len(codecs.BOM_UTF8) if has_mark else 0)
            if has_mark:
                self._note("a byte order mark at its start was ignored")
            text = start.removeprefix(codecs.BOM_UTF8).lstrip()
            if start.startswith((_SNAPSHOT_START, _GZIP_START)) or _looks_like_trace(text):
                self._read_import(file, start)
            elif text.startswith(b"["):
                self.form = "array"
                self._read_array(file)
            else:
                self._read_lines(file)
        if self._unknown:
            names = ", ".join(short(name) for name in sorted(self._unknown)[:5])
            self._note(f"{self._unknown.total()} values under {len(self._unknown)} unknown names were ignored: {names}")

    def _read_lines(self, file: BinaryIO) -> None:
        cut = ""  # problem with the previous line, if it may have been cut
        number = 0
        for lines in _blocks(file):
            for line, record in zip(lines, _parse_events(lines) or repeat(None), strict=False):
                number += 1
                if record is not None and self.headers and not cut:
                    self._add_event(number, line, record)
                else:
                    cut = self._read_line(number, line, cut)
        self._end_run(cut)
        self._note_ends()

    def _read_line(self, number: int, line: bytes, cut: str) -> str:
        """Read any line; return the problem with it, if it may have been cut."""
        where = f"line {number}"
        if len(line) > LONGEST_LINE_BYTES:
            self._fail(f"{where}, longer than {LONGEST_LINE_BYTES} bytes", "an event log")
        if line.isspace():
            return cut
        record = self._parse_line(where, line)
        is_header = isinstance(record, dict) and "schema" in record
        if cut and not is_header:
            self._fail(cut, "JSON; only the last line of a run may be cut")
        if is_header:
            self._end_run(cut)
            self._add_header(where, record)
        elif isinstance(record, NotWholeError):
            return f"{where}: {record}"
        else:
            self._add_event(number, line, record)
        return ""

    def _parse_line(self, where: str, line: bytes) -> Any:
        """Return the line's JSON value, or a description of the problem if it may have been cut."""
        try:
            return _parse(line)
        except NotWholeError as error:
            if not self.headers and not looks_like_log(line):
                self._refuse_post_mortem()
                self._fail(f"{where}: {error}", "the header line of an event log, or a JSON array of events")
            return error
        except ValueError as error:
            self._fail(f"{where}: {error}", "valid JSON values, each key once")

    def _refuse_post_mortem(self) -> None:
        """Refuse a post mortem by its name, not as a broken log."""
        with self.path.open("rb") as file:
            is_post_mortem = POST_MORTEM.encode() in file.read(4096)
        if is_post_mortem:
            self._fail(
                f"a post mortem ({POST_MORTEM})",
                "an event log",
                f"pass the log beside it, {str(self.path.with_suffix('.jsonl'))!r}; a post mortem is read with "
                "json.loads(path.read_text()).",
            )

    def _end_run(self, cut: str) -> None:
        if cut:
            self._note(f"{cut}: incomplete, as after a kill during the write; left out")

    def _note_ends(self) -> None:
        if not self.headers:
            self._note("the run ended before its header line was written: there are no events")
        if len(self.headers) > 1:
            self._note(f"it contains {len(self.headers)} runs, one after the other")
        if self._num_repeats:
            self._note(f"{self._num_repeats} lines are exact copies of an earlier line of their run")

    def _add_header(self, where: str, record: dict[str, Any]) -> None:
        schema = record.pop("schema")
        if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
            self._fail(
                f"{where}: schema={short(schema)}",
                "the schema 'memkit.events/1'",
                "a newer memkit wrote this log: update memkit.",
            )
        if record.pop("units", "bytes") != "bytes":
            self._fail(f"{where}: units other than bytes", "units='bytes'")
        try:
            self.headers.append(LogHeader(**_known(_header_values(record, self._unknown), _HEADER_KEYS, self._unknown)))
        except (InputError, InputTypeError) as error:
            self._fail(f"{where}, the run's header: {error.got}", error.expected)
        self._seen.clear()

    def _add_event(self, number: int, line: bytes, record: object) -> None:
        headers = self.headers
        if not headers or not isinstance(record, dict):
            self._fail(f"line {number}: {short(record)}", "a header line first, then one JSON object for each event")
        values = record if _EVENT_KEYS.issuperset(record) else _known(record, _EVENT_KEYS, self._unknown)
        header = headers[-1]
        if values.get("rank") is None:
            values["rank"] = header.rank
        values["run"] = self._num_runs_before + len(headers) - 1
        try:
            event = event_of(values)
        except (InputError, InputTypeError) as error:
            self._fail(f"line {number}, event {short(values.get('event'))}: {error.got}", error.expected)
        self.events.append(event)
        self._note_second(header.wall_s if event.wall_s is None else event.wall_s)
        mark, seen = hash(line), self._seen
        if mark in seen:
            self._num_repeats += 1
        seen.add(mark)

    def _note_second(self, wall_s: float | None) -> None:
        """Record a wall time; a clock that is set back must not reverse the file's own order."""
        if wall_s is not None and wall_s > self._second:
            self._second = wall_s
        self.seconds.append(self._second)

    def _chunks(self, file: BinaryIO, expected: str) -> Iterator[bytes]:
        num_bytes = 0
        while chunk := file.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > _LARGEST_WHOLE_BYTES:
                self._fail(f"more than {_LARGEST_WHOLE_BYTES} bytes", expected)
            self._crc = zlib.crc32(chunk, self._crc)
            yield chunk

    def _read_import(self, file: BinaryIO, start: bytes) -> None:
        """Read a file that another program wrote."""
        # Most files are logs: they need not import the other readers.
        from memkit._events.snapshot_log import read_snapshot
        from memkit._events.trace_file import Trace, read_profile, unzipped

        chunks = self._chunks(file, "a snapshot or a trace")
        try:
            if start.startswith(_SNAPSHOT_START):
                self.form = "snapshot"
                found = read_snapshot(iter(lambda: file.read(_CHUNK_BYTES), b""), self._num_runs_before)
                self.allocations = found.allocations
            else:
                self.form = "trace"
                is_packed = start.startswith(_GZIP_START)
                trace = Trace(unzipped(chunks, _LARGEST_WHOLE_BYTES) if is_packed else chunks)
                found = read_profile(trace, f"trace-{self._crc:08x}", self._num_runs_before)
        except (InputError, InputTypeError) as error:
            self._fail(error.got, error.expected)
        self.headers, self.events = found.headers, found.events
        for problem in found.problems:
            self._note(problem)
        for event in self.events:
            self._note_second(event.wall_s)

    def _read_array(self, file: BinaryIO) -> None:
        stream = JsonStream(self._chunks(file, "a JSON array of events"), _decoder)
        wrong: FileFormatError | None = None
        try:
            for index, record in enumerate(stream.elements()):
                if wrong is not None and stream.num_chars > _CHUNK_BYTES:
                    break  # near the end, an error from the text itself is more informative
                if stream.may_have_halves:
                    _check_characters(record)
                try:
                    if wrong is None:
                        self._add_legacy(f"index {index}", record)
                except FileFormatError as error:
                    wrong = error
            else:
                stream.expect_end()
        except FileFormatError:
            raise
        except ValueError as error:
            self._fail(str(error), "a complete JSON array of events")
        if wrong is not None:
            raise wrong
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
            self.events.append(event_of({"event": event, _LEGACY_KEYS[key]: value}))
        except (InputError, InputTypeError) as error:
            self._fail(f"{named}: {error.got}", error.expected)
        self._note_second(None)

    def _note_legacy(self) -> None:
        name, count = Counter(event.event for event in self.events).most_common(1)[0] if self.events else ("", 0)
        if count > 1:
            self._note(f"the event {short(name)} occurs {count} times: the file may contain several runs")
        peaks = [event.peak_total_bytes for event in self.events if event.peak_total_bytes is not None]
        if peaks != sorted(peaks):
            self._note("peak_memory falls at some event: the counter was reset, or the file contains several runs")

    def _note(self, problem: str) -> None:
        self.problems.append(f"{self.path}: {problem}")

    def _fail(
        self, got: str, expected: str, fix: str = "check the program that wrote the file, or remove that part."
    ) -> NoReturn:
        raise FileFormatError(f"read_memory_events({str(self.path)!r})", got=got, expected=expected, fix=fix) from None


def _looks_like_trace(start: bytes) -> bool:
    if start.startswith(b'{"schema":'):  # a log's header, whose config and argv may have any word in them
        return False
    return start.startswith(b"{") and (b'"traceEvents"' in start or b'"schemaVersion"' in start)


def _blocks(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the lines: the first one, which is a header, then some at a time; one that is too long comes in parts."""
    lines: list[bytes] = []
    num_bytes = _BLOCK_BYTES
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        lines.append(line)
        num_bytes += len(line)
        if num_bytes > _BLOCK_BYTES:
            yield lines
            lines, num_bytes = [], 0
    yield lines


def _parse_events(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """Parse lines that all are events, in two thirds of the time; None if any line needs a closer look."""
    # No value can go on in the next line: a bracket between them closes, and a text has no line break.
    text = b"],\n[".join(lines)
    if len(text) > 2 * _BLOCK_BYTES or (b"\\" in text and b"\\u" in text):
        return None
    try:
        found: list[list[Any]] = _decode(f"[[{text.decode()}]]")
        records: list[dict[str, Any]] = [record for (record,) in found]
    except (ValueError, RecursionError):
        return None
    if len(records) != len(lines) or set(map(type, records)) != {dict}:
        return None
    return None if any("schema" in record for record in records) else records


def _decode(text: str) -> list[list[Any]]:
    """Decode lists of objects; if each colon ends a key, there are as many keys as colons unless a key is repeated."""
    num_keys = text.count('":')
    if num_keys == text.count(":"):
        found: list[list[Any]] = _fast_decoder.decode(text)
        if num_keys == sum(len(record) for (record,) in found if type(record) is dict):
            return found
    return _decoder.decode(text)  # type: ignore[no-any-return]  # of JSON


def _parse(data: bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        NotWholeError: The text may have been cut.
        ValueError: The text is complete, but repeats a key, is nested too deeply, or contains invalid JSON values.
    """
    try:
        text = data.decode().strip(_SPACES)
        check_density(text)
        value, end = _decoder.raw_decode(text)
    except UnicodeError:
        raise NotWholeError("text that is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotWholeError(f"invalid JSON at character {error.pos} ({error.msg})") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if end < len(text):
        raise NotWholeError(f"invalid JSON at character {end} (Extra data)")
    if "\\u" in text:
        _check_characters(value)
    return value


def _check_characters(value: object) -> None:
    """Reject strings that UTF-8 cannot encode: an escape can produce a lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise ValueError("text that is not valid Unicode: half of a surrogate pair") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {short(repeated)} twice in one object")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not a JSON number")


# Shared by all lines: json.loads would create one for each. The fast one does not see repeated keys.
_fast_decoder = json.JSONDecoder(parse_constant=_no_constant)
_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _known(record: dict[str, Any], names: frozenset[str], unknown: Counter[str]) -> dict[str, Any]:
    """Return the values under known names and count the others."""
    unknown.update(record.keys() - names)
    return {name: value for name, value in record.items() if name in names}


def _header_values(record: dict[str, Any], unknown: Counter[str]) -> dict[str, Any]:
    """Convert the nested records of a header; invalid parts are left for the header's own check."""
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
