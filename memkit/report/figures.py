"""All figures of a report, read from a log once. No text for readers is produced here."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memkit._events.log import Event, LogHeader, Origin
from memkit._events.phase_names import is_evaluation
from memkit._events.reader import EventLog
from memkit.report.components import Components, find_components
from memkit.report.cycles import Cycle, find_begins, find_cycle
from memkit.report.nodes import Size
from memkit.report.observed import PEAK_FIELDS, Observed, observe
from memkit.report.stages import EventStage, LoggedSteps, find_stages, find_steps

_SPLITS = ("peak_by_category", "peak_by_module", "peak_by_operator", "peak_by_line", "peak_by_phase")

_OUT_OF_MEMORY = re.compile(r"OutOfMemory")
_LEAST_RANKS = 2  # a table with one row is pointless
_KINDS = ("small", "large")
_PRELOADED = 1.5  # times the bytes per step that a tracker merely saw for the first time: faster growth is real


@dataclass(frozen=True, slots=True)
class LogPeak:
    """The peak bytes in tensors over the whole log.

    Attributes:
        num_bytes: The bytes.
        event: Name of the first event that reports them.
        step: Step of that event.
        rank: Process of that event.
        origin: Source of the count.
        is_exact: Whether the value is a counter over the whole run, or a prediction; otherwise it is the largest value
            at an event or in a stage, and the real peak is at least this.
    """

    num_bytes: int
    event: str
    step: int | None
    rank: int | None
    origin: Origin
    is_exact: bool

    @property
    def size(self) -> Size:
        """The bytes, exact or as a lower bound."""
        return Size(self.num_bytes, self.num_bytes if self.is_exact else None)


@dataclass(frozen=True, slots=True)
class Layers:
    """Memory around the tensors, each value the largest in the log; None if not recorded.

    Attributes:
        requested_bytes: In tensors, before the allocator rounded sizes up.
        reserved_bytes: Held by the allocator.
        device_used_bytes: In use on the device by all processes.
        total_bytes: The device's capacity.
        host_bytes: Resident in host memory.
    """

    requested_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None
    total_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, slots=True)
class Split:
    """The peak broken down, as done by a `Tracker` and stored in a mark's note.

    Attributes:
        name: The note's key, such as ``"peak_by_category"``.
        event: The event that has the note.
        parts: Name and bytes, largest first.
        whole_bytes: The sum of the parts.
    """

    name: str
    event: str
    parts: tuple[tuple[str, int], ...]
    whole_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentFigures:
    """Contents of the allocator's segments of one kind at the end, from the note of a CUDA memory snapshot.

    Attributes:
        kind: ``"small"``, for blocks of up to 1 MiB, or ``"large"``.
        num_segments: Number of segments.
        num_blocks: Blocks in use in them.
        requested_bytes: Bytes in these blocks, as requested.
        allocated_bytes: Bytes in these blocks, rounded up.
        reserved_bytes: Total bytes of the segments.
        largest_free_bytes: The largest free block.
    """

    kind: str
    num_segments: int
    num_blocks: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """An allocation that failed for lack of memory.

    Attributes:
        event: The event's name.
        asked_bytes: Bytes requested.
        free_bytes: Bytes free on the device.
        allocated_bytes: Bytes in tensors.
    """

    event: str
    asked_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """Tensors, or graphs, that a line of code keeps, as found by a tracker at the end of its block, or by `leaks()`.

    Attributes:
        made_at: The line that made them, as ``"file:line in function"``; empty if it is not known.
        num_tensors: Number of them.
        nbytes: Their bytes, and those that their graphs saved.
        is_graph: Whether they keep graphs.
        holder: The variable that keeps them.
        grows_at: ``"file:line"`` of the statement that adds to it.
    """

    made_at: str
    num_tensors: int
    nbytes: int
    is_graph: bool
    holder: str | None
    grows_at: str | None


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run that had ended before another one began to write to the same log. The figures do not cover it.

    Attributes:
        wall_s: Start time, in seconds since 1970.
        num_events: Number of its events.
        peak: Its peak bytes in tensors, as far as known.
    """

    wall_s: float | None
    num_events: int
    peak: Size


@dataclass(frozen=True, slots=True)
class ReportFigures:
    """The figures of a report.

    Attributes:
        num_events: Events of the run.
        earlier: Runs in the log that had ended before the last one began.
        num_predicted: Predicted events that were left out, because others were measured.
        ranks: Peak bytes of each process of a distributed run; empty for a single process.
        seconds: From the first event to the last; None without a clock.
        header: Header of the last run.
        peak: None if no event reports the bytes in tensors.
        is_cumulative: Whether peaks are running peaks that are never reset.
        layers: Memory around the tensors.
        components: Loaded components.
        stages: In order of first appearance.
        steps: None if the log has no steps.
        cycle: A phase, such as an epoch, that leaves memory held each time; None if there is none.
        splits: The peak broken down.
        segments: Of an allocator at the end; empty if not recorded.
        shortages: Allocations that failed.
        num_survived: Out-of-memory errors that training recovered from, by ``"oom"`` marks.
        kept: Tensors that a tracker, or `leaks()`, found to be kept at each step; most bytes first.
        twice_bytes: Bytes of optimizer state for parameters that have state in another optimizer too; 0 if none.
        tracking_rate: Bytes of host memory that tracking itself took for each step.
        observed: The events from which the figures come.
        begins: For each of these, the index of the last one before its block began; see `find_begins`.
        evaluations: Indices of those that end an evaluation.
        failures: Indices of those that report an out-of-memory error that left its block.
        by_rank: The figures of each process of a distributed run; empty for a single process.
    """

    num_events: int
    earlier: tuple[EarlierRun, ...]
    num_predicted: int
    ranks: dict[int, int]
    seconds: float | None
    header: LogHeader | None
    peak: LogPeak | None
    is_cumulative: bool
    layers: Layers
    components: Components
    stages: tuple[EventStage, ...]
    steps: LoggedSteps | None
    cycle: Cycle | None
    splits: tuple[Split, ...]
    segments: tuple[SegmentFigures, ...]
    shortages: tuple[Shortage, ...]
    num_survived: int
    kept: tuple[KeptTensors, ...]
    twice_bytes: int
    tracking_rate: float
    observed: Sequence[Observed] = field(repr=False)
    begins: Sequence[int | None] = field(repr=False)
    evaluations: Sequence[int] = field(repr=False)
    failures: Sequence[int] = field(repr=False)
    by_rank: Mapping[int, ReportFigures] = field(repr=False)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the run computed on the host, whose capacity is not that of a GPU."""
        device = self.header.device if self.header else None
        return device is not None and device.backend == "cpu"

    @property
    def held_bytes(self) -> int | None:
        """Memory the device has to hold: the allocator's peak, or if that is not recorded, the tensors' own."""
        tensors = self.peak.num_bytes if self.peak else None
        return max((each for each in (tensors, self.layers.reserved_bytes) if each is not None), default=None)

    @property
    def unattributed(self) -> Size:
        """The part of the peak that no component accounts for."""
        if self.peak is None or not self.components.loads:
            return Size.of(None)
        return Size.of(self.peak.num_bytes - self.components.named_bytes)


_SEGMENT_NUMBERS = tuple(each.name for each in fields(SegmentFigures) if each.name != "kind")


def read_figures(log: EventLog, total_bytes: int | None) -> ReportFigures:
    """Read a log's figures; if runs follow one another, those of the last one.

    Args:
        log: The log.
        total_bytes: Capacity of the device, if the log does not state it.
    """
    runs = _events_by_run(log)
    is_over = _find_earlier(log, runs)
    earlier = tuple(_earlier_run(log, run, runs.get(run, [])) for run in sorted(is_over))
    log = replace(log, events=tuple(event for event in log.events if event.run not in is_over))
    observed, num_predicted = observe(log)
    events = [each.event for each in observed]
    noted = [event for event in events if event.note]
    splits = tuple(_find_splits(noted))
    header = next((log.headers[run] for run in reversed(range(len(log.headers))) if run not in is_over), None)
    own_total = header.device.total_bytes if header and header.device and header.device.backend != "cpu" else None
    begins, ranks = find_begins(observed), _ranks(events)
    by_rank = {rank: read_figures(_of_rank(log, rank), total_bytes) for rank in ranks}
    # The largest figure of all processes hides what one of them does.
    worst = max(by_rank.values(), key=_growth_rate, default=None)
    cycle = find_cycle(observed, begins) if worst is None else worst.cycle
    steps = _with_cycle(_without_preloaded(find_steps(observed), noted), cycle)
    return ReportFigures(
        num_events=len(log.events),
        earlier=earlier,
        num_predicted=num_predicted,
        ranks=ranks,
        seconds=_seconds(events),
        header=header,
        peak=_find_peak(log, events, splits),
        is_cumulative=_is_cumulative(events),
        layers=Layers(
            requested_bytes=_largest(events, "requested_bytes"),
            reserved_bytes=_largest(events, "reserved_peak_bytes", "reserved_bytes"),
            device_used_bytes=_largest(events, "device_used_bytes"),
            total_bytes=own_total if total_bytes is None else total_bytes,
            host_bytes=_largest(events, "host_peak_bytes", "host_rss_bytes"),
        ),
        components=find_components(observed, missing=log.missing_loads),
        stages=find_stages(observed),
        steps=steps if worst is None else _as_in(steps, worst.steps),
        cycle=cycle,
        splits=splits,
        segments=tuple(_find_segments(noted)),
        shortages=tuple(_find_shortages(noted)),
        num_survived=sum(map(_survived, noted)),
        kept=_find_kept(noted),
        twice_bytes=max((_noted(event, "optimizer_twice_bytes") for event in noted), default=0),
        tracking_rate=max(
            (_noted(event, "tracker_bytes") / max(1, _noted(event, "num_steps")) for event in noted), default=0.0
        ),
        observed=observed,
        begins=begins,
        evaluations=_find_evaluations(events),
        failures=[index for index, event in enumerate(events) if _ran_out(event)],
        by_rank=by_rank,
    )


def _of_rank(log: EventLog, rank: int) -> EventLog:
    return replace(log, events=tuple(event for event in log.events if event.rank == rank))


def _growth_rate(figures: ReportFigures) -> float:
    growth = figures.steps and (figures.steps.growth or figures.steps.slow)
    return growth.rate if growth else -1.0 if figures.steps is None else 0.0


def _as_in(steps: LoggedSteps | None, worst: LoggedSteps | None) -> LoggedSteps | None:
    """Give the steps of all processes the growth of the process that grows most."""
    if steps is None or worst is None:
        return steps
    names = ("trend", "growth", "slow", "has_larger_inputs")
    return replace(steps, **{name: getattr(worst, name) for name in names})


def _find_evaluations(events: Sequence[Event]) -> list[int]:
    paths = {path for path in {event.phase for event in events} if path is not None and is_evaluation(path)}
    return [index for index, event in enumerate(events) if event.phase in paths and event.duration_ns is not None]


def _ran_out(event: Event) -> bool:
    if event.event == "out_of_memory":
        return True
    error = event.note.get("error") if event.note else None
    return isinstance(error, str) and bool(_OUT_OF_MEMORY.search(error))


def _without_preloaded(steps: LoggedSteps | None, events: Iterable[Event]) -> LoggedSteps | None:
    """Drop a growth that is not real: a tracker counts data loaded before it started only from their first use."""
    rates = (_noted(event, "preloaded_bytes") / max(1, _noted(event, "num_steps")) for event in events)
    rate = max(rates, default=0.0)
    if steps is None or rate <= 0:
        return steps
    growth, slow = (None if each and each.rate < _PRELOADED * rate else each for each in (steps.growth, steps.slow))
    return replace(steps, growth=growth, slow=slow)


def _with_cycle(steps: LoggedSteps | None, cycle: Cycle | None) -> LoggedSteps | None:
    """Report the average growth per step if only the ends of a longer phase show it."""
    if steps is None or cycle is None or steps.growth is not None or cycle.num_calls < 2:
        return steps
    every = max(1, len(steps.steps) // cycle.num_calls)
    return replace(steps, growth=replace(cycle.growth, rate=cycle.growth.rate / every, every=every))


def _events_by_run(log: EventLog) -> dict[int | None, list[Event]]:
    runs: dict[int | None, list[Event]] = {}
    for event in log.events:
        runs.setdefault(event.run, []).append(event)
    return runs


def _find_earlier(log: EventLog, runs: Mapping[int | None, list[Event]]) -> set[int]:
    """Find the runs that ended before another one of the same rank began.

    GPUs of one snapshot, or ranks, are runs side by side. A run without events is never reported.
    """
    walls = [(each.wall_s, run) for run, each in enumerate(log.headers) if each.wall_s is not None and runs.get(run)]
    found, newest = set(), dict[int, float]()  # by rank, when its last run began
    for begun, run in sorted(walls, reverse=True):
        ended = max((event.wall_s for event in runs[run] if event.wall_s is not None), default=begun)
        last = newest.setdefault(log.headers[run].rank, begun)
        if last > begun and last >= ended:
            found.add(run)
    return found


def _earlier_run(log: EventLog, run: int, events: Sequence[Event]) -> EarlierRun:
    peak = _find_peak(log, events, tuple(_find_splits(events)))
    return EarlierRun(log.headers[run].wall_s, len(events), Size.of(None) if peak is None else peak.size)


def _find_peak(log: EventLog, events: Sequence[Event], splits: Iterable[Split]) -> LogPeak | None:
    best = max((size for name in PEAK_FIELDS if (size := _largest(events, name)) is not None), default=-1)
    winner, name = next(
        ((event, name) for event in events for name in PEAK_FIELDS if getattr(event, name) == best), (None, "")
    )
    origin = Origin() if winner is None else log.origin(winner, name)
    is_exact = origin.kind == "predicted" or (name == "peak_total_bytes" and origin.kind != "sampled")
    for split in splits if not is_exact else ():
        watched = split.whole_bytes - dict(split.parts).get("workspace", 0)
        if split.name == "peak_by_category" and watched > best:  # a tracker saw more than any event did
            event = next(event for event in events if event.event == split.event and event.note)
            return LogPeak(watched, event.event, event.step, event.rank, Origin("dispatch", "measured"), is_exact=False)
    if winner is None:
        return None
    return LogPeak(best, winner.event, winner.step, winner.rank, origin, is_exact)


def _is_cumulative(events: Sequence[Event]) -> bool:
    """Whether the only peaks are running peaks over the whole run."""
    num_records = sum(event.peak_total_bytes is not None for event in events)
    return num_records > 1 and all(event.peak_bytes is None for event in events)


def _largest(events: Sequence[Event], *names: str) -> int | None:
    # None and 0 are told apart only where nothing is larger: filter(None, ...) makes no call for an event.
    columns = [list(map(operator.attrgetter(name), events)) for name in names]
    largest = max((max(filter(None, column), default=0) for column in columns), default=0)
    return largest if largest or any(0 in column for column in columns) else None


def _ranks(events: Sequence[Event]) -> dict[int, int]:
    largest: dict[int, int] = {}
    if len({event.rank for event in events} - {None}) < _LEAST_RANKS:
        return largest
    for event in events:
        if event.rank is not None:
            value = max((getattr(event, name) or 0 for name in PEAK_FIELDS), default=0)
            largest[event.rank] = max(largest.get(event.rank, 0), value)
    return dict(sorted(largest.items()))


def _seconds(events: Iterable[Event]) -> float | None:
    walls = [event.wall_s for event in events if event.wall_s is not None]
    return max(walls) - min(walls) if walls else None


def _find_splits(events: Iterable[Event]) -> Iterable[Split]:
    """Find the breakdowns that a `Tracker` stored in notes; of each kind the one with the largest total."""
    best: dict[str, Split] = {}
    for event in events:
        for name in _SPLITS if event.note else ():
            parts = event.note.get(name) if event.note else None
            if isinstance(parts, dict) and parts and all(type(each) is int and each >= 0 for each in parts.values()):
                whole = sum(parts.values())
                if name not in best or whole > best[name].whole_bytes:
                    ordered = sorted(parts.items(), key=lambda part: -part[1])
                    best[name] = Split(name, event.event, tuple(ordered), whole)
    return best.values()


def _find_segments(events: Iterable[Event]) -> Iterable[SegmentFigures]:
    for event in events:
        noted = event.note.get("segments") if event.note else None
        for each in noted if isinstance(noted, list) else ():
            if isinstance(each, dict) and each.get("kind") in _KINDS:
                numbers: dict[str, Any] = {name: each.get(name) for name in _SEGMENT_NUMBERS}
                if all(type(number) is int and number >= 0 for number in numbers.values()):
                    yield SegmentFigures(kind=each["kind"], **numbers)


def _find_shortages(events: Iterable[Event]) -> Iterable[Shortage]:
    for event in events:
        noted = event.note.get("oom") if event.note else None
        if isinstance(noted, dict):
            asked, free = (
                size if type(size := noted.get(name)) is int and size >= 0 else None
                for name in ("asked_bytes", "free_bytes")
            )
            yield Shortage(event.event, asked, free, event.allocated_bytes)


def _survived(event: Event) -> int:
    return _noted(event, "num_ooms") if event.event == "oom" else 0


_KEPT_TYPES = {"made_at": (str,), "num_tensors": (int,), "nbytes": (int,), "is_graph": (bool,)} | dict.fromkeys(
    ("holder", "grows_at"), (str, type(None))
)


def _find_kept(events: Iterable[Event]) -> tuple[KeptTensors, ...]:
    """Return the kept tensors of the last event whose note lists any."""
    for event in reversed(list(events)):
        noted = event.note.get("kept") if event.note else None
        kept = [
            KeptTensors(**{name: each[name] for name in _KEPT_TYPES})
            for each in (noted if isinstance(noted, list) else ())
            if isinstance(each, dict) and all(type(each.get(name)) in kinds for name, kinds in _KEPT_TYPES.items())
        ]
        if kept:
            return tuple(sorted(kept, key=lambda each: -each.nbytes))
    return ()


def _noted(event: Event, name: str) -> int:
    """Return a number in an event's note; 0 without one."""
    number = event.note.get(name) if event.note else None
    return number if type(number) is int and number > 0 else 0
