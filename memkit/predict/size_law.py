"""Choose which of many batches to estimate: those whose peak a law through the known peaks predicts as highest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memkit.predict.batch_kinds import tensors_of

_ROUNDS = 300  # of the fit; more do not change which batch is highest


@dataclass(frozen=True, slots=True)
class Search:
    """Outcome of a search.

    Attributes:
        places: The batches that were measured, in that order.
        highest: The most that the law predicts for any other batch; 0 if there is none.
        miss: The largest excess of a peak over the prediction that chose its batch, as a share of that prediction.
    """

    places: list[int]
    highest: float
    miss: float


def search_highest(batches: Sequence[Any], measure: Callable[[int], int], limit: int) -> Search:
    """Measure the batches that may have the highest peak.

    The law is a sum of sizes and products of sizes with factors of zero or more. It is fitted to the known peaks, again
    after each new one.

    Args:
        batches: One of each kind; only their sizes count.
        measure: Measures the peak of the batch at a place.
        limit: How many batches to measure.
    """
    terms = _terms(batches)
    peaks: dict[int, int] = {}
    miss = 0.0
    ends = [int(each) for column in terms.T for each in (column.argmax(), column.argmin())]
    for place in list(dict.fromkeys(ends))[: max(1, limit // 2)]:
        peaks[place] = measure(place)
    predicted = _fit(terms, peaks)
    while len(peaks) < min(limit, len(batches)):
        place = max(set(range(len(batches))) - peaks.keys(), key=lambda each: (predicted[each], -each))
        peaks[place] = measure(place)
        miss = max(miss, peaks[place] / predicted[place] - 1)
        predicted = _fit(terms, peaks)
    others = set(range(len(batches))) - peaks.keys()
    return Search(list(peaks), max((float(predicted[each]) for each in others), default=0.0), miss)


def _terms(batches: Sequence[Any]) -> NDArray[np.float64]:
    """Return (batches, terms): a one, and the number of elements of each tensor, alone and times each of its sizes."""
    rows: list[dict[Hashable, float]] = []
    paths = [tuple(path for path, _ in tensors_of(batch)) for batch in batches]
    is_uniform = len(set(paths)) == 1
    for batch in batches:
        row: dict[Hashable, float] = {}
        for path, tensor in tensors_of(batch):
            # The tensors of lists that differ in length are added up.
            name = path if is_uniform else tuple(each for each in path if not isinstance(each, int))
            for term, factor in (("all", 1), *enumerate(tensor.shape)):
                row[name, term] = row.get((name, term), 0.0) + tensor.numel() * factor
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {tuple(row.get(name, 0.0) for row in rows) for name in names}
    varying = sorted(column for column in columns if len(set(column)) > 1)
    return np.array([(1.0,) * len(batches), *varying]).T


def _fit(terms: NDArray[np.float64], peaks: dict[int, int]) -> NDArray[np.float64]:
    """Return the predicted peak of each batch: least squares of relative errors, one factor after the other."""
    heights = np.array(list(peaks.values()), np.float64)
    scaled = terms / terms.max(axis=0)
    known = scaled[list(peaks)] / heights[:, None]
    squares = (known**2).sum(axis=0)
    factors = np.zeros(terms.shape[1])
    rest = np.ones(len(peaks))
    for _ in range(_ROUNDS):
        for k in range(len(factors)):
            factor = max(0.0, factors[k] + known[:, k] @ rest / squares[k]) if squares[k] else 0.0
            rest -= (factor - factors[k]) * known[:, k]
            factors[k] = factor
    return np.asarray(scaled @ factors)
