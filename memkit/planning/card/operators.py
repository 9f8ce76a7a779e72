"""Operators as CUDA takes them where PyTorch decides by device: autocast, attention, softmax, kernels of CUDA's own.

The virtual card's tensors carry PyTorch's "private use" dispatch key. Kernels for that key alone are registered while
`cuda_operators` is entered and taken away afterwards, so that nobody else's tensors are touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memkit._torch import aten
from memkit._torch.dispatch import DispatchKey
from memkit._torch.operators import pass_through, remove_kernels, run_kernel_of
from memkit.planning.card.attention import attention
from memkit.planning.card.autocast import CastCache, Kernel, autocast_kernels

_aten = torch.ops.aten
# Operators that CUDA has a kernel for, and other devices make of others.
_WHOLE = (_aten.silu_backward.default, _aten.mish_backward.default, *aten.FUSED_RMS_NORM)


@contextmanager
def cuda_operators(casts: CastCache, capability: tuple[int, int]) -> Iterator[None]:
    """Let tensors of the virtual card take the operators that they would take on a card of this compute capability."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's own
    fallthrough = [pass_through(key) for key in ("AutocastPrivateUse1", "AutogradPrivateUse1")]
    # One operator for a whole layer of inference: what it takes inside, its operators show one by one.
    fused_layers = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        for name, kernel in autocast_kernels(casts).items():
            library.impl(name, kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
        for name, kernel in (
            ("scaled_dot_product_attention", attention(capability)),
            ("softmax.int", _softmax(aten.softmax)),
            ("log_softmax.int", _softmax(aten.log_softmax)),
        ):
            library.impl(name, kernel, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
            # Without autograd, as under inference_mode:
            library.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
        for operator in _WHOLE:
            library.impl(operator, _never_called, "PrivateUse1")  # type: ignore[no-untyped-call]  # torch's own
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused_layers)
        remove_kernels(library)
        for each in fallthrough:
            remove_kernels(each)


def is_undivided(func: Any) -> bool:
    """Whether an operator that comes to a mode is made of others: only inference_mode leaves it undivided."""
    return torch.is_inference_mode_enabled() and _has_parts(func)


def run_divided(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the operators that it is made of on the card."""
    is_own = func.has_kernel_for_dispatch_key(DispatchKey.PrivateUse1)
    key = DispatchKey.PrivateUse1 if is_own else DispatchKey.CompositeImplicitAutograd
    return run_kernel_of(func, key, args, kwargs)


@cache
def _has_parts(func: Any) -> bool:
    is_other = func is torch.ops.prim.device.default or func in _WHOLE
    return not is_other and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _never_called(*_: Any, **__: Any) -> Any:
    """A kernel whose being there tells PyTorch not to divide its operator. The mode answers before it."""


def _softmax(inner: Any) -> Kernel:
    """`at::softmax` on CUDA: the kernel itself widens float16; what else has another dtype is converted first."""

    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        widens = x.dtype is torch.float16 and dtype is torch.float32
        converted = x if widens or dtype is None else x.to(dtype)
        out: Tensor = inner(converted, dim, widens)
        return out

    return kernel
