"""Submanifold convolution in plain torch; memory and time scale with the number of occupied voxels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit._core.errors import ConfigError, InputError
from memkit._core.settings import Checker
from memkit._core.sparse_voxels import Pairs, SparseVoxels, Triple
from memkit._gradients.streamed import accumulator_dtype, refuse_second_derivative, refuse_transforms

CALL = "submanifold_conv3d(voxels, weight)"


def submanifold_conv3d(
    voxels: SparseVoxels, weight: Tensor, bias: Tensor | None = None, *, dilation: int | Sequence[int] = 1
) -> SparseVoxels:
    """Convolve occupied voxels, with results at these voxels only.

    One layer equals `torch.nn.functional.conv3d` with padding to the same size, read at the occupied voxels. A stack of
    layers does not: a dense layer also has results next to the occupied voxels, which the next layer reads. So a
    network of submanifold layers is a different model, in which the occupied set does not grow.

    Neighbors are found at the first call for a kernel size and cached with the coordinates; the result and everything
    from `SparseVoxels.with_features` share the cache.

    Args:
        voxels: N voxels with features (N, C_in).
        weight: (C_out, C_in, kd, kh, kw), as in `torch.nn.Conv3d`; odd sizes.
        bias: (C_out,) or None.
        dilation: Spacing of the kernel's elements: one number, or one per dimension.

    Returns:
        The same voxels with features (N, C_out).

    Raises:
        ConfigError: A kernel size is even, or a dilation is below 1.
        InputError: The weight does not match the features.
        InputTypeError: The voxels are a dense volume, or something else.
        StateError: In a backward pass with ``create_graph=True``, inside a transform of ``torch.func``, or with
            forward-mode tangents.

    Memory cost: the result, and the rows gathered for one kernel offset, at most 3 times N rows; in the backward pass
    the gradients and the same amount again. The neighbor cache takes 4 bytes per neighbor of each voxel.

    Source: Graham, Engelcke, van der Maaten, "3D Semantic Segmentation with Submanifold Sparse Convolutional Networks",
    2018.

    Example:
        >>> import torch
        >>> from memkit.chunk import submanifold_conv3d
        >>> from memkit.voxel import SparseVoxels
        >>> voxels = SparseVoxels.from_coords(torch.tensor([[3, 4, 5], [3, 4, 6]]), torch.ones(2, 1), shape=(8, 8, 8))
        >>> submanifold_conv3d(voxels, torch.ones(1, 1, 3, 3, 3)).features.tolist()
        [[2.0], [2.0]]
    """
    steps = _triple(dilation)
    _check(voxels, weight, bias)
    given = [voxels.features, weight, *([] if bias is None else [bias])]
    refuse_transforms(
        CALL, given, "inside the transform, use torch.nn.functional.conv3d on voxels.to_dense(), with padding."
    )
    kernel: Triple = (weight.shape[2], weight.shape[3], weight.shape[4])
    pairs = voxels.sites.pairs(kernel, steps)
    by_offset = weight.permute(2, 3, 4, 1, 0).flatten(0, 2)  # (offsets, C_in, C_out)
    device = voxels.features.device.type
    features = voxels.features.contiguous()
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        features, by_offset = features.to(dtype), by_offset.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return voxels.with_features(_Submanifold.apply(features, by_offset, bias, pairs))  # type: ignore[no-untyped-call]


class _Submanifold(torch.autograd.Function):
    """Processes one offset at a time; the backward gathers rows again, so no gathered rows are kept."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, pairs: list[Pairs]) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.pairs = pairs
        center = weight[len(weight) // 2]
        out = (features @ center).to(accumulator_dtype(features.dtype))
        if bias is not None:
            out += bias
        for number, sources, targets in _directed(pairs, len(weight)):
            _add_rows(out, targets, features.index_select(0, sources), weight[number])
        return out.to(features.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(CALL, "for second derivatives use torch.nn.functional.conv3d on voxels.to_dense().")
        features, weight = ctx.saved_tensors
        above = upstream[0].contiguous()
        is_input, is_weight, is_bias = ctx.needs_input_grad[:3]
        center = len(weight) // 2
        total = (above @ weight[center].t()).to(accumulator_dtype(above.dtype)) if is_input else None
        slopes = torch.empty_like(weight) if is_weight else None
        if slopes is not None:
            torch.mm(features.t(), above, out=slopes[center])
        for number, sources, targets in _directed(ctx.pairs, len(weight)):
            part = above.index_select(0, targets)
            if total is not None:
                _add_rows(total, sources, part, weight[number].t())
            if slopes is not None:
                torch.mm(features.index_select(0, sources).t(), part, out=slopes[number])
        return (
            None if total is None else total.to(features.dtype),
            slopes,
            above.sum(0) if is_bias else None,
            None,
        )


def _directed(pairs: list[Pairs], num_offsets: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the number, the rows read and the rows written, for each offset except the center."""
    for number, near, far in pairs:
        yield number, far, near
        yield num_offsets - 1 - number, near, far


def _add_rows(out: Tensor, rows: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``out[rows] += left @ right``; rows are unique, so no atomics are needed and results repeat."""
    part = out.index_select(0, rows)
    if part.dtype == left.dtype:
        part.addmm_(left, right)
    else:
        part += left @ right
    out.index_copy_(0, rows.long(), part)


def _triple(value: int | Sequence[int]) -> Triple:
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3 or min(values) < 1:
        raise ConfigError(
            CALL,
            got=f"dilation={value!r}",
            expected="one int or three ints, each at least 1",
            fix="omit dilation, or pass for example dilation=2.",
        )
    return values


def _check(voxels: SparseVoxels, weight: Tensor, bias: Tensor | None) -> None:
    fix = "pass SparseVoxels.from_dense(volume), or call torch.nn.functional.conv3d for a dense volume."
    Checker(CALL).instance(voxels, SparseVoxels, "SparseVoxels", fix)
    sizes, num_in = tuple(weight.shape), voxels.features.shape[1]
    if weight.dim() != 5 or any(size % 2 == 0 for size in sizes[2:]):
        raise ConfigError(
            CALL,
            got=f"a weight of shape {sizes}",
            expected="(C_out, C_in, kd, kh, kw) with odd kernel sizes: an even kernel has no center",
            fix="use a kernel size of 3, or (1, 3, 3).",
        )
    if sizes[1] != num_in or (bias is not None and bias.shape != sizes[:1]):
        form = "" if bias is None else f" and a bias of shape {tuple(bias.shape)}"
        raise InputError(
            CALL,
            got=f"a weight of shape {sizes}{form} for features of {num_in} channels",
            expected=f"a weight (C_out, {num_in}, kd, kh, kw) and a bias (C_out,); groups are not supported",
            fix="create the layer with as many input channels as the features have.",
        )
