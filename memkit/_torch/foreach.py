"""Operators on many tensors at once, used by torch's own optimizers; documented, although their names are private."""

from collections.abc import Sequence

import torch
from torch import Tensor

from memkit._torch.aten import overloads

multiply_ = torch._foreach_mul_
norm = torch._foreach_norm


def clone(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy tensors; in 2.10 and earlier, one after the other, and contiguously."""
    if _clone is None:
        return [torch.detach_copy(each) for each in tensors]
    copies: Sequence[Tensor] = _clone(tensors)
    return copies


_clone = getattr(torch, "_foreach_clone", None)

COPIES = overloads("_foreach_clone.default") or overloads("detach_copy.default")
"""The operators that `clone` runs, and models do not."""

__all__ = ["COPIES", "clone", "multiply_", "norm"]
