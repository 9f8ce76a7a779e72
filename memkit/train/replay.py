"""Run a forward again as if for the first time: random state and buffers as they were, statistics updated once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import nn

from memkit import _rng
from memkit._errors import StateError

_Buffer = tuple[nn.Module, str]


class BufferWatch:
    """Knows which of a module's buffers its forward changes, so that only those are ever copied.

    A BatchNorm's statistics and a spectral norm's vectors change; a mask or a table of positions, which can be large,
    does not. The first snapshot copies all buffers; what the first forward left alone is not copied again.

    Args:
        module: The module, with its children.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: set[_Buffer] | None = None
        self._buffers: list[_Buffer] | None = None  # listed once: walking a model's modules takes longer than a copy

    def snapshot(self) -> BufferSnapshot:
        """Copy the buffers that a forward may change, and note the state of all others."""
        if self._buffers is None:
            self._buffers = [
                (owner, name) for owner in self._module.modules() for name, _ in owner.named_buffers(recurse=False)
            ]
        marks = {(owner, name): _mark(getattr(owner, name)) for owner, name in self._buffers}
        wanted = self._buffers if self._changing is None else self._changing
        copies = {(owner, name): getattr(owner, name).detach().clone() for owner, name in wanted}
        return BufferSnapshot(copies, marks)

    def learn(self, snapshot: BufferSnapshot) -> None:
        """Compare with a snapshot taken before a forward that has run to its end; forget copies not needed."""
        self._changing = snapshot.find_changed(by_value=self._changing is None) | (self._changing or set())
        for key in snapshot.copies.keys() - self._changing:
            del snapshot.copies[key]


class BufferSnapshot:
    """Values of buffers at one instant.

    Args:
        copies: The values, by owner and name.
        marks: Identity and version of every buffer.
    """

    def __init__(self, copies: dict[_Buffer, torch.Tensor], marks: dict[_Buffer, tuple[int, int]]) -> None:
        self.copies = copies
        self.marks = marks

    def find_changed(self, *, by_value: bool = False) -> set[_Buffer]:
        """Find the buffers that changed since the snapshot.

        A changed mark of one buffer counts for all of its owner's: batch_norm writes its running statistics without
        raising their version, only ``num_batches_tracked`` shows it. Comparing values finds everything, but waits for
        the device.
        """
        owners = {owner for (owner, name), mark in self.marks.items() if _mark(getattr(owner, name)) != mark}
        return {
            (owner, name)
            for owner, name in self.marks
            if owner in owners or (by_value and not _equal(self.copies[owner, name], getattr(owner, name)))
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back in place.

        Raises:
            StateError: A buffer changed that no forward had changed before, so that nobody kept its value.
        """
        for owner, name in self.find_changed() - self.copies.keys():
            raise StateError(
                "rolling back a failed attempt",
                got=f"the buffer {name!r} of a {type(owner).__name__}, changed for the first time by it",
                expected="buffers that change in the first steps if they change at all",
                fix="restart from the last checkpoint; switch modules between train() and eval() before training.",
            )
        for (owner, name), value in self.copies.items():
            buffer = getattr(owner, name)
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                setattr(owner, name, value.clone())


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
        return _Again(self)

    @contextlib.contextmanager
    def repetition(self) -> Iterator[None]:
        """Run a block in the first run's circumstances, and leave no trace."""
        random_now = _rng.capture_host()
        buffers_now = {(owner, name): getattr(owner, name) for owner, name in self._buffers.copies}
        for (owner, name), value in self._buffers.copies.items():
            setattr(owner, name, value.clone())
        _rng.restore_host(self._random)
        try:
            yield
        finally:
            _rng.restore_host(random_now)
            for (owner, name), buffer in buffers_now.items():
                setattr(owner, name, buffer)


class _Again(contextlib.AbstractContextManager[None]):
    """A repetition that can be entered more than once: a graph that is kept is recomputed for each backward."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._replay.repetition())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is itself here


def _mark(buffer: torch.Tensor) -> tuple[int, int]:
    """Identity and version: a buffer that was overwritten or replaced has another mark."""
    return id(buffer), buffer._version  # noqa: SLF001 - autograd's own count of in-place changes; no public form
