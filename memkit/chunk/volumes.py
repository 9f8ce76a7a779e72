"""Advice for row-wise functions that get volumes: rows are cut along dimension 0; `memkit.tiled_apply` cuts space."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from memkit.chunk.held import modules_of

_NUM_SPATIAL = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def spatial_call(fn: object, tensors: Sequence[Tensor]) -> str | None:
    """Return the call that cuts space, if the function has convolutions and its only tensor fits them."""
    num_spatial = _num_spatial(fn)
    if len(tensors) != 1 or num_spatial is None or tensors[0].dim() not in (num_spatial + 1, num_spatial + 2):
        return None
    longest = max(tensors[0].shape[-num_spatial:])
    tile_size = 1 << max(4, longest.bit_length() - 2)  # a fourth to a half of the longest side
    return f"mk.tiled_apply(module, {'x' if is_batched(fn, tensors[0]) else 'x[None]'}, tile_size={tile_size})"


def without_batch(fn: object, tensors: Sequence[Tensor]) -> str | None:
    """Return the way out for a single volume (C, D, H, W), whose channels would be the rows; None for anything else."""
    where = None if not tensors or is_batched(fn, tensors[0]) else spatial_call(fn, tensors)
    return where and f"add the batch dimension, x[None]; to cut space: {where}"


def is_batched(fn: object, tensor: Tensor) -> bool:
    """Return whether dimension 0 is the batch for a function with convolutions; True for one without."""
    num_spatial = _num_spatial(fn)
    return num_spatial is None or tensor.dim() != num_spatial + 1


def _num_spatial(fn: object) -> int | None:
    """Return the number of spatial dimensions of a function's first convolution."""
    layers = (layer for module in modules_of(fn) for layer in module.modules())
    return next((number for layer in layers for kind, number in _NUM_SPATIAL.items() if isinstance(layer, kind)), None)
