"""Facts for advice from a log's figures."""

from __future__ import annotations

from collections.abc import Sequence

from memkit._advice.suggest import Facts, Tip, suggest
from memkit.report.figures import ReportFigures
from memkit.report.finding import ReportFinding
from memkit.report.growing import HORIZON, LEAKS
from memkit.report.nodes import clean
from memkit.report.words import Words


def recommend(figures: ReportFigures, findings: Sequence[ReportFinding], words: Words) -> tuple[Tip, ...]:
    """Return the advice that the figures support, best first."""
    components, layers = figures.components, figures.layers
    leak = next((each for each in findings if each.kind in LEAKS), None)
    config = (figures.header.config if figures.header else None) or {}
    facts = Facts(
        peak_bytes=figures.peak.num_bytes if figures.peak else None,
        reserved_bytes=layers.reserved_bytes,
        total_bytes=layers.total_bytes,
        has_expandable_segments=config.get("expandable_segments") is True,  # of a snapshot's allocator
        components=tuple((clean(load.name), load.num_bytes) for load in components.loads if load.num_bytes is not None),
        loaded_bytes=components.whole_bytes,
        growth_bytes=None if leak is None else leak.at_stake // HORIZON,
        growth_holder=None if leak is None else leak.suspect,
        unattributed_bytes=None if figures.splits else figures.unattributed.low,
        lacks_stages=figures.is_cumulative,
        lacks_reserved=layers.reserved_bytes is None and not figures.is_on_cpu,
    )
    return tuple(suggest(facts, words.language))
