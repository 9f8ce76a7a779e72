"""Split a batch into parts along its rows: dimension 0 of every tensor in it, and entries of its lists of samples."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from memkit._core.attributes import attributes_of
from memkit._core.errors import InputError, InputTypeError
from memkit._recovery.attempt import Done, attempt, insist, unless_failed
from memkit._torch.fake import FakeTensor
from memkit._torch.pytree import children_of, with_children
from memkit.train.samples import ARRAYS, PLAIN, SampleList, mark_samples

SplitFn = Callable[[Any, int], list[Any]]
Tree = TypeVar("Tree")

_CALL = "splitting a batch"
_WAY_OUT = "give each tensor in it one row for each sample, or leave it out of the batch."
_SPLIT_FN = "pass split_fn=..., which takes (batch, n) and returns a list of n parts."
_ATOMS = (torch.Tensor, *PLAIN)
_OF_GRAPHS = ("graphs", "nodes", "edges")
_NUM_SIGNS = 6
_ALL_SIGNS, _NO_SIGNS = [True] * _NUM_SIGNS, [False] * _NUM_SIGNS  # of a mask
_LEAVES = (np.ndarray, np.generic, SampleList, *PLAIN)


def count_rows(batch: Any) -> int:
    """Count the rows of a batch.

    Args:
        batch: A pytree (tensors, NumPy arrays, dicts and other mappings, lists, tuples, dataclasses) whose tensors of
            one or more dimensions all have the rows in dimension 0. 0-dim tensors and plain values belong to every row.
            A list with one entry for each row, or a list of samples, is cut between them; see `mark_samples`.

    Returns:
        The number of rows.

    Raises:
        InputError: The tensors disagree, there are none, or there is an object that cannot be inspected.
    """
    return _count(_leaves(mark_samples(batch)), _WAY_OUT, batch)


def survey(batch: Any, *, call: str = _CALL) -> tuple[int, str, list[torch.Tensor]]:
    """Return the row count, the shape key and the tensors of a batch that may have to be split, in one pass.

    The key describes the shapes without the rows: for one key, memory is proportional to the number of rows.

    Args:
        batch: The batch, as `mark_samples` returns it.
        call: The user's call, for messages.
    """
    leaves = _leaves(batch, _SPLIT_FN, call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) < len(leaves) and any(isinstance(leaf, SampleList) for leaf in leaves):
        tensors = list_tensors(batch)
    return _count(leaves, _SPLIT_FN, batch, call), _key(leaves), tensors


class Surveyor:
    """Surveys one batch after the other, and reuses the last survey for a batch of the same shapes and dtypes.

    Args:
        call: The user's call, for messages.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._last: tuple[object, int, str] = None, 0, ""

    def survey(self, batch: Any) -> tuple[Any, int, str, list[torch.Tensor]]:
        """Return a batch as `mark_samples` returns it, and its `survey`.

        Raises:
            InputError: Its tensors have no common number of rows.
        """
        tensors, fingerprint = batch_fingerprint(batch)
        known, size, key = self._last
        if fingerprint is not None and fingerprint == known:
            return batch, size, key, tensors
        marked = mark_samples(batch)
        size, key, tensors = survey(marked, call=self._call)
        self._last = fingerprint if marked is batch else None, size, key
        return marked, size, key, tensors


def batch_fingerprint(batch: Any) -> tuple[list[Any], object]:
    """Return a batch's entries, and everything that its survey depends on; None unless all entries are tensors."""
    kind = type(batch)
    columns = batch.values() if kind is dict else batch if kind is tuple or kind is list else (batch,)
    entries = list(columns)
    fingerprint = []
    for each in entries:
        if type(each) is not torch.Tensor or each.is_nested:
            return entries, None
        fingerprint.append((each.shape, each.dtype, each.layout))
    return entries, (kind, fingerprint) if fingerprint else None


def _count(leaves: list[Any], fix: str, batch: Any, call: str = _CALL) -> int:
    sizes: set[int] = {leaf.shape[0] for leaf in leaves if isinstance(leaf, ARRAYS) and leaf.ndim > 0}
    sizes.update([len(leaf.items) for leaf in leaves if isinstance(leaf, SampleList)])
    if len(sizes) == 1:
        return sizes.pop()
    raise InputError(
        call,
        got=f"tensors with {sorted(sizes)} rows" if sizes else "no tensor with rows",
        expected="tensors that all have the rows in dimension 0",
        fix=_way_out(batch, fix),
    )


def _way_out(node: Any, fix: str) -> str:
    """Return the way out for an object, or a batch, that cannot be cut along rows: a function that splits it."""
    packages = {base.__module__.partition(".")[0] for base in type(node).__mro__}
    if "torch_geometric" in packages:
        return "pass split_fn=memkit.integrations.torch_geometric.split_graphs."
    if "dgl" in packages:
        return "pass split_fn=..., which takes (batch, n) and returns dgl.batch(...) of n runs of dgl.unbatch(batch)."
    if isinstance(node, Mapping) and "offset" in node:
        return "pass split_fn=memkit.points.split_packed."
    if type(node) is list and len(node) > 1:
        return f"if it is a list of samples, let each be a tuple: [(each,) for each in batch]; else {fix}"
    return fix


def has_unlike_rows(batch: Any) -> bool:
    """Return whether parts of a batch with as many rows may differ by what no tensor's shape shows.

    These are lists of samples of different sizes, and what only the code that reads it knows: arrays and text.
    """
    return any(map(_is_unlike, list_leaves(mark_samples(batch))))


def _is_unlike(leaf: Any) -> bool:
    if isinstance(leaf, SampleList):
        return len({tuple(tuple(each.shape) for each in list_tensors(item)) for item in leaf.items}) > 1
    return isinstance(leaf, (str, bytes)) or (isinstance(leaf, np.ndarray) and leaf.ndim > 0)


def take_rows(batch: Any, start: int, stop: int, *, num_rows: int | None = None) -> Any:
    """Take the rows ``start:stop`` of a batch that `mark_samples` has returned, or of a part of it.

    Tensors become views, containers keep their type.
    """
    return _slice(batch, slice(start, stop), count_rows(batch) if num_rows is None else num_rows)


def pick_rows(batch: Any, rows: list[int], *, num_rows: int) -> Any:
    """Take rows by their numbers, in that order: like `take_rows`, but tensors become copies."""
    return _slice(batch, rows, num_rows)


def split_batch(batch: Any, num_parts: int, *, num_rows: int | None = None, call: str = _CALL) -> list[tuple[Any, int]]:
    """Split a batch into parts of nearly equal size, the larger ones first.

    Args:
        batch: Same as for `count_rows`, as `mark_samples` returns it, or a part of it.
        num_parts: Number of parts; a batch with fewer rows gives one part per row.
        num_rows: Rows of the batch, if known.
        call: The user's call, for messages.

    Returns:
        The parts with their numbers of rows, in order. A single part is the batch itself.

    Raises:
        InputError: A list holds as many numbers as there are rows, so it may be one per row or a size shared by all; or
            as many tensors, and these as many rows; or a mask is square, and so may belong to all rows.
    """
    rows = count_rows(batch) if num_rows is None else num_rows
    num_parts = max(1, min(num_parts, rows))
    if num_parts == 1:
        return [(batch, rows)]
    _refuse_ambiguous(batch, rows, call)
    smaller, num_larger = divmod(rows, num_parts)
    edges = [part * smaller + min(part, num_larger) for part in range(num_parts + 1)]
    return [(_slice(batch, slice(start, stop), rows), stop - start) for start, stop in itertools.pairwise(edges)]


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenate parts along their rows: the inverse of `take_rows`, also for parts of several batches.

    Raises:
        InputError: The parts have different structures, or differ in a value that belongs to every row.
    """
    return parts[0] if len(parts) == 1 else _join(parts, [_count(_leaves(part), _WAY_OUT, part) for part in parts])


def _key(leaves: list[Any]) -> str:
    return ";".join([_key_of(leaf) for leaf in leaves if _has_rows(leaf) or isinstance(leaf, SampleList)])


def _key_of(leaf: Any) -> str:
    if isinstance(leaf, SampleList):  # of any sizes, so that not each batch has a key of its own
        return f"samples {[(each.ndim, str(each.dtype)) for each in list_tensors(leaf.items[:1])]}"
    return f"{tuple(leaf.shape[1:])}{leaf.dtype}"


def check_batch(batch: object, *, call: str, written: str = "trainer.train_step({}, loss_fn)") -> None:
    """Check that an object without rows is a batch at all.

    Args:
        batch: The object passed as a batch.
        call: The user's call, for messages.
        written: The call as the user writes it, with ``{}`` in place of the batch.

    Raises:
        InputTypeError: It is None, a data loader, a dataset or an iterator.
    """
    if batch is None or isinstance(batch, Iterator | DataLoader | Dataset):
        raise InputTypeError(
            call,
            got="None" if batch is None else f"a {type(batch).__name__}",
            expected="one batch: tensors in dicts, lists, tuples or objects",
            fix="pass the tensors that your function takes; if it takes no data, an empty tuple: "
            f"{written.format('()')}"
            if batch is None
            else f"write for batch in loader: {written.format('batch')}",
        )


def count_elements(batch: Any) -> int:
    """Count the elements of all tensors: the size of a packed batch, whose rows are not samples."""
    return sum(tensor.numel() for tensor in list_tensors(batch))


def cut_batch(
    batch: Any, num_parts: int, *, size: int, split_fn: SplitFn | None, call: str = _CALL
) -> list[tuple[Any, int]]:
    """Split a batch, with the user's own function if there is one.

    Args:
        batch: The batch, or a part of it.
        num_parts: Number of parts.
        size: Its rows, or its elements.
        split_fn: Splits a packed batch; None splits rows.
        call: The user's call, for messages.

    Returns:
        The parts with their sizes, in order.

    Raises:
        InputError: ``split_fn`` did not return a list of parts, or has dropped a part of the batch.
    """
    if num_parts <= 1:
        return [(batch, size)]
    if split_fn is None:
        return split_batch(batch, num_parts, num_rows=size, call=call)
    parts = split_fn(batch, num_parts)
    if type(parts) is not list or not parts:
        raise InputError(
            f"split_fn(batch, {num_parts})",
            got=f"{parts!r:.60}",
            expected="a list of at least one part",
            fix="return a list of batches, one for each part.",
        )
    _check_kept(batch, num_parts, parts)
    return [(each, count_elements(each)) for each in parts]


def _check_kept(batch: Any, num_parts: int, parts: Sequence[Any]) -> None:
    """Check that the parts of a batch together have all that it has."""
    if isinstance(batch, Mapping) and all(isinstance(part, Mapping) for part in parts):
        for key in batch:
            if any(key not in part for part in parts) and list_tensors(batch[key]):
                whose = "any part" if all(key not in part for part in parts) else "each part"
                raise _dropped(num_parts, f"no {key!r} in {whose}", "every entry of the batch")
    for unit, before, now in _totals(batch, parts):
        if now < before:
            got = f"{now} of {before} {unit}, in {len(parts)} part{'s' * (len(parts) > 1)}"
            raise _dropped(num_parts, got, f"all {unit} of the batch")


def _totals(batch: Any, parts: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield what a batch consists of, its number, and that of all parts: graphs, nodes, edges, entries, rows.

    Rows count if all tensors have fewer of them: a single one may have been trimmed of padding, or be shared. The
    places where samples start say nothing, since each part has the place of an end too.
    """
    graphs = _count_graphs(parts)
    for unit, number in _count_graphs([batch]).items():
        yield unit, number, graphs.get(unit, number)
    if isinstance(batch, list) and all(isinstance(part, list) for part in parts):
        yield "entries", len(batch), sum(map(len, parts))
        return
    whole, rows = _rows_of_parts(batch, parts)
    counts = list(rows.values())
    before, now = min(counts, key=lambda each: each[1] - each[0], default=(0, 0))
    is_less = now < before
    if is_less and all(less < more or _are_starts(whole[place], counts) for place, (more, less) in rows.items()):
        yield "rows", before, now


def _rows_of_parts(batch: Any, parts: Sequence[Any]) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, int]]]:
    """Return a batch's tensors by their places, and for each its rows and those of its parts together.

    There are none if a part has tensors in other places. A part may have its keys in another order.
    """
    whole, *found = (dict(_places(one)) for one in (batch, *parts))
    if any(each.keys() != whole.keys() for each in found):
        return {}, {}
    return whole, {place: _num_rows(each, *(part[place] for part in found)) for place, each in whole.items()}


def _places(node: Any, place: str = "batch", *, is_attribute: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with rows that `list_tensors` finds, after the place that it has in a batch."""
    if isinstance(node, torch.Tensor):
        if node.dim():
            yield place, node
        return
    if isinstance(node, _LEAVES):
        return
    entries: list[tuple[str, Any]] = []
    if isinstance(node, Mapping):
        entries = [(f"{place}[{key!r}]", each) for key, each in node.items()]
    elif (children := children_of(node)) is not None:
        names = [f".{each.name}" for each in fields(node)] if is_dataclass(node) else []
        names = names if len(names) == len(children) else [f"[{index}]" for index in range(len(children))]
        entries = [(place + name, each) for name, each in zip(names, children, strict=True)]
    elif not is_attribute:  # an object; not one in its attributes
        entries, is_attribute = [(f"{place}.{name}", each) for name, each in attributes_of(node).items()], True
    for where, each in entries:
        yield from _places(each, where, is_attribute=is_attribute)


def added_names(batch: Any, part: Any) -> list[str]:
    """Return the keys and attributes that a part of a batch has and the batch has not: its forward wrote them."""
    if isinstance(part, torch.Tensor) or type(part) is not type(batch):
        return []
    if isinstance(part, Mapping):
        return [str(name) for name in part if name not in batch]
    if isinstance(part, (tuple, list)):
        pairs = zip(batch, part, strict=False) if len(batch) == len(part) else ()
        return [name for one, other in pairs for name in added_names(one, other)]
    return [name for name in getattr(part, "__dict__", ()) if name not in vars(batch)]


def names_in(batch: Any) -> set[str]:
    """Return the keys and attributes of a batch, where `added_names` looks for them."""
    if isinstance(batch, torch.Tensor):
        return set()
    if isinstance(batch, (tuple, list)):
        return set().union(*map(names_in, batch))
    return set(map(str, batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", ())))


def rows_left_out(batch: Any, parts: Sequence[Any]) -> str:
    """Describe the rows of a tensor that are in none of the parts, where other tensors are complete; or ""."""
    whole, rows = _rows_of_parts(batch, parts)
    for place, (before, now) in rows.items():
        if now < before and not _are_starts(whole[place], list(rows.values())):
            return f"{now} of {before} rows of {place}, a tensor of the shape {tuple(whole[place].shape)}"
    return ""


def _count_graphs(graphs: Any) -> dict[str, int]:
    """Count the graphs of PyTorch Geometric or DGL in anything, and their nodes and edges."""
    leaves: list[Any] = []
    _collect(graphs, leaves)
    counts: dict[str, int] = {}
    for leaf in leaves:
        numbers = {} if isinstance(leaf, _ATOMS) else {name: getattr(leaf, f"num_{name}", None) for name in _OF_GRAPHS}
        if numbers.get("nodes") is not None:
            numbers["graphs"] = 1 if numbers["graphs"] is None else numbers["graphs"]
            for name, given in numbers.items():
                number = given() if callable(given) else given
                counts[name] = counts.get(name, 0) + (number if isinstance(number, int) else 0)
    return counts


def _num_rows(whole: torch.Tensor, *parts: torch.Tensor) -> tuple[int, int]:
    """Return the rows of a tensor and of its parts together; of edges, columns: both ends are in each part."""
    dim = int(all(each.dim() == 2 and len(each) == 2 for each in (whole, *parts)))
    return whole.shape[dim], sum(each.shape[dim] for each in parts)


def _are_starts(tensor: torch.Tensor, rows: Sequence[tuple[int, int]]) -> bool:
    """Return whether a tensor tells where the samples of a packed batch start, and the last one ends."""
    if tensor.dim() != 1 or tensor.is_floating_point() or isinstance(tensor, FakeTensor) or not len(tensor):
        return False
    first, last = tensor[[0, -1]].tolist()
    return first == 0 and last in {before for before, _ in rows}


def _dropped(num_parts: int, got: str, expected: str) -> InputError:
    return InputError(
        f"split_fn(batch, {num_parts})",
        got=got,
        expected=f"{expected}: dropped data is not trained on",
        fix="return parts that together have all of it; x.chunk(n) and torch.tensor_split(x, n) drop nothing.",
    )


def survey_packed(batch: Any) -> tuple[int, list[torch.Tensor]]:
    """Return the number of elements and the tensors of a batch that ``split_fn`` cuts.

    Raises:
        InputError: The batch has no tensors.
    """
    tensors = list_tensors(batch)
    if not tensors:  # otherwise it would silently never be split
        raise InputError(
            "splitting a batch with split_fn",
            got=f"a {type(batch).__name__} in which memkit finds no tensor",
            expected="tensors in dicts, lists, tuples, or in attributes of an object",
            fix="pass the batch as a dict of its tensors.",
        )
    return sum(tensor.numel() for tensor in tensors), tensors


def map_leaves(fn: Callable[[Any], Any], tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """Map a function over the leaves of nested containers: pytree's own, mappings, dataclasses; types are kept."""
    if isinstance(tree, SampleList):
        return tree.with_items(map_leaves(fn, tree.items, is_leaf))  # type: ignore[return-value]  # the same type
    children = None if isinstance(tree, _ATOMS) or (is_leaf is not None and is_leaf(tree)) else children_of(tree)
    if children is None:
        return fn(tree)  # type: ignore[no-any-return]
    return with_children(tree, [map_leaves(fn, child, is_leaf) for child in children])  # type: ignore[no-any-return]


def list_leaves(batch: Any) -> list[Any]:
    """List everything in the containers of a batch, as `mark_samples` returns it."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    return leaves


def list_tensors(batch: Any) -> list[torch.Tensor]:
    """List all tensors of a batch, including those in attributes of its objects."""
    return [leaf for leaf in list_arrays(batch) if isinstance(leaf, torch.Tensor)]


def list_arrays(batch: Any) -> list[Any]:
    """List all tensors and NumPy arrays of a batch, including those in attributes of its objects."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    for leaf in tuple(leaves):
        if isinstance(leaf, SampleList):
            leaves += list_arrays(leaf.items)
        elif not isinstance(leaf, ARRAYS):  # an object may hold its tensors in attributes, as PyG's batches do
            _collect(attributes_of(leaf), leaves)
    return [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]


def copied(batch: Tree) -> Tree:
    """Return a batch with copies of its tensors, arrays and objects, for a run that may write to them."""
    return map_leaves(_own, batch)


def _own(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        own = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if vars(leaf):
            _carry_attributes(leaf, own, is_whole=True)
        return own
    if isinstance(leaf, PLAIN):
        return leaf
    outcome = unless_failed((Exception,), copy.deepcopy, leaf)
    return outcome.result if isinstance(outcome, Done) else leaf


def has_no_rows(batch: Any) -> bool:
    """Return whether a batch has no tensor with rows, or an object that cannot be cut, such as a graph."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    is_empty = not any(_has_rows(leaf) or isinstance(leaf, SampleList) for leaf in leaves)
    return is_empty or not all(map(_may_be_cut, leaves))


def _may_be_cut(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_nested
    return isinstance(leaf, _LEAVES)


def structure_of(batch: Any) -> tuple[object, ...]:
    """Return dtypes and dimensions of tensors, and other types; not sizes, which vary between text batches."""
    leaves: list[Any] = []
    _collect(batch, leaves)
    return tuple(_structure_of_leaf(leaf) for leaf in leaves)


def _structure_of_leaf(leaf: Any) -> object:
    if isinstance(leaf, SampleList):
        return structure_of(tuple(leaf.items[:1]))
    return (leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf)


def _leaves(batch: Any, fix: str = _WAY_OUT, call: str = _CALL) -> list[Any]:
    leaves: list[Any] = []
    _collect(batch, leaves)
    for leaf in leaves:
        if not _may_be_cut(leaf):
            kind = " that is sparse or nested" if isinstance(leaf, torch.Tensor) else ""
            raise InputError(
                call,
                got=f"a {type(leaf).__name__} in it{kind}",
                expected="tensors, arrays and plain values in dicts, lists, tuples and dataclasses",
                fix=_way_out(leaf, fix),
            )
    return leaves


def _collect(batch: Any, leaves: list[Any]) -> None:
    """Append the leaves; handles the usual containers without torch's pytree, which costs 20 microseconds a batch."""
    children = None if isinstance(batch, _ATOMS) else children_of(batch)
    if children is None:
        leaves.append(batch)
        return
    for child in children:
        _collect(child, leaves)


def _slice(node: Any, rows: slice | list[int], num_rows: int) -> Any:
    """Take rows of a batch that `mark_samples` has returned."""
    if isinstance(node, ARRAYS):
        if node.ndim == 0:
            return node
        if not isinstance(node, torch.Tensor):
            return node[rows]
        # Else what a part's forward writes into it (coordinates += update) would join the graphs of all parts.
        part = node[rows] if node.requires_grad else node[rows].detach()
        if vars(node):
            _carry_attributes(node, part, is_whole=isinstance(rows, slice) and len(part) == len(node))
        return part
    if isinstance(node, SampleList):
        return node.with_items(_items(node.items, rows))
    if type(node) in (tuple, list) and _is_column(node, num_rows):
        return _items(node, rows)
    children = children_of(node)
    return node if children is None else with_children(node, [_slice(child, rows, num_rows) for child in children])


def _carry_attributes(source: torch.Tensor, part: torch.Tensor, *, is_whole: bool) -> None:
    """Give a part, or a copy, the Python attributes of a tensor that its class has not given it already.

    Args:
        source: The tensor.
        part: Some of its rows.
        is_whole: Whether these are all of its rows, in order.

    Raises:
        InputError: An attribute may have an entry for each row of the tensor, and the part has not these rows.
    """
    missing = _attributes_missing_in(part, source)
    for name, value in missing.items():
        if not is_whole and _may_have_rows(value, len(source)):
            raise InputError(
                _CALL,
                got=f"a {type(source).__name__} of {len(source)} rows, whose attribute {name!r} has as many",
                expected="attributes that belong to all rows: only the tensor itself is cut",
                fix=f"put it into the batch beside the tensor, {{'x': x, {name!r}: x.{name}}}; if it belongs to "
                "all rows, make it a tuple.",
            )
    vars(part).update(missing)


def _attributes_missing_in(part: torch.Tensor, source: torch.Tensor) -> dict[str, Any]:
    if type(source).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return {}  # they make up the tensor: a fake one's memory, a sharded one's placement
    return {name: value for name, value in vars(source).items() if name not in vars(part)}


def _may_have_rows(value: Any, num_rows: int) -> bool:
    is_list = type(value) is list and len(value) == num_rows
    return is_list or any(_has_rows(each) and len(each) == num_rows for each in list_leaves(value))


def _items(node: Any, rows: slice | list[int]) -> Any:
    return node[rows] if isinstance(rows, slice) else type(node)(node[row] for row in rows)


def _join(nodes: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Undo `_slice` for parts with the given numbers of rows."""
    first, kind = nodes[0], type(nodes[0])
    if all(type(node) is kind for node in nodes):
        if all(map(_has_rows, nodes)):
            return _join_tensors(nodes) if isinstance(first, torch.Tensor) else np.concatenate(nodes)
        if kind in (tuple, list) and all(map(_is_column, nodes, sizes)):
            return kind(itertools.chain.from_iterable(nodes))
        if kind is SampleList:
            items = itertools.chain.from_iterable(node.items for node in nodes)
            return first.with_items(type(first.items)(items))
        levels = _levels_of(nodes)
        if levels:
            return with_children(first, [_join(column, sizes) for column in zip(*levels, strict=True)])
    if all(_is_shared(node) and _is_same(node, first) for node in nodes):
        return first  # it belongs to every row
    raise InputError(
        "putting the rows of several batches together",
        got=", ".join(dict.fromkeys(f"{list(node) if isinstance(node, Mapping) else node!r:.40}" for node in nodes)),
        expected="batches of the same structure, and equal values where one value belongs to all rows",
        fix="remove this entry from the batch, or give one value per row.",
    )


def _join_tensors(nodes: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = torch.cat(list(nodes))
    if any(map(vars, nodes)):
        first, *others = [_attributes_missing_in(joined, node) for node in nodes]
        if not all(_are_same(each, first) for each in others):
            raise InputError(
                "putting the rows of several batches together",
                got=f"tensors of the type {type(nodes[0]).__name__} with different attributes",
                expected="equal values where one value belongs to all rows",
                fix="put what differs into the batch beside the tensor, one value per row.",
            )
        vars(joined).update(first)
    return joined


def _are_same(attributes: dict[str, Any], others: dict[str, Any]) -> bool:
    same = unless_failed((Exception,), lambda: all(map(_is_same, attributes.values(), others.values())))
    return attributes.keys() == others.keys() and isinstance(same, Done) and same.result


def _levels_of(nodes: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the entries of each of several containers, in the order of the first; empty if they differ."""
    if isinstance(nodes[0], Mapping):
        is_alike = all(node.keys() == nodes[0].keys() for node in nodes)
        return [[node[key] for key in nodes[0]] for node in nodes] if is_alike else []
    levels = [children for node in nodes if (children := children_of(node)) is not None]
    return levels if len(levels) == len(nodes) and len(set(map(len, levels))) == 1 else []


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, ARRAYS) and leaf.ndim > 0


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *_LEAVES)) and not _has_rows(leaf)


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two shared values are equal (NaN equals NaN); an identical object is not read from its device."""
    return value is other or bool(value == other) or bool((value != value) & (other != other))


def _is_column(node: Any, rows: int) -> bool:
    """Return whether a list or tuple holds one string per row, as a DataLoader collates strings."""
    return len(node) == rows and all(isinstance(value, (str, bytes)) for value in node)


def _refuse_ambiguous(batch: Any, num_rows: int, call: str) -> None:
    """Refuse a list that may hold one value per row or just happen to be as long, such as the size [224, 224, 3, 1]."""
    nodes = [batch]
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.Tensor):
            if node.shape == (num_rows, num_rows):
                _refuse_mask(node, call)
        elif isinstance(node, SampleList):
            if node.is_open:
                raise InputError(
                    call,
                    got=f"a list of {num_rows} tensors of {num_rows} rows in a batch of {num_rows} rows",
                    expected="an unambiguous choice between one entry for each row and one row in each entry",
                    fix="make it a list of tuples, [(each,) for each in entries], if it has one entry per row, or a "
                    "dict of its entries if these have one row for each.",
                )
        elif type(node) is list and len(node) == num_rows and _is_plain(node) and not _is_column(node, num_rows):
            raise InputError(
                call,
                got=f"{node!r:.60}, as many values as the batch has rows",
                expected="an unambiguous choice between one value per row and one value for all rows",
                fix="make it a tensor if it has one value per row, or a tuple if it belongs to all rows.",
            )
        elif not isinstance(node, PLAIN):
            nodes += children_of(node) or ()


def _is_plain(node: Sequence[Any]) -> bool:
    return bool(node) and all(isinstance(value, PLAIN) for value in node)


def _refuse_mask(tensor: torch.Tensor, call: str) -> None:
    """Refuse a mask of as many columns as rows that is causal or symmetric: it belongs to positions, not to samples."""
    if len(tensor) < 2 or tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return
    if not (tensor.dtype == torch.bool or tensor.is_floating_point()) or not _is_mask(tensor):
        return
    raise InputError(
        call,
        got=f"a mask of shape {tuple(tensor.shape)} in a batch of {len(tensor)} rows, which looks as if it belongs to "
        "all rows: cut into parts, it would be a different mask",
        expected="tensors that have one row for each sample",
        fix="keep it out of the batch: make it in the model, or in loss_fn; if it has one row for each sample, pass "
        "mask[:, None], or split_fn=...",
    )


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a matrix is a causal or symmetric mask; where memory is short, fewer rows are looked at at once."""
    todo, signs = [slice(0, len(tensor))], _ALL_SIGNS
    while todo:
        rows = todo.pop()
        middle = (rows.start + rows.stop) // 2
        if middle == rows.start:
            found = insist(functools.partial(_signs_of_mask, tensor, rows), "looking for a mask in a batch")
        else:
            outcome = attempt(_signs_of_mask, tensor, rows)
            if not isinstance(outcome, Done):
                todo += [slice(middle, rows.stop), slice(rows.start, middle)]
                continue
            found = outcome.result
        signs = [each and other for each, other in zip(signs, found, strict=True)]
        if not any(signs):
            return False
    *are_causal, is_symmetric, is_constant = signs
    return any(are_causal) or (is_symmetric and not is_constant)


def _signs_of_mask(tensor: torch.Tensor, rows: slice) -> Sequence[bool]:
    """Whether some rows are those of a mask of each of four causal kinds, a symmetric one, one of equal values."""
    of_rows, first = tensor[rows], tensor[:1, :1]
    is_set, is_first_set, of_columns = of_rows, first, tensor[:, rows].T
    if tensor.is_floating_point():
        is_set, is_first_set = of_rows.isneginf(), first.isneginf()
        if not (is_set | (of_rows == 0)).all():
            return _NO_SIGNS
        of_columns = of_columns.isneginf()
    columns = torch.arange(len(tensor), device=tensor.device)
    below, above = (compare(columns, columns[rows, None]) for compare in (torch.le, torch.ge))
    kinds = (below, ~below, above, ~above, of_columns, is_first_set)
    signs: list[bool] = torch.stack([(is_set == each).all() for each in kinds]).tolist()
    return signs
