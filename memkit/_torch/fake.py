"""Tensors without data, and what refuses to compute on them."""

from typing import Any

import torch
from torch import _guards as fake_mode_owner  # its `detect_fake_mode` says whether tensors have no data
from torch._C import _get_default_device as default_device
from torch._C import _nn as to_owner  # its `_parse_to` reads the arguments of `module.to(...)`
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import _BypassDispatchCache as BypassDispatchCache
from torch._subclasses.fake_tensor import _DispatchCacheKey as DispatchCacheKey


def device_context() -> Any:
    """Return the context that `torch.set_default_device` has entered; None where there is none."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


__all__ = [
    "BypassDispatchCache",
    "DataDependentOutputException",
    "DispatchCacheKey",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "default_device",
    "device_context",
    "fake_mode_owner",
    "to_owner",
]
