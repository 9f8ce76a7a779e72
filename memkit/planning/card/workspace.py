"""What CUDA kernels take from the allocator inside, beyond their results: by operator, from their source."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memkit._torch import aten
from memkit._torch.aten import overloads
from memkit.planning.card.reductions import Processors, reduction
from memkit.planning.kernels import RESULTS as CPU_RESULTS
from memkit.planning.kernels import is_matrix

_aten = torch.ops.aten
_NONE = 0  # at::Reduction
_SORTED_AT_ONCE = 3072  # rows that embedding's backward adds up without sorting them
_FLOAT, _INDEX = 4, 8  # bytes
Phases: TypeAlias = tuple[tuple[int, ...], ...]


_LOSSES = overloads("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "huber_loss")
MULTIPLYING = overloads("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot", "_scaled_mm")
"""Operators that take a handle of cuBLAS."""

RESULTS = {
    operator: result
    for operator, result in CPU_RESULTS.items()
    if operator in _LOSSES | overloads("native_layer_norm_backward")
}
"""Results that are as on a CPU, since their code is the same: see `memkit.planning.kernels.RESULTS`."""


def inside(func: Any, args: Sequence[Any], processors: Processors) -> Phases:
    """Bytes of the blocks that a kernel takes and gives back before it returns.

    Returns:
        Phases, one after the other: blocks that are there at the same time, in the order in which they are taken.
    """
    kernel = _KERNELS.get(func)
    if kernel is not None:
        return kernel(args, processors)
    return (reduction(func, args, processors),)


def _product(args: Sequence[Any], _: Processors) -> Phases:
    """`prepare_matrix_for_cublas`: a matrix whose rows and columns both have gaps is copied first."""
    matrices = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return (tuple(matrix.numel() * matrix.element_size() for matrix in matrices if not is_matrix(matrix)),)


def _loss(args: Sequence[Any], _: Processors) -> Phases:
    """The losses that are reduced."""
    reduced = next((arg for arg in reversed(args) if isinstance(arg, int)), 1) != _NONE
    return ((args[0].numel() * args[0].element_size(),),) if reduced else ()


def _flash_backward(args: Sequence[Any], _: Processors) -> Phases:
    """`mha_bwd` in flash_api.cpp: sums of the rows, and the gradient of the queries in float32."""
    batch, heads, rows, width = args[1].shape
    rows = math.ceil(rows / 128) * 128
    width = math.ceil(width / 32) * 32 if width <= 192 else 256
    return ((batch * heads * rows * _FLOAT, batch * heads * rows * width * _FLOAT),)


def _efficient_backward(args: Sequence[Any], _: Processors) -> Phases:
    """`_efficient_attention_backward`: output times gradient, in float32; half precision accumulates in it too."""
    query, out = args[1], args[5]
    batch, heads, rows, _width = query.shape
    delta = batch * heads * rows * _FLOAT
    if query.dtype is torch.float32:
        return ((out.numel() * _FLOAT, delta),)
    return ((delta, out.numel() * _FLOAT),)


def _layer_norm_backward(args: Sequence[Any], processors: Processors) -> Phases:
    """`LaunchGammaBetaBackwardCUDAKernel`: many short rows are summed up in groups first."""
    width = math.prod(args[2])
    rows, columns = args[1].numel() // width, math.ceil(width / 32)
    if rows <= 64 * 1024 or width // 32 >= processors.multiprocessors // 2:
        return ()
    groups = min(32 * 1024 // columns, math.ceil(rows / 32))
    return ((groups * width * args[1].element_size(),) * sum(args[-1][1:]),)


def _group_norm(args: Sequence[Any], _: Processors) -> Phases:
    """Factor and shift of each channel."""
    rows, channels, size = args[3:6]
    has_weights = args[1] is not None or args[2] is not None
    return ((rows * channels * _FLOAT,) * 2,) if size > 1 and has_weights else ()


def _group_norm_backward(args: Sequence[Any], _: Processors) -> Phases:
    """Two sums of each channel; for the input's gradient two factors of each group, and one of each channel."""
    rows, channels, size, groups = args[5:9]
    if size == 1:
        return ()
    per_channel, per_group = rows * channels * _FLOAT, rows * groups * _FLOAT
    factors = (per_group, per_group, per_channel if args[4] is not None else 0) if args[9][0] else ()
    return ((per_channel, per_channel, *factors),)


def _embedding_backward(args: Sequence[Any], _: Processors) -> Phases:
    """`embedding_dense_backward_cuda`: few rows are added as they come; else sorted, then summed in tens."""
    grad, indices, num_weights = args[:3]
    num_rows, size, width = indices.numel(), indices.element_size(), grad.shape[-1]
    if num_rows <= _SORTED_AT_ONCE and not args[4]:
        return ()
    order = (num_rows * size,) * 2
    num_segments = min(num_rows, num_weights)
    num_parts = num_rows // 10 + num_segments
    return (
        (*order, num_rows * size, _radix_sort(num_rows, num_weights, size)),
        (*order, num_rows * size, 8, *(num_segments * size,) * 2, 8, num_parts * size, num_parts * width * _FLOAT),
    )


def _index_put(args: Sequence[Any], _: Processors) -> Phases:
    """`index_put_with_sort_kernel`, where values are added: positions, and their order."""
    if len(args) < 4 or not args[3]:
        return ()
    given = [index for index in args[1] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return ()  # how many rows a mask selects is in its data
    num_rows = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))  # type: ignore[no-untyped-call]
    num_slots = math.prod(size for size, index in zip(args[0].shape, args[1], strict=False) if index is not None)
    positions = num_rows * _INDEX
    return ((positions,), (positions,) * 4 + (_radix_sort(num_rows, num_slots, _INDEX),))


def _radix_sort(num_rows: int, num_keys: int, size: int) -> int:
    """What CUB's `DeviceRadixSort::SortPairs` asks for: with one block of threads nothing, which it calls 1 byte."""
    if num_rows <= 256 * (19 * 4 // size):
        return 1
    num_passes = math.ceil(num_keys.bit_length() / 8)
    num_blocks = math.ceil(num_rows / (384 * (17 if size == 4 else 10)))
    second = math.ceil(num_rows * size / 256) * 256 if num_passes > 1 else 0
    return num_passes * 256 * 8 + num_blocks * 256 * 4 + 2 * second + 256 + 255


_KERNELS: dict[Any, Callable[[Sequence[Any], Processors], Phases]] = {
    aten.flash_attention_backward: _flash_backward,
    aten.efficient_attention_backward: _efficient_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys(aten.FUSED_RMS_NORM_BACKWARD, _layer_norm_backward),
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default), _product),
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(overloads("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
}
