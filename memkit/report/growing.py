"""Find growth: of tensors with each step or epoch, of kept graphs, of host memory, of child processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from memkit._core.units import MIB
from memkit.report.figures import KeptTensors, ReportFigures
from memkit.report.finding import ReportFinding
from memkit.report.growth import HeldGrowth, growth_of
from memkit.report.nodes import clean

HORIZON = 1_000  # steps over which growth is counted, to compare it with memory that is spent once
LEAKS = frozenset({"leak", "leak_every", "leak_cycle", "graph"})
"""Kinds of findings about tensors that are kept."""
_LEAST_HOST_BYTES = 32 * MIB  # over the log: heaps, shared batches and late-loaded libraries account for about 10 MiB
_LEAST_KEPT = 3  # graphs: one or two may belong to a variable that is still alive


def find_growing(figures: ReportFigures) -> Iterator[ReportFinding]:
    """Find everything that grows, the tensors first."""
    steps, held = figures.steps, find_leak(figures)
    if held is not None:
        yield held
    elif figures.kept and figures.kept[0].is_graph and figures.kept[0].num_tensors >= _LEAST_KEPT:
        kept = figures.kept[0]
        values = {"count": f"{kept.num_tensors:,}"}
        yield ReportFinding(
            kind="graphs", severity="warning", at_stake=kept.nbytes, values=values, suspect=suspect(kept)
        )
    if steps is None:
        return
    if steps.has_larger_inputs:
        yield ReportFinding(kind="inputs", severity="note")
    host = _find_host_growth(figures, "host_peak_bytes")
    of_tensors = steps.growth.rate if steps.growth is not None and figures.is_on_cpu else 0.0
    if host is not None and host.rate > 2 * of_tensors:
        is_counted = any(step.held_bytes is not None for step in steps.steps)
        yield _of_growth("host" if is_counted or not figures.is_on_cpu else "process", host, figures)
    children = _find_host_growth(figures, "children_bytes")
    if children is not None:
        yield _of_growth("workers", children, figures)


def find_leak(figures: ReportFigures) -> ReportFinding | None:
    """Find tensors that are kept, step after step or once in an epoch."""
    growth = figures.steps.growth if figures.steps else None
    kept = figures.kept[0] if figures.kept else None
    what = suspect(kept) if kept is not None else None
    if figures.cycle is not None and (growth is None or growth.every > 1):
        path, by_cycle, _ = figures.cycle
        rate = by_cycle.rate / 100 if growth is None else growth.rate  # without steps, assume a hundred per cycle
        values = {"rise": by_cycle.rise_bytes, "name": clean(path), **_certainty(by_cycle)}
        return ReportFinding(
            kind="leak_cycle", severity="fault", at_stake=round(HORIZON * rate), values=values, suspect=what
        )
    if growth is None:
        return None
    is_graph = kept is not None and kept.is_graph
    kind = "graph" if is_graph else "leak" if growth.every == 1 else "leak_every"
    return _of_growth(kind, growth, figures, what)


def suspect(kept: KeptTensors) -> str | None:
    """Return the line that keeps tensors, and the variable, if they are known."""
    return ", ".join(clean(part) for part in (kept.grows_at or kept.made_at, kept.holder) if part) or None


def _of_growth(kind: str, growth: HeldGrowth, figures: ReportFigures, what: str | None = None) -> ReportFinding:
    count = len(figures.steps.steps) if figures.steps else 0
    return ReportFinding(
        kind=kind,
        severity="fault",
        at_stake=round(growth.rate * HORIZON),
        values={
            "rate": round(growth.rate),
            "rise": growth.rise_bytes,
            "every": f"{growth.every:,}",
            "count": f"{count:,}",
            **_certainty(growth),
        },
        suspect=what,
    )


def _certainty(growth: HeldGrowth) -> dict[str, str]:
    """Return the key of the text that says how certain a growth is."""
    return {"certainty": "probably" if growth.is_certain else "perhaps"}


def _find_host_growth(figures: ReportFigures, name: str) -> HeldGrowth | None:
    """Find growth of the processes' host memory, per step, without the memory of the tracking itself."""
    points: dict[int, int] = {}  # the last reading at or before the end of each step
    number = 0
    for each, value in zip(figures.observed, map(attrgetter(f"event.{name}"), figures.observed), strict=True):
        number += each.step is not None
        if value is not None:
            points[number] = value
    if len(points) < 2:
        return None
    values = _evenly(sorted(points.items()))
    num_steps = max(points) - min(points)
    growth = growth_of(values, least_rate=0)
    if growth is None:
        return None
    scale = num_steps / (len(values) - 1)  # steps from one value to the next
    rate = growth.rate / scale - 2 * figures.tracking_rate
    is_large = rate * num_steps >= _LEAST_HOST_BYTES
    return HeldGrowth(rate, max(1, round(growth.every * scale)), growth.is_certain) if is_large else None


def _evenly(points: Sequence[tuple[int, int]]) -> list[int]:
    """Resample the readings at equal distances, by linear interpolation; as many values as readings."""
    (first, _), (last, _) = points[0], points[-1]
    values, at = [], 0
    for index in range(len(points)):
        place = first + (last - first) * index / (len(points) - 1)
        while at < len(points) - 2 and points[at + 1][0] < place:
            at += 1
        (left, low), (right, high) = points[at], points[at + 1]
        values.append(round(low + (high - low) * (place - left) / (right - left)))
    return values
