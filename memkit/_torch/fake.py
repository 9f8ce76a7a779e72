"""Fake tensors, which have no data, and the parts of torch that handle them."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _guards as fake_mode_owner  # its `detect_fake_mode` tells whether tensors are fake
from torch._C import (
    _get_default_device as default_device,
    _nn as to_owner,  # its `_parse_to` reads the arguments of `module.to(...)`
)
from torch._functorch import config as functorch_settings
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _device as utils_device

device_context: Callable[[], Any] = functools.partial(getattr, torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
"""Returns the context entered by `torch.set_default_device`; None if there is none."""


NORMALIZE_DEVICE = "_normalize_fake_device" if hasattr(FakeTensor, "_normalize_fake_device") else None
"""Name of the static method that normalizes the device of a fake tensor; 2.10 lacks it."""

device_constructors: Callable[[], set[Callable[..., Any]]] = utils_device._device_constructors
"""Returns the functions that the default device applies to; torch caches the set after the first call."""

IS_MADE_WITH_DEVICE = "fake_mode_or_elem" not in inspect.signature(FakeTensor.__new__).parameters
"""Whether ``FakeTensor(mode, elem, device)`` reads the device before anything else: until 2.12."""

guard_data_pointer: Callable[[torch.Tensor], None] = (
    torch._C._set_warn_deprecated_on_mutable_data_ptr
    if functorch_settings.fake_tensor_allow_unsafe_data_ptr_access
    else torch._C._set_throw_on_mutable_data_ptr
)
"""Makes reading the address of a fake tensor a warning or an error, depending on torch's settings."""

RUN_FALLBACK = "run_fallback_kernel"
"""Name of the function in `fake_tensor` that runs an operator without a shape function on zeros."""

PARSE_TO = "_parse_to"


def attributes_of_user(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that code has given to a tensor, without those through which a fake tensor works."""
    own = {*FakeTensor.__annotations__, "_fake_device", "_is_param"}
    return {name: value for name, value in vars(tensor).items() if name not in own and "_memo" not in name}


@contextmanager
def without_fake_log() -> Iterator[None]:
    """Keep torch from logging a traceback of its own for each operator that fails on fake tensors."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


__all__ = [
    "IS_MADE_WITH_DEVICE",
    "NORMALIZE_DEVICE",
    "PARSE_TO",
    "RUN_FALLBACK",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "current_default_device",
    "default_device",
    "device_constructors",
    "device_context",
    "fake_mode_owner",
    "fake_tensor",
    "guard_data_pointer",
    "set_default_device",
    "to_owner",
    "without_fake_log",
]


def set_default_device(device: torch.device | None) -> None:
    """Do the same as `torch.set_default_device`; in 2.8, `torch.get_default_device` fails after None was set."""
    torch.set_default_device(device)
    if device is None and device_context() is None:
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def current_default_device() -> torch.device:
    """Return the default device; `torch.get_default_device` creates a tensor to determine its index."""
    stack = function_modes()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    modes = [mode for mode in stack if isinstance(mode, utils_device.DeviceContext)]
    context = modes[-1] if modes else device_context()
    return torch.device(default_device()) if context is None else context.device
