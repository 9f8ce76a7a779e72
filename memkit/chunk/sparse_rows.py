"""Run a network on occupied voxels only, laid out as a volume that is N voxels long.

Layers that treat each voxel independently give the same results. Larger convolutions are replaced, on request, by
submanifold convolutions over the occupied voxels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memkit._core.errors import InputError
from memkit._core.sparse_voxels import SparseVoxels
from memkit._torch.autocast import without_gradients
from memkit.chunk.independence import forward_hooks, undone
from memkit.chunk.submanifold import submanifold_conv3d

CALL = "SparsityAwareProcessor(fn)(volume)"
_SUBMANIFOLD_CALL = 'SparsityAwareProcessor(fn, mode="submanifold")(volume)'


def pointwise(fn: nn.Module, voxels: SparseVoxels) -> SparseVoxels:
    """Run a pointwise network on the occupied voxels."""
    return voxels.with_features(_on_rows(fn, _one_or_more(voxels).features)[: len(voxels.coords)])


def pointwise_everywhere(fn: nn.Module, voxels: SparseVoxels) -> Tensor:
    """Run a pointwise network for the whole volume: a single empty voxel is run too, for all empty voxels.

    A network's output for zero is rarely zero. The shared row receives the gradient of all empty voxels.

    Returns:
        (B, C_out, D, H, W).
    """
    rows = voxels.features
    results = _on_rows(fn, torch.cat([rows, rows.new_zeros(1, rows.shape[1])]))
    volume = results[-1].view(1, -1, 1, 1, 1).repeat(voxels.batch_size, 1, *voxels.shape)
    sample, *places = voxels.coords.unbind(1)
    volume[sample, :, places[0], places[1], places[2]] = results[:-1]
    return volume


def submanifold(fn: nn.Module, voxels: SparseVoxels) -> SparseVoxels:
    """Run a network with its convolutions replaced by submanifold ones: a different model than the dense one.

    Raises:
        InputError: A convolution has no submanifold form: it is strided, has an even kernel, or changes the size.
    """
    some = _one_or_more(voxels)
    with _Replacing(some):
        return voxels.with_features(_on_rows(fn, some.features)[: len(voxels.coords)])


def check_submanifold(fn: nn.Module, rows: Tensor) -> None:
    """Refuse a network that mixes voxels by anything but convolutions: NaN in an isolated voxel must stay there.

    BatchNorm is allowed: its statistics are those of the occupied voxels.

    Args:
        fn: The network.
        rows: (3, C), zeros to test with.

    Raises:
        InputError: It pools, resamples, attends or normalizes over space; the first such layer is named.
    """
    coords = torch.tensor([[0, 0, 0], [64, 64, 64], [128, 128, 128]], device=rows.device)
    lone = SparseVoxels.from_coords(coords, rows.index_fill(0, coords.new_ones(1), math.nan), shape=(129, 129, 129))
    names = {child: f"`{name}` ({type(child).__name__})" for name, child in fn.named_modules() if name}
    culprits: list[str] = []

    def watch(child: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the signature of a hook
        if not _is_lone(output):
            culprits.append(names[child])

    try:
        with (
            without_gradients(),
            undone([fn]),  # some layers count their calls
            forward_hooks(names, watch),
            _Replacing(lone, without_batch_norm=True),
        ):
            rows = _on_rows(fn, lone.features)
    except InputError:
        raise
    except RuntimeError as error:
        raise _no_form(f"a module that does not run on single voxels ({error})") from error
    if not _is_lone(_as_volume(rows)):
        where = culprits[0] if culprits else "its own code"
        raise _no_form(f"a module that mixes voxels by something other than convolutions, first in {where}")


def _is_lone(volume: object) -> bool:
    """Return whether NaN is confined to the middle one of three voxels."""
    if not isinstance(volume, Tensor) or volume.dim() != 5 or volume.shape[4] != 3:
        return False
    return not bool(torch.isnan(volume[..., ::2]).any())


def _one_or_more(voxels: SparseVoxels) -> SparseVoxels:
    """Add an empty voxel if there is none: torch's convolutions refuse empty volumes."""
    if len(voxels.coords):
        return voxels
    rows = voxels.features
    coords = voxels.coords.new_zeros(1, 4)
    return SparseVoxels.from_coords(
        coords, rows.new_zeros(1, rows.shape[1]), shape=voxels.shape, batch_size=voxels.batch_size
    )


def _on_rows(fn: Callable[[Tensor], Any], rows: Tensor) -> Tensor:
    y = fn(_as_volume(rows))
    if not isinstance(y, Tensor) or y.dim() != 5 or y.shape[2:] != (1, 1, len(rows)):
        raise InputError(
            CALL,
            got=f"a module that gives {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__} for "
            f"{(1, rows.shape[1], 1, 1, len(rows))}",
            expected="one result for each voxel",
            fix='pool or flatten outside of the module, or pass mode="dense".',
        )
    return _as_rows(y)


def _as_volume(rows: Tensor) -> Tensor:
    # Along the last dimension: along the first, the backward of torch's 1x1x1 convolution is 30 times slower.
    return rows.t()[None, :, None, None, :]


def _as_rows(volume: Tensor) -> Tensor:
    return volume[0, :, 0, 0, :].t()


class _Replacing(TorchFunctionMode):
    """Replaces the convolutions with kernels larger than one voxel."""

    def __init__(self, voxels: SparseVoxels, *, without_batch_norm: bool = False) -> None:
        super().__init__()
        self._voxels, self._without_batch_norm = voxels, without_batch_norm

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.conv3d:
            return self._convolve(*args, **(kwargs or {}))
        if func is F.batch_norm and self._without_batch_norm:
            return args[0]
        return func(*args, **(kwargs or {}))

    def _convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        sizes, steps = weight.shape[2:], _three(dilation)
        kept = [step * (size - 1) // 2 for step, size in zip(steps, sizes, strict=True)]
        given = {"same": kept, "valid": [0, 0, 0]}[padding] if isinstance(padding, str) else _three(padding)
        if any(size % 2 == 0 for size in sizes) or _three(stride) != [1, 1, 1] or given != kept:
            raise _no_form(
                f"a convolution with kernel {tuple(sizes)}, stride {stride}, padding {padding}, dilation {dilation}"
            )
        if max(sizes) == 1:
            return F.conv3d(x, weight, bias, groups=groups)
        voxels = self._voxels.with_features(_as_rows(x))
        return _as_volume(submanifold_conv3d(voxels, weight, bias, dilation=steps).features)


def _three(value: Any) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [int(each) for each in (values * 3 if len(values) == 1 else values)]


def _no_form(got: str) -> InputError:
    return InputError(
        _SUBMANIFOLD_CALL,
        got=got,
        expected="convolutions of stride 1 that keep the size, and operations on each voxel alone",
        fix='remove that layer, or pass mode="auto", which accepts any network.',
    )
