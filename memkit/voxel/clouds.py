"""Distances between point clouds: Chamfer and Hausdorff, under named conventions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, SupportsIndex, TypeAlias

import torch
from torch import Tensor

from memkit._core.errors import ConfigError, InputError
from memkit._core.printable import described
from memkit._core.settings import Checker, nearest_word
from memkit._core.words import guided
from memkit._gradients.streamed import refuse_transforms
from memkit.voxel.nearest import NearestBackend, NearestPoints, nearest_points

_REDUCTIONS = {
    "each direction is the mean over its points": "point_reduction",
    "the mean over the batch is taken; for single values, call it for each cloud": "batch_reduction reduction",
    "a": "x pred prediction",
    "b": "y gt target",
}
Cloud: TypeAlias = Tensor | Sequence[Tensor]
ConventionName = Literal["pytorch3d", "kaolin", "open3d", "lidm", "occnet"]
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": lambda a, b: (a + b) / 2,
    "max": torch.maximum,
}


class ChamferConvention(NamedTuple):
    """Definition of a Chamfer distance; each direction is the mean over its points.

    Attributes:
        squared: Whether distances are squared before the mean.
        combine: How the two directions are combined.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> farther = mk.voxel.ChamferConvention(squared=False, combine="max")
        >>> mk.voxel.chamfer_distance(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), convention=farther).item()
        5.0
    """

    squared: bool
    combine: Literal["sum", "mean", "max"]


CHAMFER_CONVENTIONS: dict[ConventionName, ChamferConvention] = {
    "pytorch3d": ChamferConvention(squared=True, combine="sum"),
    "kaolin": ChamferConvention(squared=True, combine="sum"),
    "open3d": ChamferConvention(squared=False, combine="sum"),
    "lidm": ChamferConvention(squared=True, combine="mean"),
    "occnet": ChamferConvention(squared=False, combine="mean"),
}


@guided(words=_REDUCTIONS | {"convention='pytorch3d'": "norm squared"})
def chamfer_distance(
    a: Cloud | NearestPoints,
    b: Cloud | None = None,
    *,
    convention: ConventionName | ChamferConvention = "pytorch3d",
    empty_distance: float = math.inf,
    backend: NearestBackend = "auto",
    memory_budget: SupportsIndex | str = "16MiB",
) -> Tensor:
    """Compute the Chamfer distance with gradients, in memory of order N + M instead of N times M.

    Args:
        a: (N, D); a batch (B, N, D) or a sequence of B clouds (N_i, D), over which the mean is taken; or the result of
            `nearest_points`.
        b: The other cloud or clouds; None with `nearest_points`.
        convention: ``"pytorch3d"``, ``"kaolin"``: squared, the sum of both directions. ``"open3d"``: not squared, the
            sum. ``"lidm"`` (LiDAR-Diffusion): squared, the mean of both. ``"occnet"`` (Occupancy Networks): not
            squared, the mean. Or a `ChamferConvention` of your own.
        empty_distance: Distance of a pair in which one cloud is empty. Both empty: 0.
        backend: As for `nearest_points`.
        memory_budget: As for `nearest_points`.

    Returns:
        A 0-dim tensor, float32 or float64. The gradient of a distance of zero is zero.

    Raises:
        ConfigError: The convention or the backend is unknown.
        InputTypeError: An argument is not a point cloud.
        InputError: The batch sizes differ, or a coordinate is not finite.

    Memory cost: see `nearest_points`; autograd keeps one difference (N + M, D).

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> a, b = torch.tensor([[0.0, 0, 0], [1, 0, 0]]), torch.tensor([[0.0, 0, 0]])
        >>> mk.voxel.chamfer_distance(a, b).item(), mk.voxel.chamfer_distance(a, b, convention="lidm").item()
        (0.5, 0.25)
    """
    squared, combine = _convention(convention)

    def distance(pairs: NearestPoints) -> Tensor:
        if (empty := _if_empty(pairs, empty_distance)) is not None:
            return empty
        of_a, of_b = pairs.squared_distances() if squared else pairs.distances()
        return _COMBINE[combine](of_a.mean(), of_b.mean())

    return mean_of_clouds("chamfer_distance(a, b)", distance, a, b, backend, memory_budget)


@guided(words=_REDUCTIONS | {"quantile=0.95": "percentile", "quantile": "q"})
def hausdorff_distance(
    a: Cloud | NearestPoints,
    b: Cloud | None = None,
    *,
    quantile: float = 1.0,
    empty_distance: float = math.inf,
    backend: NearestBackend = "auto",
    memory_budget: SupportsIndex | str = "16MiB",
) -> Tensor:
    """Compute the Hausdorff distance, or the larger of both directions' quantiles of nearest-point distances.

    ``quantile=0.95`` is the HD95 of medical imaging: the larger of two directed quantiles, each with linear
    interpolation as in NumPy, not the quantile of both directions pooled.

    Args:
        a: As for `chamfer_distance`.
        b: As for `chamfer_distance`.
        quantile: In [0, 1]; 1 is the maximum.
        empty_distance: Distance of a pair in which one cloud is empty. Both empty: 0.
        backend: As for `nearest_points`.
        memory_budget: As for `nearest_points`.

    Returns:
        A 0-dim tensor, in the unit of the coordinates; gradients reach the points that determine it.

    Raises:
        ConfigError: The quantile or the backend is invalid.
        InputTypeError: An argument is not a point cloud.
        InputError: The batch sizes differ, or a coordinate is not finite.

    Memory cost: see `nearest_points`.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> a, b = torch.tensor([[0.0, 0, 0], [3, 4, 0]]), torch.tensor([[0.0, 0, 0]])
        >>> mk.voxel.hausdorff_distance(a, b).item(), mk.voxel.hausdorff_distance(a, b, quantile=0.5).item()
        (5.0, 2.5)
    """
    Checker("hausdorff_distance").number("quantile", quantile, 0, 1, fix="pass quantile=0.95, the 95th percentile.")

    def distance(pairs: NearestPoints) -> Tensor:
        if (empty := _if_empty(pairs, empty_distance)) is not None:
            return empty
        return torch.maximum(*(_quantile(each, quantile) for each in pairs.distances()))

    return mean_of_clouds("hausdorff_distance(a, b)", distance, a, b, backend, memory_budget)


def paired(
    call: str, a: Cloud | NearestPoints, b: Cloud | None, backend: NearestBackend, memory_budget: SupportsIndex | str
) -> Iterator[NearestPoints]:
    """Yield the nearest points of each pair of clouds; refuse anything else with a message that names the call."""
    if isinstance(a, NearestPoints) and b is None:
        yield a
        return
    clouds: tuple[Cloud, Cloud]
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and b.dim():
        clouds = ((a,), (b,)) if a.dim() == 2 else (a, b)
    elif isinstance(a, Sequence) and isinstance(b, Sequence):
        clouds = a, b
    else:
        _refuse_batches(call, a, b)
    if len(clouds[0]) != len(clouds[1]) or not len(clouds[0]):
        _refuse_batches(call, a, b)
    for pair in zip(*clouds, strict=True):
        _refuse_columns(call, *pair)
        yield nearest_points(*pair, backend=backend, memory_budget=memory_budget)


def _refuse_columns(call: str, a: object, b: object) -> None:
    """Refuse two clouds (3, N), the transposed form of Open3D and PointNet: they would count as 3 points."""
    shapes = [tuple(each.shape) if isinstance(each, Tensor) else () for each in (a, b)]
    if all(len(each) == 2 and each[0] in (2, 3) and each[1] > 3 for each in shapes):
        name, arguments = call.partition("(")[::2]
        first, second = arguments.rstrip(")").split(", ")
        raise InputError(
            call,
            got=f"clouds {shapes[0]} and {shapes[1]}",
            expected="one row for each point, (N, 3)",
            fix=f"write {name}({first}.T, {second}.T); for {shapes[0][0]} points of {shapes[0][1]} coordinates "
            f"{name}(mk.voxel.nearest_points({first}, {second}))",
        )


def mean_of_clouds(call: str, metric: Callable[[NearestPoints], Tensor], *samples: Any) -> Tensor:
    """Return the mean of a metric over the samples; the other arguments are those of `paired`."""
    refuse_transforms(call, [], "inside the transform, take the smallest of all distances, torch.cdist(a, b).min(1).")
    return torch.stack([metric(each) for each in paired(call, *samples)]).mean(0)


def _if_empty(pairs: NearestPoints, one_empty: float) -> Tensor | None:
    """Return the distance if a cloud is empty, connected to the graphs of both; None if neither is empty."""
    if len(pairs.a) and len(pairs.b):
        return None
    value = 0.0 if len(pairs.a) == len(pairs.b) else one_empty
    return pairs.a.sum() * 0 + pairs.b.sum() * 0 + value


def _quantile(values: Tensor, quantile: float) -> Tensor:
    """Return a quantile with linear interpolation, by selection: `torch.quantile` is limited to 16 million values."""
    place = quantile * (len(values) - 1)
    below = math.floor(place)
    low = values.kthvalue(below + 1).values
    high = values.kthvalue(min(below + 2, len(values))).values
    return low + (high - low) * (place - below)


def _convention(convention: ConventionName | ChamferConvention) -> ChamferConvention:
    found = CHAMFER_CONVENTIONS.get(convention) if isinstance(convention, str) else convention
    if not isinstance(found, ChamferConvention) or found.combine not in _COMBINE:
        meant = nearest_word(convention, CHAMFER_CONVENTIONS) if isinstance(convention, str) else None
        raise ConfigError(
            f"chamfer_distance(..., convention={convention!r})",
            got=repr(convention),
            expected=f"one of {', '.join(map(repr, CHAMFER_CONVENTIONS))}, or a ChamferConvention(squared, combine)",
            fix=f"pass convention={meant!r}."
            if meant
            else "pass for example ChamferConvention(squared=False, combine='max').",
        )
    return found


def _refuse_batches(call: str, a: object, b: object) -> NoReturn:
    raise InputError(
        call,
        got=f"{described(a)} and {described(b)}",
        expected="two clouds (N, D), two batches (B, N, D), two sequences with the same number of clouds, or one "
        "NearestPoints",
        fix="pass the same number of clouds in both, at least one.",
    )
