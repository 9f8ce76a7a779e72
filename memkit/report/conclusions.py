"""Sections that draw conclusions: overview, efficiency, advice, findings."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from memkit._advice.catalog import HORIZONS
from memkit._advice.suggest import Tip
from memkit._core.printable import printable
from memkit._events.reader import EventLog
from memkit.report.cards import Fit, smallest_card
from memkit.report.figures import LogPeak, ReportFigures
from memkit.report.finding import ReportFinding
from memkit.report.findings import headline, next_step
from memkit.report.nodes import Bullets, Cell, Node, Paragraph, Section, Share, Size, clean
from memkit.report.rating import CAPS, Rating
from memkit.report.usage import rise_text, shortage_texts
from memkit.report.words import Words, describe, share_text

_MOST_PROBLEMS = 10
_NUM_PRIORITIES = 3


def verdict(figures: ReportFigures, fits: Sequence[Fit], words: Words) -> str:
    """Summarize the most important figures in one sentence."""
    if figures.peak is None:
        return words("verdict_none", count=f"{figures.num_events:,}")
    parts = [words("verdict_peak", size=words.size(figures.peak.size), event=clean(figures.peak.event))]
    if figures.held_bytes is not None and figures.layers.total_bytes:
        parts.append(words("verdict_room", share=f"{1 - figures.held_bytes / figures.layers.total_bytes:.1%}"))
    if card := smallest_card(fits):
        parts.append(words("verdict_card", name=card.card.name))
    elif fits:
        parts.append(words("verdict_no_card"))
    return words("sentence", text=words.join(parts))


def highlights(
    figures: ReportFigures, rating: Rating, fits: Sequence[Fit], words: Words
) -> tuple[tuple[str, Cell], ...]:
    """Return the headline figures that are known."""
    held, total, card = figures.held_bytes, figures.layers.total_bytes, smallest_card(fits)
    steps = figures.steps
    growth = None
    if steps is not None and steps.course is not None:
        found = steps.growth or steps.slow
        growth = words("growth_level") if found is None else Size.of(round(found.rate), is_change=True)
    tiles: tuple[tuple[str, Cell], ...] = (
        (words("fact_peak"), figures.peak.size if figures.peak else None),
        (words("tile_growth"), growth),
        (words("tile_free"), Share(1 - held / total if held is not None and total else None)),
        (words("tile_rating"), None if rating.points is None else f"{rating.points} / 100"),
        (words("tile_card"), card.card.name if card and not figures.is_on_cpu else None),
    )
    return tuple(tile for tile in tiles if words.cell(tile[1]) != words("not_recorded"))


def overview(log: EventLog, figures: ReportFigures, words: Words) -> Section:
    """Build the section about the run and its environment."""
    facts = tuple(_facts(log, figures, words))
    rows = tuple(fact for fact in facts if words.cell(fact[1]) != words("not_recorded"))
    nodes: list[Node] = [words.table(("col_fact", "col_value"), rows)]
    if figures.ranks:
        peaks = tuple((str(rank), Size.of(num_bytes)) for rank, num_bytes in figures.ranks.items())
        nodes.append(words.table(("col_rank", "col_peak"), peaks, words("ranks_caption")))
    if figures.earlier:
        earlier = tuple(
            (None if run.wall_s is None else _date(run.wall_s), run.num_events, run.peak)
            for run in figures.earlier[-_MOST_PROBLEMS:]
        )
        nodes += [
            Paragraph(words("runs_earlier", count=f"{len(figures.earlier):,}")),
            words.table(("col_began", "col_events", "col_peak"), earlier, words("runs_caption")),
        ]
    if log.problems:
        shown = tuple(clean_sentence(problem) for problem in log.problems[:_MOST_PROBLEMS])
        nodes += [Paragraph(words("problems_text", count=f"{len(log.problems):,}")), Bullets(shown)]
    return Section(words("overview_title"), tuple(nodes))


def clean_sentence(text: str) -> str:
    """Make a sentence from a file safe for a page; it may be longer than a name."""
    return printable(text[:500])


def _facts(log: EventLog, figures: ReportFigures, words: Words) -> Iterator[tuple[str, Cell]]:
    header, peak = figures.header, figures.peak
    device = header.device if header else None
    yield words("fact_peak"), peak.size if peak else None
    yield words("fact_peak_at"), None if peak is None else _place(peak, words)
    yield words("fact_origin"), _origin(peak, words)
    yield words("fact_reserved"), Size.of(figures.layers.reserved_bytes)
    yield words("fact_host"), Size.of(figures.layers.host_bytes)
    yield words("fact_device"), clean(device.name) if device and device.name else None
    yield words("fact_capacity"), Size.of(figures.layers.total_bytes)
    yield words("fact_events"), figures.num_events
    if figures.num_predicted:
        yield words("fact_predicted"), figures.num_predicted
    yield words("fact_form"), words(f"form_{log.form}")
    yield words("fact_runs"), len(log.headers) - len(figures.earlier) or None
    yield words("fact_began"), None if header is None or header.wall_s is None else _date(header.wall_s)
    yield words("fact_seconds"), None if figures.seconds is None else f"{figures.seconds:,.2f} s"
    yield words("fact_versions"), describe(dict(header.versions)) or None if header else None
    if header and header.config:
        yield words("fact_config"), describe(header.config)


def _place(peak: LogPeak, words: Words) -> str:
    parts = [clean(peak.event)]
    if peak.step is not None:
        parts.append(words("place_step", step=peak.step))
    if peak.rank:
        parts.append(words("place_rank", rank=peak.rank))
    return ", ".join(parts)


def _origin(peak: LogPeak | None, words: Words) -> str | None:
    if peak is None or (peak.origin.kind is None and peak.origin.source is None):
        return None
    kind = words(f"kind_{peak.origin.kind}") if peak.origin.kind else words("not_recorded")
    return words("origin", kind=kind, source=clean(peak.origin.source or words("not_recorded")))


def _date(wall_s: float) -> str:
    return dt.datetime.fromtimestamp(wall_s, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def efficiency(rating: Rating, words: Words, *, is_on_cpu: bool) -> Section:
    """Build the section with efficiency figures and the rating."""
    total = sum(each.rule.weight for each in rating.marks if each.mark is not None)
    rows = tuple(
        (
            words(f"rule_{each.rule.name}"),
            Share(each.value),
            f"{100 * each.mark:.0f} / 100",
            Share(each.rule.weight / total),
            words.join([f"{share_text(Share(place))} → {100 * mark:.0f}" for place, mark in each.rule.points]),
        )
        for each in rating.marks
        if each.mark is not None
    )
    columns = ("col_figure", "col_value", "col_mark", "col_weight", "col_curve")
    if rating.points is None:
        text = words("rating_none", count=rating.num_inputs, least=rating.least_inputs)
        if not is_on_cpu and any(each.rule.name == "headroom" and each.value is None for each in rating.marks):
            text += words("rating_gpu")
    else:
        text = words("rating_text", points=rating.points, count=rating.num_inputs, total=len(rating.marks))
        if rating.points != rating.uncapped:
            text += words("rating_cap", points=rating.uncapped, **CAPS)
    table = words.table(columns, rows)
    return Section(words("efficiency_title"), (Paragraph(text), table, Paragraph(words("rating_method"))))


def advice_section(advice: Sequence[Tip], words: Words, *, is_faulty: bool) -> Section:
    """Build the section with short-, middle- and long-term advice; the next step for a fault is at the report's top."""
    nodes: list[Node] = []
    columns = ("col_advice", "col_evidence", "col_results", "col_saves")
    results = {True: words("results_same"), False: words("results_change"), None: ""}
    for horizon in HORIZONS:
        rows = tuple(
            (each.action, each.evidence, results[each.exact], _saving(each.saves_bytes, words))
            for each in advice
            if each.horizon == horizon
        )
        if rows:
            nodes.append(words.table(columns, rows, words(f"horizon_{horizon}")))
    last = "advice_method" if nodes else "advice_none_else" if is_faulty else "advice_none"
    nodes.append(Paragraph(words(last)))
    return Section(words("advice_title"), tuple(nodes))


def _saving(num_bytes: int | None, words: Words) -> Cell:
    return words("saving_unknown") if num_bytes is None else Size(None, num_bytes)


def conclusions(
    figures: ReportFigures, findings: Sequence[ReportFinding], advice: Sequence[Tip], fits: Sequence[Fit], words: Words
) -> Section:
    """Build the section with findings, priorities and deployment."""
    priorities = advice[:_NUM_PRIORITIES]
    nodes: list[Node] = []
    if len(findings) > 1:
        nodes += [Paragraph(words("also_head")), Bullets(tuple(full_text(each, words) for each in findings[1:]))]
    nodes += [Paragraph(words("findings_head")), Bullets(tuple(_facts_found(figures, words)))]
    if priorities:
        texts = tuple(each.action for each in priorities)
        nodes += [Paragraph(words("priorities_head")), Bullets(texts, is_numbered=True)]
    card = smallest_card(fits)
    if fits:
        size = words.size(Size.of(figures.held_bytes))
        text = words("deploy_none", size=size)
        if card is not None:
            text = words("deploy_card", name=card.card.name, share=f"{card.share:.1%}")
        nodes.append(Paragraph(words("deployment_head", text=text)))
    return Section(words("conclusions_title"), tuple(nodes))


def full_text(finding: ReportFinding, words: Words) -> str:
    """Say what was found, where it comes from, and what to do."""
    return " ".join(words("sentence", text=line) for line in (headline(finding, words), *hints(finding, words)))


def hints(finding: ReportFinding, words: Words) -> tuple[str, ...]:
    """Return the lines below a headline: the suspect, and the next step."""
    texts = (("line_suspect", finding.suspect), ("line_next", next_step(finding, words)))
    return tuple(words(key, text=text) for key, text in texts if text is not None)


def _facts_found(figures: ReportFigures, words: Words) -> Iterator[str]:
    peak, found = figures.peak, figures.components
    yield from shortage_texts(figures, words)
    if peak is None:
        yield words("pattern_none")
        return
    yield words("pattern_peak", event=clean(peak.event), size=words.size(peak.size))
    known = [(load.num_bytes, load.name) for load in found.loads if load.num_bytes is not None]
    if known and found.whole_bytes:
        size, name = max(known)
        share = f"{size / found.whole_bytes:.1%}"
        yield words("finding_largest", name=clean(name), size=words.size(Size.of(size)), share=share)
    if found.unattributed_bytes:
        yield words("finding_unattributed", size=words.size(Size.of(found.unattributed_bytes)))
    if figures.is_cumulative:
        yield words("cumulative_text")
    if figures.steps and figures.steps.course:
        yield words(f"finding_{figures.steps.course}")
    if figures.steps and figures.steps.rise is not None:
        yield rise_text(figures.steps.rise, words)
