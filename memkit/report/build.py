"""Build a report: first the figures, then the sections in reading order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from memkit._advice.suggest import Tip
from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._events.reader import EventLog
from memkit.report.advice import recommend
from memkit.report.allocations import allocation_section
from memkit.report.cards import CatalogueRow, Fit, card_nodes, find_fits
from memkit.report.comparing import (
    CHANGE_COLUMNS,
    changed_findings,
    compare_figures,
    compare_headline,
    compare_section,
    judge,
)
from memkit.report.conclusions import advice_section, conclusions, efficiency, highlights, hints, overview, verdict
from memkit.report.figures import ReportFigures, read_figures
from memkit.report.finding import ReportFinding
from memkit.report.findings import find_findings, headline, is_faulty
from memkit.report.nodes import Cell, Paragraph, Report, Section, SectionMaker, Share
from memkit.report.rating import Rating, rate
from memkit.report.usage import missing_line, timeline_section, usage_sections
from memkit.report.words import Words


def build_report(
    log: EventLog,
    *,
    cards: Iterable[CatalogueRow],
    baseline: EventLog | None = None,
    total_bytes: int | None = None,
    language: str = "en",
    sections: Sequence[SectionMaker] = (),
) -> Report:
    """Build a report of a log.

    Args:
        log: The log that `read_memory_events` returned.
        cards: GPUs for the fit table.
        baseline: Another log to compare with.
        total_bytes: The device's capacity, if the log does not state it.
        language: ``"en"`` or ``"zh"``.
        sections: Custom sections, placed after the built-in ones.

    Raises:
        InputTypeError: ``log`` or ``baseline`` is not an `EventLog`, or a custom section is invalid.
        InputError: The log has no events.
        ConfigError: The language is not supported.
    """
    words = Words(language)
    figures = _figures("log", log, total_bytes)
    before = None if baseline is None else _figures("baseline", baseline, total_bytes)
    fits = () if figures.held_bytes is None else find_fits(figures.held_bytes, cards)
    findings = find_findings(figures)
    rating, advice = rate(figures, findings), recommend(figures, findings, words)
    facts = overview(log, figures, words)
    missing = missing_line(figures, words)
    built = [] if before is None else [compare_section(before, figures, words)]
    for number, blocks in enumerate(log.allocations):
        of_card = words("alloc_of_card", number=number) if len(log.allocations) > 1 else ""
        built.append(allocation_section(blocks, words("alloc_title") + of_card, words))
    built += [timeline_section(figures, words), conclusions(figures, findings, advice, fits, words)]
    built.append(advice_section(advice, words, is_faulty=is_faulty(findings[0])))
    built += usage_sections(figures, words, missing=log.missing_stages)
    built.append(Section(words("cards_title"), tuple(card_nodes(figures, fits, words))))
    if rating.num_inputs:
        built.append(efficiency(rating, words, is_on_cpu=figures.is_on_cpu))
    built.append(facts if missing is None else Section(facts.title, (*facts.nodes, missing)))
    built += [section for maker in sections if (section := _own_section(maker, log, language)) is not None]
    built.append(Section(words("reading_title"), tuple(Paragraph(words(f"reading_{n}")) for n in range(1, 5))))
    return Report(
        title=words("title"),
        headline=headline(findings[0], words),
        severity=findings[0].severity,
        hints=hints(findings[0], words),
        verdict=verdict(figures, fits, words),
        highlights=highlights(figures, rating, fits, words),
        sections=tuple(section for section in built if section.nodes),
        language=language,
        figures=functools.partial(_plain, figures, findings, rating, advice, fits, before),
    )


def build_comparison(before: EventLog, after: EventLog, *, language: str = "en") -> Report:
    """Build a report of only the differences between two logs; errors as for `build_report`."""
    words = Words(language, "memkit compare")
    old, new = _figures("before", before, None), _figures("after", after, None)
    changes = compare_figures(old, new)
    peak = changes[0]
    came, went = changed_findings(old, new)
    cells: tuple[Cell, ...] = (*peak.sizes, Share(peak.share, is_change=True))
    return Report(
        title=words("compare_title"),
        headline=compare_headline(old, new, peak, words),
        severity=judge(old, new, peak, came),
        hints=tuple(
            words(key, text=headline(each, words))
            for key, found in (("compare_came", came), ("compare_went", went))
            for each in found
        ),
        verdict=words("compare_text"),
        highlights=tuple((words(key), cell) for key, cell in zip(CHANGE_COLUMNS, cells, strict=True)),
        sections=(compare_section(old, new, words),),
        language=language,
        figures=lambda: {"changes": _jsonable(changes), "peak_share": peak.share},
    )


def _figures(name: str, log: object, total_bytes: int | None) -> ReportFigures:
    call = f"{name}=..."
    fix = "read the file first: pass memkit.report.read_memory_events(path)."
    log = Checker(call).instance(log, EventLog, "an EventLog, as memkit.report.read_memory_events returns", fix)
    if not log.events:
        raise InputError(
            call,
            got="a log without events",
            expected="at least one event",
            fix="check that the run wrote its events to this file.",
        )
    return read_figures(log, total_bytes)


def _own_section(maker: SectionMaker, log: EventLog, language: str) -> Section | None:
    section = maker(log, language)
    if section is not None and not isinstance(section, Section):
        raise InputTypeError(
            f"write_report(sections=[{maker!r}])",
            got=f"a {type(section).__name__}",
            expected="a memkit.report.nodes.Section, or None",
            fix="return Section(title, (Paragraph(...), Table(...))).",
        )
    return section


def _plain(
    figures: ReportFigures,
    findings: Sequence[ReportFinding],
    rating: Rating,
    advice: Sequence[Tip],
    fits: Sequence[Fit],
    before: ReportFigures | None,
) -> dict[str, Any]:
    """Return all figures as plain JSON values, with names as in the log."""
    kept = [each.name for each in dataclasses.fields(ReportFigures) if each.name not in ("observed", "header")]
    values = {name: _jsonable(getattr(figures, name)) for name in kept}
    values["header"] = _jsonable(figures.header)
    values["unattributed_bytes"] = figures.unattributed.low
    values["held_bytes"] = figures.held_bytes
    values["rating"] = {
        "points": rating.points,
        "marks": {
            each.rule.name: {"value": each.value, "mark": each.mark, "weight": each.rule.weight}
            for each in rating.marks
        },
    }
    values["findings"] = _jsonable(findings)
    values["advice"] = _jsonable(advice)
    values["cards"] = {fit.card.name: fit.verdict for fit in fits}
    if before is not None:
        values["changes"] = _jsonable(compare_figures(before, figures))
    return values


def _jsonable(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _jsonable(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_jsonable(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _jsonable(each) for key, each in value.items()}
    return value
