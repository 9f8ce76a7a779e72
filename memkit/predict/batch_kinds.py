"""Group batches by the memory that their steps take, and strip a batch of its data."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from types import NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memkit._simulation.tensors import StorageCopies, has_values, holds_values
from memkit._torch.pytree import children_of, with_children
from memkit._torch.tensors import storage_key

Path: TypeAlias = tuple[Hashable, ...]
_ATOMS = (bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device)


def batch_kind(batch: Any) -> Hashable:
    """Return a key that is equal for batches whose steps take the same memory, unless a step reads values from them.

    It holds structure, shapes, strides, dtypes, devices and storages of tensors, and plain values. An object that
    cannot be inspected (a NumPy array, a tensor of another layout) gets a kind of its own.
    """
    storages: dict[int, int] = {}  # tensors may share one
    return tuple((path, _kind(node, storages)) for path, node in _walk(batch))


def _kind(node: Any, storages: dict[int, int]) -> Hashable:
    if isinstance(node, Tensor) and node.layout is torch.strided:
        storage = node.untyped_storage()
        place = storages.setdefault(storage_key(storage), len(storages))
        tensor = type(node), node.shape, node.stride(), node.dtype, node.device, node.requires_grad
        return *tensor, place, storage.nbytes()
    if isinstance(node, type):
        return node
    return (type(node), repr(node)) if isinstance(node, _ATOMS) else object()


def tensors_of(batch: Any) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors of a batch, each with the names that lead to it."""
    return ((path, node) for path, node in _walk(batch) if isinstance(node, Tensor))


def _walk(node: Any, path: Path = (), parents: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every node of a batch with the names that lead to it; for a container, its type."""
    inside = None if isinstance(node, Tensor) or id(node) in parents else _inside(node)
    yield path, node if inside is None else type(node)
    for name, each in inside or ():
        yield from _walk(each, (*path, name), (*parents, id(node)))


def _inside(node: Any) -> list[tuple[Hashable, Any]] | None:
    """Return the names and values in a container; None if the node is not one."""
    children = children_of(node)
    if children is not None:
        return list(zip(node if isinstance(node, Mapping) else range(len(children)), children, strict=True))
    is_open = hasattr(node, "__dict__") and not isinstance(node, type) and holds_values(node)
    return list(vars(node).items()) if is_open else None


def values_of(batch: Any) -> bytes:
    """Return a digest of the values that a step can read from a batch: those of its small integer tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for _, tensor in tensors_of(batch):
        if has_values(tensor):
            digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def without_data(batch: Any) -> Any:
    """Return a batch of the same kind; tensors whose values a step cannot read are on the meta device.

    An object that is not a container is returned as it is.
    """
    copies = StorageCopies()

    def stripped(node: Any) -> Any:
        if isinstance(node, Tensor):
            if type(node) is not Tensor or node.layout is not torch.strided:
                return node
            copy = copies.view(node, "cpu" if has_values(node) else "meta")
            return copy.requires_grad_(node.requires_grad)
        children = children_of(node)
        return node if children is None else with_children(node, [stripped(each) for each in children])

    return stripped(batch)


def with_data(batch: Any) -> Any:
    """Return a batch of the same kind that a real step can run on, in place of one from `without_data`.

    Floating-point tensors without data get random numbers, large integer tensors zeros. Kernels take the same memory.
    """

    def filled(node: Any) -> Any:
        if isinstance(node, Tensor):
            if node.device.type != "meta":
                return node
            new = torch.zeros_like(node, device="cpu")
            if new.dtype.is_floating_point or new.dtype.is_complex:
                new.normal_()
            return new.requires_grad_(node.requires_grad)
        children = children_of(node)
        return node if children is None else with_children(node, [filled(each) for each in children])

    return filled(batch)
