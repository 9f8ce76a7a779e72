"""Render the view of allocations: the elements that the page's script fills in, and its data."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence

from memkit.report.nodes import AllocationView, Size
from memkit.report.words import Words

_MOST_STRIPS, _WIDTH = 8, 1000
_Segments = Sequence[tuple[int, Sequence[tuple[int, int]]]]
_WORDS = (
    *("others", "total", "event", "peak", "shortage", "at_peak", "at_moment", "reserved", "all_stacks", "back"),
    *("bare", "bare_text", "small", "small_text", "before", "never", "whole", "closer"),
    *("label_category", "label_phase", "label_module", "label_operator", "label_line"),
)


def view_parts(view: AllocationView, words: Words, still: str) -> Iterator[str]:
    """Yield the view as HTML, for the page's script to fill in; ``still`` is shown if scripts are switched off."""

    def said(key: str) -> str:
        return html.escape(words(f"alloc_{key}"))

    def table(name: str, first: str, *numbers: str) -> str:
        heads = "".join(f'<th scope="col" class="n">{said(key)}</th>' for key in numbers)
        head = f'<thead><tr><th scope="col">{said(first)}</th>{heads}</tr></thead>'
        return f'<table class="{name}">{head}<tbody></tbody></table>'

    texts = {key: words.raw(f"alloc_{key}") for key in _WORDS}
    data = json.dumps({**view.data, "words": texts}, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    yield f'<div class="alloc"><noscript><p>{said("noscript")}</p>{still}</noscript>'
    yield from (f'<fieldset class="{key}"><legend>{said(key)}</legend></fieldset>' for key in ("by", "span"))
    yield f'<p class="hint">{said("hint")}</p><div class="plot"><div class="ys"></div>'
    slider = f'role="slider" aria-label="{said("slider")}" aria-valuemin="0" aria-valuenow="0"'
    yield f'<div class="field" tabindex="0" {slider}><svg preserveAspectRatio="none" aria-hidden="true"></svg>'
    yield '<span class="now"></span><output class="tip"></output></div>'
    yield f'<div class="xs"></div><div class="x">{said("axis")}</div></div>'
    yield '<p class="moment" aria-live="polite"></p>'
    yield table("groups two", "group", "live", "share")
    yield f'<h3>{said("stacks")}</h3><div class="flame" role="group" aria-label="{said("stacks")}"></div>'
    yield f"<h3>{said('largest_now')}</h3>"
    yield table("blocks", "line", "bytes", "asked", "given")
    yield f'<script type="application/json">{data}</script></div>'
    for name, segments in view.rooms:
        yield from _room(name, segments, words)


def _room(name: str, segments: _Segments, words: Words) -> Iterator[str]:
    """Draw the partly free segments with the most free bytes as strips, in which the blocks in use are dark."""
    free = [(size - sum(end - start for start, end in blocks), size, blocks) for size, blocks in segments if blocks]
    shown = sorted((each for each in free if each[0]), key=lambda each: -each[0])[:_MOST_STRIPS]
    if not shown:
        return
    caption = words("alloc_strips", moment=name, shown=len(shown), count=f"{len(segments):,}")
    yield f'<figure class="room"><figcaption>{html.escape(caption)}</figcaption>'
    for num_free, size, blocks in shown:
        ends = ((_WIDTH * start / size, _WIDTH * end / size) for start, end in blocks)
        path = "".join(f"M{start:.1f},0H{end:.1f}V1H{start:.1f}z" for start, end in ends)
        text = words("alloc_strip", free=words.size(Size.of(num_free)), share=f"{num_free / size:.0%}")
        exact = f"{num_free:,} / {size:,} bytes"
        yield f'<div title="{exact}"><span>{words.size(Size.of(size))}</span>'
        yield f'<svg viewBox="0 0 {_WIDTH} 1" preserveAspectRatio="none" aria-hidden="true"><path d="{path}"/></svg>'
        yield f"<span>{html.escape(text)}</span></div>"
    yield "</figure>"
