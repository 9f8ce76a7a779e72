"""Pytrees, as used throughout torch; the public module is slower to import."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "SUPPORTED_NODES",
    "TreeSpec",
    "children_of",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "with_children",
]


def children_of(node: Any) -> Sequence[Any] | None:
    """Return the entries of a container (torch's own, any mapping, a dataclass); None for a leaf."""
    kind = type(node)
    if kind is tuple or kind is list:
        return node  # type: ignore[no-any-return]  # it is one
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, tuple):  # a named tuple, or torch.return_types
        return tuple(node)
    if kind in SUPPORTED_NODES:
        return tree_flatten(node, is_leaf=partial(operator.is_not, node))[0]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    return None


def with_children(node: Any, children: Sequence[Any]) -> Any:
    """Return a container like this one with other entries."""
    kind = type(node)
    if kind is tuple or kind is list:
        return kind(children)
    if isinstance(node, MutableMapping):
        part: Any = {} if kind is dict else copy.copy(node)
        for key, value in zip(node, children, strict=True):
            part[key] = value
        return part
    if isinstance(node, Mapping):  # one that is read only
        return kind(dict(zip(node, children, strict=True)))
    if isinstance(node, tuple):
        return kind(*children) if hasattr(node, "_fields") else kind(children)
    if kind in SUPPORTED_NODES:
        return tree_unflatten(children, tree_flatten(node, is_leaf=partial(operator.is_not, node))[1])
    part = copy.copy(node)
    for field, value in zip(dataclasses.fields(node), children, strict=True):
        object.__setattr__(part, field.name, value)  # a frozen one too
    return part
