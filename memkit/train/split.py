"""Split a batch into parts along its rows: dimension 0 of every tensor in it."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from memkit._core.errors import InputError
from memkit._torch import pytree

SplitFn = Callable[[Any, int], list[Any]]
Tree = TypeVar("Tree")

_WAY_OUT = "give each tensor in it one row for each sample, or leave it out of the batch."
_SPLIT_FN = (
    "pass split_fn=..., which takes (batch, n) and returns a list of n parts; where no batch is ever to be cut, pass "
    "on_oom='raise'."
)
_ARRAYS = (torch.Tensor, np.ndarray)
_SHARED = (str, bytes, int, float, complex, bool, type(None))  # leaves that belong to every row
_LEAVES = (np.ndarray, np.generic, *_SHARED)


def count_rows(batch: Any, *, fix: str = _WAY_OUT) -> int:
    """Count the rows of a batch.

    Args:
        batch: A pytree (tensors, NumPy arrays, dicts and other mappings, lists, tuples) whose tensors of one or more
            dimensions all have the rows in dimension 0. 0-dim tensors and plain values belong to every row.
        fix: The fix that an error message suggests.

    Returns:
        The number of rows.

    Raises:
        InputError: The tensors disagree, there are none, or there is an object that cannot be inspected.
    """
    return _count(_leaves(batch, fix), fix)


def survey(batch: Any) -> tuple[int, str, list[torch.Tensor]]:
    """Return the row count, the `shape_key` and the tensors of a batch that may have to be split, in one pass."""
    leaves = _leaves(batch, _SPLIT_FN)
    return _count(leaves, _SPLIT_FN), _key(leaves), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _count(leaves: list[Any], fix: str) -> int:
    sizes: set[int] = {leaf.shape[0] for leaf in leaves if isinstance(leaf, _ARRAYS) and leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    raise InputError(
        "splitting a batch",
        got=f"tensors with {sorted(sizes)} rows" if sizes else "no tensor with rows",
        expected="tensors that all have the rows in dimension 0",
        fix=fix,
    )


def take_rows(batch: Any, start: int, stop: int, *, num_rows: int | None = None) -> Any:
    """Take the rows ``start:stop``; tensors become views, mappings and tuples keep their type."""
    return _slice(batch, slice(start, stop), count_rows(batch) if num_rows is None else num_rows)


def split_batch(batch: Any, num_parts: int, *, num_rows: int | None = None) -> list[tuple[Any, int]]:
    """Split a batch into parts of nearly equal size, the larger ones first.

    Args:
        batch: Same as for `count_rows`.
        num_parts: Number of parts; a batch with fewer rows gives one part per row.
        num_rows: Rows of the batch, if known.

    Returns:
        The parts with their numbers of rows, in order. A single part is the batch itself.

    Raises:
        InputError: A list holds as many numbers as there are rows, so it may be one per row or a size shared by all.
    """
    rows = count_rows(batch) if num_rows is None else num_rows
    num_parts = max(1, min(num_parts, rows))
    if num_parts == 1:
        return [(batch, rows)]
    _refuse_ambiguous(batch, rows)
    smaller, num_larger = divmod(rows, num_parts)
    edges = [part * smaller + min(part, num_larger) for part in range(num_parts + 1)]
    return [(_slice(batch, slice(start, stop), rows), stop - start) for start, stop in itertools.pairwise(edges)]


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenate parts along their rows: the inverse of `take_rows`, also for parts of several batches.

    Raises:
        InputError: The parts have different structures, or differ in a value that belongs to every row.
    """
    return parts[0] if len(parts) == 1 else _join(parts, [count_rows(part) for part in parts])


def shape_key(batch: Any) -> str:
    """Describe the shapes of a batch without its rows; for one key, memory is proportional to the number of rows."""
    return _key(_leaves(batch))


def _key(leaves: list[Any]) -> str:
    return ";".join([f"{tuple(leaf.shape[1:])}{leaf.dtype}" for leaf in leaves if _has_rows(leaf)])


def count_elements(batch: Any) -> int:
    """Count the elements of all tensors: the size of a packed batch, whose rows are not samples."""
    return sum(tensor.numel() for tensor in list_tensors(batch))


def cut_batch(batch: Any, num_parts: int, *, size: int, split_fn: SplitFn | None) -> list[tuple[Any, int]]:
    """Split a batch, with the user's own function if there is one.

    Args:
        batch: The batch, or a part of it.
        num_parts: Number of parts.
        size: Its size as returned by `measure_batch`.
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
            fix="return a list of batches, one for each part.",
        )
    return [(each, count_elements(each)) for each in parts]


def measure_batch(batch: Any, split_fn: SplitFn | None, *, may_cut: bool) -> int:
    """Return a batch's size: rows, or elements of a packed batch.

    Args:
        batch: The batch.
        split_fn: Splits a packed batch; None splits rows.
        may_cut: Whether the batch may have to be split. If not, a batch without common rows has size 1.

    Raises:
        InputError: There is nothing to count.
    """
    if split_fn is None:
        try:
            return count_rows(batch, fix=_SPLIT_FN)
        except InputError:
            if may_cut:
                raise
            return 1
    if not list_tensors(batch):  # otherwise it would silently never be split
        raise InputError(
            "splitting a batch with split_fn",
            got=f"a {type(batch).__name__} in which memkit finds no tensor",
            expected="tensors in dicts, lists, tuples, or in attributes of an object",
            fix="pass the batch as a dict of its tensors.",
        )
    return count_elements(batch)


def map_leaves(fn: Callable[[Any], Any], tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Map a function over the leaves of nested containers (pytree's own, any mutable mapping), keeping their types."""

    def apply(leaf: Any) -> Any:
        if not isinstance(leaf, MutableMapping) or (is_leaf is not None and is_leaf(leaf)):
            return fn(leaf)
        mapped: Any = copy.copy(leaf)
        for key, value in leaf.items():
            mapped[key] = map_leaves(fn, value, is_leaf)
        return mapped

    whole: Tree = pytree.tree_map(apply, tree, is_leaf=is_leaf)
    return whole


def list_tensors(batch: Any) -> list[torch.Tensor]:
    """List all tensors of a batch, including those in attributes of its objects."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    for leaf in tuple(leaves):
        if not isinstance(leaf, torch.Tensor):  # an object may hold its tensors in attributes, as PyG's batches do
            _collect(getattr(leaf, "__dict__", {}), leaves)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def structure_of(batch: Any) -> tuple[object, ...]:
    """Return dtypes and dimensions of tensors, and types of all else; not sizes, which vary between text batches."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    return tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)


def _leaves(batch: Any, fix: str = _WAY_OUT) -> list[Any]:
    leaves: list[Any] = []
    _collect(batch, leaves)
    for leaf in leaves:
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor and leaf.layout is torch.strided and not leaf.is_nested:
            continue
        is_plain = not is_tensor
        if not (is_plain and isinstance(leaf, _LEAVES)):
            raise InputError(
                "splitting a batch",
                got=f"a {type(leaf).__name__} in it" + ("" if is_plain else " that is sparse or nested"),
                expected="tensors, arrays and plain values in dicts, lists and tuples",
                fix=fix,
            )
    return leaves


def _collect(batch: Any, leaves: list[Any]) -> None:
    """Append the leaves; handles the usual containers without torch's pytree, which costs 20 microseconds a batch."""
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
    """Take rows of a batch; handles the usual containers without torch's pytree."""
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


def _join(nodes: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Undo `_slice` for parts with the given numbers of rows."""
    first, kind = nodes[0], type(nodes[0])
    if all(type(node) is kind for node in nodes):
        if all(map(_has_rows, nodes)):
            return torch.cat(list(nodes)) if isinstance(first, torch.Tensor) else np.concatenate(nodes)
        if kind in (tuple, list) and all(map(_is_column, nodes, sizes)):
            return kind(itertools.chain.from_iterable(nodes))
        if isinstance(first, Mapping):
            if all(node.keys() == first.keys() for node in nodes):
                whole: Any = {} if kind is dict else copy.copy(first)
                for key in first:
                    whole[key] = _join([node[key] for node in nodes], sizes)
                return whole
        elif kind in pytree.SUPPORTED_NODES or isinstance(first, tuple):
            levels = [pytree.tree_flatten(node, is_leaf=functools.partial(operator.is_not, node)) for node in nodes]
            if all(spec == levels[0][1] for _, spec in levels):
                columns = zip(*(children for children, _ in levels), strict=True)
                return pytree.tree_unflatten([_join(column, sizes) for column in columns], levels[0][1])
    if all(_is_shared(node) and _is_same(node, first) for node in nodes):
        return first  # it belongs to every row
    raise InputError(
        "putting the rows of several batches together",
        got=", ".join(dict.fromkeys(f"{list(node) if isinstance(node, Mapping) else node!r:.40}" for node in nodes)),
        expected="batches of the same structure, and equal values where one value belongs to all rows",
        fix="remove this entry from the batch, or give one value per row.",
    )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS) and leaf.ndim > 0


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *_LEAVES)) and not _has_rows(leaf)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two shared values are equal (NaN equals NaN); an identical object is not read from its device."""
    return value is other or bool(value == other) or bool((value != value) & (other != other))


def _is_column(node: Any, rows: int) -> bool:
    """Return whether a list or tuple holds one string per row, as a DataLoader collates strings."""
    return len(node) == rows and all(isinstance(value, (str, bytes)) for value in node)


def _refuse_ambiguous(batch: Any, num_rows: int) -> None:
    """Refuse a list that may hold one value per row or just happen to be as long, such as the size [224, 224, 3, 1]."""
    nodes = [batch]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            nodes += node.values()
        elif isinstance(node, (list, tuple)):
            is_plain = bool(node) and all(isinstance(value, _SHARED) for value in node)
            if type(node) is list and len(node) == num_rows and is_plain and not _is_column(node, num_rows):
                raise InputError(
                    "splitting a batch",
                    got=f"{node!r:.60}, as many values as the batch has rows",
                    expected="an unambiguous choice between one value per row and one value for all rows",
                    fix="make it a tensor if it has one value per row, or a tuple if it belongs to all rows.",
                )
            if not is_plain:
                nodes += node
