"""Storages held by tensors and autograd graphs, read without running hooks or copying. Used by the leak watch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import Node

from memkit._torch.dispatch import TensorBase, without_torch_function
from memkit._torch.graph import fields_of, saved_as_stored, sequence_number
from memkit._torch.tensors import storage_key, strided_parts

# Attributes through the base class's descriptors: a subclass's override could compute, warn or fail.
_IS_LEAF, _GRAD, _GRAD_FN = (vars(TensorBase)[name].__get__ for name in ("is_leaf", "grad", "grad_fn"))
_LEAF_NODE = "AccumulateGrad"


def grad_of(tensor: Tensor) -> Tensor | None:
    """Return the gradient of a leaf; None for other tensors, where reading it would warn."""
    try:
        return _GRAD(tensor) if _IS_LEAF(tensor) else None
    except RuntimeError:
        return None


def graph_of(tensor: Tensor) -> Node | None:
    """Return the node that created a tensor, if it has a graph."""
    try:
        return _GRAD_FN(tensor)  # type: ignore[no-any-return]
    except RuntimeError:  # a view whose base was changed in place, an expired torch.func wrapper
        return None


def storages_of(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield key and bytes of each storage of a tensor; views of one storage share the key.

    A tensor on the meta device has no storage of its own, nor has a wrapper around other tensors, which are listed
    themselves.
    """
    if "__tensor_flatten__" in dir(type(tensor)):
        return
    with without_torch_function():
        for part in strided_parts(tensor):
            try:
                storage = part.untyped_storage()
                if storage.device.type != "meta":
                    yield storage_key(storage), storage.nbytes()
            except (RuntimeError, ValueError):  # opaque, or a parameter that is not initialized yet
                continue


@dataclass
class GraphWalk:
    """Autograd nodes reached so far and the storages that they keep for a backward.

    The parameters at the graph's leaves are not counted: they do not depend on it.

    Attributes:
        device: The device whose storages are counted; None for all devices.
        num_nodes: Number of nodes, without the parameters' own.
        storages: Bytes of the saved tensors by storage key.
    """

    device: torch.device | None = None
    num_nodes: int = 0
    storages: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, Node] = field(default_factory=dict)  # the Python objects of nodes live only while referenced
    _parameters: set[int] = field(default_factory=set)
    _fields: dict[type, list[str]] = field(default_factory=dict)

    def add(self, nodes: Iterable[Node]) -> None:
        """Walk the graphs under some nodes; nodes and storages seen before are not counted again."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if id(node) in self._seen:
                continue
            self._seen[id(node)] = node
            if node.name().endswith(_LEAF_NODE):
                self._parameters.update(key for key, _ in storages_of(node.variable))  # type: ignore[attr-defined]
                continue
            self.num_nodes += 1
            for tensor in self._saved(node):
                if self.device is None or tensor.device == self.device:
                    self.storages.update(storages_of(tensor))
            stack += [child for child, _ in node.next_functions if child is not None]
        for key in self._parameters:
            self.storages.pop(key, None)

    def _saved(self, node: Node) -> Iterator[Tensor]:
        """Yield the saved tensors of a node as stored: unpacking would run hooks, copy or recompute."""
        kind = type(node)
        if kind not in self._fields:
            self._fields[kind] = fields_of(kind)
        packed: list[object] = list(getattr(node, "__dict__", {}).values())  # of a custom function's context
        for name in self._fields[kind]:
            with contextlib.suppress(RuntimeError):  # freed by a backward
                packed += saved_as_stored(node, name)
        for value in packed:
            for item in value if type(value) in (tuple, list) else [value]:  # type: ignore[attr-defined]
                if Tensor in type(item).__mro__:
                    yield item


def spanning(tensors: Iterable[Tensor], start: int, middle: int) -> list[Tensor]:
    """Find the tensors whose graph was created partly before and partly after `middle`.

    Args:
        tensors: Tensors that have a graph.
        start: Sequence number at which the interval before the last began; older nodes are ignored.
        middle: Sequence number at which the last interval began.

    Returns:
        One tensor for each such graph, without those computed from another of them.
    """
    nodes = [(node, tensor) for tensor in tensors if (node := graph_of(tensor)) is not None]
    # An older node never leads to a younger one, so a root computed from another root comes after it.
    nodes = sorted(
        ((n, t) for n, t in nodes if sequence_number(n) >= middle), key=lambda pair: sequence_number(pair[0])
    )
    found: dict[int, Tensor] = {}
    known: dict[int, Node] = {}  # nodes that lead to no old node
    for root, tensor in nodes:
        seen: dict[int, Node] = {}
        stack, spans = [root], False
        while stack:
            node = stack.pop()
            if id(node) in found:
                break
            if id(node) in seen or id(node) in known or sequence_number(node) < start:
                continue
            seen[id(node)] = node
            spans = spans or sequence_number(node) < middle
            stack += [child for child, _ in node.next_functions if child is not None]
        else:
            if spans:
                found[id(root)] = tensor
            else:
                known |= seen
    return list(found.values())


def nodes_before(root: Node, middle: int) -> list[Node]:
    """Find the nodes at which the graph under a node becomes older than `middle`."""
    seen: dict[int, Node] = {}
    stack, older = [root], []
    while stack:
        node = stack.pop()
        if sequence_number(node) < middle:
            older.append(node)
        elif id(node) not in seen:
            seen[id(node)] = node
            stack += [child for child, _ in node.next_functions if child is not None]
    return older
