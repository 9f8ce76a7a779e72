"""Split a PyTorch Geometric batch between its graphs: a `split_fn` for the training wrapper."""

# ruff: noqa: SLF001 - the rows of each graph are in private attributes of the batch; the public way, graph after graph,
# takes 8 to 120 times as long (docs/batches.md)

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch

from memkit._core.errors import InputError, InputTypeError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.points.packed import cut_evenly


@guided(words={"n": "num_parts chunks"})
def split_graphs(batch: Any, n: int) -> list[Any]:
    """Split a `torch_geometric.data.Batch` into about n batches, between its graphs.

    Each part equals ``Batch.from_data_list(batch[first:last])``: graphs in order, with ``batch``, ``ptr``, the vectors
    of ``follow_batch``, and renumbered nodes; this includes `HeteroData`, custom ``__inc__`` and ``__cat_dim__``, and
    nested attributes. Of all ways to cut the graphs into n runs, it picks one whose largest part has the fewest nodes
    and edges; if one graph outweighs the others, there may be fewer parts.

    Args:
        batch: A batch created by ``Batch.from_data_list``, as by PyG's ``DataLoader``, of `Data` or `HeteroData`.
        n: Maximum number of parts.

    Returns:
        Batches of the same class. A single part is the batch itself.

    Raises:
        InputTypeError: It is not such a batch. ``NeighborLoader`` yields one graph around its seed nodes: use a smaller
            ``batch_size`` there, and `GradientAccumulator`.
        InputError: ``n`` is less than 1; or an attribute was added, or its rows changed, after the graphs were batched,
            so the graph of each row is unknown; or it is sparse, nested, or an `EdgeIndex`.

    Memory cost: attributes are views, except those that hold node numbers: ``edge_index``, ``batch`` and ``ptr`` of the
    parts are new. Time cost: see ``docs/batches.md``.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from memkit.integrations.torch_geometric import split_graphs
        >>> def ring(n):
        ...     return Data(x=torch.rand(n, 2), edge_index=torch.stack([torch.arange(n), torch.arange(n).roll(1)]))
        >>> parts = split_graphs(Batch.from_data_list([ring(3), ring(4), ring(9)]), 2)
        >>> [(part.num_graphs, part.num_nodes) for part in parts]
        [(2, 7), (1, 9)]
    """
    call = f"split_graphs(batch, {n})"
    Checker("split_graphs(batch, n)", InputError).whole("n", n, 1)
    if not isinstance(batch, Batch) or all("_slice_dict" not in vars(store) for store in batch.stores):
        _refuse_type(batch, call)
    borders = cut_evenly(_measure_graphs(batch), n)
    if len(borders) <= 2:
        return [batch]
    return [_Run(batch, first, last, call).take() for first, last in pairwise(borders)]


def _measure_graphs(batch: Any) -> list[int]:
    """Nodes plus edges of each graph, plus one, so that an empty graph has a size too."""
    sizes = torch.ones(batch.num_graphs, dtype=torch.int64)
    for store in batch.stores:
        if "ptr" in store:
            sizes += store["ptr"].diff().cpu()
        for name, slices in _noted(batch._slice_dict, store).items():
            if "edge_index" in name and isinstance(slices, Tensor) and slices.dim() == 1:
                sizes += slices.diff()
    counted: list[int] = sizes.tolist()
    return counted


def _noted(notes: Mapping[Any, Any], store: Any) -> dict[str, Any]:
    """PyG's notes on a store's attributes: under its key for a node or edge type, else at the top level."""
    own = notes if store._key is None else notes.get(store._key, {})
    return {name: note for name, note in own.items() if name in store}


@final
class _Run:
    """A run of consecutive graphs of a batch.

    Args:
        batch: The batch.
        first: The first graph.
        last: The one after the last.
        call: The user's call, for errors.
    """

    def __init__(self, batch: Any, first: int, last: int, call: str) -> None:
        self._batch, self._first, self._last, self._call = batch, first, last, call

    def take(self) -> Any:
        """Return the batch of these graphs."""
        part = copy.copy(self._batch)  # with its own stores
        slice_dict: dict[Any, Any] = {}
        inc_dict: dict[Any, Any] = {}
        for store, new in zip(self._batch.stores, part.stores, strict=True):
            slices, incs = _noted(self._batch._slice_dict, store), _noted(self._batch._inc_dict, store)
            own_slices: dict[str, Any] = {}
            own_incs: dict[str, Any] = {}
            for name in tuple(store):
                if name in slices:
                    rows = self._rows(store, name, store[name], slices[name], incs[name])
                    new[name], own_slices[name], own_incs[name] = rows
                elif name == "num_nodes" and "_num_nodes" in vars(store):
                    new._num_nodes = store._num_nodes[self._first : self._last]
                    new.num_nodes = sum(new._num_nodes)
                else:
                    new[name] = self._numbering(store, name)
            if store._key is None:
                slice_dict |= own_slices
                inc_dict |= own_incs
            elif own_slices:
                slice_dict[store._key], inc_dict[store._key] = own_slices, own_incs
        part._slice_dict, part._inc_dict, part._num_graphs = slice_dict, inc_dict, self._last - self._first
        return part

    def _rows(self, store: Any, name: str, value: Any, slices: Any, incs: Any) -> tuple[Any, Any, Any]:
        """Return one attribute of these graphs, with its notes."""
        if isinstance(value, Mapping):
            of_key = {key: self._rows(store, key, value[key], slices[key], incs[key]) for key in value}
            rows, new_slices, new_incs = ({key: each[place] for key, each in of_key.items()} for place in range(3))
            return rows, new_slices, new_incs
        if isinstance(slices, list):
            taken = [self._rows(store, name, *each) for each in zip(value, slices, incs, strict=True)]
            return [each[0] for each in taken], [each[1] for each in taken], [each[2] for each in taken]
        if isinstance(value, list):
            self._check_rows(name, len(value), slices)
            return value[self._first : self._last], self._rebase(slices), None
        is_plain = isinstance(value, Tensor) and not isinstance(value, (EdgeIndex, Index)) and not value.is_nested
        if not is_plain or value.layout is not torch.strided:
            self._refuse(name, f"a {type(value).__name__}", "tensors, lists, and dicts of them")
        dim = self._batch.__cat_dim__(name, value, store) or 0  # None: each graph's tensor is one row
        self._check_rows(name, value.size(dim), slices)
        start, stop = int(slices[self._first]), int(slices[self._last])
        tensor, base = value.narrow(dim, start, stop - start), incs[self._first]
        tensor = tensor - base.to(tensor.device) if base.any() else tensor
        return tensor, self._rebase(slices), incs[self._first : self._last] - base

    def _check_rows(self, name: str, num_rows: int, slices: Tensor) -> None:
        if num_rows != int(slices[-1]):
            self._refuse(name, f"{num_rows} rows", f"the {int(slices[-1])} rows that the graphs had when batched")

    def _numbering(self, store: Any, name: str) -> Tensor:
        """Return one of a pair such as ``batch`` and ``ptr``: the graph of each row, or the first row of each graph."""
        stem = name.removesuffix("batch") if name.endswith("batch") else name.removesuffix("ptr")
        graph_of_row, ptr = store.get(stem + "batch"), store.get(stem + "ptr")
        if not (isinstance(graph_of_row, Tensor) and isinstance(ptr, Tensor)):
            self._refuse(
                name, "an attribute that was added after batching", "attributes that the graphs had when batched"
            )
        if name.endswith("ptr"):
            return self._rebase(ptr)
        numbers: Tensor = graph_of_row[int(ptr[self._first]) : int(ptr[self._last])] - self._first
        return numbers

    def _rebase(self, starts: Tensor) -> Tensor:
        """Return the start of each graph's rows, and the end of the last one's, counted within the run."""
        return starts[self._first : self._last + 1] - starts[self._first]

    def _refuse(self, name: str, got: str, expected: str) -> NoReturn:
        raise InputError(
            self._call,
            got=f"{name!r}: {got}",
            expected=expected,
            fix="change graphs before they are batched (transform= of the dataset), or in loss_fn after the split.",
        )


def _refuse_type(batch: Any, call: str) -> NoReturn:
    if isinstance(batch, (list, tuple)):
        raise InputTypeError(
            call,
            got=f"a {type(batch).__name__}",
            expected="a Batch of several graphs",
            fix="write split_graphs(Batch.from_data_list(graphs), n)",
        )
    if isinstance(batch, Mapping) and not hasattr(batch, "stores"):
        raise InputTypeError(
            call,
            got="a dict",
            expected="a Batch of several graphs",
            fix="write memkit.points.split_packed(batch, n)",
        )
    seeds = [store["batch_size"] for store in getattr(batch, "stores", ()) if "batch_size" in store]
    raise InputTypeError(
        call,
        got=f"a {type(batch).__name__}" + (f" sampled around {sum(seeds)} seed nodes" if seeds else ""),
        expected="a Batch of several graphs, made by Batch.from_data_list or PyG's DataLoader",
        fix="a single graph cannot be split: use a smaller NeighborLoader(batch_size=...), and accumulate several "
        "of its batches per step: GradientAccumulator(optimizer, accumulation_steps=...), count=batch.batch_size.",
    )
