"""Facts for advice from a log's figures."""

from __future__ import annotations

from memkit._advice.suggest import Facts, Tip, suggest
from memkit.report.figures import ReportFigures
from memkit.report.nodes import clean
from memkit.report.words import Words


def recommend(figures: ReportFigures, words: Words) -> tuple[Tip, ...]:
    """Return the advice that the figures support, best first."""
    components, layers = figures.components, figures.layers
    trend = figures.steps.trend if figures.steps else None
    config = (figures.header.config if figures.header else None) or {}
    facts = Facts(
        peak_bytes=figures.peak.num_bytes if figures.peak else None,
        reserved_bytes=layers.reserved_bytes,
        total_bytes=layers.total_bytes,
        has_expandable_segments=config.get("expandable_segments") is True,  # of a snapshot's allocator
        components=tuple((clean(load.name), load.num_bytes) for load in components.loads if load.num_bytes is not None),
        loaded_bytes=components.whole_bytes,
        growth=(trend.slope, trend.low, trend.high) if trend is not None and trend.is_growth else None,
        unattributed_bytes=None if figures.splits else figures.unattributed.low,
        lacks_stages=figures.is_cumulative,
        lacks_reserved=layers.reserved_bytes is None,
    )
    return tuple(suggest(facts, words.language))
