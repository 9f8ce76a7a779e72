"""What CUDA's reductions take from the allocator inside: partial sums and counters, where many blocks share a result.

The rules are `setReduceConfig` in ATen/native/cuda/Reduce.cuh and the order of dimensions in ATen/TensorIterator.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_MOST_THREADS = 512  # of a block
_WARP = 32
_VECTOR = 4  # numbers that a thread loads at a time
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that a thread adds up
_COUNTER = 4  # bytes
# Bytes of what is carried along: a sum; a value and its index; mean and squares.
_FLOAT, _WITH_INDEX, _MOMENTS = 4, 16, 16


class Processors(NamedTuple):
    """What of a card decides how a kernel is laid out.

    Attributes:
        multiprocessors: Their number.
        threads: Most threads at a time on one of them.
    """

    multiprocessors: int
    threads: int

    @classmethod
    def of(cls, capability: tuple[int, int], count: int | None) -> Processors:
        """Those of a card; where their number is not known, as many as an A100 has."""
        threads = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536}.get(capability, 2048)
        return cls(count or 108, 1536 if capability[0] == 12 else threads)


def reduction(func: Any, args: Sequence[Any], processors: Processors) -> tuple[int, ...]:
    """Bytes of the partial results and of the counters that a reducing operator takes; nothing where it needs none."""
    rule = _RULES.get(func)
    if rule is None or args[0].layout is not torch.strided or not args[0].numel():
        return ()
    x, carried, position = args[0], *rule
    dims = args[position] if 0 < position < len(args) else None
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        dims = range(x.dim())
    return _split_over_blocks(x, {dim % x.dim() for dim in dims if x.dim()}, max(carried, x.element_size()), processors)


class _Dimension(NamedTuple):
    """A dimension with the steps of input and output in it, in numbers; an output does not move where it is summed."""

    size: int
    step: int
    step_out: int


def _dimensions(x: Tensor, reduced: set[int]) -> list[_Dimension]:
    """Those of the kernel: the reduced ones first, the fastest of each first, and what lies in order as one."""
    dims, step_out = [], 1
    for dim in reversed(range(x.dim())):
        dims.append(_Dimension(x.shape[dim], x.stride(dim), 0 if dim in reduced else step_out))
        step_out *= 1 if dim in reduced else x.shape[dim]
    merged: list[_Dimension] = []
    for new in sorted(dims, key=lambda d: (d.step_out, d.step if d.step_out == 0 else 0)):
        last = merged[-1] if merged else None
        if last is None:
            merged.append(new)
        elif last.size == 1:
            merged[-1] = new
        elif new.size == 1 or (last.size * last.step, last.size * last.step_out) == (new.step, new.step_out):
            merged[-1] = last._replace(size=last.size * new.size)
        else:
            merged.append(new)
    return merged


def _split_over_blocks(x: Tensor, reduced: set[int], carried: int, processors: Processors) -> tuple[int, ...]:
    dims = _dimensions(x, reduced)
    num_reduced = sum(dim.step_out == 0 for dim in dims)
    num_outputs = math.prod(x.shape[dim] for dim in range(x.dim()) if dim not in reduced)
    num_inputs = x.numel() // num_outputs
    is_along_rows = num_reduced == len(dims) or dims[0].step < dims[num_reduced].step
    across, down = (num_inputs, num_outputs) if is_along_rows else (num_outputs, num_inputs)
    fastest = dims[0 if is_along_rows else num_reduced].step if dims else 1
    vector_out = 1
    if fastest == 1 and is_along_rows and across > 128 and num_reduced == 1 and carried != _MOMENTS:
        across //= _VECTOR
    elif fastest == 1 and not is_along_rows:
        others = [dim.step for index, dim in enumerate(dims) if index != num_reduced]
        vector_out = math.gcd(_VECTOR, x.storage_offset(), dims[num_reduced].size, *others)
        across //= vector_out

    most_threads = _MOST_THREADS // vector_out
    across, down = (_power_of_two(min(number, most_threads)) for number in (across, down))
    height = min(down, most_threads // min(across, _WARP))
    width = min(across, most_threads // height)
    step_in, step_out = (width, 1) if is_along_rows else (1, width)
    values = math.ceil(num_inputs / step_in)
    if values < height * _FEWEST_VALUES and values < _MOST_VALUES:
        return ()
    values = math.ceil(num_inputs / (step_in * height))
    grid = math.ceil(num_outputs // vector_out / step_out)
    room = processors.multiprocessors * (processors.threads // (width * height))
    if values < _MOST_VALUES or grid > room:
        return ()
    blocks = max(
        min(math.ceil(room / grid), math.ceil(values / _FEWEST_VALUES)),
        math.ceil(values / _MOST_VALUES),
    )
    if blocks == 1:
        return ()
    per_output = 1 if is_along_rows else width * vector_out
    return carried * num_outputs * blocks * per_output, _COUNTER * grid


def _power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


_RULES: dict[Any, tuple[int, int]] = {
    _aten.sum.default: (_FLOAT, 0),
    _aten.sum.dim_IntList: (_FLOAT, 1),
    _aten.nansum.default: (_FLOAT, 1),
    _aten.mean.default: (_FLOAT, 0),
    _aten.mean.dim: (_FLOAT, 1),
    _aten.linalg_vector_norm.default: (_FLOAT, 2),
    _aten.prod.default: (_FLOAT, 0),
    _aten.prod.dim_int: (_FLOAT, 1),
    _aten.amax.default: (0, 1),
    _aten.amin.default: (0, 1),
    _aten.max.default: (0, 0),
    _aten.min.default: (0, 0),
    _aten.max.dim: (_WITH_INDEX, 1),
    _aten.min.dim: (_WITH_INDEX, 1),
    _aten.argmax.default: (_WITH_INDEX, 1),
    _aten.argmin.default: (_WITH_INDEX, 1),
    _aten.var.correction: (_MOMENTS, 1),
    _aten.std.correction: (_MOMENTS, 1),
    _aten.var_mean.correction: (_MOMENTS, 1),
    _aten.std_mean.correction: (_MOMENTS, 1),
}
"""Bytes that a reduction carries along (0: those of the input's numbers), and where its dimensions are named."""
