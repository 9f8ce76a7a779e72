"""Figures of an evaluation from its outputs as they come: what is kept is a few numbers, never the outputs."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor

from memkit._core.errors import InputError


class Reducer(Protocol):
    """Takes values batch by batch, and gives one figure."""

    def update(self, *values: Tensor) -> None:
        """Take the values of some rows in."""

    def result(self) -> Any:
        """Return the figure; None where nothing came."""

    def reset(self) -> None:
        """Forget everything."""


@final
class Mean:
    """The mean of all values, summed in float64.

    Memory cost: two numbers.

    Example:
        >>> import torch, memkit as mk
        >>> mean = mk.recipes.Mean()
        >>> for batch in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])):
        ...     mean.update(batch)
        >>> mean.result()
        4.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._total, self._count = 0.0, 0

    def update(self, *values: Tensor) -> None:
        """Take values of any shape in; booleans count as 0 and 1."""
        for each in values:
            self._total += each.sum(dtype=torch.float64).item()
            self._count += each.numel()

    def result(self) -> float | None:
        """Return the mean; None where nothing came."""
        return self._total / self._count if self._count else None


@final
class WeightedMean:
    """The mean of values with weights, summed in float64. A weight of 0 counts for nothing, even beside a NaN.

    Memory cost: two numbers.

    Example:
        >>> import torch, memkit as mk
        >>> mean = mk.recipes.WeightedMean()
        >>> mean.update(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0]))
        >>> mean.result()
        1.75
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._total, self._weight = 0.0, 0.0

    def update(self, *values: Tensor) -> None:
        """Take ``(values, weights)`` in, two tensors of the same shape.

        Raises:
            InputError: Not two tensors, or of different shapes.
        """
        shapes = [tuple(each.shape) for each in values]
        if len(values) != 2 or shapes[0] != shapes[1]:
            _refuse("WeightedMean.update(values, weights)", f"shapes {shapes}", "two tensors of the same shape")
        value, weight = (each.double() for each in values)
        self._total += torch.where(weight == 0, 0.0, value * weight).sum().item()
        self._weight += weight.sum().item()

    def result(self) -> float | None:
        """Return the mean; None where nothing came that weighs anything."""
        return self._total / self._weight if self._weight else None


@final
class Accuracy:
    """The share of rows whose class is among the ``top`` highest scores. A row with a NaN among its scores is wrong.

    Args:
        top: How many scores count.
        ignore_index: Rows with this class are left out.

    Memory cost: two numbers.

    Example:
        >>> import torch, memkit as mk
        >>> accuracy = mk.recipes.Accuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 0, 0]))
        >>> round(accuracy.result(), 3)
        0.667
    """

    def __init__(self, top: int = 1, *, ignore_index: int | None = None) -> None:
        self._top, self._ignored = top, ignore_index
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._right, self._count = 0, 0

    def update(self, *values: Tensor) -> None:
        """Take ``(scores, targets)`` in: (N, C) of any float dtype, and (N,) of classes.

        Raises:
            InputError: The shapes do not go together.
        """
        shapes = [tuple(each.shape) for each in values]
        if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
            _refuse("Accuracy.update(scores, targets)", f"shapes {shapes}", "scores (N, C) and targets (N,)")
        scores, targets = values
        best = scores.topk(min(self._top, scores.shape[1]), dim=1).indices
        is_right = (best == targets[:, None]).any(dim=1) & ~scores.isnan().any(dim=1)
        if self._ignored is not None:
            is_right = is_right[targets != self._ignored]
        self._right += int(is_right.sum())
        self._count += is_right.numel()

    def result(self) -> float | None:
        """Return the share; None where nothing came."""
        return self._right / self._count if self._count else None


@final
class ConfusionCounts:
    """How often each class was taken for each: exact counts, from which precision, recall and IoU follow.

    Args:
        num_classes: C.
        ignore_index: Elements whose target is this are left out.

    Memory cost: C x C int64 on the host.

    Example:
        >>> import torch, memkit as mk
        >>> confusion = mk.recipes.ConfusionCounts(2)
        >>> confusion.update(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        >>> confusion.result().tolist()
        [[1, 1], [0, 1]]
        >>> confusion.iou().tolist()
        [0.5, 0.5]
    """

    def __init__(self, num_classes: int, *, ignore_index: int | None = None) -> None:
        self._num_classes, self._ignored = num_classes, ignore_index
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._counts = torch.zeros(self._num_classes, self._num_classes, dtype=torch.int64)

    def update(self, *values: Tensor) -> None:
        """Take ``(predictions, targets)`` in: classes, integers of one shape.

        Raises:
            InputError: Different shapes, or a class outside of 0 to C - 1.
        """
        shapes = [tuple(each.shape) for each in values]
        if len(values) != 2 or shapes[0] != shapes[1]:
            _refuse("ConfusionCounts.update(predictions, targets)", f"shapes {shapes}", "two tensors of one shape")
        predictions, targets = (each.flatten() for each in values)
        if self._ignored is not None:
            is_counted = targets != self._ignored
            predictions, targets = predictions[is_counted], targets[is_counted]
        for each in (predictions, targets):
            if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < self._num_classes:
                _refuse(
                    "ConfusionCounts.update(predictions, targets)",
                    f"classes {int(each.min())} to {int(each.max())}",
                    f"0 to {self._num_classes - 1}, or ignore_index",
                )
        pairs = targets.long() * self._num_classes + predictions.long()
        self._counts += torch.bincount(pairs, minlength=self._num_classes**2).view_as(self._counts).cpu()

    def result(self) -> Tensor:
        """Return the counts so far, (C, C) int64: row the true class, column the predicted one."""
        return self._counts.clone()

    def iou(self) -> Tensor:
        """Return each class's intersection over union, (C,) float64; NaN for a class that never came."""
        hits = self._counts.diagonal().double()
        return hits / (self._counts.sum(0) + self._counts.sum(1) - hits)


def _refuse(call: str, got: str, expected: str) -> None:
    raise InputError(call, got=got, expected=expected, fix="change what the evaluation's function returns.")
