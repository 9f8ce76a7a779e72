"""Advice from the figures: each recommendation gives its evidence and the most it can save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from memkit._core.units import GIB
from memkit.report.figures import ReportFigures
from memkit.report.nodes import Share, Size, clean
from memkit.report.words import Words, share_text

Horizon = Literal["short", "middle", "long"]
HORIZONS: tuple[Horizon, ...] = ("short", "middle", "long")

_LARGE_PART = 0.25  # of the peak: a smaller part is not worth a code change
_LARGE_CACHE = 0.2  # of the reserved bytes; below, fragmentation costs less than a fix is worth
_TIGHT, _ROOMY = 0.1, 0.5  # of the device, free at the peak


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One recommended change.

    Attributes:
        horizon: ``"short"``: today, by a setting or one line. ``"middle"``: a change of the program. ``"long"``: a
            change of the model or the hardware.
        action: Recommended action.
        evidence: The figures that support it.
        saves_bytes: The most it can take off the peak, derived from the log; None if the log cannot tell.
    """

    horizon: Horizon
    action: str
    evidence: str
    saves_bytes: int | None


def recommend(figures: ReportFigures, words: Words) -> tuple[Recommendation, ...]:
    """Return the advice that the figures support, by horizon, and within it by largest saving."""
    found = [*_about_components(figures, words), *_about_cache(figures, words), *_about_growth(figures, words)]
    found += [*_about_work(figures, words), *_about_room(figures, words), *_about_log(figures, words)]
    return tuple(sorted(found, key=lambda each: (HORIZONS.index(each.horizon), -(each.saves_bytes or 0))))


def _about_components(figures: ReportFigures, words: Words) -> Iterator[Recommendation]:
    peak = figures.peak.num_bytes if figures.peak else 0
    for load in figures.components.loads:
        if load.num_bytes is None or load.num_bytes < _LARGE_PART * peak or not peak:
            continue
        name, size, share = clean(load.name), _gib(load.num_bytes, words), _percent(load.num_bytes, peak)
        evidence = words("evidence_component", name=name, size=size, share=share)
        yield Recommendation("short", words("advice_offload", name=name), evidence, load.num_bytes)
        yield Recommendation("middle", words("advice_halve", name=name), evidence, load.num_bytes // 2)
        yield Recommendation("long", words("advice_replace", name=name), evidence, None)


def _about_cache(figures: ReportFigures, words: Words) -> Iterator[Recommendation]:
    reserved = figures.layers.reserved_bytes
    if figures.peak is None or reserved is None:
        return
    cache = reserved - figures.peak.num_bytes
    if cache >= max(GIB, _LARGE_CACHE * reserved):
        evidence = words("evidence_cache", size=_gib(cache, words), share=_percent(cache, reserved))
        yield Recommendation("short", words("advice_segments"), evidence, cache)


def _about_growth(figures: ReportFigures, words: Words) -> Iterator[Recommendation]:
    trend = figures.steps.trend if figures.steps else None
    if trend is not None and trend.is_growth:
        slope, low, high = (f"{round(each):,}" for each in (trend.slope, trend.low, trend.high))
        yield Recommendation(
            "short", words("advice_leak"), words("evidence_growth", slope=slope, low=low, high=high), None
        )


def _about_work(figures: ReportFigures, words: Words) -> Iterator[Recommendation]:
    """Advise on memory besides the loaded components: activations and temporaries."""
    if figures.peak is None or figures.components.whole_bytes is None:
        return
    peak = figures.peak.num_bytes
    work = peak - figures.components.whole_bytes
    if work >= _LARGE_PART * peak > 0:
        evidence = words("evidence_work", size=_gib(work, words), share=_percent(work, peak))
        yield Recommendation("middle", words("advice_checkpoint"), evidence, work)


def _about_room(figures: ReportFigures, words: Words) -> Iterator[Recommendation]:
    held, total = figures.held_bytes, figures.layers.total_bytes
    if held is None or not total:
        return
    free = 1 - held / total
    evidence = words("evidence_room", share=f"{free:.1%}", size=_gib(total, words))
    if free < _TIGHT:
        yield Recommendation("middle", words("advice_accumulate"), evidence, None)
        yield Recommendation("long", words("advice_larger_card"), evidence, None)
    elif free > _ROOMY:
        yield Recommendation("middle", words("advice_larger_batch"), evidence, None)


def _about_log(figures: ReportFigures, words: Words) -> Iterator[Recommendation]:
    if figures.is_cumulative:
        yield Recommendation("short", words("advice_reset_peaks"), words("evidence_cumulative"), None)
    peak, unattributed = figures.peak, figures.unattributed.low
    if peak and unattributed is not None and unattributed >= _LARGE_PART * peak.num_bytes and not figures.splits:
        evidence = words(
            "evidence_unattributed", size=_gib(unattributed, words), share=_percent(unattributed, peak.num_bytes)
        )
        yield Recommendation("short", words("advice_track"), evidence, None)
    if figures.layers.reserved_bytes is None:
        yield Recommendation("long", words("advice_record"), words("evidence_no_reserved"), None)


def _gib(num_bytes: int, words: Words) -> str:
    return words.size(Size.of(num_bytes), exact=False)


def _percent(part: int, whole: int) -> str:
    return share_text(Share(part / whole))
