"""sample_edges: a random share of the edges of every node of a graph, exact, at least one of each."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from memkit.points.cells import Points
from memkit.points.draw import Rounding
from memkit.points.grid import GridIndex
from memkit.points.sampler import GridAwareSampler


# Two overloads differ in one line each: a type checker reads them so, and the signature in full.
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


def sample_edges(
    dst: Points,
    ratio: float | tuple[float, float] = (0.3, 0.7),
    seed: int = 0,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    return_weight: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Choose edges of a graph: of the edges into each node a random share, without replacement, at least one.

    A mean over the chosen edges of a node is an unbiased estimate of the mean over all of them as it is. A sum is not:
    multiply each edge by its weight, ``1 / (share that its node really kept)``, which makes it unbiased. (The nominal
    ratio would not: rounding and the edge that stays at least change the share, most of all at nodes with few edges.)

    The same edges come for the same seed. For other ones in each step pass another ``seed``, or a ``generator``. Where
    the graph stays the same, keep ``GridIndex.from_cells(dst)`` and draw from it with a `GridAwareSampler`: that is
    what happens here, without finding the nodes anew.

    Args:
        dst: (E,) integers, the node that each edge leads to, in any order; torch or NumPy.
        ratio: Least and greatest share that a node keeps of its edges, drawn for each node; or one share for all.
        seed: In [0, 2^63).
        rounding: ``"nearest"`` or ``"floor"``, see `GridAwareSampler`.
        generator: Takes the place of the seed; one number is drawn from it.
        return_weight: Whether to return the weights too.

    Returns:
        Indices of the chosen edges, (K,) int64, ascending, on the device of ``dst``; with ``return_weight`` also
        (K,) weights in torch's default dtype, at least 1.

    Raises:
        ConfigError: A setting is out of its range.
        InputError: ``dst`` is not one row of integers.
        InputTypeError: ``dst`` is not made of integers.

    Memory cost: about 40 bytes for each edge on the way.

    Example:
        >>> import torch, memkit as mk
        >>> dst = torch.tensor([0, 0, 0, 0, 2, 2, 5])
        >>> keep, weight = mk.points.sample_edges(dst, ratio=0.5, seed=1, return_weight=True)
        >>> dst[keep].tolist(), weight.tolist()
        ([0, 0, 2, 5], [2.0, 2.0, 2.0, 1.0])
    """
    sampler = GridAwareSampler(ratio, seed=seed, rounding=rounding)
    index = GridIndex.from_cells(dst)
    sample = sampler.sample_half_density(index, generator)
    device = dst.device if isinstance(dst, Tensor) else None
    keep = sample.indices.to(device)
    if not return_weight:
        return keep
    share = sample.ratios[index.cell_of_point()[sample.indices]]
    return keep, share.reciprocal().to(device, torch.get_default_dtype())
