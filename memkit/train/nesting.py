"""Blocks that run three times in a step: recomputed by memkit, and by a checkpoint of the model's own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from memkit._core.errors import warn_user
from memkit._torch.dispatch import LeanDispatchMode
from memkit._torch.graph import current_backward, saving_hooks

_CHECKPOINT = torch.utils.checkpoint.__file__
_TREATMENTS = "memkit.train.treatments"  # which calls the checkpoint of a treated block
_SWITCHES = {  # by method of a model: what turns its own checkpoints off
    "activation_checkpointing_disable": "model.activation_checkpointing_disable()",
    "gradient_checkpointing_disable": "model.gradient_checkpointing_disable()",
    "disable_gradient_checkpointing": "model.disable_gradient_checkpointing()",
    "set_grad_checkpointing": "model.set_grad_checkpointing(False)",
}


class Nesting:
    """Notices that the model checkpoints treated blocks, or parts of them, itself, and warns once.

    The gradient is the same. Nothing is said where torch ends the outer run before the inner one, as it does if one
    checkpoint holds hardly more than the other.

    Args:
        model: The model.
        call: The user's call that treats its blocks, for the warning.
        without: How to do without that call.
    """

    def __init__(self, model: nn.Module, call: str, without: str) -> None:
        own = "take torch.utils.checkpoint out of the model's forward, or pass its use_checkpoint=False"
        own = next((f"write {fix}" for name, fix in _SWITCHES.items() if hasattr(model, name)), own)
        self._call, self._fix, self._is_told = call, f"{own}; or {without}", False

    def around(self, name: str, forward: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context of a block's forward; it warns if a checkpoint around the block runs it again just now."""
        if self._is_told or current_backward() == -1:
            return forward
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - a forward is not told why it runs in a backward
        while frame is not None and frame.f_globals.get("__name__") != _TREATMENTS:
            frame = frame.f_back  # of the block's own checkpoint
        while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
            frame = frame.f_back
        return forward if frame is None else self._telling(name, forward)

    @contextlib.contextmanager
    def _telling(self, name: str, forward: AbstractContextManager[None]) -> Iterator[None]:
        with forward:
            self.tell(name)  # not before it is entered: torch may end the outer run right before
            yield

    def tell(self, name: str) -> None:
        """Warn, once for a model."""
        if not self._is_told:
            self._is_told = True
            warn_user(
                f"{self._call}: the forward of the block {name!r} runs three times in each step, and so may others: "
                "the model checkpoints it itself, too (torch.utils.checkpoint), or another wrapper of the same block "
                f"does. Way out: {self._fix}."
            )


class LookInside(LeanDispatchMode):
    """Around the repeated forward of a block: warns if a checkpoint inside of it runs, which is to run once more.

    Args:
        nesting: Tells the user.
        name: The block's name.
    """

    supports_higher_order_operators = True

    def __init__(self, nesting: Nesting, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nesting, self._name, self._own_hooks = nesting, name, saving_hooks()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the block run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._own_hooks is not None and (self._is_in_hooks_of_another() or _is_in_reentrant()):
            self._own_hooks = None  # one is enough
            self._nesting.tell(self._name)
        return func(*args, **(kwargs or {}))

    def _is_in_hooks_of_another(self) -> bool:
        """Return whether another checkpoint than the block's own saves tensors now, however it got its own."""
        hooks = saving_hooks()
        if hooks is None or hooks == self._own_hooks:
            return False
        return getattr(getattr(hooks[0], "__code__", None), "co_filename", None) == _CHECKPOINT


def _is_in_reentrant() -> bool:
    """Return whether a checkpoint of the reentrant form, whose forward sets no hooks, runs the present operator."""
    if torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - operators are not told who calls them
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None and frame.f_code is CheckpointFunction.forward.__code__
