"""Convolutional modules applied tile by tile to volumes that do not fit, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import ConfigError, InputError, InputTypeError, warn_user
from memkit._core.foreign import LIMIT
from memkit._core.printable import described
from memkit._core.settings import Checker, as_whole
from memkit._core.words import guided
from memkit._gradients.streamed import refuse_transforms
from memkit._torch.compiler import runs_eagerly
from memkit.chunk.halo import find_reach, warn_of_kept_results
from memkit.chunk.map import read_device
from memkit.chunk.tileloop import CALL, TileJob, apply_tiles
from memkit.chunk.tiles import ExactAxis, Reach


@guided(
    words={
        "the overlap is measured, and exact": "overlap halo padding pad context",
        "tiles are exact, so nothing is blended": "mode sigma_scale padding_mode cval",
        "one tile runs at a time": "sw_batch_size",
        "there is no budget: halve tile_size until it fits": LIMIT,
    },
    rewrite={"tiled_apply": lambda _: "tiled_apply(module, x, tile_size=32)"},
)
@runs_eagerly
def tiled_apply(
    module: nn.Module,
    x: Tensor,
    tile_size: int | Sequence[int],
    *,
    dims: Sequence[int] | None = None,
    online_reduce: Callable[[Tensor], Tensor] | None = None,
    output_device: torch.device | str | None = None,
) -> Tensor:
    """Apply a module to a volume tile by tile, equal to ``module(x)``, with one tile's graph at a time.

    Each tile is cut with the margin (halo) that its results depend on. The margin and the module's stride are found by
    tracing NaN through the module. The backward pass recomputes each tile and sums its gradients into those of the
    input and of the parameters, which get one gradient per call.

    Args:
        module: Convolutions, transposed convolutions, pooling, upsampling, activations, skip connections, BatchNorm in
            evaluation mode. It takes (B, C, *spatial) and returns one tensor with the same number of dimensions.
        x: (B, C, *spatial), floating point; one, two or three spatial dimensions, any batch size.
        tile_size: Maximum input extent that a tile owns: one number, or one per dimension in ``dims``; rounded down to
            a multiple of the module's stride, and of what it pads its input to. A tile reads the halo on both sides in
            addition.
        dims: Dimensions to cut; None for all spatial ones. ``(-3,)`` cuts slabs.
        online_reduce: Applied to each tile's result before it is stored, under ``torch.no_grad()``:
            ``lambda y: y.argmax(1)`` stores one label instead of many channels. It must keep the spatial dimensions
            last, and treat each voxel by itself, which is checked on the first tile.
        output_device: Device on which the result is assembled, ``"cpu"`` for one that does not fit; None for the device
            of the module's output.

    Returns:
        The result, (B, channels, *out_spatial), or with the shape that ``online_reduce`` gives.

    Raises:
        InputError: The module cannot be tiled exactly; the message names it (a norm over space,
            attention, global pooling, circular padding, BatchNorm in training mode). Tiles are compared with the whole
            at the first call, on small volumes of noise and of values like those of ``x``: a mean or a count where
            ``x > 100`` is refused if this ``x`` has such values. So are tiles that branch in Python on their values,
            each in its own way.
        InputTypeError: The module or its result has an unsupported type or shape.
        ConfigError: A setting is out of range, or ``online_reduce`` comes with gradients.
        StateError: In a backward pass with ``create_graph=True``.

    A tile as large as the volume is one plain call. Random numbers (dropout) are drawn separately for each tile, and
    repeated in the backward pass: a valid draw, but not that of ``module(x)``.

    Memory cost: the result, the input's gradient (in float32 for half precision), one gradient of the parameters, and
    the memory of one tile with its halo. The first call for a module determines the halo: see `find_reach`.
    Time cost: the backward pass repeats the forward; halos are computed more than once.

    Source: halos of half the receptive field aligned to the stride, Majurski and Bajcsy, "Exact tile-based
    segmentation inference for images larger than GPU memory", 2021.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from memkit import tiled_apply
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1)).double()
        >>> image = torch.rand(1, 1, 60, 50, dtype=torch.float64, requires_grad=True)
        >>> y = tiled_apply(net, image, 16)
        >>> bool((y - net(image)).abs().max() < 1e-12)
        True
        >>> y.square().mean().backward()
        >>> image.grad.shape
        torch.Size([1, 1, 60, 50])
    """
    _check_input(module, x)
    cut = _per_dim(x, dims, tile_size)
    dims = list(cut)
    if online_reduce is not None:
        _check_inference(module, x)
    spatial = range(2 - x.dim(), 0)

    def cut_along(dim: int, reach: Reach) -> ExactAxis:
        return ExactAxis.cut(x.shape[dim], cut[dim], reach)

    is_whole = all(cut[dim] >= x.shape[dim] for dim in dims)
    axes = [ExactAxis.cut(x.shape[dim], x.shape[dim], Reach(0, 0)) for dim in spatial]
    if not is_whole:
        differentiated = [x] if torch.is_grad_enabled() else []  # otherwise tangents go through the tiles
        refuse_transforms(CALL, differentiated, "inside the transform, call the module itself: module(x).")
        smaller = [dim for dim in dims if cut[dim] < x.shape[dim]]
        reaches = find_reach(module, x, smaller, lambda dim, reach: [cut_along(dim, reach).length])
        axes = [cut_along(dim, reaches[dim]) if dim in reaches else axes[dim] for dim in spatial]
        _warn_of_no_effect(x, axes, reaches)
    if all(axis.length == axis.size for axis in axes):
        y: Tensor = module(x)
        y = y if online_reduce is None else online_reduce(y)
        return y if output_device is None else y.to(output_device)
    warn_of_kept_results(module, x, CALL)
    device = read_device(CALL, output_device)
    return apply_tiles(TileJob(module, tuple(axes), device, online_reduce), x)


def _check_input(module: object, x: object) -> None:
    way_out = "put the function into the forward of a module that holds its layers."
    if isinstance(module, Tensor):
        way_out = "write tiled_apply(module, x, tile_size=32)"
    if isinstance(module, type):
        way_out = f"write tiled_apply({module.__name__}(...), x, tile_size=32)"
    module = Checker(CALL).instance(module, nn.Module, "an nn.Module, whose parameters are known", way_out)
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
        raise InputTypeError(
            CALL,
            got=described(x),
            expected="a floating point tensor (B, C, *spatial)",
            fix="convert with x.float()."
            if isinstance(x, Tensor) and x.dim() >= 3
            else "add the missing dimensions with x[None, None]; convert with x.float().",
        )
    params = {id(each) for each in module.parameters()}
    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_leaf and value.requires_grad and id(value) not in params:
                raise InputError(
                    CALL,
                    got=f"a module whose attribute `{name}{'.' if name else ''}{attribute}` requires grad but is not "
                    "a parameter",
                    expected="every tensor that requires a gradient among the module's parameters",
                    fix="make it an nn.Parameter; otherwise its gradient would be missing.",
                )


def _check_inference(module: nn.Module, x: Tensor) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or any(each.requires_grad for each in module.parameters())):
        raise ConfigError(
            "tiled_apply(online_reduce=...)",
            got="a call that records gradients",
            expected="inference: gradients need the whole result",
            fix="call it under torch.no_grad().",
        )


def _per_dim(x: Tensor, dims: Sequence[int] | None, tile_size: Any) -> dict[int, int]:
    """Return the tile size of each dimension to cut, with dimensions counted from the end."""
    spatial = range(2 - x.dim(), 0)
    if dims is not None and not isinstance(dims, Iterable):
        raise ConfigError(
            f"tiled_apply(dims={dims!r})",
            got=f"a {type(dims).__name__}",
            expected="the dimensions to cut",
            fix=f"pass dims=({dims!r},)." if as_whole(dims) in spatial else "omit dims to cut all of them.",
        )
    given = [as_whole(dim) for dim in (spatial if dims is None else dims)]
    chosen = [dim - x.dim() if dim > 0 else dim for dim in given if dim is not None]
    are_many = isinstance(tile_size, Iterable) and getattr(tile_size, "ndim", 1) > 0
    values = [as_whole(each) for each in (tile_size if are_many else [tile_size] * len(chosen))]
    if not chosen or len(set(chosen)) < len(given) or not set(chosen) <= set(spatial):
        raise ConfigError(
            f"tiled_apply(dims={dims!r})",
            got=f"{dims!r} for an input of {x.dim()} dimensions",
            expected=f"distinct spatial dimensions out of {tuple(spatial)}",
            fix="omit dims to cut all of them.",
        )
    sizes = [each for each in values if each is not None and each >= 1]
    if not len(sizes) == len(values) == len(chosen):
        raise ConfigError(
            f"tiled_apply(tile_size={tile_size!r})",
            got=repr(tile_size),
            expected=f"one int, or one int for each of the {len(chosen)} dimensions that are cut; 1 or more",
            fix=f"pass tile_size={_size_meant(tile_size)}.",
        )
    return dict(zip(chosen, sizes, strict=True))


def _warn_of_no_effect(x: Tensor, axes: Sequence[ExactAxis], reaches: dict[int, Reach]) -> None:
    if any(axis.length < axis.size for axis in axes):
        return
    halos = ", ".join(
        f"{x.shape[dim]} or more" if reach.covers(x.shape[dim]) else f"{reach.before} + {reach.after}"
        for dim, reach in reaches.items()
    )
    warn_user(
        f"tiled_apply: a tile with its halo ({halos}) is as large as the volume {tuple(x.shape[2:])}: the module "
        "runs on the whole volume, and no memory is saved. Way out: use a larger volume, a module with a smaller "
        "receptive field, or mk.Checkpointing(module, 'auto')."
    )


def _size_meant(tile_size: Any) -> int:
    """Return the side of a tile that was probably meant."""
    first = next(iter(tile_size), 0) if isinstance(tile_size, list | tuple) else tile_size
    number = int(first) if isinstance(first, str) and first.isdigit() else as_whole(first)
    return number if number is not None and number >= 1 else 32
