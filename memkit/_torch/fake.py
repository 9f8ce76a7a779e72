"""Tensors without data, and what refuses to compute on them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _guards as fake_mode_owner  # its `detect_fake_mode` says whether tensors have no data
from torch._C import _get_default_device as default_device
from torch._C import _nn as to_owner  # its `_parse_to` reads the arguments of `module.to(...)`
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
from torch._subclasses.fake_tensor import _BypassDispatchCache as BypassDispatchCache
from torch._subclasses.fake_tensor import _DispatchCacheKey as DispatchCacheKey

from memkit._torch.dispatch import no_dispatch
from memkit._torch.pytree import tree_map


def device_context() -> Any:
    """Return the context that `torch.set_default_device` has entered; None where there is none."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


PARSE_TO = "_parse_to"
FAKE_LOGGER = fake_tensor.__name__  # where torch says which operator it could not run without data

__all__ = [
    "FAKE_LOGGER",
    "PARSE_TO",
    "BypassDispatchCache",
    "DataDependentOutputException",
    "DispatchCacheKey",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "current_default_device",
    "default_device",
    "device_context",
    "device_patches",
    "fake_mode_owner",
    "fallback_patch",
    "set_default_device",
    "to_owner",
]


def device_patches(name_device: Callable[[torch.device], torch.device]) -> list[tuple[Any, str, Any]]:
    """Return patches (owner, name, replacement) by which tensors without data keep ``name_device(device)``.

    Where that is the device itself, torch completes it as ever, with the index of a device that is there.
    """
    patches: list[tuple[Any, str, Any]] = []
    normalize = getattr(FakeTensor, "_normalize_fake_device", None)  # 2.10 lacks it
    if normalize is not None:

        @functools.wraps(normalize)
        def normalized(device: torch.device) -> torch.device:
            named = name_device(device)
            return named if named is not device else normalize(device)

        patches.append((FakeTensor, "_normalize_fake_device", staticmethod(normalized)))
    new = FakeTensor.__new__
    if "fake_mode_or_elem" not in inspect.signature(new).parameters:  # until 2.12 a tensor is made before that

        @functools.wraps(new)
        def created(cls: type, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            return new(cls, mode, elem, name_device(torch.device(device)), *args, **kwargs)

        patches.append((FakeTensor, "__new__", staticmethod(created)))
    return patches


def set_default_device(device: torch.device | None) -> None:
    """Do what `torch.set_default_device` does; in 2.8 `torch.get_default_device` fails once None was set."""
    torch.set_default_device(device)
    if device is None and device_context() is None:
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def current_default_device() -> torch.device:
    """Return the device that tensors are made on."""
    try:
        return torch.get_default_device()
    except AttributeError:  # in 2.8, once it was set to None
        return torch.device(default_device())


def fallback_patch(own: torch.device) -> tuple[Any, str, Any]:
    """Return a patch by which operators without a shape function run for tensors of a device that is not there.

    torch runs them on zeros, on the device itself; here they run on the CPU.
    """
    run: Callable[..., Any] = fake_tensor.run_fallback_kernel

    def moved(value: Any, device: torch.device) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with no_dispatch():
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(value.fake_mode, like, device)

    @functools.wraps(run)
    def run_on_host(mode: Any, func: Any, flat_args: Sequence[Any], *args: Any) -> Any:
        if not any(isinstance(each, FakeTensor) and each.fake_device.type == own.type for each in flat_args):
            return run(mode, func, flat_args, *args)
        out = run(mode, func, [moved(each, torch.device("cpu")) for each in flat_args], *args)
        return tree_map(lambda value: moved(value, own), out)

    return fake_tensor, "run_fallback_kernel", run_on_host
