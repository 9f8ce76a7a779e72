"""One curve of a sweep, with its points and its law, and the figures that the edge-count analysis derives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memkit._core.errors import InputError
from memkit._core.units import GIB
from memkit.predict.gpus import GPU, CapacityLike, all_gpus, find_gpu
from memkit.predict.scaling.law import predicted
from memkit.predict.scaling.points import StepMode
from memkit.predict.scaling.result import ScalingResult
from memkit.recipes.memory_test.reference import EdgeCase


@dataclass(frozen=True, eq=False)
class ScalingCurve:
    """One step over a range of sizes, in each mode.

    Attributes:
        name: Name of the step.
        case: The part of the reference operator; None for the user's own step.
        result: Points, predicted or measured, and the law of each mode.
    """

    name: str
    case: EdgeCase | None
    result: ScalingResult

    @property
    def modes(self) -> tuple[StepMode, ...]:
        """The modes with points."""
        return tuple(dict.fromkeys(point.mode for point in self.result.points))

    def ratios(self) -> dict[int, float]:
        """Training peak over inference peak by size, for the points that have both."""
        both = self.result.peaks("train").keys() & self.result.peaks("inference").keys()
        return {size: self.result.ratio(size) or 0.0 for size in sorted(both)}

    def predicted_bytes(self, mode: StepMode, size: int) -> int | None:
        """The peak by the law; None if there is no law, or the size is out of its range."""
        return predicted(self.result.law.get(mode), size)

    def growth_bytes(self, mode: StepMode, size: int) -> int | None:
        """Growth when the number of edges doubles, by the law: the edges' share, without the constant part."""
        once, twice = self.predicted_bytes(mode, size), self.predicted_bytes(mode, 2 * size)
        return None if once is None or twice is None else twice - once

    def largest(self, mode: StepMode, budget: CapacityLike) -> int | None:
        """The largest size whose predicted peak fits; None if there is no law, or if every size fits."""
        try:
            return self.result.law[mode].max_n(budget) if mode in self.result.law else None
        except InputError:  # out of the law's range
            return None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row per point, sizes in bytes; None means unknown."""
        case, ratios = self.case, self.ratios()
        for point in self.result.points:
            theory = None if case is None else case.edge_bytes(point.size)
            actual = self.growth_bytes(point.mode, point.size)
            ratio = ratios.get(point.size)
            yield {
                "curve": self.name,
                "part": None if case is None else case.part,
                "mlp": None if case is None else "x".join(map(str, case.mlp)),
                "coord_dim": None if case is None else case.coord_dim,
                "feature_dim": None if case is None else case.feature_dim,
                "mode": point.mode,
                "size": point.size,
                "status": point.status,
                "source": point.source,
                "peak_bytes": point.peak_bytes,
                "predicted_bytes": self.predicted_bytes(point.mode, point.size),
                "requested_bytes": point.requested_bytes,
                "train_inference_ratio": None if ratio is None else round(ratio, 4),
                "theoretical_edge_bytes": theory,
                "actual_edge_bytes": actual,
                "actual_over_theoretical": None if actual is None or not theory else round(actual / theory, 4),
                "seconds": None if point.seconds is None else round(point.seconds, 4),
                "peak_where": point.peak_where,
            }


@dataclass(frozen=True, slots=True)
class Capacity:
    """A GPU to compare a sweep with.

    Attributes:
        name: Name of the class that it stands for; empty if the user named the GPU.
        card: The GPU.
        advised: The edge count that the source recommends; None if it gives none.
    """

    name: str
    card: GPU
    advised: int | None


def capacities(gpus: Sequence[str] = ()) -> tuple[Capacity, ...]:
    """The named GPUs; by default, for each of the source's three classes, the NVIDIA GPU with the least memory.

    Raises:
        InputError: A name does not match exactly one GPU.
    """
    if gpus:
        return tuple(Capacity("", find_gpu(name), None) for name in gpus)
    cards = [gpu for gpu in all_gpus() if gpu.vendor == "NVIDIA"]
    classes = (("4-8 GB", 4, 8, 100_000), ("12-16 GB", 12, 16, 500_000), ("24 GB and more", 24, math.inf, 1_000_000))
    return tuple(
        Capacity(name, min(_within(cards, low, high), key=lambda gpu: gpu.usable_bytes), advised)
        for name, low, high, advised in classes
    )


def _within(cards: Sequence[GPU], low: float, high: float) -> list[GPU]:
    return [gpu for gpu in cards if low <= gpu.box_bytes / GIB <= high]
