"""Samplers of a loader: what a saved state has of them, and what they keep that it has not."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from memkit._core.attributes import attributes_of
from memkit._core.errors import warn_user
from memkit._core.printable import counted
from memkit._core.protocols import ResumableOrder, Stateful
from memkit._machine import random_state
from memkit._recorder.rehearsal import Attributes

_PLAIN = (bool, int, float, str)
_SAMPLERS, _LOADERS = ("sampler", "batch_sampler"), ("loader", "dataloader")


def held_apart(roots: Sequence[object]) -> Attributes:
    """Return what functions and modules hold, but for loaders and their data, which are looked at by themselves."""
    return Attributes(roots, except_for=(Dataset, DataLoader, Sampler))


class Samplers:
    """The samplers of a loader, at any depth, with the loaders around them.

    Saved are the torch generators that they, and their ``collate_fn``, hold, and what a sampler's own ``state_dict``
    returns.

    Args:
        loader: The loader.

    Attributes:
        collate_fns: The user's functions that make batches.
    """

    def __init__(self, loader: Any) -> None:
        nodes = list(_nodes_of(loader, set()))
        found = [getattr(node, "collate_fn", None) for node, _ in nodes]
        self.collate_fns = [each for each in found if not getattr(each, "__module__", "torch.").startswith("torch.")]
        held = [each for node, _ in nodes for each in attributes_of(node).values() if isinstance(each, torch.Generator)]
        held += held_apart(self.collate_fns).torch_generators()
        own = {id(each): each for each in held if each is not torch.default_generator}
        self._generators: list[torch.Generator] = list(own.values())
        samplers = [node for node, is_sampler in nodes if is_sampler and not isinstance(node, ResumableOrder)]
        self._stateful = [each for each in samplers if isinstance(each, Stateful)]
        # A sampler with a set_epoch is told the epoch, and draws its order from it.
        self._silent = [each for each in samplers if not (isinstance(each, Stateful) or hasattr(each, "set_epoch"))]
        self._kept: list[dict[tuple[str, int], object]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return plain types and tensors."""
        return {
            "generators": [each.get_state() for each in self._generators],
            "samplers": [each.state_dict() for each in self._stateful],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, into a loader built like the saved one.

        Warns:
            MemkitWarning: It has other generators and samplers; nothing is restored.
        """
        saved, present = (
            (len(state["generators"]), len(state["samplers"])),
            (len(self._generators), len(self._stateful)),
        )
        if saved != present:
            warn_user(
                f"MemoryEfficientTrainLoop: the state was saved with {_in_words(*saved)}, and now the loader has "
                f"{_in_words(*present)}: these are left as they are, and the order of the samples differs from that of "
                "a run that was not stopped. Way out: build the loader as it was when the state was saved."
            )
            return
        for generator, each in zip(self._generators, state["generators"], strict=True):
            generator.set_state(each)
        for sampler, each in zip(self._stateful, state["samplers"], strict=True):
            sampler.load_state_dict(each)

    def note(self) -> None:
        """Note what is not saved, as it is now."""
        self._kept = [_kept_by(each) for each in self._silent]

    def changed(self) -> list[str]:
        """Return the names of attributes that are not saved and have changed since `note`."""
        names = set[str]()
        for node, before in zip(self._silent, self._kept, strict=False):
            for (name, identity), value in _kept_by(node).items():
                missing = value if identity else getattr(type(node), name, value)  # a count may begin in the class
                if before.get((name, identity), missing) != value:
                    names.add(f"{type(node).__name__}.{name}")
        self._kept = []
        return sorted(names)


def _in_words(num_generators: int, num_samplers: int) -> str:
    return f"{counted(num_generators, 'generator')} and {counted(num_samplers, 'sampler')} with a state_dict"


def _nodes_of(node: Any, seen: set[int], *, is_sampler: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield a loader, and the loaders and samplers that it holds, each with whether it is a sampler; no data sets."""
    if id(node) in seen:
        return
    seen.add(id(node))
    yield node, is_sampler
    for name, value in attributes_of(node).items():
        if isinstance(value, Sampler) or (name in _SAMPLERS and value is not None):
            yield from _nodes_of(value, seen, is_sampler=True)
        elif isinstance(value, DataLoader) or (name in _LOADERS and value is not None):
            yield from _nodes_of(value, seen)


def _kept_by(node: Any) -> dict[tuple[str, int], object]:
    """Return copies of the numbers, words, lists, arrays and generators in an object's attributes.

    Their keys hold the name and, of a list or an array, its identity: one that is shuffled in place is a state, a new
    one in each epoch is drawn from elsewhere.
    """
    found: dict[tuple[str, int], object] = {}
    for name, value in attributes_of(node).items():
        if type(value) in _PLAIN:
            found[name, 0] = value
        elif isinstance(value, random_state.GENERATORS):
            if not isinstance(value, torch.Generator):
                found[name, id(value)] = pickle.dumps(random_state.generator_state(value))
        elif isinstance(value, (list, np.ndarray)):
            found[name, id(value)] = _frozen(value)
    return found


def _frozen(value: Any) -> object:
    """Return something equal for a list, or an array, of the same things in the same order, at any depth."""
    if type(value) in (list, tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    return value if type(value) in _PLAIN else id(value)
