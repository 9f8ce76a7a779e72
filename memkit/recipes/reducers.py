"""Streaming evaluation metrics: a few running numbers are kept, never the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from memkit._core.attributes import UserState
from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import ANY_WHOLE, Checker


class Reducer(Protocol):
    """Accumulates values batch by batch into one figure."""

    def update(self, *values: Tensor) -> None:
        """Add the values of some rows."""

    def result(self) -> Any:
        """Return the figure; None if there were no values."""

    def reset(self) -> None:
        """Reset to the initial state."""


class _Ratio(UserState):
    """Two running sums, on the host; the figure is the one over the other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset to the initial state."""
        self._sum = self._weight = 0.0

    def result(self) -> float | None:
        """Return the figure; None if there were no values, or none with a weight."""
        return self._sum / self._weight if self._weight else None

    def _add(self, part: Tensor, weight: float) -> None:
        self._sum += part.item()
        self._weight += weight


@final
class Mean(_Ratio):
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

    def update(self, *values: Tensor | float) -> None:
        """Add values of any shape, or numbers; booleans count as 0 and 1."""
        for each in map(torch.as_tensor, values):
            self._add(each.sum(dtype=torch.float64), each.numel())


@final
class WeightedMean(_Ratio):
    """The weighted mean of values, summed in float64. A weight of 0 counts for nothing, even with a NaN value.

    Memory cost: two numbers.

    Example:
        >>> import torch, memkit as mk
        >>> mean = mk.recipes.WeightedMean()
        >>> mean.update(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0]))
        >>> mean.result()
        1.75
    """

    def update(self, *values: Tensor) -> None:
        """Add ``(values, weights)``, two tensors of the same shape.

        Raises:
            InputError: There are not two tensors, or their shapes differ.
        """
        shapes = _shapes("WeightedMean.update(values, weights)", values, "two tensors of the same shape")
        if len(values) != 2 or shapes[0] != shapes[1]:
            _refuse("WeightedMean.update(values, weights)", f"shapes {shapes}", "two tensors of the same shape")
        value, weight = (each.double() for each in values)
        self._add(torch.where(weight == 0, 0.0, value * weight).sum(), weight.sum().item())


@final
class TotalOverCount(_Ratio):
    """The total of sums over the total of what they count, in float64. A sum counts even if its own count is 0."""

    def update(self, *values: Tensor) -> None:
        """Add ``(sums, counts)``."""
        sums, counts = values
        self._add(sums.sum(dtype=torch.float64), counts.sum(dtype=torch.float64).item())


@final
class Accuracy(_Ratio):
    """The share of rows whose class is among the ``top`` highest scores. A row with a NaN score counts as wrong.

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
        super().__init__()
        check = Checker("Accuracy(...)")
        self._top = check.whole("top", top, 1)
        fix = "pass the class as an int."
        self._ignored = None if ignore_index is None else check.whole("ignore_index", ignore_index, *ANY_WHOLE, fix=fix)

    def update(self, *values: Tensor) -> None:
        """Add ``(scores, targets)``: (N, C) of any float dtype, and (N,) class indices.

        Raises:
            InputError: The shapes do not match, there are fewer classes than ``top``, or a target is no class, and not
                ``ignore_index``.
        """
        shapes = _shapes("Accuracy.update(scores, targets)", values, "scores (N, C) and targets (N,)")
        if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
            _refuse("Accuracy.update(scores, targets)", f"shapes {shapes}", "scores (N, C) and targets (N,)")
        scores, targets = values
        num_classes = scores.shape[1]
        if self._top > num_classes:
            call = f"Accuracy(top={self._top}).update(scores, targets)"
            fix = f"write Accuracy(top={max(1, num_classes - 1)})."
            raise InputError(call, got=f"scores of {num_classes} classes", expected=f"{self._top} or more", fix=fix)
        self._check(targets, num_classes)
        best = scores.topk(self._top, dim=1).indices
        is_right = (best == targets[:, None]).any(dim=1) & ~scores.isnan().any(dim=1)
        if self._ignored is not None:
            is_right = is_right[targets != self._ignored]
        self._add(is_right.sum(), is_right.numel())

    def _check(self, targets: Tensor, num_classes: int) -> None:
        call, expected = "Accuracy.update(scores, targets)", f"class indices from 0 to {num_classes - 1}"
        if targets.is_floating_point() or targets.is_complex():
            fix = "convert labels with targets.long(), and probabilities of classes with targets.argmax(1)."
            raise InputError(call, got=f"targets of dtype {targets.dtype}", expected=expected, fix=fix)
        wrong = set(targets[(targets < 0) | (targets >= num_classes)].tolist()) - {self._ignored}
        if wrong:
            fix = f"if it marks rows to leave out, write Accuracy(ignore_index={min(wrong)})."
            raise InputError(call, got=f"the target {min(wrong)}", expected=expected, fix=fix)


def _shapes(call: str, values: Sequence[object], expected: str) -> list[tuple[int, ...]]:
    for each in values:
        if not isinstance(each, Tensor):
            fix = f"let the evaluation function return {expected}."
            raise InputTypeError(call, got=f"a {type(each).__name__}", expected=expected, fix=fix)
    return [tuple(each.shape) for each in values if isinstance(each, Tensor)]


def _refuse(call: str, got: str, expected: str) -> None:
    raise InputError(call, got=got, expected=expected, fix=f"let the evaluation function return {expected}.")
