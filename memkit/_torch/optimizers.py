"""Where torch decides whether an optimizer steps several tensors at once."""

from torch.utils import _foreach_utils as foreach

__all__ = ["foreach"]
