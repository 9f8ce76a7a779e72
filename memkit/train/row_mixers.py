"""Modules that mix the rows of a batch, and those that draw random numbers: found, frozen and silenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memkit._torch.modules import BatchNorm, Dropout
from memkit.train.models import device_of


def scan_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of modules in training mode that normalize over the batch's rows, without running any."""
    return tuple(name for name, module in model.named_modules() if normalizes_over_rows(module))


def normalizes_over_rows(module: nn.Module) -> bool:
    """Whether a module is a batch normalization that takes its statistics from the batch."""
    return isinstance(module, BatchNorm) and (module.training or module.running_mean is None)


def is_norm(module: nn.Module) -> bool:
    """Whether a module looks like a normalization: by its class's name, or by running statistics."""
    names = [type(module).__name__.lower(), *(name for name, _ in module.named_buffers(recurse=False))]
    return any("norm" in name or "running" in name for name in names)


def freezing(norms: Sequence[Any], prepare: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes batch normalizations independent of the batch, after another preparation.

    They get running statistics where they have none.
    """

    def freeze() -> None:
        prepare()
        for norm in norms:
            norm.training = False
            if norm.running_mean is None:
                dtype = None if norm.weight is None else norm.weight.dtype
                norm.running_mean = torch.zeros(norm.num_features, device=device_of(norm), dtype=dtype)
                norm.running_var = torch.ones(norm.num_features, device=device_of(norm), dtype=dtype)

    return freeze


def silence(model: nn.Module) -> None:
    """Switch off a model's dropout."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.training = False
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
