"""What CUDA kernels take from the allocator inside of themselves, beyond their results: by operator, from their source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memkit.planning.cuda_reductions import Processors, reduction
from memkit.planning.kernels import RESULTS as CPU_RESULTS

_aten = torch.ops.aten
_NONE = 0  # at::Reduction
_SORTED_AT_ONCE = 3072  # rows that embedding's backward adds up without sorting them
_FLOAT, _INDEX = 4, 8  # bytes
_LAYER_NORM_PARTS = 64  # rows of partial sums


def _overloads(*names: str) -> frozenset[Any]:
    return frozenset(
        getattr(getattr(_aten, name), overload) for name in names for overload in getattr(_aten, name).overloads()
    )


_LOSSES = _overloads("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "huber_loss")
_INDEX_WRITES = _overloads("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
MULTIPLYING = _overloads(
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "einsum", "linear", "matmul", "mm", "mv", "vdot",
    "_scaled_mm", "linalg_vecdot",
)  # fmt: skip
"""Operators that take a handle of cuBLAS. Under inference_mode the composite ones come undivided."""

RESULTS = {
    operator: result
    for operator, result in CPU_RESULTS.items()
    if operator in _LOSSES | _overloads("native_layer_norm_backward")
}
"""Results that are as on a CPU, since their code is the same: see `memkit.planning.kernels.RESULTS`."""


def inside(func: Any, args: Sequence[Any], out: Any, processors: Processors) -> tuple[int, ...]:
    """Bytes of each block that a kernel takes and gives back before it returns, in the order in which it takes them."""
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(args[1])
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward(args[1], args[5])
    if func in _LOSSES:
        reduced = next((arg for arg in reversed(args) if isinstance(arg, int)), 1) != _NONE
        return (args[0].numel() * args[0].element_size(),) if reduced else ()
    if func is _aten.native_layer_norm_backward.default:
        width = math.prod(args[2])
        return (_LAYER_NORM_PARTS * width * _FLOAT,) * 2 if any(args[7]) else ()
    if func is _aten.native_group_norm_backward.default:
        rows, channels = args[5], args[6]
        return (rows * channels * _FLOAT,) * 2
    if func is _aten.embedding_dense_backward.default:
        return _sorting(args[1].numel()) if args[1].numel() > _SORTED_AT_ONCE else ()
    if func in _INDEX_WRITES and len(args) > 3 and args[3]:
        first = next(index for index in args[1] if index is not None)
        return (first.numel() * _INDEX, *_sorting(first.numel()))
    return reduction(func, args, processors)


def _flash_backward(query: Tensor) -> tuple[int, ...]:
    """`mha_bwd` in flash_api.cpp: sums of the rows, and the gradient of the queries in float32."""
    batch, heads, rows, width = query.shape
    rows = math.ceil(rows / 128) * 128
    width = math.ceil(width / 32) * 32 if width <= 192 else 256
    return batch * heads * rows * _FLOAT, batch * heads * rows * width * _FLOAT


def _efficient_backward(query: Tensor, out: Tensor) -> tuple[int, ...]:
    """`_efficient_attention_backward`: float32 multiplies output and gradient beforehand; half precision accumulates."""
    batch, heads, rows, _ = query.shape
    delta = batch * heads * rows * _FLOAT
    if query.dtype is torch.float32:
        return out.numel() * _FLOAT, delta
    return delta, out.numel() * _FLOAT


def _sorting(num_rows: int) -> tuple[int, ...]:
    """Positions before and after sorting, the sorted keys, and CUB's second buffers."""
    return (num_rows * _INDEX,) * 4
