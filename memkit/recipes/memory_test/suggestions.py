"""Suggestions for the memory of edges: why training takes more than inference, and how to make room, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memkit._core.units import format_bytes
from memkit.recipes.memory_test.curves import ScalingCurve

_SMALLEST_WIDTH = 8


def explain_ratio(curves: Sequence[ScalingCurve]) -> list[str]:
    """Say how much more training takes than inference, and why; empty if no size has both."""
    ratios = [ratio for curve in curves for ratio in curve.ratios().values()]
    if not ratios:
        return []
    ends = list(dict.fromkeys(f"{end:.2f}" for end in (min(ratios), max(ratios))))
    return [
        f"Training takes {' to '.join(ends)} times the memory of inference:",
        "backward needs each layer's output for each row, so training holds the rows of",
        "all layers at once; inference holds those of one layer and its input.",
        "A ratio of 1.5 to 3 is typical of one or two hidden layers.",
    ]


def suggest_room(curves: Sequence[ScalingCurve]) -> list[str]:
    """Return ways to make room for more edges, with the peak of each; empty without a training law of edges.

    The figures are those of the curve with the largest training peak, at its largest size. Fewer edges are read from
    its law; "about" is the law's growing part, scaled by the rows' bytes.
    """
    known = [(curve.result.peaks("train"), curve) for curve in curves if curve.case and "train" in curve.result.law]
    known = [(peaks, curve) for peaks, curve in known if peaks]
    if not known:
        return []
    peaks, curve = max(known, key=lambda each: max(each[0].values()))
    size = max(peaks)
    half = curve.predicted_bytes("train", max(1, size // 2))
    if curve.case is None or half is None:
        return []
    growing = 2 * (peaks[size] - half)  # the part that grows with the edges
    narrow = tuple(max(_SMALLEST_WIDTH, width // 2) for width in curve.case.mlp)
    share = replace(curve.case, mlp=narrow).edge_bytes(size) / curve.case.edge_bytes(size)
    rows = [
        ("half of the edges", format_bytes(half), "keep = mk.points.sample_edges(dst, ratio=0.5, seed=0)"),
        (
            f"an MLP of {'x'.join(map(str, narrow))}",
            f"about {format_bytes(peaks[size] - round((1 - share) * growing))}",
            f"MemoryTestConfig(mlp={narrow}) gives its law",
        ),
        (
            "mixed precision",
            f"about {format_bytes(peaks[size] - growing // 2)}",
            "MemoryEfficientTrainingWrapper(model, optimizer, precision='bf16-mixed')",
        ),
        (
            "edges in chunks, recomputed in backward",
            "a budget of your own",
            "mk.ChunkedProcessor(kernel, memory_budget='512MiB').segment_reduce(...)",
        ),
    ]
    title = f"Ways to make room for edges ({curve.name}, training, {size:,} edges: {format_bytes(peaks[size])})"
    return [title, *(line for what, left, call in rows for line in (f"- {what}: {left}", f"    {call}"))]
