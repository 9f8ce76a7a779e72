"""Operators on many tensors at once, as torch's own optimizers use them; documented, though their names are private."""

import torch

clone = torch._foreach_clone
multiply_ = torch._foreach_mul_
norm = torch._foreach_norm

__all__ = ["clone", "multiply_", "norm"]
