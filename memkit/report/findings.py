"""All findings of a log, the worst first, and their texts."""

from __future__ import annotations

import itertools
from dataclasses import replace

from memkit.report.figures import ReportFigures
from memkit.report.finding import ReportFinding, Severity
from memkit.report.growing import find_growing
from memkit.report.nodes import Size, clean
from memkit.report.peaking import (
    find_cached,
    find_evaluation,
    find_lone_peak,
    find_optimizer_twice,
    find_shortages,
)
from memkit.report.words import Words

_DETECTORS = (
    find_shortages,
    find_growing,
    find_evaluation,
    find_lone_peak,
    find_optimizer_twice,
    find_cached,
)
_ORDER: tuple[Severity, ...] = ("fault", "warning", "note", "good")


def find_findings(figures: ReportFigures) -> tuple[ReportFinding, ...]:
    """Return the findings, the worst first; if nothing is wrong, one finding that says so.

    Of several processes, each kind is found once, where it is worst.
    """
    worst: dict[str, ReportFinding] = {}
    parts: list[tuple[int | None, ReportFigures]] = [*figures.by_rank.items()] or [(None, figures)]
    for rank, of_rank in parts:
        for found in itertools.chain.from_iterable(detect(of_rank) for detect in _DETECTORS):
            if found.kind not in worst or found.at_stake > worst[found.kind].at_stake:
                worst[found.kind] = replace(found, rank=rank)
    ordered = sorted(worst.values(), key=lambda each: (_ORDER.index(each.severity), -each.at_stake))
    return tuple(ordered) or (_nothing_wrong(figures),)


def is_faulty(finding: ReportFinding) -> bool:
    """Whether a finding says that something is wrong."""
    return finding.severity in ("fault", "warning")


def _nothing_wrong(figures: ReportFigures) -> ReportFinding:
    peak, steps = figures.peak, figures.steps
    if peak is None:
        return ReportFinding(kind="unknown", severity="note", values={"count": f"{figures.num_events:,}"})
    is_known = steps is not None and steps.trend is not None
    values = {
        "peak": peak.num_bytes,
        "event": clean(peak.event),
        "count": f"{len(steps.steps):,}" if steps else "0",
    }
    if steps is not None and steps.slow is not None:
        return ReportFinding(kind="slow", severity="note", values=values | {"rate": round(steps.slow.rate)})
    if is_known:
        return ReportFinding(kind="level", severity="good", values=values)
    return ReportFinding(kind="nothing", severity="note", values=values)


def headline(finding: ReportFinding, words: Words) -> str:
    """Say what was found, in one sentence."""
    values = {name: _text(value, words) for name, value in finding.values.items()}
    if "certainty" in values:
        values["certainty"] = words(f"certainty_{values['certainty']}")
    text = words(f"find_{finding.kind}", **values)
    return text if finding.rank is None else f"{text} ({words('place_rank', rank=finding.rank)})"


def next_step(finding: ReportFinding, words: Words) -> str | None:
    """Say what to do about it; None if there is nothing to do."""
    if finding.kind in {"level", "slow", "nothing"}:
        return None
    values = {name: _text(value, words) for name, value in finding.values.items()}
    if finding.kind in _NAMED and finding.suspect is None:
        return words("next_leaks")
    return words(f"next_{finding.kind}", **values)


_NAMED = frozenset({"leak", "leak_every", "leak_cycle"})
"""Kinds whose remedy concerns a variable: without a suspect, the next step is to find it."""


def _text(value: object, words: Words) -> str:
    return words.size(Size.of(value)) if isinstance(value, int) else str(value)
