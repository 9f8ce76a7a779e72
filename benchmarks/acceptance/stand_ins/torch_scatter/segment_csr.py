"""Sums, means and largest values of the segments of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_csr(src: Tensor, indptr: Tensor, reduce: str) -> Tensor:
    """Reduce the rows of ``src`` between the entries of ``indptr``; both may have a batch dimension before."""
    if src.ndim == 3:
        return torch.stack([segment_csr(*each, reduce) for each in zip(src, indptr, strict=True)])
    return torch.segment_reduce(src, reduce, offsets=indptr, axis=0, unsafe=True)
