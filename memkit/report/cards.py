"""GPUs that have room for a run: compare its peak bytes held with the usable bytes of each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from memkit.report.figures import ReportFigures
from memkit.report.nodes import Node, Paragraph, Share, Size
from memkit.report.words import Words

_FITS_UP_TO = 0.85  # of the usable bytes; above this, another order of allocations or a longer input may not fit
_NEAR = 6  # rows on either side of the limit

CardVerdict = Literal["fits", "tight", "no"]


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """A row of the GPU catalog.

    Attributes:
        name: Display name.
        usable_bytes: Bytes available to torch's allocator.
        confidence: How certain that number is, such as ``"observed"``.
    """

    name: str
    usable_bytes: int
    confidence: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a GPU has room for the run."""

    card: CatalogueRow
    share: float
    verdict: CardVerdict


def find_fits(held_bytes: int, cards: Iterable[CatalogueRow]) -> tuple[Fit, ...]:
    """Compare the run with every GPU, smallest first."""
    fits = []
    for card in sorted(cards, key=lambda each: (each.usable_bytes, each.name)):
        share = held_bytes / card.usable_bytes
        fits.append(Fit(card, share, "fits" if share <= _FITS_UP_TO else "tight" if share <= 1 else "no"))
    return tuple(fits)


def smallest_card(fits: Iterable[Fit]) -> Fit | None:
    """Return the smallest GPU that holds the run with headroom."""
    return next((fit for fit in fits if fit.verdict == "fits"), None)


def card_nodes(figures: ReportFigures, fits: tuple[Fit, ...], words: Words) -> Iterator[Node]:
    """Build the fit table: the GPUs near the limit, and all GPUs in a folded table."""
    if figures.held_bytes is None:
        yield Paragraph(words("cards_none"))
        return
    key = "cards_reserved" if figures.layers.reserved_bytes == figures.held_bytes else "cards_tensors"
    yield Paragraph(words(key, size=words.size(Size.of(figures.held_bytes))))
    counts = {verdict: sum(fit.verdict == verdict for fit in fits) for verdict in ("fits", "tight", "no")}
    yield Paragraph(words("cards_counts", total=len(fits), **counts))
    border = next((index for index, fit in enumerate(fits) if fit.verdict != "no"), len(fits))
    room = next((index for index, fit in enumerate(fits) if fit.verdict == "fits"), len(fits))
    near = fits[max(0, border - _NEAR) : room + _NEAR]
    columns = ("col_card", "col_verdict", "col_usable", "col_used", "col_confidence")
    for shown, caption, is_folded in ((near, "cards_near", False), (fits, "cards_all", True)):
        if is_folded and len(near) == len(fits):
            return
        rows = tuple(
            (
                fit.card.name,
                words(f"verdict_{fit.verdict}"),
                Size.of(fit.card.usable_bytes),
                Share(fit.share),
                fit.card.confidence,
            )
            for fit in shown
        )
        yield words.table(columns, rows, words(caption), is_folded=is_folded)
