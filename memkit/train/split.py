"""Cut a batch into parts along its rows: dimension 0 of every tensor in it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from memkit._errors import InputError

_SHARED = (str, bytes, int, float, complex, bool, type(None))  # leaves that belong to every row


def count_rows(batch: Any) -> int:
    """Count the rows of a batch.

    Args:
        batch: A pytree (tensors, NumPy arrays, dicts and other mappings, lists, tuples) whose tensors of one or more
            dimensions all have the rows in dimension 0. 0-dim tensors and plain values belong to every row.

    Returns:
        The number of rows.

    Raises:
        InputError: The tensors disagree, there is none, or there is an object that cannot be looked into.
    """
    sizes = {len(leaf) for leaf in _leaves(batch) if _has_rows(leaf)}
    if len(sizes) == 1:
        return sizes.pop()
    raise InputError(
        "splitting a batch",
        got=f"tensors with {sorted(sizes)} rows" if sizes else "no tensor with rows",
        expected="tensors that all have the rows in dimension 0",
        fix="pass split_fn=..., which takes (batch, n) and returns a list of n parts.",
    )


def take_rows(batch: Any, start: int, stop: int, *, num_rows: int | None = None) -> Any:
    """Take the rows from ``start`` to before ``stop``; tensors become views, mappings and tuples keep their type."""
    rows = count_rows(batch) if num_rows is None else num_rows

    def take(leaf: Any) -> Any:
        return leaf[start:stop] if _has_rows(leaf) or _is_column(leaf, rows) else leaf

    return _map(batch, take, rows)


def split_batch(batch: Any, num_parts: int) -> list[Any]:
    """Split a batch into parts of nearly equal size, the larger ones first.

    Args:
        batch: As for `count_rows`.
        num_parts: How many parts; a batch with fewer rows gives one part per row.

    Returns:
        The parts, in order. A single part is the batch itself.
    """
    if num_parts == 1:
        return [batch]
    rows = count_rows(batch)
    num_parts = max(1, min(num_parts, rows))
    smaller, num_larger = divmod(rows, num_parts)
    edges = [part * smaller + min(part, num_larger) for part in range(num_parts + 1)]
    return [take_rows(batch, a, b, num_rows=rows) for a, b in itertools.pairwise(edges)]


def shape_key(batch: Any) -> str:
    """Describe the shapes of a batch without its rows: batches with one key take memory in proportion to their rows."""
    return ";".join(f"{tuple(leaf.shape[1:])}{leaf.dtype}" for leaf in _leaves(batch) if _has_rows(leaf))


def count_elements(batch: Any) -> int:
    """Count the elements of all tensors: the size of a packed batch, whose rows are not samples."""
    leaves = pytree.tree_leaves(_to_pytree(batch))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _leaves(batch: Any) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves(_to_pytree(batch))
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, np.ndarray, np.generic, *_SHARED)):
            raise InputError(
                "splitting a batch",
                got=f"a {type(leaf).__name__} in it",
                expected="tensors, arrays and plain values in dicts, lists and tuples",
                fix="pass split_fn=..., which takes (batch, n) and returns a list of n parts.",
            )
    return leaves


def _to_pytree(batch: Any) -> Any:
    """Show torch's pytree functions a mapping that they do not know (a tokenizer's BatchEncoding) as a dict."""
    if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:
        return {key: _to_pytree(value) for key, value in batch.items()}
    return batch


def _map(batch: Any, fn: Callable[[Any], Any], rows: int) -> Any:
    if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:
        mapped: Any = copy.copy(batch)
        for key, value in batch.items():
            mapped[key] = _map(value, fn, rows)
        return mapped
    return pytree.tree_map(fn, batch, is_leaf=lambda node: _is_column(node, rows))


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _is_column(node: Any, rows: int) -> bool:
    """Whether a list holds one plain value per row, such as the captions or file names of a batch."""
    return type(node) is list and len(node) == rows and all(isinstance(value, _SHARED) for value in node)
