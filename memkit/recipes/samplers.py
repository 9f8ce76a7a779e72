"""Samplers of a loader, and the loader: what a saved state has of them, and what they keep that it has not."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from memkit._core.attributes import attributes_of
from memkit._core.errors import warn_user
from memkit._core.installed import is_users_module
from memkit._core.printable import counted
from memkit._core.protocols import ResumableOrder, Stateful
from memkit._machine import random_state
from memkit._recorder.attributes import Attributes
from memkit._torch.tensors import content_sums, has_storage

_PLAIN = (bool, int, float, str)
_SAMPLERS, _LOADERS = ("sampler", "batch_sampler"), ("loader", "dataloader")
_MOST_TENSORS = 64  # of a list that a loader keeps
_OF_TORCH = frozenset(vars(DataLoader(TensorDataset(torch.zeros(1)))))  # attributes of every DataLoader


def held_apart(roots: Sequence[object]) -> Attributes:
    """Return what functions and modules hold, but for loaders and their data, which are looked at by themselves."""
    return Attributes(roots, except_for=(Dataset, DataLoader, Sampler))


class Samplers:
    """The samplers of a loader, at any depth, with the loaders around them.

    Saved are the torch generators that they, and their ``collate_fn``, hold, and what the own ``state_dict`` of a
    sampler, or of a loader that the user wrote, returns.

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
        loaders = [node for node, is_sampler in nodes if not is_sampler and any(map(_is_users, type(node).__mro__))]
        self._stateful = [each for each in samplers if isinstance(each, Stateful)]
        # Packages' own loaders save the place in the epoch, which the loop finds by itself.
        self._stateful += [each for each in loaders if isinstance(each, Stateful) and _is_users(each.state_dict)]
        self._silent, self._silent_loaders = list(filter(_is_silent, samplers)), list(filter(_is_silent, loaders))
        self._kept: list[_Kept] = []
        self._begun: list[list[_Snapshot]] | None = None  # of the loaders: at first, and in each of two epochs

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
        self._begun = [[_Snapshot.of(each) for each in self._silent_loaders]]

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

    def note_begun(self) -> None:
        """Note what the loaders keep, now that a whole epoch has yielded its first batch."""
        if self._begun is not None and len(self._begun) < 3:
            self._begun.append([_Snapshot.of(each) for each in self._silent_loaders])

    def changed_loaders(self) -> list[str]:
        """Return, once, the names of loaders' attributes that differ between the first two whole epochs since `note`.

        Both are noted at the same batch, because a place in the epoch, which a loader may keep too, begins anew.
        """
        if self._begun is None or len(self._begun) < 3:
            return []
        all_noted, self._begun = self._begun, None
        return sorted(
            {
                f"{type(node).__name__}.{name}"
                for node, *noted in zip(self._silent_loaders, *all_noted, strict=True)
                for name in _differing(*noted)
            }
        )


class _Itself:
    """An object as a key. It stays alive, since a new one could get its `id`."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value


_Kept: TypeAlias = dict[tuple[str, _Itself | None], object]


class _Snapshot(NamedTuple):
    """The state that a loader keeps, and sums over the bits of its tensors and arrays, by name."""

    kept: _Kept
    sums: dict[str, list[list[int]]]

    @classmethod
    def of(cls, loader: Any) -> _Snapshot:
        found = {name: _sums_of(value) for name, value in _attributes_of(loader).items()}
        return cls(_kept_by(loader), {name: sums for name, sums in found.items() if sums})


def _differing(at_first: _Snapshot, one: _Snapshot, other: _Snapshot) -> set[str]:
    """Return the names of what has changed from one epoch to the other.

    A new tensor counts if it has the values that were there before the first epoch, and these changed places: an order
    that each epoch shuffles. One that each epoch draws anew is usually not there before.
    """
    changed = {name for (name, at), value in other.kept.items() if one.kept.get((name, at), value) != value}
    return changed | {
        name
        for name, sums in other.sums.items()
        if one.sums.get(name, sums) != sums
        and [each[0] for each in sums] == [each[0] for each in at_first.sums.get(name, ())]
    }


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


def _is_users(value: Any) -> bool:
    """Whether the user has written a class or a method."""
    return is_users_module(sys.modules.get(getattr(value, "__module__", "")))


def _is_silent(node: Any) -> bool:
    """Whether a state has nothing of it; one with a set_epoch is told the epoch, and draws its order from it."""
    return not (isinstance(node, Stateful) or hasattr(node, "set_epoch"))


def _attributes_of(node: Any) -> dict[str, Any]:
    """Return a node's attributes, without those that every DataLoader has."""
    left_out = _OF_TORCH if isinstance(node, DataLoader) else ()
    return {name: value for name, value in attributes_of(node).items() if name not in left_out}


def _kept_by(node: Any) -> _Kept:
    """Return what tells the numbers, words, lists, arrays, tensors and generators in an object's attributes apart.

    Their keys hold the name and, of what can be shuffled in place, itself: so changed it is a state, while a new one in
    each epoch is drawn from elsewhere.
    """
    found: _Kept = {}
    for name, value in _attributes_of(node).items():
        if type(value) in _PLAIN:
            found[name, None] = value
        elif isinstance(value, random_state.GENERATORS):
            if not isinstance(value, torch.Generator):
                found[name, _Itself(value)] = pickle.dumps(random_state.generator_state(value))
        elif isinstance(value, (list, np.ndarray)):
            found[name, _Itself(value)] = _frozen(value)
        elif has_storage(value):
            found[name, _Itself(value)] = content_sums(value)
    return found


def _sums_of(value: Any) -> list[list[int]]:
    """Return sums over the bits of a tensor or an array, or of several in a list; see `content_sums`."""
    if type(value) in (list, tuple):
        return [
            sums for each in value[:_MOST_TENSORS] if not isinstance(each, (list, tuple)) for sums in _sums_of(each)
        ]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        parts = [value, value[::2], value[..., ::2]] if value.ndim else [value]
        return [[int(np.ascontiguousarray(each).view(np.uint8).sum()) for each in parts]]
    return [content_sums(value)] if has_storage(value) else []


def _frozen(value: Any) -> object:
    """Return something equal for a list, or an array, of the same things in the same order, at any depth."""
    if type(value) in (list, tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    return value if type(value) in _PLAIN else id(value)
