"""Containers of a batch, and which lists in it hold one entry per sample.

Tensors stacked by a collate function have the samples in dimension 0. Samples of different sizes cannot be stacked: a
batch of them is a list, or has lists, with one entry per sample, such as the images and the boxes of detection. Whether
a list holds samples or columns is decided once for the whole batch (`mark_samples`), not for each part: a part of three
images in RGB would look like columns of three rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from memkit._torch.pytree import children_of, with_children

ARRAYS = (torch.Tensor, np.ndarray)
PLAIN = (str, bytes, int, float, complex, bool, type(None))  # leaves that belong to every row
_SURELY_MANY = 4  # tensors of one kind: stacked columns of one kind are rarely more than three


class SampleList:
    """A list or tuple with one entry per sample, in a batch that `mark_samples` has returned.

    Attributes:
        items: The entries.
        is_open: Whether the list could just as well hold columns, with as many rows as it has entries.
        is_guess: Whether it could just as well hold columns with another number of rows: nothing in the batch decides.
    """

    __slots__ = ("is_guess", "is_open", "items")

    def __init__(self, items: list[Any] | tuple[Any, ...], *, is_open: bool = False, is_guess: bool = False) -> None:
        self.items, self.is_open, self.is_guess = items, is_open, is_guess

    def with_items(self, items: Any) -> SampleList:
        """Return a copy with other entries."""
        return SampleList(items, is_open=self.is_open, is_guess=self.is_guess)


def mark_samples(batch: Any) -> Any:
    """Return the batch with its lists of samples as `SampleList`; the batch itself if it has none.

    A list or tuple inside the batch is one if there is an entry for each row, and the entries are of one kind (tensors
    of one dtype and number of dimensions, mappings that share keys, tuples of one length, or other objects), or have no
    rows themselves; a list of plain values is none. A batch that is a list is one itself if the first dimensions of
    its tensors differ (of two or three tensors, only the first ones), or if it has none; where they agree, if it has
    four entries or more and they are not integers, or if the entries are tuples. A batch that is a tuple holds columns.

    Args:
        batch: The whole batch.
    """
    is_usual = type(batch) is torch.Tensor or (type(batch) is tuple and {*map(type, batch)} == {torch.Tensor})
    return batch if is_usual else _mark_samples(batch)


def _mark_samples(batch: Any) -> Any:
    every: list[tuple[Any, str]] = []
    sizes: set[int] = set()
    _search(batch, every, sizes, is_whole=True)
    found = [each for each in every if each[1] != "described"]
    if not found and len(sizes) > 1:
        return _as_one_sample(batch)
    is_alone = not sizes
    if is_alone:
        found = [each for each in found if each[1] == "either" or not _are_probably_columns(each[0])]
    marked, num_rows = _mark_found(found, sizes, is_alone=is_alone)
    described = [node for node, reading in every if reading == "described" and not _has_columns(node)]
    if is_alone and not found:
        lengths = set(map(len, described))
        num_rows = lengths.pop() if len(lengths) == 1 else None
    marked |= {id(node): SampleList(node) for node in described if len(node) == num_rows}
    return _replace(batch, lambda node: marked.get(id(node), node)) if marked else batch


def _mark_found(
    found: Sequence[tuple[Any, str]], sizes: set[int], *, is_alone: bool
) -> tuple[dict[int, SampleList], int | None]:
    """Return the lists of samples that have tensors, by `id`, and the number of rows; None if it is not known."""
    marked: dict[int, SampleList] = {}
    if not found:
        return marked, next(iter(sizes)) if len(sizes) == 1 else None
    if is_alone:
        sizes = {len(node) for node, reading in found if reading == "samples"}
    is_known = bool(sizes)
    if not sizes:
        node = found[0][0]
        sizes = {len(node) if _are_probably_samples(node) else _first_dimension(node)}
    if len(sizes) != 1:
        return marked, None  # to be refused, or never cut
    (num_rows,) = sizes
    is_list_of_samples = any(reading == "samples" and len(node) == num_rows for node, reading in found)
    for node, reading in found:
        if len(node) != num_rows:
            continue
        is_both = reading == "either" and _first_dimension(node) == num_rows and not is_list_of_samples
        if is_both and not (_are_probably_samples(node) or (_are_images(node) and not is_alone)):
            continue
        is_sure = type(node[0]) is tuple  # no collate function makes a list of tuples
        is_decided = is_known or not isinstance(node[0], ARRAYS) or _are_images(node)
        is_guess = reading == "either" and not is_decided
        is_open = is_both and not (is_alone or is_sure)
        marked[id(node)] = SampleList(node, is_open=is_open, is_guess=is_guess)
    return marked, num_rows


def _has_columns(node: Sequence[Any]) -> bool:
    """Whether entries may be columns: a collate function makes tuples of as many texts as there are rows."""
    return any(type(each) in (list, tuple) and len(each) == len(node) for each in node)


def _as_one_sample(batch: Any) -> Any:
    """Return a batch whose columns disagree with its lists of one entry as `SampleList`: a last batch of one sample."""

    def mark(node: Any) -> Any:
        is_one = type(node) in (list, tuple) and len(node) == 1 and not isinstance(node[0], PLAIN)
        return SampleList(node) if is_one else node

    marked = mark(batch) if type(batch) is list else batch
    marked = _replace(batch, mark) if marked is batch else marked
    sizes: set[int] = set()
    _search(marked, [], sizes, is_whole=True)
    return marked if sizes == {1} else batch


def unmark_samples(batch: Any) -> Any:
    """Return a batch, or a part of it, with plain lists and tuples: the inverse of `mark_samples`."""
    return _replace(batch, lambda node: node.items if isinstance(node, SampleList) else node)


def _replace(node: Any, replace: Callable[[Any], Any]) -> Any:
    new = replace(node)
    if new is not node:
        return new
    children = None if isinstance(node, (*ARRAYS, *PLAIN)) else children_of(node)
    if children is None:
        return node
    changed = [_replace(child, replace) for child in children]
    is_same = all(map(operator.is_, changed, children))
    return node if is_same else with_children(node, changed)


def _search(node: Any, found: list[tuple[Any, str]], sizes: set[int], *, is_whole: bool = False) -> None:
    """Collect the lists that may hold samples, and the numbers of rows of all other tensors."""
    if isinstance(node, ARRAYS):
        if node.ndim:
            sizes.add(node.shape[0])
        return
    if isinstance(node, SampleList):
        sizes.add(len(node.items))
        return
    if isinstance(node, PLAIN):
        return
    kind = type(node)
    if kind in (list, tuple) and not is_whole and _is_described(node):
        found.append((node, "described"))
        return
    if kind is list or (kind is tuple and not is_whole):
        reading = _reading(node, is_whole=is_whole)
        if reading != "columns":
            found.append((node, reading))
            return
    for child in children_of(node) or ():
        _search(child, found, sizes)


def _is_described(node: Sequence[Any]) -> bool:
    """Return whether a list has entries without rows themselves: boxes' names, 0-dim tensors, lists of tokens."""
    return not all(isinstance(each, PLAIN) for each in node) and all(map(_has_no_rows, node))


def _has_no_rows(node: Any) -> bool:
    if isinstance(node, PLAIN):
        return True
    if isinstance(node, ARRAYS):
        return not node.ndim
    children = children_of(node)
    return children is not None and all(map(_has_no_rows, children))  # an object may have tensors in attributes


def _reading(node: Sequence[Any], *, is_whole: bool) -> Literal["columns", "samples", "either"]:
    """Return whether a list may hold columns (tensors with the rows in dimension 0), samples, or either."""
    if not node or isinstance(node[0], PLAIN) or not _are_of_one_kind(node):
        return "columns"
    if not isinstance(node[0], ARRAYS) and children_of(node[0]) is None:
        # Objects, such as graphs; next to tensors, also paths.
        return "samples" if not is_whole or hasattr(node[0], "__dict__") else "columns"
    sizes = _first_dimensions(node)
    if len(node) > 1 and (len(sizes) > 1 or (is_whole and not sizes)):
        return "samples"
    return "either" if sizes and len(node) > 1 else "columns"


def _are_of_one_kind(node: Sequence[Any]) -> bool:
    first, kind = node[0], type(node[0])
    if isinstance(first, ARRAYS):
        ndim, dtype = first.ndim, first.dtype
        return ndim > 0 and all(isinstance(each, ARRAYS) and (each.ndim, each.dtype) == (ndim, dtype) for each in node)
    if kind is list or any(type(each) is not kind for each in node):
        return False  # a collate function makes lists of columns in lists
    if isinstance(first, Mapping):
        return bool(set(first).intersection(*node[1:]))  # some samples may lack an entry
    return kind is not tuple or all(len(each) == len(first) for each in node)


def _first_dimensions(node: Sequence[Any]) -> set[int]:
    sizes: set[int] = set()
    todo = list(node)
    while todo:
        each = todo.pop()
        if isinstance(each, ARRAYS):
            sizes |= {each.shape[0]} if each.ndim else set()
        elif not isinstance(each, PLAIN):
            todo += children_of(each) or ()
    return sizes


def _first_dimension(node: Sequence[Any]) -> int:
    return min(_first_dimensions(node), default=0)


def _are_probably_columns(node: Sequence[Any]) -> bool:
    """Return whether two or three tensors are probably columns of different things, such as nodes and edges."""
    is_few = len(node) < _SURELY_MANY and isinstance(node[0], ARRAYS)
    return is_few and (node[0].ndim == 1 or len({tuple(each.shape[1:]) for each in node}) > 1)


def _are_images(node: Sequence[Any]) -> bool:
    return isinstance(node[0], ARRAYS) and node[0].ndim == 3 and node[0].shape[0] in (1, 3, 4)


def _are_probably_samples(node: Sequence[Any]) -> bool:
    """Return whether entries of equal first dimensions are more likely samples than columns.

    A DataLoader's own collate function makes lists of columns: two or three of a kind (noisy and clean images), or
    several of integers (tokens, masks, labels). It never makes a list of tuples.
    """
    first = node[0]
    if type(first) is tuple:
        return True
    is_integer = isinstance(first, torch.Tensor) and not first.is_floating_point() and first.dtype != torch.uint8
    return len(node) >= _SURELY_MANY and not is_integer


def doubt_of_columns(batch: Any, *, is_checked: bool) -> tuple[str, bool]:
    """Return what to say of a list of two or three tensors that is taken for columns, and whether to say it at once.

    They may as well be samples. Where they look like images in three colors, they rather are, but for a last batch of
    three rows. Where they have equal shapes, a check would tell, unless there is none.

    Args:
        batch: The batch.
        is_checked: Whether it is checked that its parts have the gradient of the whole.

    Returns:
        The text, empty if there is no doubt, and whether to say it at once.
    """
    is_few = type(batch) is list and 1 < len(batch) < _SURELY_MANY
    if not is_few or not isinstance(batch[0], ARRAYS) or not _are_of_one_kind(batch) or not batch[0].shape[0] > 1:
        return "", False
    number = len(batch)
    text = (
        f"the batch is a list of {number} tensors, which are treated as columns of {len(batch[0])} rows and split "
        f"along them. If they are {number} samples, let each be a tuple: [(each,) for each in batch]; if columns, pass "
        "tuple(batch)."
    )
    look_like_images = batch[0].ndim == 3 and batch[0].shape[0] == 3
    return text, look_like_images or not (is_checked or _are_probably_columns(batch))
