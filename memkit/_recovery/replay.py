"""Rerun a forward as if for the first time: with the original random state and buffers, and statistics updated once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memkit._core.errors import StateError
from memkit._recovery.makeup import Makeup
from memkit._recovery.snapshot import AttributeStates, Rollback, StateWatch, are_same, cloned
from memkit._torch.modules import parameters_of
from memkit._torch.script import as_written, early_stop_through_handlers
from memkit._torch.tensors import version_of


class Replay:
    """One forward that will run again: enter the object itself around the first run, `again` around a rerun.

    The rerun starts from the same state as the first run: buffers, attributes, the module's own generators, and the
    random state of NumPy and Python (torch's own is handled by `torch.utils.checkpoint`). It has no side effects: the
    buffers are swapped for copies while it runs, not overwritten, so that tensors saved for backward stay valid.
    Tensors that stood in for parameters, as in `torch.func.functional_call`, do so again. Parameters that the first run
    has changed must stay as they are: their values before it are gone. So must all others, as for plain autograd.

    Args:
        watch: The watch of the module that runs the forward.
    """

    def __init__(self, watch: StateWatch) -> None:
        self._watch = watch
        self._before: Rollback
        self._versions: list[tuple[nn.Parameter, int]] = []
        self._changed: list[nn.Parameter] = []
        self._makeup: Makeup
        self._as_written = as_written()

    def __enter__(self) -> None:
        self._before = Rollback(self._watch, of_torch=False)
        self._versions = [
            (each, version_of(each))
            for owner in self._before.buffers.owners
            for each in parameters_of(owner).values()
            if each is not None and not (each.is_inference() or is_lazy(each))
        ]
        self._makeup = Makeup(self._before.buffers.owners)
        self._as_written.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._as_written.__exit__(kind, error, trace)
        if error is None:
            self._before.learn()
            changed = [each for each, version in self._versions if version_of(each) != version]
            if changed:  # the rerun changes them too: values are compared instead
                self._versions = [pair for pair in self._versions if version_of(pair[0]) == pair[1]]
            self._changed = [each for each in changed if each.requires_grad]
        else:
            self._versions = []

    @property
    def again(self) -> AbstractContextManager[None]:
        """Return a context for the rerun; it may be entered once for every rerun."""
        return ReusableRerun(self.repetition)

    @contextlib.contextmanager
    def repetition(self) -> Iterator[None]:
        """Run a block in the state of the first run, without side effects.

        Raises:
            StateError: A parameter was written to since, so the rerun would be another one.
        """
        for each, version in self._versions:
            if version_of(each) != version:
                self._refuse_written(each)
        with self._makeup.again():
            yield from self._repetition()

    def _repetition(self) -> Iterator[None]:
        attributes = self._before.attributes
        attributes_now = None if attributes is None else AttributeStates(self._watch)
        parameters_now = [(each, cloned(each)) for each in self._changed]
        entries = self._before.buffers.entries.items()
        copies = [(owner, name, cloned(entry.copy)) for (owner, name), entry in entries if entry.copy is not None]
        buffers_now = []
        try:
            if attributes is not None:
                attributes.restore()  # before buffers are swapped: the dict that holds them is an attribute, too
            for owner, name, copy in copies:
                buffers_now.append((owner, name, getattr(owner, name)))
                setattr(owner, name, copy)
            with self._before.random.again(), as_written(), early_stop_through_handlers():
                yield
        finally:
            for owner, name, buffer in buffers_now:
                setattr(owner, name, buffer)
            if attributes_now is not None:
                attributes_now.restore()
            if not all(are_same(each, now) for each, now in parameters_now):
                self._refuse_changed(parameters_now)

    def _refuse_written(self, parameter: nn.Parameter) -> NoReturn:
        module = self._watch.module
        name = next((name for name, each in module.named_parameters() if each is parameter), "one that stood in")
        raise StateError(
            f"backward() through a {type(module).__name__} that runs its forward again",
            got=f"a parameter that was changed in place since the forward: {name}",
            expected="parameters that stay as they are until backward, as for plain autograd",
            fix="call backward() before the step of the optimizer that trains this block, or run the forward again "
            "after it.",
        )

    def _refuse_changed(self, parameters_now: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> NoReturn:
        for each, now in parameters_now:
            each.data.copy_(now)
        raise StateError(
            "the repeated forward of a block",
            got=f"a {type(self._watch.module).__name__} that changes its own parameters, and does so again when it is "
            "repeated in backward",
            expected="parameters that a forward leaves as they are",
            fix="change them after the step, or use checkpoint 'offload' for this block.",
        )


def contexts_of(watch: StateWatch) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward and for its reruns, as `torch.utils.checkpoint` takes them."""
    replay = Replay(watch)
    return replay, replay.again


class ReusableRerun(contextlib.AbstractContextManager[None]):
    """A rerun that can be entered more than once: a retained graph is recomputed for each backward.

    Args:
        repetition: Creates the context of one rerun.
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
