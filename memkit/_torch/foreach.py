"""Operators on many tensors at once, used by torch's own optimizers; documented, although their names are private."""

from collections.abc import Sequence

import torch
from torch import Tensor

from memkit._torch.aten import overloads

add_ = torch._foreach_add_
multiply_ = torch._foreach_mul_
norm = torch._foreach_norm


def clone(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy tensors; in 2.10 and earlier, one after the other."""
    if _clone is None or not tensors:  # torch refuses an empty list
        return [each.clone() for each in tensors]
    copies: Sequence[Tensor] = _clone(tensors)
    return copies


def clone_aside(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy strided tensors by `COPIES`, which do not count as operators of a forward that runs meanwhile."""
    return clone(tensors) if _clone is not None else [torch.detach_copy(each) for each in tensors]


_clone = getattr(torch, "_foreach_clone", None)

COPIES = overloads("_foreach_clone.default") or overloads("detach_copy.default")
"""The operators that `clone_aside` runs, and models do not."""

__all__ = ["COPIES", "add_", "clone", "clone_aside", "multiply_", "norm"]
