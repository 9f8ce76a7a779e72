"""Parameters, buffers and modes of modules, saved for a rerun of their forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from memkit._torch.modules import buffers_of, parameters_of, training_flags
from memkit._torch.tensors import version_of

_Members = dict[str, Tensor | None]
_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


class Flags:
    """Which leaf tensors require a gradient at one instant, for a rerun that may come after that has changed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._flags = [(each, each.requires_grad) for each in tensors if each.is_leaf]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run a block with the flags of that instant."""
        changed = [(each, flag) for each, flag in self._flags if each.requires_grad is not flag and each.is_leaf]
        try:
            for each, flag in changed:
                each.requires_grad = flag
            yield
        finally:
            for each, flag in changed:
                each.requires_grad = not flag


class Makeup:
    """The members and modes of modules at one instant, for a rerun that may come after they have changed.

    Between a forward and its backward, `torch.func.functional_call` puts the modules' own tensors back, a validation
    calls `eval`, and a GAN freezes its other half.

    Args:
        modules: The modules, without their children.
        others: Other leaf tensors that are trained.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Tensor] = ()) -> None:
        self._modules = list(modules)
        self._modes = training_flags(self._modules)
        # Some libraries replace these dicts by objects that gather parameters.
        found: list[Any] = [own for each in self._modules for own in (parameters_of(each), buffers_of(each))]
        found = [own for own in found if own and type(own) is dict]
        self._members: list[tuple[_Members, _Members]] = [(own, own.copy()) for own in found]
        held = [each for _, first in self._members for each in first.values() if each is not None]
        self._flags = Flags((*held, *others))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run a block with all of it in place, then put back what is there now."""
        modes = [
            (each, each.training)
            for each, mode in zip(self._modules, self._modes, strict=True)
            if each.training is not mode
        ]
        moved = [
            (own, name, own[name], each)
            for own, first in self._members
            for name, each in first.items()
            if each is not own.get(name) and _changed_places(each, own.get(name))
        ]
        try:
            for module, mode in modes:
                module.training = not mode
            for own, name, _, each in moved:
                own[name] = each
            with self._flags.again():
                yield
        finally:
            for own, name, now, _ in moved:
                own[name] = now
            for module, mode in modes:
                module.training = mode


class WrittenBuffers:
    """The buffers of modules, so that a rerun does not change them once more: counts of tokens, statistics.

    Args:
        modules: The modules, without their children.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._versions = [
            (own, name, each, version_of(each))
            for own in map(buffers_of, modules)
            for name, each in own.items()
            if each is not None and type(each) in _PLAIN and not (each.requires_grad or each.is_inference())
        ]
        self._unwritten = self._versions[:0]

    def end(self) -> None:
        """Call at the end of the forward: what it has not written to is to stay as it is, for its rerun."""
        self._unwritten = [each for each in self._versions if version_of(each[2]) == each[3]]

    def changed(self) -> str | None:
        """Return the name of a buffer that was written to since the end of the forward; None if none was."""
        return next((name for _, name, each, version in self._unwritten if version_of(each) != version), None)

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """Run a block with copies of those buffers that were written to since the start; they stay as they are now."""
        written = [
            (own, name, each)
            for own, name, each, version in self._versions
            if version_of(each) != version and own.get(name) is each
        ]
        try:
            for own, name, each in written:
                own[name] = each.clone()
            yield
        finally:
            for own, name, each in written:
                own[name] = each


def _changed_places(first: object, now: object) -> bool:
    """Whether one tensor has taken another one's place; shards change places by themselves, and are DTensors."""
    return type(first) in _PLAIN and type(now) in _PLAIN
