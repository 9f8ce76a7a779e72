"""Downsample long series without losing a peak: each bucket keeps its smallest and its largest point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from memkit.report.nodes import Curve, clean

_NUM_BUCKETS = 240  # two points each; finer than the pixels of a chart on a phone, and as fine as print


def thin(name: str, places: Sequence[float], sizes: Sequence[int | None], labels: Sequence[str]) -> Curve:
    """Make a curve of at most 482 points.

    The largest point of every bucket is kept, and so are the global peak with its name, and both ends.

    Args:
        name: The curve's name.
        places: Position of each point. The curve is sorted by position: a clock can be set back.
        sizes: Bytes at each point; a point without is left out.
        labels: Label of each point.

    Example:
        >>> from memkit.report.thin import thin
        >>> sizes = [7 if i == 7777 else 1 for i in range(100_000)]
        >>> line = thin("held", range(100_000), sizes, [str(i) for i in range(100_000)])
        >>> len(line.x) <= 482, max(line.y), line.labels[line.y.index(7)]
        (True, 7, '7777')
    """
    order: Sequence[int] = range(len(sizes))
    if None in sizes:
        order = [index for index in order if sizes[index] is not None]
    order = sorted(order, key=places.__getitem__)
    known = cast("list[int]", list(map(sizes.__getitem__, order)))
    kept: Iterable[int] = range(len(order))
    if len(order) > 2 * _NUM_BUCKETS:
        kept = sorted(_extremes(known) | {0, len(order) - 1})
    return Curve(
        name,
        tuple(places[order[at]] for at in kept),
        tuple(known[at] for at in kept),
        tuple(clean(labels[order[at]]) for at in kept),
    )


def _extremes(sizes: Sequence[int]) -> set[int]:
    """Return the indices of each bucket's smallest and largest size."""
    found = set()
    for bucket in range(_NUM_BUCKETS):
        start, end = (len(sizes) * each // _NUM_BUCKETS for each in (bucket, bucket + 1))
        inside = sizes[start:end]
        found |= {start + inside.index(min(inside)), start + inside.index(max(inside))}
    return found
