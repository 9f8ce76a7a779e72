"""Write memory logs: JSON lines, with a header line for each run and one flushed line for each event."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memkit._core.errors import FileFormatError, InputError, StateError, warn_user
from memkit._core.printable import printable_json
from memkit._events.log import EVENT_KEYS, Event, LogHeader, require_rank
from memkit._machine.files import atomic_writer, check_place

if sys.platform != "win32":
    import fcntl

SCHEMA = "memkit.events/1"
POST_MORTEM = "memkit.postmortem/1"  # the schema of the JSON file beside an out-of-memory's log
LONGEST_LINE_BYTES = 2**24  # the reader buffers no more of a file that may not be a log
_LOG_START = b'{"schema":"memkit.events/'
_NUM_UNWRITTEN = 10_000  # about 5 MB of events
_get_values = operator.attrgetter(*EVENT_KEYS)
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


class EventWriter:
    """Append events to a log file, one line each, so that a kill costs at most the line being written.

    Each line is passed to the system immediately, in one write. Several threads may write.

    A file that already contains runs is continued: a truncated last line is terminated, and a new header line starts
    the new run. Each process writes its own file; see `rank_path`.

    Events are not individually synced to disk: data passed to the system survives the end of the process, even by
    SIGKILL or the out-of-memory killer; only a crash of the whole machine may lose the last seconds.

    When the file can no longer be written (disk full), one `MemkitWarning` is issued, and the run continues: the last
    10,000 of the following events are kept in ``unwritten``, for `save_events` to another path.

    Args:
        path: The log file. Its directory must exist.
        header: Header that describes this run.

    Raises:
        InputError: ``path`` is a directory, or lies in one that does not exist; or the header takes more than 16 MiB.
        OSError: The file cannot be opened.
        StateError: Another writer, in this process or another one, has the file open; it is left unchanged. Not
            detected on Windows, nor on file systems without locks.
        FileFormatError: The file is not an event log; it is left unchanged.

    Example:
        >>> import tempfile, pathlib
        >>> from memkit._events.reader import read_memory_events
        >>> from memkit._events.log import Event, LogHeader
        >>> from memkit._events.writer import EventWriter
        >>> path = pathlib.Path(tempfile.mkdtemp(), "memory_events.jsonl")
        >>> with EventWriter(path, LogHeader.new()) as writer:
        ...     writer.write(Event("forward", step=0, peak_bytes=35_122_176))
        >>> [(event.event, event.peak_bytes) for event in read_memory_events(path).events]
        [('forward', 35122176)]
    """

    def __init__(self, path: str | os.PathLike[str], header: LogHeader) -> None:
        self.path = Path(path)
        self.unwritten: deque[Event] = deque(maxlen=_NUM_UNWRITTEN)
        self._has_failed = False
        self._pid = os.getpid()
        line = _header_line(header)
        check_place(f"log={str(self.path)!r}", self.path, example="memory_events.jsonl")
        self._file = self.path.open("a+b", buffering=0)
        try:
            self._lock()
            self._append(self._join() + line)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """Reject a file that another writer has open. The lock is released however its holder ends."""
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"EventWriter({str(self.path)!r})",
                got="a log that another writer has open, in this process or another one",
                expected="one writer at a time for each log file",
                fix="close() the other manager first, or choose another path. Ranks get a file each where RANK and "
                "WORLD_SIZE are set. The workers of a killed run hold its log until they end.",
            ) from None
        except OSError:  # some network file systems have no locks: other writers are not detected there
            return

    def _join(self) -> bytes:
        """Return the separator between the file's content and a new header line; reject a file that is not a log."""
        self._file.seek(0)
        start = self._file.read(len(_LOG_START))
        if not looks_like_log(start):
            raise FileFormatError(
                f"EventWriter({str(self.path)!r})",
                got=f"a file that begins with {start!r}",
                expected="a new file, or an event log to continue",
                fix="choose another path; nothing was changed.",
            )
        if len(start) < len(_LOG_START):  # new, or cut before it is recognizable
            self._file.truncate(0)
            return b""
        self._file.seek(-1, os.SEEK_END)
        return b"" if self._file.read(1) == b"\n" else b"\n"

    def write(self, event: Event) -> None:
        """Append one event.

        Args:
            event: The event.

        Raises:
            StateError: The writer is closed, or belongs to the process that this one was forked from.
            InputError: The event takes more than 16 MiB.
        """
        self.write_texts([_text_of(event)])

    def write_texts(self, texts: Sequence[str]) -> None:
        """Append several events in one write.

        Args:
            texts: The `event_text` of each event.

        Raises:
            StateError: As for `write`.
            InputError: An event takes more than 16 MiB; none is written.
        """
        data = b"".join([_line(text) for text in texts])
        if os.getpid() != self._pid:
            raise StateError(
                "EventWriter.write(event)",
                got=f"a call in process {os.getpid()} on the writer of process {self._pid}",
                expected="one process for each log file",
                fix="open an EventWriter with another path in the forked process.",
            )
        if self._file.closed:
            raise StateError(
                "EventWriter.write(event)",
                got="a closed writer",
                expected="an open one",
                fix="write before close(), or open the path again: that appends a new run.",
            )
        num_left = (data if self._has_failed else self._append(data)).count(b"\n")
        self.unwritten.extend(parse_event(text) for text in texts[len(texts) - num_left :])

    def _append(self, data: bytes) -> bytes:
        """Write lines; on failure, warn, abandon the file, and return the unwritten rest, possibly from mid-line."""
        rest = data
        try:
            while rest:  # more than one iteration only if the disk is full or the call is interrupted
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._has_failed = True
            warn_user(
                f"The memory log {str(self.path)!r} cannot be written any more ({error}). The run goes on without it; "
                f"the last {_NUM_UNWRITTEN} events from here on are in EventWriter.unwritten."
            )
        return rest

    def close(self) -> None:
        """Close the file; may be called more than once."""
        if sys.platform != "win32" and not self._file.closed and os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # release at once: a forked process may have the file open
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def looks_like_log(start: bytes) -> bool:
    """Return whether a file that begins with ``start`` is an event log, however early it was cut."""
    return start.startswith(_LOG_START) or _LOG_START.startswith(start)


def save_events(path: str | os.PathLike[str], header: LogHeader, events: Iterable[Event]) -> None:
    """Write a complete log atomically: an existing file is replaced as a whole.

    Args:
        path: The log file. Its directory must exist.
        header: Header that describes the run.
        events: The run's events in order.

    Raises:
        InputError: ``path`` is a directory, or lies in one that does not exist; or the header or an event takes more
            than 16 MiB.
        OSError: The file cannot be written; an existing file is unchanged.
    """
    with atomic_writer(path) as file:
        file.writelines(run_lines(header, events))


def run_lines(header: LogHeader, events: Iterable[Event]) -> Iterator[bytes]:
    """Yield the lines of one run; a file may contain several runs in sequence."""
    yield _header_line(header)
    for event in events:
        yield _line(_text_of(event))


def rank_path(path: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """Return the log path of one process in a run.

    Args:
        path: The run's log path, as passed to the reader.
        rank: Rank of the process.
        world_size: Number of processes; with one, the path is unchanged.

    Returns:
        The process's own path.

    Raises:
        InputTypeError: A number is not an int.
        InputError: The run has no such rank.

    Example:
        >>> from memkit._events.writer import rank_path
        >>> str(rank_path("memory_events.jsonl", rank=3, world_size=4))
        'memory_events.rank3.jsonl'
    """
    call = f"rank_path({str(path)!r}, rank={rank!r}, world_size={world_size!r})"
    require_rank(call, rank, world_size)
    base = Path(path)
    return base if world_size == 1 else base.with_name(f"{base.stem}.rank{rank}{base.suffix}")


def _header_record(header: LogHeader) -> dict[str, Any]:
    """Return the JSON object of a header."""
    known = asdict(header, dict_factory=lambda pairs: {name: value for name, value in pairs if value is not None})
    return {"schema": SCHEMA, **known, "units": "bytes"}


def _header_line(header: LogHeader) -> bytes:
    return _line(_encode(_header_record(header)))


def event_text(values: Mapping[str, Any]) -> str:
    """Return the JSON of an event's values, as accepted by ``Event(**values)``, without checks; None is left out."""
    return f"{text_of_first(values)}}}"


def text_of_first(values: Mapping[str, Any]) -> str:
    """Return the same for its first values, without the closing brace.

    Encoding the whole dict would take twice as long: most values are numbers, which Python formats as JSON does.
    """
    texts = [
        f'"{name}":{value if (kind := type(value)) is int or kind is float else _encode(value)}'
        for name, value in values.items()
        if value is not None
    ]
    return f"{{{','.join(texts)}"


def parse_event(text: str) -> Event:
    """Return the event of an `event_text`."""
    return Event(**json.loads(text))


def _text_of(event: Event) -> str:
    return event_text(dict(zip(EVENT_KEYS, _get_values(event), strict=True)))


def _line(text: str) -> bytes:
    line = _utf8(printable_json(text) + "\n")
    if len(line) > LONGEST_LINE_BYTES:
        raise InputError(
            "writing a memory log",
            got=f"a line of {len(line)} bytes",
            expected=f"lines up to {LONGEST_LINE_BYTES} bytes",
            fix="put less into its note, config or names.",
        )
    return line


def _utf8(text: str) -> bytes:
    # UTF-8 cannot encode a lone surrogate, as in a file name that is not Unicode: it becomes "?".
    return text.encode(errors="replace")
