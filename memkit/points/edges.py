"""sample_edges: an exact random fraction of the incoming edges of every graph node, at least one each."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from memkit._core.errors import ConfigError, InputError, InputTypeError, of_call
from memkit._core.words import guided
from memkit._torch.compiler import runs_eagerly
from memkit.points.cells import Points
from memkit.points.grid import GridIndex
from memkit.points.passes import Rounding
from memkit.points.sampler import GridAwareSampler


# The two overloads differ in one line each; the full signatures are spelled out for type checkers.
@overload
def sample_edges(
    dst: Points,
    ratio: float | tuple[float, float] = ...,
    seed: int = ...,
    *,
    rounding: Rounding = ...,
    generator: torch.Generator | None = ...,
    return_weight: Literal[False] = ...,
) -> Tensor: ...


@overload
def sample_edges(
    dst: Points,
    ratio: float | tuple[float, float] = ...,
    seed: int = ...,
    *,
    rounding: Rounding = ...,
    generator: torch.Generator | None = ...,
    return_weight: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@guided(
    words={
        "p of dropout_edge is the fraction that is dropped: pass the fraction that is kept, ratio=1 - p": "p",
        "dst": "edge_index index",
        "sample first, then aggregate: multiply a sum by the weights of return_weight=True": "aggr",
    }
)
@runs_eagerly
def sample_edges(
    dst: Points,
    ratio: float | tuple[float, float] = (0.3, 0.7),
    seed: int = 0,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    return_weight: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sample a random fraction of the edges into each graph node, without replacement, at least one.

    A mean over a node's sampled edges is an unbiased estimate of the mean over all of its edges. A sum is not: multiply
    each edge by its weight, ``1 / (fraction its node actually kept)``, to make it unbiased. (The nominal ratio would
    be wrong: rounding and the minimum of one edge change the fraction, most of all at nodes with few edges.)

    The same seed gives the same edges. For different edges at each step, pass another ``seed``, or a ``generator``. If
    the graph stays the same, keep ``GridIndex.from_cells(dst)`` and draw from it with a `GridAwareSampler`: this gives
    the same samples without regrouping the edges.

    Args:
        dst: (E,) integers, the target node of each edge, in any order; torch or NumPy.
        ratio: Minimum and maximum fraction of its edges that a node keeps, drawn for each node; or one fraction for
            all.
        seed: In [0, 2^63).
        rounding: ``"nearest"`` or ``"floor"``, see `GridAwareSampler`.
        generator: Replaces the seed; one number is drawn from it.
        return_weight: Whether to return the weights too.

    Returns:
        Indices of the chosen edges, (K,) int64, ascending, on the device of ``dst``; with ``return_weight`` also
        (K,) weights in torch's default dtype, at least 1.

    Raises:
        ConfigError: A setting is out of range.
        InputError: ``dst`` is not one-dimensional.
        InputTypeError: ``dst`` does not contain integers.

    Memory cost: temporarily about 40 bytes per edge.

    Example:
        >>> import torch, memkit as mk
        >>> dst = torch.tensor([0, 0, 0, 0, 2, 2, 5])
        >>> keep, weight = mk.points.sample_edges(dst, ratio=0.5, seed=1, return_weight=True)
        >>> dst[keep].tolist(), weight.tolist()
        ([0, 0, 2, 5], [2.0, 2.0, 2.0, 1.0])
    """
    try:
        sampler = GridAwareSampler(ratio, seed=seed, rounding=rounding)
    except ConfigError as error:
        raise of_call("sample_edges(dst, ...)", error) from None
    shape, kind = getattr(dst, "shape", ()), str(getattr(dst, "dtype", ""))
    if len(shape) == 2 or "float" in kind:
        raise (InputError if len(shape) == 2 else InputTypeError)(
            "sample_edges(dst)",
            got=f"dst of shape {tuple(shape)} and {kind.removeprefix('torch.')}",
            expected="(E,) integers, the target node of each edge",
            fix="write sample_edges(edge_index[1])" if len(shape) == 2 else "write sample_edges(dst.long())",
        )
    index = GridIndex.from_cells(dst)
    sample = sampler.sample_half_density(index, generator)
    device = dst.device if isinstance(dst, Tensor) else None
    keep = sample.indices.to(device)
    if not return_weight:
        return keep
    share = sample.ratios[index.cell_of_point()[sample.indices]]
    return keep, share.reciprocal().to(device, torch.get_default_dtype())
