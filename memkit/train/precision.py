"""Training precision: autocast, loss scaling, or a fully converted model."""

from __future__ import annotations

import contextlib
import itertools
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from memkit._core.errors import warn_user
from memkit._core.settings import Checker
from memkit._machine import devices
from memkit.train.gradients import set_gradient_dtype
from memkit.train.split import map_leaves

PrecisionName = Literal["bf16-mixed", "fp16-mixed", "bf16-true", "auto"]
_NAMES = ("bf16-mixed", "fp16-mixed", "bf16-true", "auto")


class Precision:
    """The precision of a step.

    Args:
        model: The model; ``"bf16-true"`` converts it until `close`.
        name: None changes nothing; ``"auto"`` is ``"bf16-mixed"`` where the device handles it well, else None.
        device: The model's device.

    Attributes:
        name: The chosen precision; None for no change.
        scaler: The loss scaler of ``"fp16-mixed"``, else None.

    Raises:
        ConfigError: The name is unknown.
    """

    def __init__(self, model: nn.Module, name: PrecisionName | None, device: torch.device) -> None:
        fix = "use 'bf16-mixed' on recent cards, 'fp16-mixed' on older ones."
        Checker(f"precision={name!r}").choice("precision", name, (None, *_NAMES), fix=fix)
        if name == "auto":
            name = "bf16-mixed" if devices.prefers_bfloat16(device) else None
        if name == "fp16-mixed" and device.type == "cpu":
            warn_user(
                "precision='fp16-mixed' on a CPU, which emulates float16: steps are 4 to 60 times slower than in "
                "float32 and save hardly any memory. Use precision=None, or 'bf16-mixed' on a CPU that has "
                "bfloat16; move a model for an accelerator there first: model.to('cuda')."
            )
        self.name = name
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16-mixed" else None
        self._device_type = device.type
        self._converted: list[tuple[torch.Tensor, torch.dtype]] = []
        self._cleanup = contextlib.ExitStack()
        if name == "bf16-true":
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
            case _:
                return contextlib.nullcontext()

    def close(self) -> None:
        """Restore a converted model's dtypes (values and optimizer state keep bfloat16's digits)."""
        self._cleanup.close()
        for tensor, dtype in self._converted:
            tensor.data = tensor.data.to(dtype)
            if isinstance(tensor, nn.Parameter):
                set_gradient_dtype(tensor, dtype)
        self._converted = []

    def _convert(self, model: nn.Module) -> None:
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
        self._converted = [(tensor, tensor.dtype) for tensor in tensors]
        for tensor in tensors:  # replace only the data: optimizers hold these parameters
            tensor.data = tensor.data.to(torch.bfloat16)
        handle = model.register_forward_pre_hook(_convert_inputs, with_kwargs=True)
        self._cleanup.callback(handle.remove)


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
