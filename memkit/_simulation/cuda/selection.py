"""Scratch memory of CUDA's kernels that sort, select, scan, and make random choices.

Long rows are sorted by CUB, whose memory is not known; short ones in place, and a selection counts digits, block by
block. A scan of a single line needs a few bytes of CUB's for each tile, of which this is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit._torch import aten
from memkit._torch.aten import overloads

_aten = torch.ops.aten
_INDEX, _COUNT = 8, 4  # bytes
_SORTED_IN_PLACE = 4096  # numbers: `should_use_small_sort` in Sort.h
_THREADS, _DIGITS = 256, 256  # `mbtopk` in TensorTopK.cu
_FEWEST_ITEMS, _MOST_ITEMS = 4, 64  # of a thread
_BLOCKS_AT_ONCE = 6  # of a multiprocessor, by their registers
# `should_use_multiblock`: up to so many rows, each with at least so many numbers.
_BY_SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
_BY_SEVERAL_OF_MANY_ROWS = 400
_TILE, _OF_TILE = 1024, 16  # `cub::DeviceScan`: the fewest numbers of a tile, and the bytes of its state
_TILES_AHEAD = 32
_DRAWN_TWICE = 4096  # bytes for the places of equal keys


def asks_library(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of `MAY_ASK` runs kernels whose memory is not known: a library's, or some that are not modeled."""
    if func in SORTING or func in MEDIANS:
        return _sorted_length(args[0], args, kwargs, is_flat=func in MEDIANS) > _SORTED_IN_PLACE
    if func is _aten.topk.default:
        is_sorted = len(args) < 5 or bool(args[4])
        return is_sorted and bool(args[1] > _SORTED_IN_PLACE)
    return True


def _sorted_length(x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_flat: bool) -> int:
    dim = kwargs.get("dim", next((each for each in args[1:2] if type(each) is int), -1))
    return x.numel() if is_flat or not x.dim() else int(x.shape[dim])


def _sort(args: Sequence[Any], *_: object) -> tuple[tuple[int, ...], ...]:
    """`sort_cuda_kernel` in Sort.cpp: the places along the dimension."""
    x = args[0]
    dims = args[1:2] if type(next(iter(args[1:2]), None)) is int else range(x.dim())  # named: the longest one
    return ((max((x.shape[dim] for dim in dims), default=1) * _INDEX,),)


def _median(args: Sequence[Any], *_: object) -> tuple[tuple[int, ...], ...]:
    """`median_impl` in Sorting.cpp: the sorted numbers and their places."""
    x = args[0]
    return ((_copy_bytes(x), x.numel() * x.element_size(), x.numel() * _INDEX, x.numel() * _INDEX),)


def _select(args: Sequence[Any], processors: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """`launch_gather_topk_kernel` in TensorTopK.cu: a row by one block, or by several that count its digits first."""
    x, dim = args[0], next(iter(args[2:3]), -1)
    copy_bytes, row = _copy_bytes(x), x.shape[dim] if x.dim() else 1
    if not x.numel() or not args[1]:
        return ()
    rows = x.numel() // row
    fewest = next((least for most, least in _BY_SEVERAL_BLOCKS if rows <= most), _BY_SEVERAL_OF_MANY_ROWS)
    if row < fewest:
        return ((copy_bytes,),)
    items = math.ceil(x.numel() / (processors[0] * _BLOCKS_AT_ONCE * _THREADS))
    blocks = rows * math.ceil(row / (_THREADS * min(max(items, _FEWEST_ITEMS), _MOST_ITEMS)))
    word = max(x.element_size(), _COUNT)
    of_rows = rows * x.element_size(), 2 * rows * _COUNT, 2 * rows * word
    of_blocks = 2 * blocks * _DIGITS, rows * _DIGITS * _COUNT, blocks * _COUNT, blocks * _COUNT
    return ((copy_bytes, *of_rows, *of_blocks, _scan_bytes(blocks)),)


def _scan(args: Sequence[Any], *_: object) -> tuple[tuple[int, ...], ...]:
    """`scan_dim` in ScanUtils.cuh: a single line by CUB, rows of several by a kernel that takes nothing."""
    x, dim = args[0], args[1]
    is_line = x.dim() and x.numel() == x.shape[dim]
    return ((_copy_bytes(x), _scan_bytes(x.numel()) if is_line else 0),)


def _choose(args: Sequence[Any], processors: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """`multinomial`: weights with noise, of which the largest are taken; or normalized ones, and their running sums."""
    x, num_samples, *others = args
    own_bytes = x.numel() * x.element_size()
    if others[:1] == [True]:
        return ((own_bytes, own_bytes),)
    phases = _select((x, num_samples), processors) if num_samples > 1 else ((),)
    return tuple((own_bytes, *phase) for phase in phases)


def _permute(args: Sequence[Any], *_: object) -> tuple[tuple[int, ...], ...]:
    """`randperm_out_cuda`: keys, sorted keys and numbers in order, and at most as much for CUB's sort of both."""
    num_bytes = args[0] * _INDEX
    return ((num_bytes, num_bytes, num_bytes, 2 * num_bytes + _DRAWN_TWICE),)


def _copy_bytes(x: Tensor) -> int:
    return 0 if x.is_contiguous() else x.numel() * x.element_size()


def _scan_bytes(num_values: int) -> int:
    return (_TILES_AHEAD + math.ceil(num_values / _TILE)) * _OF_TILE


SORTING = overloads("sort.default", "sort.stable")
MEDIANS = overloads("median.default", "nanmedian.default")
_NOT_MODELED = overloads("mode.default", "bincount.default", "histc.default")
# Of cuSOLVER, MAGMA, cuFFT and CUB.
_IN_LIBRARIES = aten.LINEAR_ALGEBRA | aten.MATRIX_EXPONENTIAL | aten.FOURIER | aten.UNIQUE
MAY_ASK = frozenset({*_IN_LIBRARIES, *_NOT_MODELED, *SORTING, *MEDIANS, _aten.topk.default})
SELECTING: Mapping[Any, Callable[[Sequence[Any], tuple[int, int]], tuple[tuple[int, ...], ...]]] = {
    **dict.fromkeys(SORTING, _sort),
    **dict.fromkeys(MEDIANS, _median),
    **dict.fromkeys(overloads("cumsum.default", "cumprod.default", "_logcumsumexp.default"), _scan),
    **dict.fromkeys(overloads("randperm.default", "randperm.generator"), _permute),
    _aten.topk.default: _select,
    _aten.multinomial.default: _choose,
}
"""By operator, a function of its arguments and the card's processors: what it takes, as in `memory.inside`."""
