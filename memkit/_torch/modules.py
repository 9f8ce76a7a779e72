"""Bases of torch's layers that have no public name."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout

__all__ = ["BatchNorm", "Dropout"]
