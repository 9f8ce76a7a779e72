"""Operators by which autograd's engine and backward formulas write gradients. Used by the Recorder only."""

from __future__ import annotations

import torch

_aten = torch.ops.aten
ADD = _aten.add.Tensor
# What autograd's AccumulateGrad node calls to put a gradient into `.grad`.
ACCUMULATIONS = frozenset({_aten.detach.default, _aten.clone.default, _aten.add_.Tensor, ADD})
# Backward formulas write into fresh zeros. Under a dispatch mode they call the out-of-place forms.
FILLS = frozenset({_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default})
WRITES = frozenset(
    {
        _aten.scatter.src,
        _aten.scatter.value,
        _aten.scatter_add.default,
        _aten.index_add.default,
        _aten.index_put.default,
        _aten.masked_scatter.default,
        _aten.put.default,
    }
)
REUSING = WRITES | {ADD}
