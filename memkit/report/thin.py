"""Downsample long series without losing a peak: each bucket keeps its smallest and its largest point."""

from __future__ import annotations

from collections.abc import Sequence

from memkit.report.nodes import Curve, clean

_NUM_BUCKETS = 240  # two points each; finer than the pixels of a chart on a phone, and as fine as print


def thin(name: str, points: Sequence[tuple[float, int, str]]) -> Curve:
    """Make a curve of at most 482 points.

    The largest point of every bucket is kept, and so are the global peak with its name, and both ends.

    Args:
        name: The curve's name.
        points: Position, bytes and label. They are sorted by position: a clock can be set back.

    Example:
        >>> from memkit.report.thin import thin
        >>> line = thin("held", [(float(i), 7 if i == 7777 else 1, str(i)) for i in range(100_000)])
        >>> len(line.x) <= 482, max(line.y), line.labels[line.y.index(7)]
        (True, 7, '7777')
    """
    kept = points = sorted(points, key=lambda point: point[0])
    if len(points) > 2 * _NUM_BUCKETS:
        kept = []
        for bucket in range(_NUM_BUCKETS):
            start, end = (len(points) * each // _NUM_BUCKETS for each in (bucket, bucket + 1))
            sizes = [size for _, size, _ in points[start:end]]
            ends = {start + sizes.index(min(sizes)), start + sizes.index(max(sizes))}
            kept += [points[index] for index in sorted(ends)]
        kept = [*dict.fromkeys([points[0], *kept, points[-1]])]
    return Curve(
        name, tuple(x for x, _, _ in kept), tuple(y for _, y, _ in kept), tuple(clean(label) for _, _, label in kept)
    )
