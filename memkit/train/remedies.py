"""What is done about an out-of-memory, in order: first what keeps each result bit for bit, and only then a split."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Literal

from torch import nn
from torch.utils.checkpoint import CheckpointError

from memkit._core.errors import ConfigError, warn_user
from memkit._recovery.attempt import Failed, Kinds, OutOfMemory
from memkit._torch.modules import is_compiled
from memkit.train.checkpointing import Checkpointing
from memkit.train.models import device_of
from memkit.train.offload import make_offload, offload_activations
from memkit.train.treatments import ChangedInputError

RemedyName = Literal["recompute", "offload"]


class Remedies:
    """Makes a micro-batch that ran out of memory take less, by remedies that change no bit of its gradient.

    The model's repeated blocks run again in backward, if a look at a few rows shows that this keeps the gradient (one
    that changes attributes would see them changed); then what an accelerator's forward saves waits in host memory. Both
    stay on, since the next batch is as large. Where they do not suffice and the batch may be split, they are taken
    back: parts that fit need neither. On the CPU only the disk is left for what forward saves, which takes longer than
    a split: it comes last. Each is said once.

    Args:
        model: The model.
        call: What the user called, for messages.
        has: What is on already, or cannot be.
    """

    def __init__(self, model: nn.Module, *, call: str, has: Collection[RemedyName] = ()) -> None:
        self._model, self._call = model, call
        self._can: list[RemedyName] = [each for each in ("recompute", "offload") if each not in has]
        self._left = [each for each in self._can if each == "recompute" or device_of(model).type != "cpu"]
        self._checkpointing: Checkpointing | None = None
        self._offload: offload_activations | None = None
        self._told: set[str] = set()
        self._is_last = self._is_proven = False
        self._message = "", ""

    @property
    def failures(self) -> Kinds:
        """Errors of blocks that cannot run again, where some do."""
        return (ChangedInputError, CheckpointError) if self._checkpointing is not None else ()

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that run again in backward."""
        return self._checkpointing.recomputed if self._checkpointing else ()

    @property
    def is_unproven(self) -> bool:
        """Whether blocks run again, and nobody has looked whether that keeps the gradient."""
        return self._checkpointing is not None and not self._is_proven

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """In the block, let blocks run once."""
        return contextlib.nullcontext() if self._checkpointing is None else self._checkpointing.suspended()

    def settle(self, *, is_equal: bool) -> None:
        """Note whether blocks that run again keep the gradient; let them be where they do not."""
        if is_equal:
            self._is_proven = True
            self.tell("recompute", *self._message)
        else:
            self._can = [each for each in self._can if each != "recompute"]
            self._close_checkpointing()

    def around(self) -> contextlib.AbstractContextManager[object] | None:
        """A context for forward, where there is one."""
        return None if self._offload is None else self._offload.within(self._model)

    def improve(self, failure: OutOfMemory | Failed, what: str, *, is_last: bool = False) -> bool:
        """Take the next remedy; False where none is left.

        Args:
            failure: Why the last attempt failed. A block that cannot run again is left alone from now on.
            what: What failed, for the message.
            is_last: Parts cannot be made smaller, or may not: all that is left serves, also what was taken back.
        """
        if is_last and not self._is_last:
            self._is_last = True
            is_on = {"recompute": self._checkpointing, "offload": self._offload}
            self._left = [each for each in self._can if is_on[each] is None]
        if isinstance(failure, Failed):
            self.settle(is_equal=False)
            return True
        while self._left:
            name = self._left.pop(0)
            done = self._recompute() if name == "recompute" else self._move_out()
            if done:
                self._message = f"out of memory with {what} ({failure.description})", done
                if name != "recompute":
                    self.tell(name, *self._message)
                return True
        return False

    def take_back(self) -> None:
        """Turn off what did not suffice: parts are made smaller instead."""
        if not self._is_last:
            self.close()
            self._left = []

    def tell(self, kind: str, what: str, done: str) -> None:
        """Say once of each kind what was done about an out-of-memory."""
        if kind not in self._told:
            self._told.add(kind)
            warn_user(f"{self._call}: {what}. It goes on: {done}")

    def close(self) -> None:
        """Leave the model as it was found."""
        self._close_checkpointing()
        self._offload = None

    def _recompute(self) -> str:
        try:
            self._checkpointing = Checkpointing(self._model, "auto")
        except ConfigError:  # it has no blocks, or they are treated already
            return ""
        names = list(self._checkpointing.blocks)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        return (
            f"from now on {shown} run again in backward, with the same gradients, bit for bit. "
            "checkpoint='auto' does so from the start."
        )

    def _move_out(self) -> str:
        self._offload = make_offload({"activations"}, self._model, [], contextlib.ExitStack())
        where = "on the disk" if device_of(self._model).type == "cpu" else "in host memory"
        return (
            f"from now on what forward saves waits for backward {where}, with the same gradients, bit for bit. "
            "offload={'activations'} does so from the start."
        )

    def _close_checkpointing(self) -> None:
        if self._checkpointing is not None:
            self._checkpointing.close()
        self._checkpointing = None


def make_remedies(
    model: nn.Module,
    *,
    call: str,
    may_look: bool,
    is_sharded: bool = False,
    checkpoint: object = None,
    offload: Collection[str] = (),
) -> Remedies:
    """Choose what can be done: not what is on already, not inside compiled graphs, nor where ranks exchange parameters.

    Args:
        model: The model.
        call: What the user called, for messages.
        may_look: Whether a look may tell that blocks keep the gradient when they run again.
        is_sharded: Its parameters are sharded over ranks, which all do the same.
        checkpoint: The user's choice of blocks; None for none.
        offload: What the user moves elsewhere.
    """
    has_compiled = any(is_compiled(each) for each in model.modules())
    can_recompute = may_look and checkpoint is None and not has_compiled and not is_sharded
    has: list[RemedyName] = [] if can_recompute else ["recompute"]
    if "activations" in offload or has_compiled or is_sharded:
        has.append("offload")
    return Remedies(model, call=call, has=has)
