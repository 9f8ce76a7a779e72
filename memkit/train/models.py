"""What a model is under its wrappers, and where it lies."""

from __future__ import annotations

import torch
from torch import nn


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own model from within DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # noqa: SLF001 - torch.compile's wrapper, whose class is slow to import
            model = model.get_submodule("_orig_mod")
        else:
            return model


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU where it has none."""
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
