"""Remedies for an out-of-memory, in order: first those that keep every result bit for bit, then a split."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Literal

from torch import nn
from torch.utils.checkpoint import CheckpointError

from memkit._advice.catalog import Remedy, remedy
from memkit._core.errors import ConfigError, warn_user
from memkit._core.printable import list_some
from memkit._recovery.attempt import Failed, Failure
from memkit._torch.modules import is_compiled
from memkit.train.checkpointing import Checkpointing, may_recompute
from memkit.train.checks import is_refused_transform
from memkit.train.models import device_of
from memkit.train.offload import WrittenAsideError, make_offload, offload_activations
from memkit.train.treatments import ChangedInputError

RemedyName = Literal["recompute", "offload"]
_TRANSFORMED = (
    "the loss, or a block, calls torch.func.grad or another transform of functions, which torch does not run within "
    "the saved tensor hooks that this takes"
)
_BODY = (
    " The body of the loop has run more than once: lists, counters and other objects outside of modules keep what each "
    "of its runs has changed. If it changes any, use train_step, which restores or names them."
)


def ways_to_less(
    model: nn.Module, *, checkpoint: object, offload: Collection[str], has_plan: bool, may_lower: bool
) -> list[str]:
    """Return what the user may still set to let the whole batch take less, in the wrapper's words, for messages.

    Activations are offloaded best alone: a block that runs again is there as a whole.

    Args:
        model: The model.
        checkpoint: The user's choice of blocks, or None.
        offload: The user's ``offload`` setting.
        has_plan: Whether the user has a plan for saved tensors.
        may_lower: Whether the precision may be lowered.
    """
    offloading, treated = f"offload={tuple(sorted({*offload, 'activations'}))}", checkpoint is not None
    ways: list[str] = []
    if treated or has_plan:
        others = ["checkpoint=..."] * treated + ["saved_tensors=..."] * has_plan
        ways = [f"{offloading} without {' and '.join(others)}"]
    elif "activations" not in offload:
        ways = ["checkpoint='auto' or " * may_recompute(model) + offloading]
    return ways + ["a lower precision"] * may_lower


class Remedies:
    """Reduces the memory of a micro-batch that ran out of it, with remedies that keep its gradient bit for bit.

    First the model's repeated blocks are recomputed in backward, if a check on a few rows shows that this keeps the
    gradient (a block that changes its attributes would run again with the changed ones); then an accelerator's saved
    activations are offloaded to host memory. Both stay on, since the next batch is as large. If they do not suffice and
    the batch may be split, they are taken back: parts that fit need neither. On the CPU, activations can only be
    offloaded to disk, which is slower than a split, so that comes last. If both together do not suffice either,
    activations are offloaded alone. Each remedy is reported once.

    Args:
        model: The model.
        call: The user's call, for messages.
        may_check: Whether it may be checked that recomputing blocks keeps the gradient.
        is_sharded: Whether its parameters are sharded over ranks, which must all do the same.
        checkpoint: The user's choice of blocks, or None.
        offload: The user's ``offload`` setting.
        has_plan: Whether the user has a plan for saved tensors. Blocks that run again would save others than planned;
            if activations are offloaded, all of them are, and the plan ends.
        code: How the user applies each remedy from the start, for messages; None for the wrapper's settings.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        call: str,
        may_check: bool,
        is_sharded: bool = False,
        checkpoint: object = None,
        offload: Collection[str] = (),
        has_plan: bool = False,
        code: Mapping[RemedyName, str] | None = None,
    ) -> None:
        self._model, self._call, self._has_plan = model, call, has_plan
        may_change = not is_sharded and not any(is_compiled(each) for each in model.modules())
        may_recompute = may_change and may_check and checkpoint is None and not has_plan
        self._can: list[RemedyName] = ["recompute"] if may_recompute else []
        self._can += ["offload"] if may_change and "activations" not in offload else []
        self._left = [each for each in self._can if each == "recompute" or device_of(model).type != "cpu"]
        self._checkpointing: Checkpointing | None = None
        self._offload: offload_activations | None = None
        self._reported: set[str] = set()
        self._caveat = ""  # what a message about another run has to say about the user's loop, until it has said so
        self._is_last = self._is_proven = self._is_refuted = False
        self._message = "", ""
        # Looked up now: once the host's memory runs out, there may be too little to read the catalog.
        self._known = {"recompute": remedy("checkpoint"), "offload": remedy("offload_activations")}
        self._code = code or {
            "recompute": self._known["recompute"].arguments,
            "offload": self._known["offload"].arguments,
        }

    def has_caused(self, error: BaseException) -> bool:
        """Return whether an error shows that blocks cannot be recomputed, or activations not be offloaded, if so."""
        if self._offload is not None and (isinstance(error, WrittenAsideError) or is_refused_transform(error)):
            return True
        is_of_block = isinstance(error, (ChangedInputError, CheckpointError)) or is_refused_transform(error)
        return self._checkpointing is not None and is_of_block

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that are recomputed in backward."""
        return self._checkpointing.recomputed if self._checkpointing else ()

    @property
    def offloads(self) -> bool:
        """Whether all activations are offloaded."""
        return self._offload is not None

    @property
    def is_unproven(self) -> bool:
        """Whether blocks are recomputed and it is not yet checked that this keeps the gradient."""
        return self._checkpointing is not None and not self._is_proven

    def ways_out(self) -> tuple[str, ...]:
        """Return the code of the remedies that the user may still apply, for messages."""
        may_recompute_blocks = not self._is_refuted and may_recompute(self._model)
        ways: list[RemedyName] = ["recompute"] if may_recompute_blocks else []
        ways += ["offload"] if "offload" in self._can and self._offload is None else []
        return tuple(self._code[each] for each in ways)

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Disable recomputation inside the ``with`` block."""
        return contextlib.nullcontext() if self._checkpointing is None else self._checkpointing.suspended()

    def settle(self, *, is_equal: bool | None, reason: str = "") -> None:
        """Record whether recomputing blocks keeps the gradient; turn it off if not, or if that is unknown.

        Args:
            is_equal: Whether it does; None if that could not be checked.
            reason: Why it could not.
        """
        if is_equal:
            self._is_proven = True
            self.tell("recompute", *self._message)
            return
        self._is_refuted = is_equal is False
        done = "without recomputing blocks in backward: "
        if is_equal is None:
            done += "whether that keeps the gradient could not be checked here "
            done += f"({reason.rstrip('.')}). {self._code['recompute']} recomputes them without this check."
        else:
            done += "blocks that ran again did not give the same gradient."
        self.tell("no recompute", self._message[0], done)
        self._stop_recomputing()

    def around(self) -> contextlib.AbstractContextManager[object] | None:
        """Return the context for forward, if there is one."""
        return None if self._offload is None else self._offload.within(self._model)

    def improve(self, failure: Failure, what: str, *, is_last: bool = False) -> bool:
        """Apply the next remedy; return False if none is left.

        Args:
            failure: Failure of the last attempt. If a block could not be recomputed, recomputation stays off, and so
                does offload if activations could not be offloaded.
            what: Description of the failed attempt, for the message.
            is_last: Whether parts cannot or may not be made smaller: use all remedies left, also those taken back.
        """
        if is_last and not self._is_last:
            self._is_last = True
            is_on = {"recompute": self._checkpointing, "offload": self._offload}
            self._left = [each for each in self._can if is_on[each] is None]
        if isinstance(failure, Failed):
            self._revert(failure.error)
            return True
        while self._left:
            name = self._left.pop(0)
            done = self._recompute() if name == "recompute" else self._move_out()
            if done:
                self._message = f"out of memory with {what} ({failure.description})", done
                if name != "recompute":
                    self.tell(name, *self._message)
                return True
        return is_last and self._offload_alone(failure, what)

    def _revert(self, error: BaseException) -> None:
        """Turn off, for good, the remedy that has caused an error."""
        is_refused = is_refused_transform(error)
        if self._offload is not None and (is_refused or isinstance(error, WrittenAsideError)):
            self._can, self._offload = [each for each in self._can if each != "offload"], None
            if is_refused:
                self.tell("no offload", self._message[0], f"without offloading activations: {_TRANSFORMED}.")
        elif is_refused:
            self._is_refuted = True
            self.tell("no recompute", self._message[0], f"without recomputing blocks in backward: {_TRANSFORMED}.")
            self._stop_recomputing()
        else:
            self.settle(is_equal=False)

    def _offload_alone(self, failure: Failure, what: str) -> bool:
        """Do without recomputing: a block that runs again is there as a whole, where its tensors could wait outside."""
        if self._checkpointing is None or self._offload is None:
            return False
        self._close_checkpointing()
        done = f"from now on no block runs again, and activations are offloaded: {self._offloading().effect}."
        self.tell("offload alone", f"out of memory with {what} ({failure.description})", done)
        return True

    def take_back(self) -> None:
        """Turn off remedies that did not suffice: parts are made smaller instead, until none can be."""
        self.close()
        self._left, self._is_last = [], False

    def tell(self, kind: str, what: str, done: str) -> None:
        """Report, once per kind, what was done about an out-of-memory."""
        if kind not in self._reported:
            self._reported.add(kind)
            caveat, self._caveat = self._caveat, ""
            warn_user(f"{self._call}: {what}. Training continues: {done}{caveat}")

    def note_loop(self) -> None:
        """Note that the user's own loop runs micro-batches: what its body changes is not looked at."""
        if "loop" not in self._reported:
            self._reported.add("loop")
            self._caveat = _BODY

    def close(self) -> None:
        """Restore the model."""
        self._close_checkpointing()
        self._offload = None

    def _recompute(self) -> str:
        try:
            self._checkpointing = Checkpointing.of_setting(self._model, "auto")
        except ConfigError:  # it has no blocks, or they are already treated
            return ""
        names = tuple(self._checkpointing.blocks)
        shown = list_some(names, 3)
        effect = self._known["recompute"].effect
        return f"from now on {shown} run again in backward: {effect}. {self._code['recompute']} does so from the start."

    def _offloading(self) -> Remedy:
        """Return what is known about offloading, with the place."""
        place = "the disk" if device_of(self._model).type == "cpu" else "host memory"
        return self._known["offload"].filled(place=place)

    def _move_out(self) -> str:
        self._offload = make_offload({"activations"}, self._model, [], contextlib.ExitStack())
        effect = self._offloading().effect
        which = "all activations are offloaded instead of those in the plan" if self._has_plan else ""
        which = which or "activations are offloaded"
        return f"from now on {which}: {effect}. {self._code['offload']} does so from the start."

    def _stop_recomputing(self) -> None:
        self._can = [each for each in self._can if each != "recompute"]
        self._close_checkpointing()

    def _close_checkpointing(self) -> None:
        if self._checkpointing is not None:
            self._checkpointing.close()
        self._checkpointing = None
