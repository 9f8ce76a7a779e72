"""Streaming metrics beside torchmetrics and MONAI: the same scores, the bytes that stay, and the peak of an update.

Grids: two crops of 32 x 32 x 32 voxels of the MNI152 head (nilearn's wheel) and damaged copies, added eight times;
intersection over union of the occupied voxels, the mean over the samples. Classes: scikit-learn's 1,797 digits, and
what nearest centroids take them for; the confusion matrix. "Stays" is what the metric holds after the last update more
than after the first.

Run: pip install -c constraints.txt -e ".[bench]" && python -m benchmarks.cases.evaluation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monai.metrics
import torch
import torchmetrics.segmentation
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestCentroid
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

import memkit as mk
from benchmarks.result import write_result
from benchmarks.timing import in_turns, median_ratio, seconds_of
from tests.allocations import trace_allocations
from tests.voxel.brain import crops, damaged

NUM_UPDATES, ROUNDS = 8, 15
# An update of a fresh metric, and its result.
Metric = tuple[Callable[[Tensor, Tensor], object], Callable[[], Any]]


class ByHand:
    """Keeps what comes, and counts at the end."""

    def __init__(self, result: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.count = result

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.pairs.append((prediction.clone(), target.clone()))  # batches do not outlive their step

    def result(self) -> Tensor:
        return self.count(*(torch.cat(each) for each in zip(*self.pairs, strict=True)))


def iou(prediction: Tensor, target: Tensor) -> Tensor:
    both, either = (
        (operator(prediction, target)).flatten(1).sum(1) for operator in (torch.logical_and, torch.logical_or)
    )
    return (both / either).mean()


def confusion(prediction: Tensor, target: Tensor) -> Tensor:
    return (target * 10 + prediction).bincount(minlength=100).view(10, 10)


def iou_ways() -> dict[str, Callable[[], Metric]]:
    def plain() -> Metric:
        metric = ByHand(iou)
        return metric.update, metric.result

    def memkit() -> Metric:
        metric = mk.voxel.VoxelMetrics()
        return metric.update, lambda: metric.compute()["iou"]

    def of_torchmetrics() -> Metric:
        metric = torchmetrics.segmentation.MeanIoU(num_classes=1)
        return metric.update, metric.compute

    def of_monai() -> Metric:
        metric = monai.metrics.MeanIoU()
        return metric, metric.aggregate

    return {"plain": plain, "memkit": memkit, "torchmetrics": of_torchmetrics, "MONAI": of_monai}


def confusion_ways() -> dict[str, Callable[[], Metric]]:
    def plain() -> Metric:
        metric = ByHand(confusion)
        return metric.update, metric.result

    def memkit() -> Metric:
        metric = mk.recipes.ConfusionCounts(10)
        return metric.update, metric.result

    def of_torchmetrics() -> Metric:
        metric = MulticlassConfusionMatrix(num_classes=10)
        return metric.update, metric.compute

    return {"plain": plain, "memkit": memkit, "torchmetrics": of_torchmetrics}


def measure(ways: dict[str, Callable[[], Metric]], prediction: Tensor, target: Tensor) -> dict[str, dict[str, Any]]:
    wanted = torch.as_tensor(run(ways["plain"], prediction, target)).double()
    figures: dict[str, dict[str, Any]] = {}
    for name, make in ways.items():
        found = torch.as_tensor(run(make, prediction, target)).double()
        update, _ = make()
        update(prediction, target)

        def more(update: Callable[[Tensor, Tensor], object] = update) -> None:
            for _ in range(NUM_UPDATES - 1):
                update(prediction, target)

        trace = trace_allocations(more)
        figures[name] = {
            "peak_bytes": trace.peak,
            "stays_bytes": int(trace.live[-1]),
            "difference": float((found - wanted).abs().max()),
        }
    seconds = in_turns(ways, ROUNDS, lambda make: seconds_of(lambda: run(make, prediction, target)))
    for name, taken in seconds.items():
        figures[name]["time_ratio"] = median_ratio(taken, seconds["plain"])
    return figures


def run(make: Callable[[], Metric], prediction: Tensor, target: Tensor) -> Any:
    update, result = make()
    for _ in range(NUM_UPDATES):
        update(prediction, target)
    return result()


def main() -> None:
    torch.set_num_threads(1)
    target = crops(2, 32)
    guess = damaged(target)
    digits = load_digits()
    classes = NearestCentroid().fit(digits.data, digits.target).predict(digits.data)
    figures = {
        "voxels, intersection over union": measure(iou_ways(), guess[:, :1] > 0.5, target[:, :1] > 0.5),
        "digits, confusion matrix": measure(
            confusion_ways(), torch.from_numpy(classes), torch.from_numpy(digits.target)
        ),
    }
    for name, rows in figures.items():
        for way, row in rows.items():
            print(f"{name:32} {way:14} {row}")
    print(write_result("evaluation", figures, peers=("torchmetrics", "monai", "nilearn", "scikit-learn")))


if __name__ == "__main__":
    main()
