"""Reduce the activation memory of chosen blocks, without touching the user's classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memkit._core.errors import ConfigError
from memkit._core.protocols import Closing
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit.train.blocks import BlockChoice, Choice, choose_blocks
from memkit.train.models import unwrap_model
from memkit.train.nesting import Nesting
from memkit.train.treatments import BlockOffload, TreatedForward, Treatment

_FORM = "Checkpointing(model, {})"


@guided(
    words={
        "choice": "blocks layers patterns auto_wrap_policy",
        "pass check_fn=lambda module: ... as choice=lambda name, module: ...": "check_fn",
        "there is no {key}: checkpoints are always non-reentrant and always restore the random state": (
            "use_reentrant preserve_rng_state gradient_checkpointing_kwargs"
        ),
        "choice={'*': 'offload'}": "offload_to_cpu",
    },
    absent={
        "Checkpointing(model), which treats the blocks at once": "enable",
        "with blocks.suspended(): ..., or blocks.close()": "disable",
        "blocks.close()": "remove",
        "model(...): the model is treated in place": "()",
    },
)
class Checkpointing(Closing):
    """Reduces the activation memory of chosen blocks, in any loop, until `close` or the end of a ``with`` block.

    Gradients are bit-equal to the plain model's: torch's, NumPy's and Python's random state are replayed, and buffers
    (BatchNorm statistics, spectral-norm vectors) change once. Names, ``state_dict`` and classes do not change; a deep
    copy or a pickle of the model is treated too.

    Args:
        model: The model; also compiled, or in DistributedDataParallel.
        choice: ``"auto"`` (or True) selects the repeated blocks; False selects none. `fnmatch` patterns over
            ``named_modules()``, classes such as ``nn.TransformerEncoderLayer``, and modules of the model select blocks,
            alone or in a list; so does a callable ``(name, module) -> bool``. All of these are recomputed in backward.
            A mapping from names, patterns, classes or modules gives each block's treatment. ``"full"``: recompute it.
            ``"selective"``: recompute only the cheap operators and keep the results of `KEPT_OPERATORS`.
            ``"offload"``: move everything it saves to disk or, with an accelerator, to host memory. A block's own name,
            or the module itself, takes precedence over patterns and classes. Modules inside a chosen block are treated
            with it.

    Attributes:
        blocks: The chosen modules by name.
        treatments: The treatment of each block.

    Raises:
        ConfigError: No block was chosen, a pattern or class matches no module, or a mapping is ambiguous.
        InputTypeError: ``model`` is not a module.
        StateError: From the model's forward: a block to be recomputed in backward has changed its input in place.

    TorchScript inside of chosen blocks runs its operators as they are written, without fusing them. A scripted function
    that other parts of the model use too is optimized there: choose these parts as well, or torch's checkpoint refuses
    the first steps.

    Memory cost: whatever ``choice`` keeps of each block until backward, plus the peak of the largest block.

    Source: `docs/checkpointing.md`.

    Example:
        >>> import torch, memkit as mk
        >>> block = torch.nn.TransformerEncoderLayer(8, 2, 16)
        >>> model = torch.nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        >>> blocks = mk.Checkpointing(model, {"layers.*": "full", "layers.0": "selective"})  # and train as before
        >>> blocks.treatments
        {'layers.0': 'selective', 'layers.1': 'full', 'layers.2': 'full'}
        >>> blocks.close()  # the model is as it was found
    """

    def __init__(self, model: nn.Module, choice: Choice = "auto") -> None:
        Checker(_FORM.format("...")).instance(model, nn.Module, "the model", "write Checkpointing(model, 'auto')")
        self._install(model, choice, _FORM)

    @classmethod
    def of_setting(cls, model: nn.Module, checkpoint: Choice) -> Checkpointing:
        """Create the `Checkpointing` for a wrapper's ``checkpoint=`` setting; errors name that setting."""
        self = cls.__new__(cls)
        self._install(model, checkpoint, "checkpoint={}")
        return self

    def _install(self, model: nn.Module, choice: Choice, form: str) -> None:
        if isinstance(model, nn.DataParallel):
            raise ConfigError(
                form.format("..."),
                got="a DataParallel model, whose replicas would run the blocks of the original model",
                expected="one model per process",
                fix="use DistributedDataParallel.",
            )
        chosen = BlockChoice(unwrap_model(model), choice, form)
        self.blocks, self.treatments = chosen.blocks, chosen.treatments
        self._before = {name: _own_forward(block) for name, block in self.blocks.items()}
        for name, before in self._before.items():
            _refuse_other(form, name, before, self.treatments[name])
        is_setting = form != _FORM
        without = "pass checkpoint=None" if is_setting else "leave Checkpointing(model) out"
        offload, nesting = BlockOffload(), Nesting(unwrap_model(model), chosen.call, without)
        self._installed: dict[str, TreatedForward] = {}
        told: list[str] = []
        for name, block in self.blocks.items():
            if not isinstance(self._before[name], TreatedForward):  # another wrapper already treats it
                self._installed[name] = TreatedForward(name, block, self.treatments[name], offload, nesting, told)
                block.__dict__["forward"] = self._installed[name]  # on the instance, not on the class

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that are recomputed in backward, in whole or in part."""
        return tuple(name for name, treatment in self.treatments.items() if treatment != "offload")

    @property
    def first_step_bytes(self) -> int:
        """Most bytes that the first forward of a block took for copies of its state that later ones do without."""
        return max((each.first_step_bytes for each in self._installed.values()), default=0)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Disable all treatments inside the ``with`` block."""
        for each in self._installed.values():
            each.is_suspended = True
        try:
            yield
        finally:
            for each in self._installed.values():
                each.is_suspended = False

    def close(self) -> None:
        """Restore every block's own forward."""
        for name, installed in self._installed.items():
            block = self.blocks[name]
            if block.__dict__.get("forward") is not installed:  # other code has replaced it: leave that in place
                continue
            del block.__dict__["forward"]
            if self._before[name] is not None:
                block.__dict__["forward"] = self._before[name]
        self._installed = {}


def may_recompute(model: nn.Module) -> bool:
    """Return whether ``checkpoint="auto"`` is a way out: the model has such blocks, and none is treated yet."""
    blocks = auto_blocks(model)
    is_treated = any(isinstance(block.__dict__.get("forward"), TreatedForward) for block in blocks.values())
    return bool(blocks) and not is_treated


def auto_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that ``checkpoint="auto"`` treats, by name; none if that is no choice for the model."""
    if isinstance(model, nn.DataParallel):
        return {}
    try:
        return choose_blocks(unwrap_model(model), "auto")
    except ConfigError:  # no block with several layers
        return {}


def _own_forward(block: nn.Module) -> Any:
    """Return the forward that a block has beside its class's; None if there is none."""
    if isinstance(block, torch.jit.ScriptModule) and "forward" not in vars(block):
        vars(block)["forward"] = block.forward  # torch would put it there in the first call, in the treatment's place
    return vars(block).get("forward")


def _refuse_other(form: str, name: str, before: object, treatment: Treatment) -> None:
    """Refuse a block that is already treated in another way."""
    if isinstance(before, TreatedForward) and before.treatment != treatment:
        raise ConfigError(
            form.format(f"{{{name!r}: {treatment!r}}}"),
            got=f"a block that already has the treatment {before.treatment!r}",
            expected="one treatment for each block",
            fix="first close the wrapper (or the Checkpointing) that treats this block.",
        )
