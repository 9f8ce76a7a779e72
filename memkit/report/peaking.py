"""Find memory beyond what is needed, once or in one place: out of memory, evaluation, the first step, the allocator."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memkit._core.errors import OutOfMemoryElsewhereError
from memkit._core.units import GIB, MIB
from memkit._events.log import Event
from memkit.report.figures import ReportFigures
from memkit.report.finding import ReportFinding
from memkit.report.nodes import clean
from memkit.report.observed import Observed
from memkit.report.stages import OWN_MARKS, LoggedStep

_END_OF_RUN = 10**15  # more than any device has: a run that fails matters most
_LARGER = 1.2  # times all others: smaller ratios are the spread of batches
_LEAST_BYTES = MIB  # smaller differences come from the allocators' rounding
_CACHED = 0.2  # of reserved bytes, beyond what tensors ever took: a smaller share is not worth a finding
_LEAST_CACHED = 64 * MIB  # a few partly used segments of 20 MiB each are normal
_TIGHT = 0.1  # of the device, free: another order of allocations, or a longer input, may not fit
_SAME = 0.1  # two rises with the same cause differ by less than this share
_LEAST_STEPS = 4  # with known peaks


def find_shortages(figures: ReportFigures) -> Iterator[ReportFinding]:
    """Find where memory ran out, and whether training continued."""
    events = [each.event for each in figures.observed]
    last_step = max((index for index, each in enumerate(figures.observed) if each.step is not None), default=-1)
    told = {index for index in figures.failures if _is_of_another_rank(events[index])}
    own = [index for index in figures.failures if index not in told]
    failed = [(index > last_step, clean(events[index].phase or events[index].event)) for index in own]
    lost = [where for is_last, where in failed if is_last]
    for each in figures.shortages[:1]:
        values = {"where": clean(each.event), "asked": each.asked_bytes, "free": each.free_bytes}
        kind = "oom_sizes" if None not in values.values() else "oom"
        yield ReportFinding(kind=kind, severity="fault", at_stake=_END_OF_RUN, values=values)
        return
    if lost:
        yield ReportFinding(kind="oom", severity="fault", at_stake=_END_OF_RUN, values={"where": lost[0]})
    elif any(index > last_step for index in told):
        yield ReportFinding(
            kind="oom_elsewhere", severity="fault"
        )  # less at stake: that rank's own finding comes first
    elif figures.num_survived:
        parts = max(
            ((_parts(event.note), max(event.note["sizes"])) for event in events if event.note and _parts(event.note)),
            default=None,
        )
        count = f"{figures.num_survived:,}"
        if parts is None:
            yield ReportFinding(
                kind="survived_somehow", severity="warning", at_stake=_END_OF_RUN, values={"count": count}
            )
        else:
            values = {"count": count, "parts": f"{parts[0]:,}", "rows": f"{parts[1]:,}"}
            yield ReportFinding(kind="survived", severity="warning", at_stake=_END_OF_RUN, values=values)
    elif failed:
        values = {"count": f"{len(failed):,}", "where": failed[0][1]}
        yield ReportFinding(kind="caught", severity="warning", at_stake=_END_OF_RUN, values=values)


def _is_of_another_rank(event: Event) -> bool:
    return event.note is not None and event.note.get("error") == OutOfMemoryElsewhereError.__name__


def _parts(note: Mapping[str, Any] | None) -> int:
    """Return into how many parts a batch was split after an out-of-memory error; 0 if the note does not say."""
    sizes = note.get("sizes") if note else None
    return len(sizes) if isinstance(sizes, list) and all(type(each) is int for each in sizes) else 0


def find_evaluation(figures: ReportFigures) -> Iterator[ReportFinding]:
    """Find an evaluation that builds graphs, or whose batches take more than training does."""
    observed, begins = figures.observed, figures.begins
    calls = [(index, observed[index]) for index in figures.evaluations if _is_plain(observed, index, begins[index])]
    outer = [
        (index, each)
        for index, each in calls
        if not any(str(each.event.phase).startswith(f"{other.event.phase}/") for _, other in calls)
    ]
    if not outer:
        return
    index, largest = max(outer, key=lambda call: call[1].low or 0)
    path, peak = str(largest.event.phase), largest.low if largest.low == largest.high else None
    begin = begins[index]
    base = None if begin is None else observed[begin].event.allocated_bytes
    nodes = max(_num_nodes(each.event) for _, each in outer)
    if nodes:
        work, path = max((_added(observed, each, begins[each]), str(observed[each].event.phase)) for each, _ in outer)
        values = {"name": clean(path), "nodes": f"{nodes:,}", "work": work}
        yield ReportFinding(
            kind="evaluation_graph" if work else "evaluation_nodes",
            severity="warning",
            at_stake=work,
            values=values,
            suspect=clean(path),
        )
        return
    work = _added(observed, index, begin)
    before = {each.step for each in observed[:index]}
    train = [step for step in _trainings(figures) if step.peak.is_known or step.number in before]
    highs = [step.peak.high for step in train if step.peak.high is not None]  # the first may have begun too early
    if peak is None or base is None or not highs or len(highs) < len(train) - 1:
        return
    least_held = min((step.held_bytes for step in train if step.held_bytes is not None), default=0)
    if peak > max(highs) + _LEAST_BYTES and work > _LARGER * (max(highs) - least_held):
        values = {"name": clean(path), "peak": peak, "train": max(highs)}
        stake, where = peak - max(highs), clean(path)
        yield ReportFinding(kind="evaluation_peak", severity="warning", at_stake=stake, values=values, suspect=where)


def _trainings(figures: ReportFigures) -> list[LoggedStep]:
    """Return the steps without an evaluation: one between two steps belongs to the second."""
    if figures.steps is None:
        return []
    mixed, in_it, evaluations = set(), set[int](), set(figures.evaluations)
    for index, each in enumerate(figures.observed) if evaluations else ():
        if each.step is not None:
            if each.track in in_it:
                mixed.add(each.step)
                in_it.discard(each.track)
        elif index in evaluations:
            in_it.add(each.track)
    return [step for step in figures.steps.steps if step.number not in mixed]


def _is_plain(observed: Sequence[Observed], index: int, begin: int | None) -> bool:
    """Whether a phase contains neither a step nor a backward pass, so that it does not train."""
    inside = observed[0 if begin is None else begin + 1 : index]
    return not any(each.step is not None or "backward" in (each.event.phase or "") for each in inside)


def _added(observed: Sequence[Observed], index: int, begin: int | None) -> int:
    """Return by how much a phase's peak exceeds the memory held when it began; 0 if that is unknown."""
    each, base = observed[index], None if begin is None else observed[begin].event.allocated_bytes
    return each.low - base if each.low is not None and each.low == each.high and base is not None else 0


def _num_nodes(event: Event) -> int:
    nodes = event.note.get("graph_nodes") if event.note else None
    return nodes if type(nodes) is int else 0


def find_lone_peak(figures: ReportFigures) -> Iterator[ReportFinding]:
    """Find a step that takes far more than all others: the first one, or another."""
    steps = _trainings(figures)
    lows = [step.peak.low or 0 for step in steps]
    highs = [step.peak.high for step in steps]
    if len(steps) < _LEAST_STEPS:
        return
    if highs[0] is None:
        lows[0] = max(lows[0], _rest_of_peak(figures, lows))
    top = max(lows)
    index = lows.index(top)
    others = [high for number, high in enumerate(highs) if number != index and high is not None]
    num_unknown = len(steps) - 1 - len(others)
    is_first_unknown = highs[0] is None
    if num_unknown > (index > 0 and is_first_unknown):
        return
    rest = max(others)
    if top > _LARGER * max(rest, lows[0] if index else 0) and top - rest >= _LEAST_BYTES:
        values = {"number": f"{steps[index].number:,}", "peak": top, "rest": rest, "first": lows[0]}
        kind = "lone_peak" if index else "start_peak" if is_first_unknown else "first_peak"
        kind = "lone_peak_later" if index and is_first_unknown else kind
        yield ReportFinding(kind=kind, severity="note", at_stake=top - rest, values=values)


def _rest_of_peak(figures: ReportFigures, lows: Sequence[int]) -> int:
    """Return the run's peak if only a first step that was not recorded from its beginning can have set it; else 0."""
    last = max((index for index, each in enumerate(figures.observed) if each.step is not None), default=-1)
    later = [each.low or 0 for each in figures.observed[last + 1 :] if each.event.event not in OWN_MARKS]
    peak = figures.peak.num_bytes if figures.peak else 0
    evaluations = [figures.observed[index].low or 0 for index in figures.evaluations]
    return 0 if max([*later, *evaluations, *lows], default=0) >= peak else peak


def find_optimizer_twice(figures: ReportFigures) -> Iterator[ReportFinding]:
    """Find duplicate optimizer state: as noted, or as a second rise by the amount that the first step added."""
    if figures.twice_bytes:
        yield ReportFinding(
            kind="optimizer_twice",
            severity="warning",
            at_stake=figures.twice_bytes,
            values={"size": figures.twice_bytes},
        )
        return
    for path, calls in _changes(figures).items():
        usual = statistics.median(change for _, change in calls)
        first, *others = ((number, change - usual) for number, change in calls)
        again = [(number, excess) for number, excess in others if abs(excess - first[1]) <= _SAME * first[1]]
        if len(calls) >= _LEAST_STEPS and first[1] >= _LEAST_BYTES and len(again) == 1:
            (number, excess), where = again[0], clean(path)
            values = {"size": round(excess), "number": f"{number:,}", "name": where}
            yield ReportFinding(
                kind="second_rise", severity="warning", at_stake=round(excess), values=values, suspect=where
            )
            return


def _changes(figures: ReportFigures) -> dict[str, list[tuple[int, int]]]:
    """Return by how much each phase changed the held memory, by the number of the step."""
    found: dict[str, dict[int, int]] = {}
    observed, number = figures.observed, 1
    for each, begin in zip(observed, figures.begins, strict=True):
        event = each.event
        path, after = event.phase, event.allocated_bytes
        if each.step is not None:
            number = each.step + 1
        elif path is not None and after is not None and begin is not None:
            before = observed[begin].event.allocated_bytes
            if before is not None:
                calls = found.get(path)
                if calls is None:
                    calls = found[path] = {}
                calls[number] = calls.get(number, 0) + after - before
    return {path: list(calls.items()) for path, calls in found.items()}


def find_cached(figures: ReportFigures) -> Iterator[ReportFinding]:
    """Find memory that the allocator reserved beyond what tensors ever took."""
    peak, reserved, total = figures.peak, figures.layers.reserved_bytes, figures.layers.total_bytes
    held = figures.held_bytes
    if peak is not None and peak.is_exact and reserved is not None:
        gap = reserved - peak.num_bytes
        if gap >= max(_LEAST_CACHED, _CACHED * reserved):
            values = {
                "gap": gap,
                "reserved": reserved,
                "peak": peak.num_bytes,
                "share": f"{gap / reserved:.0%}",
            }
            yield ReportFinding(kind="fragmentation", severity="warning", at_stake=gap, values=values)
    if held is not None and total and held > (1 - _TIGHT) * total:
        values = {"share": f"{max(0.0, 1 - held / total):.1%}", "total": total}
        yield ReportFinding(kind="tight", severity="note", at_stake=GIB, values=values)
