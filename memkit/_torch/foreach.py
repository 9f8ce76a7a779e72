"""Operators on many tensors at once, used by torch's own optimizers; documented, although their names are private."""

from collections.abc import Sequence

import torch
from torch import Tensor

multiply_ = torch._foreach_mul_
norm = torch._foreach_norm


def clone(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy tensors; in 2.10 and earlier, one after the other."""
    if _clone is None:
        return [each.clone() for each in tensors]
    copies: Sequence[Tensor] = _clone(tensors)
    return copies


_clone = getattr(torch, "_foreach_clone", None)

__all__ = ["clone", "multiply_", "norm"]
