"""Blocks that run three times in a step: recomputed by memkit, and by a checkpoint of the model's own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memkit._core.errors import warn_user
from memkit._torch.graph import current_backward, saving_hooks

_CHECKPOINT, _FUNCTION = torch.utils.checkpoint.__file__, torch.autograd.function.__file__
_TREATMENTS = "memkit.train.treatments"  # which calls the checkpoint of a treated block
# The functions of the reentrant form, which saves its inputs after it has run; the second one from PyTorch 2.15 on.
_REENTRANT = {"checkpoint", "_checkpoint_impl"}
_SWITCHES = {  # by method of a model: what turns its own checkpoints off
    "activation_checkpointing_disable": "model.activation_checkpointing_disable()",
    "gradient_checkpointing_disable": "model.gradient_checkpointing_disable()",
    "disable_gradient_checkpointing": "model.disable_gradient_checkpointing()",
    "set_grad_checkpointing": "model.set_grad_checkpointing(False)",
}


class Nesting:
    """Notices that the model checkpoints treated blocks, or parts of them, itself, and warns once.

    The gradient is the same. Nothing is said where torch ends the outer run before the inner one, as it does if one
    checkpoint holds hardly more than the other. A checkpoint inside of a block that gets its tensors by keyword, or
    from variables around it, is not noticed.

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
                f"the model checkpoints it itself, too (torch.utils.checkpoint). Way out: {self._fix}."
            )


class LookInside(AbstractContextManager[None]):
    """Around the repeated forward of a block: warns if a checkpoint inside of it runs, which is to run once more.

    Args:
        nesting: Tells the user.
        name: The block's name.
    """

    def __init__(self, nesting: Nesting, name: str) -> None:
        self._nesting, self._name = nesting, name
        self._entered: FrameType | None = None  # the last checkpoint inside that has saved its inputs
        self._is_run = False

    def __enter__(self) -> None:
        hooks = saving_hooks()
        assert hooks is not None  # noqa: S101 - the block's own checkpoint has set them
        self._keep, give = hooks
        self._hooks = saved_tensors_hooks(self._look, give)
        self._hooks.__enter__()

    def _look(self, tensor: torch.Tensor) -> object:
        entered = _saving_inputs(sys._getframe(1))  # noqa: SLF001 - hooks are not told who saves
        is_over = entered is not None and entered.f_code.co_name in _REENTRANT
        self._is_run = self._is_run or is_over or (self._entered is not None and entered is not self._entered)
        kept = self._keep(tensor)  # the last one that is needed ends the forward, with an error of torch's own
        self._entered = entered or self._entered
        return kept

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if self._is_run or (error is None and self._entered is not None):
            self._nesting.tell(self._name)
        self._entered = None


def _saving_inputs(frame: FrameType) -> FrameType | None:
    """Return the frame of torch's checkpoint if it saves its inputs; all other operators run in its function.

    A scripted block has no frame of its own, so that its operators seem to be run by the block's own checkpoint.
    """
    if frame.f_code.co_filename == _FUNCTION and frame.f_back is not None:  # the reentrant form is such a function
        frame = frame.f_back
    is_own = frame.f_back is not None and frame.f_back.f_globals.get("__name__") == _TREATMENTS
    return frame if frame.f_code.co_filename == _CHECKPOINT and not is_own else None
