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

SplitFn = Callable[[Any, int], list[Any]]

_ARRAYS = (torch.Tensor, np.ndarray)
_SHARED = (str, bytes, int, float, complex, bool, type(None))  # leaves that belong to every row
_LEAVES = (np.ndarray, np.generic, *_SHARED)


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
    sizes: set[int] = {leaf.shape[0] for leaf in _leaves(batch) if _has_rows(leaf)}
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
    return _slice(batch, slice(start, stop), count_rows(batch) if num_rows is None else num_rows)


def split_batch(batch: Any, num_parts: int, *, num_rows: int | None = None) -> list[tuple[Any, int]]:
    """Split a batch into parts of nearly equal size, the larger ones first.

    Args:
        batch: As for `count_rows`.
        num_parts: How many parts; a batch with fewer rows gives one part per row.
        num_rows: Rows of the batch, where they are known.

    Returns:
        The parts with their numbers of rows, in order. A single part is the batch itself.
    """
    rows = count_rows(batch) if num_rows is None else num_rows
    num_parts = max(1, min(num_parts, rows))
    if num_parts == 1:
        return [(batch, rows)]
    smaller, num_larger = divmod(rows, num_parts)
    edges = [part * smaller + min(part, num_larger) for part in range(num_parts + 1)]
    return [(_slice(batch, slice(start, stop), rows), stop - start) for start, stop in itertools.pairwise(edges)]


def shape_key(batch: Any) -> str:
    """Describe the shapes of a batch without its rows: batches with one key take memory in proportion to their rows."""
    return ";".join(f"{tuple(leaf.shape[1:])}{leaf.dtype}" for leaf in _leaves(batch) if _has_rows(leaf))


def count_elements(batch: Any) -> int:
    """Count the elements of all tensors: the size of a packed batch, whose rows are not samples."""
    return sum(tensor.numel() for tensor in list_tensors(batch))


def cut_batch(batch: Any, num_parts: int, *, size: int, split_fn: SplitFn | None) -> list[tuple[Any, int]]:
    """Split a batch, with the user's own function where there is one.

    Args:
        batch: The batch, or a part of it.
        num_parts: How many parts.
        size: Its size as `measure_batch` says.
        split_fn: Splits a packed batch; None splits rows.

    Returns:
        The parts with their sizes, in order.

    Raises:
        InputError: ``split_fn`` did not return a list of parts.
    """
    if num_parts <= 1:
        return [(batch, size)]
    if split_fn is None:
        return split_batch(batch, num_parts, num_rows=size)
    parts = split_fn(batch, num_parts)
    if type(parts) is not list or not parts:
        raise InputError(
            f"split_fn(batch, {num_parts})",
            got=f"{parts!r:.60}",
            expected="a list of at least one part",
            fix="return a list of batches, one per part.",
        )
    return [(each, count_elements(each)) for each in parts]


def measure_batch(batch: Any, split_fn: SplitFn | None) -> int:
    """Return a batch's size: rows, or elements of a packed batch.

    Raises:
        InputError: There is nothing to count.
    """
    if split_fn is None:
        return count_rows(batch)
    if not list_tensors(batch):  # else it would never be split, and nobody would know why
        raise InputError(
            "splitting a batch with split_fn",
            got=f"a {type(batch).__name__} in which memkit finds no tensor",
            expected="tensors in dicts, lists, tuples, or in attributes of an object",
            fix="pass the batch as a dict of its tensors.",
        )
    return count_elements(batch)


def list_tensors(batch: Any) -> list[torch.Tensor]:
    """List all tensors of a batch, in attributes of its objects too."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    for leaf in tuple(leaves):
        if not isinstance(leaf, torch.Tensor):  # an object may hold its tensors in attributes, as PyG's batches do
            _collect(getattr(leaf, "__dict__", {}), leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _leaves(batch: Any) -> list[Any]:
    leaves: list[Any] = []
    _collect(batch, leaves)
    for leaf in leaves:
        is_tensor = isinstance(leaf, torch.Tensor)
        is_plain = not is_tensor or (leaf.layout is torch.strided and not leaf.is_nested)
        if not is_plain or not (is_tensor or isinstance(leaf, _LEAVES)):
            raise InputError(
                "splitting a batch",
                got=f"a {type(leaf).__name__} in it" + ("" if is_plain else " that is sparse or nested"),
                expected="tensors, arrays and plain values in dicts, lists and tuples",
                fix="pass split_fn=..., which takes (batch, n) and returns a list of n parts.",
            )
    return leaves


def _collect(batch: Any, leaves: list[Any]) -> None:
    """Append the leaves; the usual containers without torch's pytree, which costs 20 microseconds a batch."""
    if isinstance(batch, torch.Tensor):
        leaves.append(batch)
    elif type(batch) in (tuple, list):
        for child in batch:
            _collect(child, leaves)
    elif isinstance(batch, Mapping):
        for child in batch.values():
            _collect(child, leaves)
    elif type(batch) in pytree.SUPPORTED_NODES or isinstance(batch, tuple):
        for child in pytree.tree_leaves(batch):
            if child is batch:
                leaves.append(child)
            else:
                _collect(child, leaves)
    else:
        leaves.append(batch)


def _slice(node: Any, rows: slice, num_rows: int) -> Any:
    """Take rows of a batch; the usual containers without torch's pytree."""
    if isinstance(node, _ARRAYS):
        return node[rows] if node.ndim > 0 else node
    kind = type(node)
    if kind in (tuple, list):
        return node[rows] if _is_column(node, num_rows) else kind([_slice(child, rows, num_rows) for child in node])
    if isinstance(node, Mapping):
        part: Any = {} if kind is dict else copy.copy(node)
        for key, value in node.items():
            part[key] = _slice(value, rows, num_rows)
        return part
    if isinstance(node, tuple):
        children = [_slice(child, rows, num_rows) for child in node]
        return kind(*children) if hasattr(node, "_fields") else kind(children)  # a named tuple, or torch.return_types
    if kind in pytree.SUPPORTED_NODES:
        return pytree.tree_map(
            lambda child: _slice(child, rows, num_rows), node, is_leaf=lambda child: child is not node
        )
    return node


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS) and leaf.ndim > 0


def _is_column(node: Any, rows: int) -> bool:
    """Whether a list holds one plain value per row, or a tuple one text per row, as a DataLoader collates texts."""
    kinds = _SHARED if isinstance(node, list) else (str, bytes)
    return len(node) == rows and all(isinstance(value, kinds) for value in node)
