"""Find the values by which operators select among all rows of a batch, as in a loss over the hardest examples.

Parts of the batch may select the same rows as the whole by accident. Sorted by these values, they do not. And an
operator may do to more rows what it does not do to few: take those from a fixed place on, or only so many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
# The position of the argument that says along which dimension.
_ALONG: Mapping[Any, int] = {
    _aten.topk.default: 2,
    _aten.sort.default: 1,
    _aten.sort.stable: 2,  # by keyword only
    _aten.kthvalue.default: 2,
    _aten.median.dim: 1,
    _aten.nanmedian.dim: 1,
    _aten.mode.default: 1,
}
_OF_ALL = frozenset({_aten.median.default, _aten.nanmedian.default})
_BY_MASK = frozenset({_aten.masked_select.default, _aten.index.Tensor})
_LIMITED = frozenset({_aten.slice.Tensor, _aten.topk.default})

SELECTING: frozenset[Callable[..., Any]] = frozenset(_ALONG) | _OF_ALL | _BY_MASK | _LIMITED


class RowLimit(NamedTuple):
    """A limit that few rows do not reach.

    Attributes:
        place: The first row that is taken; None if all rows were selected by their values.
        num_each: The numbers for each row of what was selected from.
    """

    place: int | None
    num_each: int


def limit_not_reached(func: Any, args: Sequence[Any], num_rows: int) -> RowLimit | None:
    """Return a limit of an operator's that lies beyond the rows that it is given; None if it has none."""
    if func not in _LIMITED or len(args) < 2 or not num_rows:
        return None
    given, number = args[0], args[1]
    length = given.shape[0] if given.dim() else 0
    if not length or length % num_rows or not isinstance(number, int):
        return None
    num_each = length // num_rows
    if func is _aten.topk.default:
        is_all = number == length > 1 and (args[2] if len(args) > 2 else -1) % given.dim() == 0
        return RowLimit(None, num_each) if is_all else None
    start = args[2] if number == 0 and len(args) > 2 else None
    return RowLimit(start // num_each, num_each) if isinstance(start, int) and start >= length else None


def values_of_rows(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], num_rows: int
) -> tuple[float, ...] | None:
    """Return a number for each row of the batch by which an operator of `SELECTING` selects; None if not among rows."""
    given = args[0]
    if func is _aten.slice.Tensor:
        return None
    if not isinstance(given, Tensor) or not given.is_floating_point() or not given.dim() or not given.numel():
        return None
    dim = 0
    if func in _ALONG:
        position = _ALONG[func]
        dim = (args[position] if position < len(args) else kwargs.get("dim", -1)) % given.dim()
    elif func in _BY_MASK and not _is_mask(args[1]):
        return None
    length = given.shape[dim]
    is_over_rows = length % num_rows == 0 and (dim == 0 or length == num_rows)
    if not is_over_rows or num_rows < 2:
        return None
    rows = given.detach().movedim(dim, 0).reshape(num_rows, -1).double().mean(dim=1).tolist()
    return tuple(rows) if all(map(math.isfinite, rows)) else None


def _is_mask(index: Any) -> bool:
    masks = index if isinstance(index, (list, tuple)) else [index]
    return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in masks)
