"""Pytrees, as used throughout torch; the public module is slower to import."""

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
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
