"""Read traces of torch.profiler (Kineto, in Chrome's trace format) into a log's own records. No torch."""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from memkit._events import Event, LoggedDevice, LogHeader, Origin, require_count, short
from memkit._pickles import refuse
from memkit._snapshotfile import NO_PLACE, is_library, place_name
from memkit._snapshotlog import Imported

_MEMORY = "[memory]"
_BACKENDS = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps"}  # torch's DeviceType
_FIRST_SECOND = 10**9  # times before 2001 are no times of day
_STEP = re.compile(r"ProfilerStep#(\d{1,18})", re.ASCII)
_CODE = re.compile(r"(?P<file>.+\.pyw?)\((?P<line>\d+)\): (?P<name>.+)", re.DOTALL)
# Categories of slices that are looked at; the first traces had one for operators and marks.
_SLICES = ("cpu_op", "Operator", "user_annotation", "python_function")


class _Act(NamedTuple):
    """One "[memory]" event."""

    time_us: float
    thread: tuple[Any, Any]
    address: int | None
    num_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None


class _Slice(NamedTuple):
    """Something that took a while."""

    start_us: float
    end_us: float
    kind: str
    name: str


def unzip(data: bytes, most_bytes: int) -> bytes:
    """Return what a gzip file holds; no more is unpacked than is allowed.

    Raises:
        InputError: The file is damaged, or holds more.
    """
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, most_bytes + 1)
    except zlib.error as error:
        refuse(f"a gzip file that cannot be unpacked ({error})", "a whole gzip file")
    if len(text) > most_bytes:
        refuse(f"more than {most_bytes} bytes in a gzip file", "a trace")
    if not unpacker.eof:
        refuse("a gzip file that was cut", "a whole gzip file")
    return text


def load_trace(data: bytes) -> dict[str, Any]:
    """Load a trace, and see that it has a list of events.

    Raises:
        InputError: The file is no trace.
    """
    try:
        trace = json.loads(data)
        if b"\\ud" in data or b"\\uD" in data:  # half of a surrogate pair alone has no place in UTF-8: "?" for it
            trace = json.loads(json.dumps(trace, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        refuse(f"no JSON ({short(str(error))})", "a whole trace")
    records = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        refuse("JSON that has no list of traceEvents", "a trace in Chrome's format")
    return dict(trace)


def read_profile(trace: Mapping[str, Any], name: str, first_run: int) -> Imported:
    """Read a loaded trace of torch.profiler: each device is a run, each block taken or given back an event.

    A CPU's sizes are counted here, since the profiler's own total also has blocks of earlier sessions; blocks from
    before the session are not in it. Where an accelerator was used, the CPU's blocks are left out.

    Args:
        trace: What `load_trace` returned.
        name: What no other trace is called.
        first_run: Number of the first device's run.

    Raises:
        InputError: There are no memory events, or one has values that the profiler does not give.
        InputTypeError: A field has another type than the profiler gives it.
    """
    base_s = _number(trace, "baseTimeNanoseconds", 0) / 1e9
    acts, slices = _take_apart(trace["traceEvents"])
    if not acts:
        refuse(f"a trace without {_MEMORY} events", "a profile with profile_memory=True")
    problems = []
    used = [device for device in sorted(acts) if device[0] != 0] or sorted(acts)
    if len(used) < len(acts):
        problems.append("memory events of the CPU are left out: the trace has those of an accelerator")
    headers, events = [], list[Event]()
    for device in used:
        is_own = device[0] == 0 or any(act.allocated_bytes is None for act in acts[device])
        walls = [wall for act in acts[device] if (wall := _wall(base_s, act.time_us)) is not None]
        origin = Origin("profiler" if is_own else "cuda_allocator", "measured")
        headers.append(
            LogHeader(
                run_id=f"{name}-{device[0]}-{device[1]}",
                wall_s=min(walls, default=None),
                device=_device(trace, device),
                fields={"allocated_bytes": origin, "reserved_bytes": origin},
            )
        )
        events += _Run(acts[device], slices, base_s, first_run + len(headers) - 1, is_own=is_own).events()
    return Imported(headers, events, problems)


def _take_apart(
    records: Sequence[Mapping[str, Any]],
) -> tuple[dict[tuple[int, int], list[_Act]], dict[tuple[Any, Any], list[_Slice]]]:
    """Find memory events by device, and slices by thread, both in the order of their times."""
    acts: dict[tuple[int, int], list[_Act]] = {}
    slices: dict[tuple[Any, Any], list[_Slice]] = {}
    for index, record in enumerate(records):
        thread = (str(record.get("pid")), str(record.get("tid")))
        if record.get("name") == _MEMORY and isinstance(args := record.get("args"), dict):
            change = args.get("Bytes")
            if type(change) is not int or abs(change) >= 2**63:
                refuse(f"traceEvents[{index}]: Bytes={short(change)}", "an integer below 2**63")
            device = (_number(args, "Device Type", 0), args.get("Device Id", -1))
            if type(device[1]) is not int:
                refuse(f"traceEvents[{index}]: Device Id={short(device[1])}", "an integer")
            totals = (_count(args, "Total Allocated"), _count(args, "Total Reserved"))
            acts.setdefault(device, []).append(_Act(_time(record, "ts"), thread, _count(args, "Addr"), change, *totals))
        elif record.get("ph") == "X" and record.get("cat") in _SLICES:
            start, name = _time(record, "ts"), record.get("name")
            end = start + _time(record, "dur")
            slices.setdefault(thread, []).append(_Slice(start, end, str(record["cat"]), str(name)))
    for found in acts.values():
        found.sort(key=lambda act: act.time_us)
    for parts in slices.values():
        parts.sort(key=lambda part: (part.start_us, -part.end_us))
    return acts, slices


class _Run:
    """One device's memory events.

    Args:
        acts: In the order of their times.
        slices: By thread, in the order of their beginnings.
        base_s: When the trace's clock stood at zero.
        run: Number of the device's header.
        is_own: Whether sizes have to be counted here.
    """

    def __init__(
        self,
        acts: Sequence[_Act],
        slices: Mapping[tuple[Any, Any], Sequence[_Slice]],
        base_s: float,
        run: int,
        *,
        is_own: bool,
    ) -> None:
        self._acts, self._slices, self._base_s, self._run = acts, slices, base_s, run
        if is_own:
            sums = list(accumulate(act.num_bytes for act in acts))
            before = -min(0, *sums)  # blocks from before the session that were given back in it
            self._levels = [before + each for each in sums]
        else:
            self._levels = [act.allocated_bytes or 0 for act in acts]

    def events(self) -> Iterator[Event]:
        """Make the events; at the largest, its note says who held what."""
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
        """The profiler's steps, the last one first."""
        found = [part for parts in self._slices.values() for part in parts if _STEP.fullmatch(part.name)]
        return sorted(found, key=lambda part: -part.end_us)

    def _step_event(self, step: _Slice) -> Event:
        start, end = (
            bisect_left(self._acts, time_us, key=lambda act: act.time_us) for time_us in (step.start_us, step.end_us)
        )
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
        """Find what each act was part of. The acts of a thread come in order, so each slice is looked at once."""
        ahead = {thread: list(reversed(self._slices.get(thread, ()))) for thread in {act.thread for act in self._acts}}
        inside: dict[tuple[Any, Any], list[_Slice]] = {thread: [] for thread in ahead}
        for act in self._acts:
            coming, stack = ahead[act.thread], inside[act.thread]
            while coming and coming[-1].start_us <= act.time_us:
                part = coming.pop()
                while stack and stack[-1].end_us < part.start_us:
                    stack.pop()
                stack.append(part)
            while stack and stack[-1].end_us < act.time_us:
                stack.pop()
            yield _place(stack)

    def _split(self, places: Sequence[_Place], best: int) -> dict[str, Any]:
        """Take the largest level apart by the operators and lines that took its blocks."""
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
    """What a memory event was part of; None where the trace does not say."""

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
    """Return a time of day, where the trace's clock tells it."""
    wall_s = base_s + time_us / 1e6
    return wall_s if wall_s >= _FIRST_SECOND else None


def _time(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if type(value) not in (int, float) or not 0 <= value <= 2**63:  # type: ignore[operator]  # NaN fails it as well
        refuse(f"{name}={short(value)}", "microseconds")
    return float(value)  # type: ignore[arg-type]


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = record.get(name)
    if value is not None:
        require_count("", name, value)
    return value


def _number(record: Mapping[str, Any], name: str, default: int) -> int:
    value = _count(record, name)
    return default if value is None else value
