"""Run a forward again as if for the first time: random state and buffers as they were, statistics updated once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from memkit import _rng
from memkit._errors import StateError

_Key = tuple[nn.Module, str]
_SMALL_BYTES = 2**20  # buffers up to this size are copied whether or not they ever changed


class BufferWatch:
    """Knows the buffers that a forward may change, and which large ones it leaves alone, so that these are not copied.

    A BatchNorm's statistics and a spectral norm's vectors change; a large mask or table of positions does not.

    Args:
        module: The module, with its children.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = dict.fromkeys(module.modules())
        # torch.compile compiles anew, and warns, when it finds a hook on all modules.
        self._is_compiled = any("_orig_mod" in each._modules or each._compiled_call_impl for each in self._owners)  # noqa: SLF001 - torch.compile's own marks
        self._still: set[_Key] = set()

    def snapshot(self) -> BufferSnapshot:
        """Copy the buffers, except large ones that a forward has left alone before."""
        snapshot = BufferSnapshot()
        snapshot.add(self._owners, self._still)
        return snapshot

    def learn(self, snapshot: BufferSnapshot) -> None:
        """Compare with a snapshot taken before a forward that has run to its end; forget copies not needed."""
        for key, entry in snapshot.entries.items():
            is_large = entry.copy is not None and entry.copy.nbytes > _SMALL_BYTES
            if is_large and _equal(entry.copy, key[0]._buffers.get(key[1])):  # noqa: SLF001 - None is a value too
                self._still.add(key)
                entry.copy = None

    @contextlib.contextmanager
    def discover(self, snapshot: BufferSnapshot) -> Iterator[None]:
        """In the block, notice modules outside of the watched one (a GAN's other network) before they first run."""

        def notice(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001 - the hook's form
            if module not in self._owners:
                found = [each for each in module.modules() if each not in self._owners]
                self._owners.update(dict.fromkeys(found))
                snapshot.add(found, self._still)

        if self._is_compiled:
            yield
            return
        handle = register_module_forward_pre_hook(notice)
        try:
            yield
        finally:
            handle.remove()


@dataclass(slots=True)
class _Entry:
    buffer: torch.Tensor | None  # the object itself: a forward may put another one in its place
    mark: tuple[int, int]
    copy: torch.Tensor | None


class BufferSnapshot:
    """Values of buffers at one instant."""

    def __init__(self) -> None:
        self.entries: dict[_Key, _Entry] = {}

    def add(self, owners: Iterable[nn.Module], still: set[_Key]) -> None:
        """Take the buffers of ``owners`` in; those in ``still`` without a copy."""
        for owner in owners:
            for name, buffer in owner._buffers.items():  # noqa: SLF001 - named_buffers() leaves out None
                copy = None
                if buffer is not None and not is_lazy(buffer) and (owner, name) not in still:
                    copy = _clone(buffer)
                self.entries[owner, name] = _Entry(buffer, _mark(buffer), copy)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back: the same objects with the values that they had.

        Raises:
            StateError: A large buffer changed that no forward had changed before, so that nobody kept its value.
        """
        for (owner, name), entry in self.entries.items():
            if entry.copy is None and entry.buffer is not None and not is_lazy(entry.buffer):
                if _mark(entry.buffer) != entry.mark:
                    raise StateError(
                        "rolling back a failed attempt",
                        got=f"the large buffer {name!r} of a {type(owner).__name__}, changed for the first time by it",
                        expected="large buffers that change in the first steps if they change at all",
                        fix="restart from the last checkpoint.",
                    )
            elif entry.copy is not None and entry.buffer is not None:
                entry.buffer.data.copy_(entry.copy)
            if name in owner._buffers:  # noqa: SLF001 - setattr refuses what a lazy module replaces
                owner._buffers[name] = entry.buffer  # noqa: SLF001


class Replay:
    """One forward that will run again: enter the object itself around the first run, `again` around a repetition.

    The repetition starts from the buffers and from NumPy's and Python's random state that the first run started from
    (torch's own state is `torch.utils.checkpoint`'s business), and leaves no trace: the buffers are swapped for copies
    while it runs, not overwritten, so that tensors saved for backward stay valid.

    Args:
        watch: The watch of the module whose forward it is.
    """

    def __init__(self, watch: BufferWatch) -> None:
        self._watch = watch
        self._buffers: BufferSnapshot
        self._random: _rng.HostRandomState

    def __enter__(self) -> None:
        self._buffers = self._watch.snapshot()
        self._random = _rng.capture_host()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._watch.learn(self._buffers)

    @property
    def again(self) -> AbstractContextManager[None]:
        """A context for the repetition; may be entered once for every repetition."""
        return Again(self.repetition)

    @contextlib.contextmanager
    def repetition(self) -> Iterator[None]:
        """Run a block in the first run's circumstances, and leave no trace."""
        random_now = _rng.capture_host()
        buffers_now = []
        for (owner, name), entry in self._buffers.entries.items():
            if entry.copy is not None:
                buffers_now.append((owner, name, getattr(owner, name)))
                setattr(owner, name, _clone(entry.copy))
        _rng.restore_host(self._random)
        try:
            yield
        finally:
            _rng.restore_host(random_now)
            for owner, name, buffer in buffers_now:
                setattr(owner, name, buffer)


class Again(contextlib.AbstractContextManager[None]):
    """A repetition that can be entered more than once: a graph that is kept is recomputed for each backward.

    Args:
        repetition: Makes the context of one repetition.
    """

    def __init__(self, repetition: Callable[[], AbstractContextManager[None]]) -> None:
        self._repetition = repetition
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._repetition())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _clone(buffer: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return buffer.detach().clone()


def _equal(copy: torch.Tensor | None, buffer: torch.Tensor | None) -> bool:
    if copy is None or buffer is None or copy.shape != buffer.shape:
        return False
    return bool(((copy == buffer) | ((copy != copy) & (buffer != buffer))).all())  # NaN is itself here


def _mark(buffer: torch.Tensor | None) -> tuple[int, int]:
    """Identity and version: a buffer that was overwritten or replaced has another mark."""
    if buffer is None or is_lazy(buffer) or buffer.is_inference():
        return id(buffer), 0
    return id(buffer), buffer._version  # noqa: SLF001 - autograd's own count of in-place changes; no public form
