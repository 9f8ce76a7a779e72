"""Convert traces of torch.profiler (Kineto, in Chrome's trace format) to log records. No torch."""

from __future__ import annotations

import json
import re
import sys
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from memkit._core.errors import InputError, InputTypeError
from memkit._core.pickles import refuse_pickle
from memkit._core.printable import short
from memkit._events.json_stream import JsonStream
from memkit._events.log import Event, LoggedDevice, LogHeader, Origin, require_count
from memkit._events.places import NO_PLACE, is_library, place_name
from memkit._events.snapshot_log import Imported

_MEMORY = "[memory]"
_BACKENDS = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps"}  # torch's DeviceType
_FIRST_SECOND = 10**9  # times before 2001 are not wall times
_STEP = re.compile(r"ProfilerStep#(\d{1,18})", re.ASCII)
_CODE = re.compile(r"(?P<file>.+\.pyw?)\((?P<line>\d+)\): (?P<name>.+)", re.DOTALL)
CHUNK_BYTES = 2**20
_MOST_ACTS = 2**20  # the profiler writes about 3000 bytes for each, and a file may have 2**28
_MOST_LEVELS = 1000  # of nested slices
_CHARS_PER_RECORD = 48  # minimum on average: the profiler's have about 250
_MOST_PACKED = 200  # unpacked bytes per gzip byte: about 20 in profiler files, 1000 in a zip bomb
_SMALL_BYTES = 2**24
# Categories of slices that are read; the first traces had one category for operators and marks.
_SLICES = ("cpu_op", "Operator", "user_annotation", "python_function")


_Thread = tuple[str, str]  # process and thread IDs


class _Act(NamedTuple):
    """One "[memory]" event."""

    time_us: float
    thread: _Thread
    address: int | None
    num_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None


class _Slice(NamedTuple):
    """A timed slice of the trace."""

    start_us: float
    end_us: float
    kind: str
    name: str


def unzipped(chunks: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the contents of a gzip file in chunks, up to a size limit.

    Raises:
        InputError: The file is damaged, or larger than the limit.
    """
    unpacker, num_bytes, num_packed, has_more = zlib.decompressobj(wbits=31), 0, 0, False
    for chunk in chunks:
        num_packed += len(chunk)
        packed, is_left = chunk, not unpacker.eof
        has_more |= unpacker.eof
        while is_left:
            try:
                text = unpacker.decompress(packed, CHUNK_BYTES)
            except zlib.error as error:
                refuse_pickle(f"a gzip file that cannot be unpacked ({error})", "a complete gzip file")
            num_bytes += len(text)
            if num_bytes > most_bytes:
                refuse_pickle(f"more than {most_bytes} bytes in a gzip file", "a trace")
            if num_bytes > _SMALL_BYTES + _MOST_PACKED * num_packed:
                refuse_pickle(
                    f"more than {num_bytes} bytes in {num_packed} bytes of a gzip file", "a trace of the profiler"
                )
            yield text
            packed = unpacker.unconsumed_tail
            is_left = not unpacker.eof and (bool(packed) or len(text) == CHUNK_BYTES)
    if not unpacker.eof:
        refuse_pickle("a truncated gzip file", "a complete gzip file")
    if has_more or unpacker.unused_data:
        refuse_pickle("data after the end of a gzip file", "a single trace in it")


class Trace:
    """The parts kept of a trace, which is read in chunks.

    Args:
        chunks: The file's text.

    Attributes:
        entries: Everything except its events.
        acts: Memory events by device, in order of time.
        slices: Timed slices by thread, in order of time.

    Raises:
        InputError: The file is not a trace, or an event has values that the profiler does not write.
        InputTypeError: A field does not have the type that the profiler writes.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.entries: dict[str, Any] = {}
        self.acts: dict[tuple[int, int], list[_Act]] = {}
        self.slices: dict[_Thread, list[_Slice]] = {}
        self._num_acts = 0
        self._threads: dict[_Thread, _Thread] = {}  # so that all events of a thread share one tuple
        stream = JsonStream(chunks, json.JSONDecoder())
        try:
            self._read(stream)
        except (InputError, InputTypeError):
            raise
        except ValueError as error:
            refuse_pickle(f"invalid JSON ({short(str(error))})", "a complete trace")
        for found in self.acts.values():
            found.sort(key=lambda act: act.time_us)
        for parts in self.slices.values():
            parts.sort(key=lambda part: (part.start_us, -part.end_us))

    def _read(self, stream: JsonStream) -> None:
        has_events = False
        for key in stream.names():
            if key == "traceEvents" and stream.peek() == "[" and not has_events:
                has_events = True
                for index, record in enumerate(stream.elements()):
                    if not isinstance(record, dict):
                        refuse_pickle("JSON without a list of traceEvents", "a trace in Chrome's format")
                    if index > 1000 and index * _CHARS_PER_RECORD > stream.num_chars:
                        refuse_pickle("a list of nearly empty traceEvents", "a trace of torch.profiler")
                    self._add(index, _with_whole_characters(record) if stream.may_have_halves else record)
            else:
                value = stream.value()
                self.entries[key] = _with_whole_characters(value) if stream.may_have_halves else value
        stream.expect_end()
        if not has_events or "traceEvents" in self.entries:
            refuse_pickle("JSON without a list of traceEvents", "a trace in Chrome's format")

    def _add(self, index: int, record: dict[str, Any]) -> None:
        """Keep the needed parts of an event."""
        if record.get("name") == _MEMORY and isinstance(args := record.get("args"), dict):
            self._add_act(index, record, args)
        elif record.get("ph") == "X" and record.get("cat") in _SLICES:
            start, name = _time(record, "ts"), record.get("name")
            end = start + _time(record, "dur")
            part = _Slice(start, end, sys.intern(str(record["cat"])), sys.intern(str(name)))
            self.slices.setdefault(self._thread(record), []).append(part)

    def _add_act(self, index: int, record: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        change = args.get("Bytes")
        if type(change) is not int or abs(change) >= 2**63:
            refuse_pickle(f"traceEvents[{index}]: Bytes={short(change)}", "an integer below 2**63")
        device = (_number(args, "Device Type", 0), args.get("Device Id", -1))
        if type(device[1]) is not int:
            refuse_pickle(f"traceEvents[{index}]: Device Id={short(device[1])}", "an integer")
        self._num_acts += 1
        if self._num_acts > _MOST_ACTS:
            refuse_pickle(f"over {_MOST_ACTS} memory events", "a shorter profile")
        totals = (_count(args, "Total Allocated"), _count(args, "Total Reserved"))
        act = _Act(_time(record, "ts"), self._thread(record), _count(args, "Addr"), change, *totals)
        self.acts.setdefault(device, []).append(act)

    def _thread(self, record: Mapping[str, Any]) -> _Thread:
        thread = (str(record.get("pid")), str(record.get("tid")))
        return self._threads.setdefault(thread, thread)


def _with_whole_characters(value: Any) -> Any:
    """Replace lone surrogates in a value, which UTF-8 cannot encode, by "?"."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeError:
        return json.loads(text.encode(errors="replace"))
    return value


def read_profile(trace: Trace, name: str, first_run: int) -> Imported:
    """Convert a trace of torch.profiler to records: each device is a run, each allocation or free an event.

    CPU bytes are summed here, since the profiler's own total also includes blocks of earlier sessions; the sum does not
    include blocks from before the session. If an accelerator was used, CPU blocks are left out.

    Args:
        trace: The trace.
        name: Unique name of the trace.
        first_run: Number of the first device's run.

    Raises:
        InputError: There are no memory events, or one has values that the profiler does not write.
        InputTypeError: A field does not have the type that the profiler writes.
    """
    base_s = _number(trace.entries, "baseTimeNanoseconds", 0) / 1e9
    acts = trace.acts
    if not acts:
        refuse_pickle(f"a trace without {_MEMORY} events", "a profile with profile_memory=True")
    problems = []
    used = [device for device in sorted(acts) if device[0] != 0] or sorted(acts)
    if len(used) < len(acts):
        problems.append("the CPU's memory events are left out, since the trace has an accelerator's")
    headers, events = [], list[Event]()
    for device in used:
        is_own = device[0] == 0 or any(act.allocated_bytes is None for act in acts[device])
        walls = [wall for act in acts[device] if (wall := _wall(base_s, act.time_us)) is not None]
        origin = Origin("profiler" if is_own else "cuda_allocator", "measured")
        headers.append(
            LogHeader(
                run_id=f"{name}-{device[0]}-{device[1]}",
                wall_s=min(walls, default=None),
                device=_device(trace.entries, device),
                fields={"allocated_bytes": origin, "reserved_bytes": origin},
            )
        )
        run = first_run + len(headers) - 1
        events += _Run(acts[device], trace.slices, base_s, run, is_own=is_own).events()
    return Imported(headers, events, problems, [])


class _Run:
    """One device's memory events.

    Args:
        acts: Memory events in order of time.
        slices: Slices by thread, in order of their start.
        base_s: Wall time of the trace clock's zero.
        run: Number of the device's header.
        is_own: Whether bytes have to be summed here.
    """

    def __init__(
        self,
        acts: Sequence[_Act],
        slices: Mapping[_Thread, Sequence[_Slice]],
        base_s: float,
        run: int,
        *,
        is_own: bool,
    ) -> None:
        self._acts, self._slices, self._base_s, self._run = acts, slices, base_s, run
        if is_own:
            sums = list(accumulate(act.num_bytes for act in acts))
            before = -min(0, *sums)  # blocks from before the session that were freed in it
            self._levels = [before + each for each in sums]
        else:
            self._levels = [act.allocated_bytes or 0 for act in acts]

    def events(self) -> Iterator[Event]:
        """Yield the events; the note of the peak event breaks it down."""
        best = max(range(len(self._acts)), key=self._levels.__getitem__)
        places = list(self._places())
        steps = self._steps()
        for index, (act, level, place) in enumerate(zip(self._acts, self._levels, places, strict=True)):
            while steps and steps[-1].end_us < act.time_us:
                yield self._step_event(steps.pop())
            yield Event(
                (place.code or place.operator or "alloc") if act.num_bytes > 0 else "free",
                wall_s=_wall(self._base_s, act.time_us),
                phase=place.phase,
                allocated_bytes=level,
                reserved_bytes=act.reserved_bytes or None,
                note=(self._split(places, best) or None) if index == best else None,
                rank=0,
                run=self._run,
            )
        while steps:
            yield self._step_event(steps.pop())

    def _steps(self) -> list[_Slice]:
        """Return the profiler's steps, last first."""
        found = [part for parts in self._slices.values() for part in parts if _STEP.fullmatch(part.name)]
        bounds = [self._bounds(part) for part in found]
        if sum(end - start for start, end in bounds) > _MOST_LEVELS * len(self._acts):
            refuse_pickle(f"{len(found)} steps that overlap", "one step after another")
        return sorted(found, key=lambda part: -part.end_us)

    def _bounds(self, part: _Slice) -> tuple[int, int]:
        """Return the bounds of the acts between a slice's start and end."""
        start, end = (bisect_left(self._acts, us, key=lambda act: act.time_us) for us in (part.start_us, part.end_us))
        return start, end

    def _step_event(self, step: _Slice) -> Event:
        start, end = self._bounds(step)
        within = self._levels[max(0, start - 1) : end]
        return Event(
            "step",
            step=int(step.name.partition("#")[2]),
            wall_s=_wall(self._base_s, step.end_us),
            duration_ns=round(1e3 * (step.end_us - step.start_us)),
            allocated_bytes=within[-1] if within else None,
            peak_bytes=max(within, default=None),
            rank=0,
            run=self._run,
        )

    def _places(self) -> Iterator[_Place]:
        """Find the place of each act. The acts of a thread come in order, so each slice is visited once."""
        ahead = {thread: list(reversed(self._slices.get(thread, ()))) for thread in {act.thread for act in self._acts}}
        inside: dict[_Thread, list[_Slice]] = {thread: [] for thread in ahead}
        for act in self._acts:
            coming, stack = ahead[act.thread], inside[act.thread]
            while coming and coming[-1].start_us <= act.time_us:
                part = coming.pop()
                while stack and stack[-1].end_us < part.start_us:
                    stack.pop()
                stack.append(part)
            while stack and stack[-1].end_us < act.time_us:
                stack.pop()
            if len(stack) > _MOST_LEVELS:
                refuse_pickle(f"{len(stack)} nested slices", f"at most {_MOST_LEVELS}")
            yield _place(stack)

    def _split(self, places: Sequence[_Place], best: int) -> dict[str, Any]:
        """Split the peak by the operators and lines that allocated its blocks."""
        if any(act.address is None for act in self._acts):  # as in the first traces
            return {}
        live: dict[Any, int] = {}
        for index, act in enumerate(self._acts[: best + 1]):
            if act.num_bytes > 0:
                live[act.address] = index
            else:
                live.pop(act.address, None)
        note: dict[str, dict[str, int]] = {"peak_by_operator": {}, "peak_by_line": {}}
        for index in live.values():
            for parts, name in zip(note.values(), (places[index].operator, places[index].code), strict=True):
                parts[name or NO_PLACE] = parts.get(name or NO_PLACE, 0) + self._acts[index].num_bytes
        return {name: parts for name, parts in note.items() if parts.keys() - {NO_PLACE}}


class _Place(NamedTuple):
    """Place of a memory event; None if the trace does not contain it."""

    operator: str | None
    code: str | None
    phase: str | None


def _place(stack: Sequence[_Slice]) -> _Place:
    parts = [part for part in stack if not _STEP.fullmatch(part.name)]
    operator = next((part.name for part in reversed(parts) if part.kind in ("cpu_op", "Operator")), None)
    code = None
    for part in reversed(parts):
        found = _CODE.fullmatch(part.name) if part.kind == "python_function" else None
        if found and not is_library(found["file"]):
            code = place_name(found["file"], found["line"], found["name"])
            break
    marks = [part.name for part in parts if part.kind == "user_annotation"]
    return _Place(operator, code, "/".join(marks) or None)


def _device(trace: Mapping[str, Any], device: tuple[int, int]) -> LoggedDevice:
    backend, total, name = _BACKENDS.get(device[0]), None, None
    known = trace.get("deviceProperties")
    for each in known if isinstance(known, list) and device[0] != 0 else ():
        if isinstance(each, dict) and each.get("id") == device[1]:
            total, name = each.get("totalGlobalMem"), each.get("name")
    return LoggedDevice(name, total, backend)


def _wall(base_s: float, time_us: float) -> float | None:
    """Return a wall time, if the trace's clock provides it."""
    wall_s = base_s + time_us / 1e6
    return wall_s if wall_s >= _FIRST_SECOND else None


def _time(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if type(value) not in (int, float) or not 0 <= value <= 2**63:  # type: ignore[operator]  # NaN fails too
        refuse_pickle(f"{name}={short(value)}", "microseconds")
    return float(value)  # type: ignore[arg-type]


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    if value is not None:
        require_count("", name, value)
    return value


def _number(record: Mapping[str, Any], name: str, default: int) -> int:
    value = _count(record, name)
    return default if value is None else value
