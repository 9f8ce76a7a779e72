"""Training precision: autocast, loss scaling, or a fully converted model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from memkit._core.errors import ConfigError, InputTypeError, warn_user
from memkit._machine import devices
from memkit._torch.modules import all_parameters
from memkit.train.gradients import set_gradient_dtype
from memkit.train.split import map_leaves

PrecisionName = Literal["bf16-mixed", "bf16", "fp16-mixed", "fp16", "bf16-true", "fp32", "32-true", "auto"]
_CALL = "MemoryEfficientTrainingWrapper"
_NAMES = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "32-true": "fp32"}  # synonyms
_KNOWN = ("bf16-mixed", "fp16-mixed", "bf16-true", "fp32", "auto")
# Names of precisions in accelerate, Lightning and torch, by the name here.
_FOREIGN = {
    "fp32": ("32", "float32", "fp32-true", "no", "full", "float", "none", "32-mixed"),
    "bf16-mixed": ("bfloat16", "amp", "mixed", "true", "bf16_mixed", "amp_bf16", "bfloat16-mixed"),
    "fp16-mixed": ("16", "16-mixed", "float16", "half", "fp16_mixed", "amp_fp16", "float16-mixed"),
    "bf16-true": ("bf16_true", "bfloat16-true", "bf16-full", "pure_bf16"),
}
_OFF = contextlib.nullcontext()  # stateless, so it can be entered again
_HALVES = {"16-true", "fp16-true", "float16-true"}
_DOUBLES = {"64", "64-true", "float64", "double", "fp64"}


def read_precision(name: object) -> str | None:
    """Return the main name of a precision; None keeps the model's.

    Raises:
        ConfigError: The name is unknown; the message says what this library calls it.
    """
    if name is None:
        return None
    known = _NAMES.get(name, name) if isinstance(name, str) else name
    if isinstance(known, str) and known in _KNOWN:
        return known
    word = str(name).removeprefix("torch.").lower()
    meant = next((each for each, words in _FOREIGN.items() if word in words), None)
    if meant is None and word in {*_KNOWN, *_NAMES}:  # in other letters of case
        meant = word
    fix = f"pass precision={meant!r}." if meant else "pass precision='bf16-mixed', or 'fp16-mixed' on older cards."
    if word in _HALVES:
        fix = "pass precision='fp16-mixed': it keeps the parameters in float32, which float16 steps would not change."
    elif word in _DOUBLES:
        fix = "write model.double() first and pass precision=None, which keeps the model as it is."
    elif name is False:
        fix = "pass precision=None, which keeps the model as it is."
    raise ConfigError(
        f"{_CALL}(precision={name!r})",
        got=f"precision={name!r}",
        expected="one of None, " + ", ".join(map(repr, (*_KNOWN, *_NAMES))),
        fix=fix,
    )


class Precision:
    """The precision of a step.

    Args:
        model: The model; ``"bf16-true"`` converts it until `close`.
        name: None changes nothing; nor does ``"fp32"`` (``"32-true"``), which requires float32 parameters; ``"auto"``
            is ``"bf16-mixed"`` where the device handles it well, else None.
        device: The model's device.
        scaler: The user's own loss scaler; None makes one for ``"fp16-mixed"``.

    Attributes:
        name: The chosen precision; None for no change.
        scaler: The loss scaler, if there is one and it is enabled.

    Raises:
        ConfigError: The name is unknown, or the model's parameters have the wrong dtype for it.
        InputTypeError: ``scaler`` is not a `torch.amp.GradScaler`.
    """

    def __init__(
        self,
        model: nn.Module,
        name: PrecisionName | None,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        chosen = read_precision(name)
        _check_parameters(model, chosen, has_scaler=scaler is not None)
        _check_scaler(scaler, chosen, device)
        if chosen == "auto":
            chosen = "bf16-mixed" if devices.prefers_bfloat16(device) else None
        if chosen == "fp16-mixed" and device.type == "cpu":
            warn_user(
                f"precision={name!r} on a CPU, which emulates float16: steps are 4 to 60 times slower than in "
                "float32 and save hardly any memory. Use precision=None, or 'bf16-mixed' on a CPU that has "
                "bfloat16; to train on an accelerator, move the model there first: model.to('cuda')."
            )
        self.name = None if chosen == "fp32" else chosen
        if scaler is None and chosen == "fp16-mixed":
            scaler = torch.amp.GradScaler(device.type)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device_type = device.type
        self._converted: list[tuple[torch.Tensor, torch.dtype]] = []
        self._cleanup = contextlib.ExitStack()
        if chosen == "bf16-true":
            self._convert(model)

    @property
    def is_mixed(self) -> bool:
        """Whether forwards run under autocast."""
        return self.name in {"bf16-mixed", "fp16-mixed"}

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for forward and loss."""
        match self.name:
            case "bf16-mixed":
                return torch.autocast(self._device_type, torch.bfloat16)
            case "fp16-mixed":
                return torch.autocast(self._device_type, torch.float16)
            case "bf16-true":
                return _explaining_dtypes()
            case _:
                return _OFF

    def close(self) -> None:
        """Restore a converted model's dtypes (values and optimizer state keep bfloat16's digits)."""
        self._cleanup.close()
        for tensor, dtype in self._converted:
            tensor.data = tensor.data.to(dtype)
            if isinstance(tensor, nn.Parameter):
                set_gradient_dtype(tensor, dtype)
        self._converted = []

    def _convert(self, model: nn.Module) -> None:
        tensors = [tensor for tensor in (*all_parameters(model), *model.buffers()) if tensor.is_floating_point()]
        self._converted = [(tensor, tensor.dtype) for tensor in tensors]
        for tensor in tensors:  # replace only the data: optimizers hold these parameters
            tensor.data = tensor.data.to(torch.bfloat16)
        handle = model.register_forward_pre_hook(_convert_inputs, with_kwargs=True)
        self._cleanup.callback(handle.remove)


@contextlib.contextmanager
def _explaining_dtypes() -> Iterator[None]:
    """Say in torch's error which tensors a converted model does not convert."""
    try:
        yield
    except RuntimeError as error:
        if "BFloat16" in str(error):
            error.add_note(
                "memkit: precision='bf16-true' converts the model, and what model(...) gets. Tensors that reach its "
                "layers in another way, as in model.encode(x), keep their dtype, and so do targets. Way out: write "
                "x.to(torch.bfloat16) for these, or pass precision='bf16-mixed', where torch converts them."
            )
        raise


def _check_parameters(model: nn.Module, name: str | None, *, has_scaler: bool) -> None:
    """Refuse parameters whose dtype does not fit the precision.

    Raises:
        ConfigError: A dtype does not fit.
    """
    dtypes = {each.dtype for each in all_parameters(model) if each.is_floating_point()}
    if name == "fp32" and dtypes - {torch.float32}:
        others = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes - {torch.float32}))
        raise ConfigError(
            f"{_CALL}(precision='fp32')",
            got=f"a model with {others} parameters",
            expected="float32 parameters",
            fix="write model.float() first, and make the optimizer after it; or pass precision=None, which keeps the "
            "model as it is.",
        )
    if (name == "fp16-mixed" or has_scaler) and torch.float16 in dtypes:
        raise ConfigError(
            f"{_CALL}(precision={name!r}{', scaler=...' if has_scaler else ''})",
            got="a model with float16 parameters",
            expected="float32 parameters, in which scaled gradients do not overflow; the forward computes in float16",
            fix="write model.float() first, and make the optimizer after it.",
        )


def _check_scaler(scaler: object, name: str | None, device: torch.device) -> None:
    """Refuse anything but a loss scaler of torch; warn of float16 with a disabled one.

    Raises:
        InputTypeError: ``scaler`` is not a `torch.amp.GradScaler`.
    """
    if scaler is None:
        return
    right = f"scaler=torch.amp.GradScaler({device.type!r})"
    if not isinstance(scaler, torch.amp.GradScaler):
        raise InputTypeError(
            f"{_CALL}(scaler=...)",
            got=f"the class {scaler.__name__}" if isinstance(scaler, type) else f"a {type(scaler).__name__}",
            expected="a torch.amp.GradScaler of your own, or None",
            fix=f"pass {right}, or leave it at None: precision='fp16-mixed' makes one.",
        )
    if name == "fp16-mixed" and not scaler.is_enabled():
        warn_user(
            f"{_CALL}(precision='fp16-mixed', scaler=...): the scaler is not enabled, so that small gradients become "
            f"zero in float16. Way out: pass {right}, or precision=None together with it."
        )


def _convert_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert floating-point inputs to the module's dtype."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    dtypes = (each.dtype for each in tensors if each.is_floating_point())
    dtype = next(dtypes, torch.bfloat16)
    if dtype != torch.bfloat16 and torch.bfloat16 in dtypes:  # norms reset to float32 do not change the model's dtype
        dtype = torch.bfloat16

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(convert, args), map_leaves(convert, kwargs)
