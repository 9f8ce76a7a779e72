"""Read memory logs: single files, files with several runs, per-rank files, older JSON arrays, snapshots, traces."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memkit._core.errors import InputError, InputTypeError
from memkit._core.foreign import PEAK, SAVE, SUMMARY
from memkit._core.printable import short
from memkit._core.words import guided
from memkit._events import first_program
from memkit._events.file import EventFile, Form
from memkit._events.log import BYTE_FIELDS, Event, LogHeader, Origin

if TYPE_CHECKING:  # needs NumPy, which most logs do without
    from memkit._events.allocations import Allocations

_RANK_FILE = re.compile(r"(?P<stem>.+)\.rank(?P<rank>\d+)(?P<suffix>\.\w+)?", re.ASCII)


class LogNotFoundError(InputError, FileNotFoundError):
    """There is no memory log at the path."""


@guided(
    absent={
        "max(event.peak_bytes or 0 for event in log.events)": f"{PEAK} peak_bytes",
        "[event for event in log.events if event.event == name]": "[] get",
        "mk.write_report(log, 'report.html')": f"{SUMMARY} {SAVE} write plot show to_html",
    }
)
@dataclass(frozen=True, slots=True)
class EventLog:
    """A memory log that was read.

    Attributes:
        headers: One for each run and rank; none for the older format.
        events: All events, in the file's order; for several files, in the order of their wall times. ``event.run`` is
            the index of an event's header.
        form: Source format: ``"lines"``, memkit's own; ``"array"``, the older JSON array, which has only names and one
            number per event; ``"snapshot"``, a CUDA memory snapshot; ``"trace"``, a trace of torch.profiler.
        problems: Caveats about the figures, one sentence each: a line that was cut, fields unknown to this version of
            memkit, several runs in one file, a missing rank.
        allocations: For a CUDA memory snapshot, each GPU's blocks.
    """

    headers: tuple[LogHeader, ...]
    events: tuple[Event, ...]
    form: Form = "lines"
    problems: tuple[str, ...] = ()
    allocations: tuple[Allocations, ...] = ()

    @property
    def is_legacy(self) -> bool:
        """Whether the log was in the older JSON array format."""
        return self.form == "array"

    @property
    def missing_loads(self) -> tuple[str, ...]:
        """Names of the load events missing here that the program of the older format always records."""
        return first_program.missing_loads(self._names) if self.is_legacy else ()

    @property
    def missing_stages(self) -> tuple[str, ...]:
        """Names of the stages missing here that the program of the older format always records."""
        return first_program.missing_stages(self._names) if self.is_legacy else ()

    @property
    def _names(self) -> set[str]:
        return {each.event for each in self.events}

    def origin(self, event: Event, name: str) -> Origin:
        """Return the origin of one of an event's numbers.

        Args:
            event: One of ``events``.
            name: The number, such as ``"allocated_bytes"``.

        Returns:
            The event's own origin, or else its header's. ``Origin()`` if neither gives one, and for a number that is
            not recorded.

        Raises:
            InputError: No event has a number of that name.

        Example:
            >>> from memkit._events.reader import EventLog
            >>> from memkit._events.log import Event, LogHeader, Origin
            >>> header = LogHeader.new(fields={"peak_bytes": Origin("cuda_allocator", "measured")})
            >>> log = EventLog((header,), (Event("forward", peak_bytes=512, run=0),))
            >>> log.origin(log.events[0], "peak_bytes")
            Origin(source='cuda_allocator', kind='measured')
            >>> log.origin(log.events[0], "reserved_bytes")
            Origin(source=None, kind=None)
        """
        if name not in BYTE_FIELDS:
            raise InputError(
                f"EventLog.origin(event, {name!r})",
                got=f"the name {name!r}",
                expected=f"one of {', '.join(BYTE_FIELDS)}",
                fix="pass the name of a number of bytes.",
            )
        if getattr(event, name) is None:
            return Origin()
        declared = Origin() if event.run is None else self.headers[event.run].fields.get(name, Origin())
        return Origin(event.source or declared.source, event.kind or declared.kind)


def read_memory_events(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> EventLog:
    """Read a memory log, without torch or access to the machine that wrote it.

    The last line of a run may be truncated: it is left out, and ``problems`` says so. Any other defect is an error that
    names the file and the line, or the index in an array: a log is never silently read in part.

    Args:
        path: A log file; the older JSON array ``[{"event": ..., "peak_memory": ...}, ...]``; a CUDA memory snapshot
            of ``torch.cuda.memory._dump_snapshot``; a trace that ``torch.profiler.profile(profile_memory=True)``
            exported, also as ``.json.gz``; a list of such files; the path that a run of several ranks was given
            (``memory_events.jsonl`` for ``memory_events.rank0.jsonl``, ...); or the directory that holds one such log.

    Returns:
        The log. ``peak_memory`` of the older format becomes ``peak_total_bytes``, and ``incremental_memory`` becomes
        ``incremental_bytes``. Each GPU of a snapshot or a trace is a run, and each action of its allocator an event.
        A snapshot is loaded without instantiating any class. Events of several files are merged by wall time;
        each file's own order is kept.

    Raises:
        LogNotFoundError: There is no such file (an `InputError` and a ``FileNotFoundError``).
        InputError: A directory holds several logs or none, or a list is empty or mixes the older format with others.
        InputTypeError: ``path`` is neither a path nor a list of paths.
        FileFormatError: A file is not a log, or a line of it is invalid.
        OSError: The file cannot be read.

    Memory:
        About 0.6 KB of host memory for each event.

    Example:
        >>> import tempfile, pathlib
        >>> from memkit._events.reader import read_memory_events
        >>> path = pathlib.Path(tempfile.mkdtemp(), "memory_events.json")
        >>> _ = path.write_text('[{"event": "t5_loaded", "peak_memory": 11362869248}]')
        >>> log = read_memory_events(path)
        >>> log.is_legacy, log.events[0].peak_total_bytes, log.events[0].allocated_bytes
        (True, 11362869248, None)
    """
    problems: list[str] = []
    parts: list[EventFile] = []
    for file in _find_files(path, problems):
        parts.append(EventFile(file, num_runs_before=sum(len(part.headers) for part in parts)))
    if len(parts) > 1 and any(part.form == "array" for part in parts):
        raise InputError(
            f"read_memory_events({short(path)})",
            got="a JSON array of the older format together with other files",
            expected="logs with times to merge them by",
            fix="read the array alone.",
        )
    problems += [problem for part in parts for problem in part.problems]
    headers = tuple(header for part in parts for header in part.headers)
    events = [event for part in parts for event in part.events]
    if len(parts) > 1:
        seconds = [second for part in parts for second in part.seconds]
        events = [events[index] for index in sorted(range(len(events)), key=seconds.__getitem__)]
    problems += _rank_problems([part.headers[-1] for part in parts if part.headers])
    problems += [
        f"run {run_id} of rank {rank} occurs {count} times in the log: its events are counted each time"
        for (run_id, rank), count in Counter((header.run_id, header.rank) for header in headers).items()
        if count > 1
    ]
    allocations = tuple(each for part in parts for each in part.allocations)
    return EventLog(headers, tuple(events), parts[0].form, tuple(problems), allocations)


def _find_files(path: object, problems: list[str]) -> list[Path]:
    if isinstance(path, (list, tuple)) and path:
        return [file for each in path for file in _find_one(each, problems)]
    return _find_one(path, problems)


def _find_one(path: object, problems: list[str]) -> list[Path]:
    call = f"read_memory_events({short(path)})"
    if isinstance(path, (list, tuple)):
        raise InputError(call, got="a list in a list, or an empty one", expected="paths", fix="pass a list of paths.")
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        fix = "pass the log's path, or a list of paths."
        if isinstance(path, EventLog):
            fix = "write mk.write_report(log, 'report.html'): the log has already been read."
        elif isinstance(path, Mapping):
            fix = "write the events into a file first: json.dump(events, open('memory_events.json', 'w'))"
        raise InputTypeError(call, got=f"a {type(path).__name__}", expected="a path as text", fix=fix)
    base = Path(path)
    if base.is_dir():
        base = _base_in(base, call)
    ranks = _rank_files(base)
    if base.is_file():
        if ranks:
            problems.append(f"{base}: {len(ranks)} files of single ranks beside it are not read")
        return [base]
    if not ranks:
        what = "something other than a regular file" if base.exists() else "no file at this path, and none of a rank"
        raise LogNotFoundError(call, got=what, expected="a memory log", fix="check the path and the run's directory.")
    return ranks


def _base_in(directory: Path, call: str) -> Path:
    """Find the only log in a directory: the path that was passed to the run."""
    names = set()
    for file in directory.glob("*.jsonl"):
        match = _RANK_FILE.fullmatch(file.name)
        names.add(f"{match['stem']}{match['suffix']}" if match else file.name)
    if len(names) != 1:
        listed = f": {', '.join(sorted(names)[:5])}" if names else ""
        raise InputError(
            call,
            got=f"a directory with {len(names)} logs{listed}",
            expected="a directory with one log (*.jsonl), or the path of a file",
            fix="name the file.",
        )
    return directory / names.pop()


def _rank_files(base: Path) -> list[Path]:
    """List ``log.rank0.jsonl``, ``log.rank1.jsonl``, ... for ``log.jsonl``, by number."""
    found = {}
    for file in base.parent.iterdir() if base.parent.is_dir() else ():
        match = _RANK_FILE.fullmatch(file.name)
        if match and f"{match['stem']}{match['suffix'] or ''}" == base.name:
            found[file] = int(match["rank"])
    return sorted(found, key=found.__getitem__)


def _rank_problems(headers: list[LogHeader]) -> Iterator[str]:
    sizes = sorted({header.world_size for header in headers})
    if len(sizes) > 1:
        yield f"the files are from runs with {', '.join(map(str, sizes))} ranks: some may be left from an older run"
    elif sizes:
        ranks = {header.rank for header in headers}
        missing = sizes[0] - len(ranks)
        if missing:
            first = next(rank for rank in range(sizes[0]) if rank not in ranks)
            yield f"{missing} of {sizes[0]} ranks are missing, the first of them rank {first}"
