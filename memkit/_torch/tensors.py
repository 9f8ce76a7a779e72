"""What a tensor is besides its values: how often it was changed, which storage it has, which hooks hang on it."""

from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from typing import Any

import torch

from memkit._torch.versions import require


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, as autograd itself counts; not for inference tensors."""
    return tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version of each tensor."""
    return [each._version for each in tensors]


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Returns a number that is the same for all Python objects of one storage."""


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor as it is; the public forms want it coalesced."""
    return tensor._indices(), tensor._values()


use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")
"""Returns how many hold a tensor below Python."""


def hooks_of(tensor: torch.Tensor) -> Any:
    """Return the hooks on a tensor's gradient; None where it never had any."""
    return tensor._backward_hooks


def set_hooks(tensor: torch.Tensor, hooks: Any) -> None:
    """Give a tensor what `hooks_of` returned."""
    tensor._backward_hooks = hooks


def accumulate_hooks(tensor: torch.Tensor) -> Any:
    """Return the hooks that wait for a leaf's gradient to be accumulated; empty or None without any."""
    return tensor._post_accumulate_grad_hooks


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what a view is a view of; None for what is no view."""
    return tensor._base


is_zero_tensor: Callable[[torch.Tensor], bool] = methodcaller("_is_zerotensor")
"""Says whether a tensor is one of autograd's zeros, which take no memory."""


is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")
"""Says whether a tensor is a view."""


MAKE_SUBCLASS = "_make_subclass"
"""Name of the static method of a tensor that makes parameters and other subclasses."""


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autograd keeps a tensor's gradient in; None where it takes any."""
    return tensor.grad_dtype if _HAS_GRADIENT_DTYPE else tensor.dtype


def assign_gradient_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Choose the dtype that autograd keeps a tensor's gradient in.

    Raises:
        TorchVersionError: It is not the tensor's own, and torch is older than 2.10.
    """
    if _HAS_GRADIENT_DTYPE:
        tensor.grad_dtype = dtype
    elif dtype is not None and dtype != tensor.dtype:
        require_gradient_dtypes("a gradient in another dtype than its parameter's")


def require_gradient_dtypes(feature: str) -> None:
    """Refuse a feature that keeps gradients in another dtype than their parameters'.

    Raises:
        TorchVersionError: torch is older than 2.10.
    """
    require(_HAS_GRADIENT_DTYPE or None, name="Tensor.grad_dtype", since="2.10", feature=feature)


_HAS_GRADIENT_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # 2.8 lacks it, 2.10 has it
