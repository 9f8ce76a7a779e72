"""Compare two logs: peak, components, stages, steps, and the rows that only one of them has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from memkit.report.figures import ReportFigures
from memkit.report.finding import ReportFinding, Severity
from memkit.report.findings import find_findings, is_faulty
from memkit.report.nodes import Cell, Node, Paragraph, Section, Share, Size, clean
from memkit.report.words import Words

_MOST_ROWS = 60
CHANGE_COLUMNS = ("col_before", "col_after", "col_change", "col_change_share")

Presence = Literal["both", "new", "gone"]


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure in both logs; None if a log lacks it, or knows only a bound.

    Attributes:
        group: ``"peak"``, ``"component"``, ``"stage"`` or ``"step"``.
        name: Name of the component or stage.
        before_bytes: Bytes in the baseline.
        after_bytes: Bytes in the log.
        presence: Which of the logs has the row.
    """

    group: str
    name: str
    before_bytes: int | None
    after_bytes: int | None
    presence: Presence

    @property
    def change_bytes(self) -> int | None:
        """Bytes added."""
        both = self.before_bytes is not None and self.after_bytes is not None
        return self.after_bytes - self.before_bytes if both else None  # type: ignore[operator]

    @property
    def sizes(self) -> tuple[Size, Size, Size]:
        """Before, after, and the change."""
        change = Size.of(self.change_bytes, is_change=True)
        return Size.of(self.before_bytes), Size.of(self.after_bytes), change

    @property
    def share(self) -> float | None:
        """The change, as a fraction of the baseline's bytes."""
        return self.change_bytes / self.before_bytes if self.change_bytes is not None and self.before_bytes else None


def compare_figures(before: ReportFigures, after: ReportFigures) -> tuple[FigureChange, ...]:
    """Compare two logs by name, in the order of the second; rows only in the first come last."""
    changes = []
    for group in ("peak", "component", "stage", "step"):
        old, new = _named(before, group), _named(after, group)
        for name in {**new, **old}:
            presence: Presence = "new" if name not in old else "gone" if name not in new else "both"
            changes.append(FigureChange(group, name, old.get(name), new.get(name), presence))
    return tuple(changes)


def _named(figures: ReportFigures, group: str) -> dict[str, int | None]:
    if group == "peak":
        peak = figures.peak.num_bytes if figures.peak else None
        return {"tensors": peak, "allocator": figures.layers.reserved_bytes, "host": figures.layers.host_bytes}
    if group == "component":
        named = {load.name: load.num_bytes for load in figures.components.loads if load.num_bytes is not None}
        return {**named, "": figures.components.unattributed_bytes} if named else {}
    if group == "stage":
        return {stage.name: stage.peak.low if stage.peak.is_known else None for stage in figures.stages}
    changes = [step.change_bytes for step in figures.steps.steps] if figures.steps else []
    known = [change for change in changes if change is not None]
    return {"largest": max(known), "smallest": min(known)} if known else {}


_MATTERS = 0.01  # of the peak: smaller changes come from the allocators' rounding


def compare_headline(before: ReportFigures, after: ReportFigures, peak: FigureChange, words: Words) -> str:
    """Say how the peak and the growth per step have changed."""
    sizes = [words.size(size) for size in peak.sizes]
    key = "peak" if peak.share is not None else "peak_unknown"
    if peak.change_bytes == 0:
        key = "peak_same"
    share = words.cell(Share(peak.share, is_change=True))
    parts = [words(f"compare_{key}", before=sizes[0], after=sizes[1], share=share)]
    rates = [_rate(figures) for figures in (before, after)]
    if None not in rates:
        old, new = (words.size(Size.of(rate, is_change=True)) if rate else words("growth_level") for rate in rates)
        key = "compare_growth" if old != new else "compare_growth_same"
        parts.append(words(key, before=old, after=new))
    return words.join(parts)


def changed_findings(
    before: ReportFigures, after: ReportFigures
) -> tuple[tuple[ReportFinding, ...], tuple[ReportFinding, ...]]:
    """Return the faults that only the second log has, and those that only the first has."""
    old, new = ([each for each in find_findings(figures) if is_faulty(each)] for figures in (before, after))
    return _without(new, old), _without(old, new)


def _without(findings: Sequence[ReportFinding], others: Sequence[ReportFinding]) -> tuple[ReportFinding, ...]:
    kinds = {each.kind for each in others}
    return tuple(each for each in findings if each.kind not in kinds)


def judge(before: ReportFigures, after: ReportFigures, peak: FigureChange, came: Sequence[ReportFinding]) -> Severity:
    """Return the severity of a comparison's result, given the faults that only the second log has."""
    if (_rate(after) or 0) > (_rate(before) or 0):
        return "fault"
    if came:
        return came[0].severity
    return "warning" if (peak.share or 0) > _MATTERS else "good"


def _rate(figures: ReportFigures) -> int | None:
    """Return the growth per step: 0 if there is none, None if it is unknown."""
    if figures.steps is None or figures.steps.course is None:
        return None
    return round(figures.steps.growth.rate) if figures.steps.growth is not None else 0


def compare_section(before: ReportFigures, after: ReportFigures, words: Words) -> Section:
    """Build the section that compares with a baseline."""
    return Section(words("compare_title"), tuple(_nodes(before, after, words)))


def _nodes(before: ReportFigures, after: ReportFigures, words: Words) -> Iterator[Node]:
    changes = compare_figures(before, after)
    differences = tuple(_settings(before, after))
    if differences:
        yield words.table(("col_fact", "col_before", "col_after"), differences, words("compare_settings"))
    rows = [
        (_name(change, words), *change.sizes, _share(change, words))
        for change in changes[:_MOST_ROWS]
        if change.before_bytes is not None or change.after_bytes is not None
    ]
    yield words.table(("col_figure", *CHANGE_COLUMNS), rows)
    if len(changes) > _MOST_ROWS:
        yield Paragraph(words("left_out", count=f"{len(changes) - _MOST_ROWS:,}"))


def _share(change: FigureChange, words: Words) -> Cell:
    if change.presence != "both":
        return words(f"change_{change.presence}")
    return "" if change.before_bytes == 0 else Share(change.share, is_change=True)


def _name(change: FigureChange, words: Words) -> str:
    if change.group in ("peak", "step"):
        return words(f"compare_{change.group}_{change.name}")
    name = clean(change.name) if change.name else words("unattributed")
    return words(f"compare_{change.group}", name=name)


def _settings(before: ReportFigures, after: ReportFigures) -> Iterator[tuple[Cell, ...]]:
    """Yield the settings in which the runs differ: a memory difference may then have other causes."""
    old, new = _flat(before), _flat(after)
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield clean(name), clean(old[name]) if name in old else None, clean(new[name]) if name in new else None


def _flat(figures: ReportFigures) -> dict[str, str]:
    header = figures.header
    if header is None:
        return {}
    values = {f"versions.{name}": version for name, version in header.versions.items()}
    values |= {f"config.{name}": str(value) for name, value in (header.config or {}).items()}
    values["world_size"] = str(header.world_size)
    if header.device is not None and header.device.name is not None:
        values["device"] = header.device.name
    return values
