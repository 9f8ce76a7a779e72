"""Leak suspects: containers that gained tensors, tensors whose graph got longer, hooks. Used by the leak watch."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

from memkit._torch.modules import HOOKS
from memkit.memory.graphs import GraphWalk, graph_of, nodes_before, storages_of
from memkit.memory.holders import CACHE, References, is_a, is_object_array, namespace_of

GrowthKind = Literal["tensors", "graph", "tensors and graph", "hooks"]
Grew = Callable[[Any, list[tuple[int, int]]], bool]
Age = Callable[[Tensor], int | None]
CONTAINERS = (list, tuple, dict, set, deque)
_WIDEST, _DEEPEST = 64, 8  # bounds of the upward search: objects per level, levels
_MOST_CONTENTS = 20_000  # objects inspected inside one container


@dataclass(frozen=True, slots=True)
class Suspect:
    """An object that may be growing, and the memory that it keeps alive.

    Attributes:
        value: A container, or a tensor with a graph.
        kind: Kind of objects that it keeps alive.
        size: The count that must rise from check to check: of tensors, graph nodes or hooks.
        num_tensors: Number of tensors in it.
        nbytes: Bytes of its tensors and of those saved in their graphs, each storage counted once.
        growth_bytes: The part of ``nbytes`` added since the last check.
        num_graph_nodes: Number of autograd nodes under its tensors.
        growth_graph_nodes: The part of ``num_graph_nodes`` added since the last check.
    """

    value: Any
    kind: GrowthKind
    size: int
    num_tensors: int = 0
    nbytes: int = 0
    growth_bytes: int = 0
    num_graph_nodes: int = 0
    growth_graph_nodes: int = 0


def growing_containers(targets: list[Tensor], references: References, age_of: Age, grew: Grew) -> list[Suspect]:
    """Find the nearest containers above some tensors that also gained tensors in the last interval.

    Args:
        targets: Tensors to start from.
        references: The references between objects at this moment.
        age_of: Returns the number of checks since a tensor was first seen.
        grew: Returns whether a container whose elements have these ages counts as growing.
    """
    found: list[Suspect] = []
    level: list[Any] = targets
    seen = set(map(id, targets))
    for _ in range(_DEEPEST):
        if not level:
            break
        pairs = references.referrers(level)
        if level is targets and not set(map(id, targets)) <= {id(child) for _, child in pairs}:
            references.find_arrays()
            pairs = references.referrers(level)
        level = []
        for parent, _ in pairs:
            if id(parent) in seen or is_a(parent, ModuleType) or _is_bounded(parent):
                continue
            seen.add(id(parent))
            if _is_container(parent):
                tensors, ages = _contents(parent, age_of)
                if grew(parent, ages) and not _is_namespace(parent, references):
                    found.append(_measure(parent, tensors, age_of))
                    continue
            level.append(parent)
        level = level[:_WIDEST]
    return found


def growing_graph(tensor: Tensor, middle: int) -> Suspect:
    """Measure a tensor whose graph got longer since the sequence number `middle`."""
    root = graph_of(tensor)
    assert root is not None, "only tensors with a graph come here"  # noqa: S101 - an invariant
    walk = GraphWalk()
    walk.add(nodes_before(root, middle))
    num_older, older_bytes = walk.num_nodes, sum(walk.storages.values())
    walk.add([root])
    nbytes = sum(({**walk.storages, **dict(storages_of(tensor))}).values())
    return Suspect(
        tensor,
        "graph",
        size=walk.num_nodes,
        num_tensors=1,
        nbytes=nbytes,
        growth_bytes=sum(walk.storages.values()) - older_bytes,
        num_graph_nodes=walk.num_nodes,
        growth_graph_nodes=walk.num_nodes - num_older,
    )


def hook_dicts(modules: list[Any]) -> Iterable[Any]:
    """Yield the dicts that hold the hooks of layers."""
    for module in modules:
        own = namespace_of(module)
        for name in HOOKS:
            hooks = own.get(name) if type(own) is dict else None
            if hooks and is_a(hooks, dict):
                yield hooks


def _is_container(value: object) -> bool:
    return is_object_array(value) or any(is_a(value, kind) for kind in CONTAINERS)


def _is_bounded(value: Any) -> bool:
    if type(value) is CACHE:
        return value.cache_parameters()["maxsize"] is not None
    return is_a(value, deque) and deque.maxlen.__get__(value) is not None


def _is_namespace(value: Any, references: References) -> bool:
    """Whether a dict holds the attributes of an object or a class: separate names rather than a collection."""
    if type(value) is not dict:
        return False
    owners = [owner for owner, _ in references.referrers([value])]
    return "__builtins__" in value or any(is_a(each, type) or namespace_of(each) is value for each in owners)


def _contents(container: Any, age_of: Age) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return the tensors in a container, at any depth, and their ages as pairs (index of the element, age)."""
    tensors: list[Tensor] = []
    ages: list[tuple[int, int]] = []
    seen = {id(container)}
    elements = list(container.flat) if is_object_array(container) else gc.get_referents(container)
    for number, element in enumerate(elements):
        stack = [element]
        while stack and len(seen) < _MOST_CONTENTS + len(elements):
            value = stack.pop()
            if id(value) in seen or is_a(value, type) or is_a(value, ModuleType):
                continue
            seen.add(id(value))
            if is_a(value, Tensor) and (age := age_of(value)) is not None:
                tensors.append(value)
                ages.append((number, age))
            if type(value) is not dict or "__builtins__" not in value:
                stack += gc.get_referents(value)
    return tensors, ages


def _measure(container: Any, tensors: list[Tensor], age_of: Age) -> Suspect:
    walk = GraphWalk()
    storages: dict[int, int] = {}

    def add(part: list[Tensor]) -> tuple[int, int]:
        walk.add(node for tensor in part if (node := graph_of(tensor)) is not None)
        storages.update(pair for tensor in part for pair in storages_of(tensor))
        return walk.num_nodes, sum({**walk.storages, **storages}.values())

    older_nodes, older_bytes = add([tensor for tensor in tensors if age_of(tensor) != 0])
    nodes, nbytes = add(tensors)
    return Suspect(
        container,
        "tensors and graph" if nodes else "tensors",
        size=len(tensors),
        num_tensors=len(tensors),
        nbytes=nbytes,
        growth_bytes=nbytes - older_bytes,
        num_graph_nodes=nodes,
        growth_graph_nodes=nodes - older_nodes,
    )
