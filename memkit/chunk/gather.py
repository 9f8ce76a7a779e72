"""Arguments whose rows are picked from smaller tensors, chunk by chunk: node features at the ends of edges."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError

Gather: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""By keyword of the function: a pair (x, src); the function gets the rows x[src]."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An argument whose rows are gathered from a tensor, chunk by chunk: ``tensor[pick]``.

    Attributes:
        tensor: (n, ...).
        pick: int64 or int32, one for each row of the call.
    """

    tensor: Tensor
    pick: Tensor


def gathered(
    call: str, fn: Callable[..., Any], gather: Gather | None, num_rows: int | None = None
) -> dict[str, Gathered]:
    """Check ``gather`` and wrap its pairs.

    Args:
        call: The user's call, for messages.
        fn: The function or module that gets the rows as keywords.
        gather: The user's argument.
        num_rows: Rows of the call; None if the other arguments determine it.

    Raises:
        InputError: An index does not fit the rows, or its tensor.
        InputTypeError: ``gather`` is not a mapping, or ``fn`` lacks one of its keywords.
    """
    if gather is None:
        return {}
    if not isinstance(gather, Mapping):
        raise InputTypeError(
            call,
            got=f"gather as a {type(gather).__name__}",
            expected="a mapping from keywords of the function to pairs (x, src)",
            fix='write gather={"x_j": (x, src)}',
        )
    keywords = _keywords_of(fn)
    for key, pair in gather.items():
        _check(call, key, pair, num_rows)
        if keywords is not None and key not in keywords:
            raise InputTypeError(
                call,
                got=f"gather[{key!r}] for a function of {', '.join(keywords) or 'no arguments'}",
                expected="keywords that fn takes",
                fix=f"add the argument: def fn(rows, {key}), or lambda rows, {key}: ...",
            )
    return {key: Gathered(*pair) for key, pair in gather.items()}


def _keywords_of(fn: Callable[..., Any]) -> list[str] | None:
    """Return the names that a function takes as keywords; None if it takes any, or has no signature."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def _check(call: str, key: str, pair: Any, num_rows: int | None) -> None:
    is_pair = isinstance(pair, tuple | list) and [isinstance(each, Tensor) for each in pair] == [True, True]
    x: Any
    pick: Any
    x, pick = pair if is_pair else (None, None)
    is_index = is_pair and pick.dtype in (torch.int64, torch.int32)
    if not is_index or not x.dim() or pick.dim() != 1 or num_rows not in (None, len(pick)):
        shapes = [f"{tuple(each.shape)} in {each.dtype}" for each in pair] if is_pair else [type(pair).__name__]
        raise InputError(
            call,
            got=f"gather[{key!r}]: {' and '.join(shapes)}",
            expected="a pair (x, src): x (num_nodes, ...), src int64 or int32 "
            f"({'number of rows' if num_rows is None else num_rows},)",
            fix=_meant(key, x, pick, num_rows),
        )
    if pick.is_cpu and len(pick):  # elsewhere the check would synchronize
        low, high = (int(bound) for bound in pick.aminmax())
        if low < 0 or high >= len(x):
            raise InputError(
                call,
                got=f"gather[{key!r}] with rows from {low} to {high}",
                expected=f"rows from 0 to {len(x) - 1}: x has shape {tuple(x.shape)}",
                fix="check how src was built: every entry must index a row of x.",
            )


def _meant(key: str, x: Any, pick: Any, num_rows: int | None) -> str:
    """Return the corrected argument."""
    if isinstance(pick, Tensor) and isinstance(x, Tensor):
        if pick.is_floating_point() and not x.is_floating_point():
            return f"swap the pair: gather={{{key!r}: (x, src)}}"
        if pick.dim() == 2 and pick.shape[0] == 2:
            end = 1 if key.endswith("_i") else 0
            return f"write gather={{{key!r}: (x, edge_index[{end}])}}"
        if pick.dim() == 1 and num_rows in (None, len(pick)):
            return f"write gather={{{key!r}: (x, src.long())}}"
    return f"pass gather={{{key!r}: (x, src)}}, which gives fn the rows x[src]."
