"""CUDA's autocast for the virtual card: which operator runs in which precision, and the cache of cast weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from memkit._torch.autocast import operators_by_policy
from memkit._torch.dispatch import DispatchKey, DispatchKeySet, without_keys
from memkit._torch.dispatch import private_backend_name as private_name
from memkit._torch.operators import schema_of
from memkit._torch.pytree import tree_leaves, tree_map
from memkit._torch.tensors import is_view

Kernel: TypeAlias = Callable[..., Any]
_aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
_NO_AUTOCAST = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]  # not in torch's stubs


class CastCache:
    """Casts of weights that autocast keeps until its outermost block ends."""

    def __init__(self) -> None:
        self._casts: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def clear(self) -> None:
        """Forget all casts."""
        self._casts = WeakIdKeyDictionary()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`at::autocast::cached_cast`: a float32 leaf that requires a gradient is cast once; others each time."""
        if not _is_eligible(value) or value.dtype is dtype:
            return value
        is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not is_view(value)
        # Nothing is kept in inference mode: so do the recorded allocations of inference under autocast.
        is_kept = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not (is_weight and dtype in _LOW and is_kept):
            return value.to(dtype)
        if value not in self._casts or (torch.is_grad_enabled() and not self._casts[value].requires_grad):
            self._casts[value] = value.to(dtype)
        return self._casts[value]


def autocast_kernels(casts: CastCache) -> dict[str, Kernel]:
    """CUDA's autocast, operator by operator."""
    policies: dict[str, Callable[[Any], Kernel]] = {
        "LOWER_PRECISION_FP": lambda operator: _casting(
            operator, casts, lambda _: torch.get_autocast_dtype(private_name())
        ),
        "FP32": lambda operator: _casting(operator, casts, lambda _: torch.float32),
        "FP32_SET_OPT_DTYPE": _setting_dtype,
        "PROMOTE": lambda operator: _casting(operator, casts, _widest),
    }
    kernels = {
        name: make(_operator(name))
        for policy, make in policies.items()
        for name in operators_by_policy()[policy]
        if _operator(name) is not None
    }
    for name in ("norm.Scalar", "norm.ScalarOpt_dim"):  # their redispatch has another signature
        kernels[name] = _norm_in_float32(_operator(name))
    return kernels


def _operator(name: str) -> Any:
    """The overload, or None where this PyTorch lacks it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet, None), overload or "default", None)


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type != "cpu"
    )


def _casting(operator: Any, casts: CastCache, choose: Callable[[Any], torch.dtype]) -> Kernel:
    @wraps(operator)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs))
        with without_keys(_NO_AUTOCAST):
            args, kwargs = tree_map(lambda value: casts.cast(value, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _widest(arguments: Any) -> torch.dtype:
    has_float32 = any(leaf.dtype is torch.float32 for leaf in tree_leaves(arguments) if _is_eligible(leaf))
    return torch.float32 if has_float32 else torch.get_autocast_dtype(private_name())


def _setting_dtype(operator: Any) -> Kernel:
    @wraps(operator)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        num_positional = sum(not argument.kwarg_only for argument in schema_of(operator).arguments)
        has_dtype = kwargs.get("dtype") is not None or (
            len(args) == num_positional and isinstance(args[-1], torch.dtype)
        )
        if _is_eligible(args[0]) and not has_dtype:
            position = [argument.name for argument in schema_of(operator).arguments].index("dtype")
            args = args[:position]
            kwargs = {**kwargs, "dtype": torch.float32}
        with without_keys(_NO_AUTOCAST):
            return operator(*args, **kwargs)

    return kernel


def _norm_in_float32(operator: Any) -> Kernel:
    @wraps(operator)
    def kernel(x: Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
        with without_keys(_NO_AUTOCAST):
            if not _is_eligible(x):
                return operator(x, p, *args, **kwargs)
            given: list[Any] = [*args, *kwargs.values()]
            dim = given[0] if given else ()
            keepdim = len(given) > 1 and given[1]
            return _aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)

    return kernel
