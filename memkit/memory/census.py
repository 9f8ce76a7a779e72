"""Census of live storages at one instant, without tracking: bytes by category, and the largest storages by holder."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memkit._torch.modules import BUFFERS, PARAMETERS
from memkit._torch.pytree import keystr, tree_leaves_with_path
from memkit.memory.graphs import GraphWalk, grad_of, graph_of, storages_of
from memkit.memory.holders import References, attributes, instances_of, is_a

_Owners = dict[int, tuple[str, Any]]  # by id of a tensor: its category, and the parameter that it belongs to
_Places = dict[int, tuple[str, Any]]  # by id of a parameter: its name in its layer, and the layer


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """One live storage.

    Attributes:
        nbytes: Its size.
        category: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer"``, ``"saved for backward"``, ``"other"``.
        shape: Shape of a tensor in it; None if only the autograd graph holds one.
        dtype: That tensor's dtype.
        holder: The variable that holds the tensor, by its name in the user's code; None if there was not enough memory
            to find out.
    """

    nbytes: int
    category: str
    shape: tuple[int, ...] | None
    dtype: str | None
    holder: str | None


@dataclass(frozen=True, slots=True)
class Census:
    """Live storages.

    Attributes:
        by_category: Bytes per category, largest first, each storage counted once.
        largest: The largest storages, largest first.
    """

    by_category: dict[str, int]
    largest: tuple[LiveStorage, ...]


def take_census(device: torch.device, num_largest: int) -> Census:
    """Inspect all live tensors reachable from Python or a live autograd graph. Allocates nothing on the device.

    Args:
        device: The device whose storages are counted.
        num_largest: Number of storages to list with their holders.
    """
    objects = gc.get_objects()  # no closure may hold it: the list would contain its cell, a cycle that is never freed
    tensors: list[Tensor] = instances_of(Tensor, objects)
    layers = instances_of(nn.Module, objects)
    gradients = [(gradient, tensor) for tensor in tensors if (gradient := grad_of(tensor)) is not None]
    states = list(_optimizer_states(instances_of(torch.optim.Optimizer, objects)))
    there = {
        key: (nbytes, tensor)
        for tensor in (*(gradient for gradient, _ in gradients), *tensors)
        if tensor.device == device
        for key, nbytes in storages_of(tensor)
        if nbytes
    }
    walk = GraphWalk(device=device)
    walk.add(node for node in map(graph_of, tensors) if node is not None)
    buffers = [attributes(layer).get(BUFFERS) for layer in layers]  # missing if the error came during construction
    categories = {
        **dict.fromkeys(walk.storages, "saved for backward"),
        **_label("optimizer", (value for value, _, _ in states)),
        **_label("gradient", (gradient for gradient, _ in gradients)),
        **_label("buffer", (value for each in buffers if each for value in each.values())),
        **_label("parameter", (tensor for tensor in tensors if is_a(tensor, nn.Parameter))),
    }
    sizes = {**walk.storages, **{key: nbytes for key, (nbytes, _) in there.items()}}
    by_category: Counter[str] = Counter()
    for key, nbytes in sizes.items():
        by_category[categories.get(key, "other")] += nbytes
    largest = {key: there.get(key, (0, None))[1] for key in sorted(sizes, key=lambda key: -sizes[key])[:num_largest]}
    owners: _Owners = {id(value): (name, parameter) for value, name, parameter in states}
    owners |= {id(gradient): ("gradient", tensor) for gradient, tensor in gradients}
    holders = _find_holders(largest, owners, objects, layers)
    return Census(
        dict(by_category.most_common()),
        tuple(
            LiveStorage(
                nbytes=sizes[key],
                category=categories.get(key, "other"),
                shape=None if tensor is None else tuple(tensor.shape),
                dtype=None if tensor is None else str(tensor.dtype).removeprefix("torch."),
                holder=holders.get(key),
            )
            for key, tensor in largest.items()
        ),
    )


def _optimizer_states(optimizers: list[Any]) -> Iterator[tuple[Tensor, str, Any]]:
    """Yield each tensor of an optimizer's state, its category, and the parameter that it belongs to."""
    for optimizer in optimizers:
        for parameter, values in dict(getattr(optimizer, "state", {})).items():  # missing if __init__ failed
            for path, value in tree_leaves_with_path(values):
                if is_a(value, Tensor):
                    yield value, f"state{keystr(path)} of {type(optimizer).__name__}", parameter


def _find_holders(
    largest: dict[int, Tensor | None], owners: _Owners, objects: list[object], layers: list[Any]
) -> dict[int, str]:
    """Return the holder of each storage, or none at all if there is not enough memory for the search."""
    try:
        references = References(objects, layers)
        references.prepare([each for each in largest.values() if each is not None])
        own = ((attributes(layer).get(PARAMETERS) or {}, layer) for layer in layers)
        places = {id(each): (name, layer) for members, layer in own for name, each in members.items()}
        return {key: _holder_of(tensor, owners, places, references) for key, tensor in largest.items()}
    except MemoryError:
        return {}


def _holder_of(tensor: Tensor | None, owners: _Owners, places: _Places, references: References) -> str:
    if tensor is not None and id(tensor) in owners:
        name, parameter = owners[id(tensor)]
        return f"{name} for {_holder_of(parameter, {}, places, references)}" if is_a(parameter, Tensor) else name
    if id(tensor) in places:  # an optimizer, which holds all parameters alike, may be as near
        name, layer = places[id(tensor)]
        return f"attribute `_parameters[{name!r}]` of {type(layer).__name__} ({references.end(layer)})"
    holder = None if tensor is None else references.holder_of(tensor)
    return "no variable: the autograd graph, or other C++ code" if holder is None or not holder.place else holder.text


def _label(category: str, values: Iterable[Any]) -> dict[int, str]:
    return {key: category for each in values if is_a(each, Tensor) for key, _ in storages_of(each)}
