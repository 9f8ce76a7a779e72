"""Losses on volumes: structure and occupancy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from memkit._core.errors import InputError
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._gradients.streamed import Gradients, with_gradients
from memkit.voxel.layout import VoxelLayout, refuse_no_layout
from memkit.voxel.pairs import VolumeLoss, mean_of_samples, work_dtype

VoxelKind = Literal["l1", "mse", "bce"]
_LOSSES: dict[str, Callable[..., Tensor]] = {
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


@guided(methods=("forward",))
class StructurePreservingLoss(VolumeLoss):
    """A loss on the differences of neighboring voxels: it depends on edges, not on a constant offset.

    The mean absolute difference of the finite differences along D, H and W, averaged over the three axes. An axis of
    one voxel counts as 0. Computed in float32, with its gradient, one sample at a time.

    Memory cost: one gradient of the prediction in float32, and two volumes of one sample.

    Source: the gradient difference loss of Mathieu et al. 2016 in 3D, with signed differences; `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> target = torch.rand(1, 1, 4, 4, 4)
        >>> loss = mk.StructurePreservingLoss()
        >>> bool(loss(target + 5, target) < 1e-5), bool(loss(target * 5, target) > 0.1)
        (True, True)
    """

    def __init__(self) -> None:
        super().__init__()

    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        return with_gradients(functools.partial(_structure, prediction, target), [prediction], call=self._call)


@torch.no_grad()
def _structure(prediction: Tensor, target: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Gradients]:
    dtype = work_dtype(prediction)
    total = torch.zeros((), dtype=dtype, device=prediction.device)
    gradient = torch.zeros_like(prediction, dtype=dtype) if needs[0] else None
    for sample, (ours, theirs) in enumerate(zip(prediction, target, strict=True)):
        residual = ours.to(dtype) - theirs.to(dtype)  # differences are linear: compute them on the residual
        for axis in (1, 2, 3):
            difference = residual.diff(dim=axis)
            if not difference.numel():
                continue
            share = 1 / (3 * len(prediction) * difference.numel())
            total += difference.abs().sum() * share
            if gradient is not None:
                difference.sign_().mul_(share)
                length = difference.shape[axis]
                gradient[sample].narrow(axis, 1, length).add_(difference)
                gradient[sample].narrow(axis, 0, length).sub_(difference)
    return total, [gradient]


@guided(words={"occupied_weight": "pos_weight weight"}, methods=("forward",))
class OccupancyAwareLoss(VolumeLoss):
    """A mean over voxels that weights occupied ones more, because empty voxels would dominate in a sparse grid.

    The weighted mean within each sample, then the mean over samples: a constant error gives the same loss for any
    occupancy, and micro-batches add up to the batch. Computed in float32 regardless of the surrounding precision.

    Args:
        occupied_weight: Weight of voxels that are occupied in the target; empty ones have weight 1.
        kind: ``"l1"``, ``"mse"``, or ``"bce"``: the prediction is logits, the target in [0, 1].
        layout: Defines which voxels are occupied. Without it, those whose target is nonzero in some channel.

    Raises:
        ConfigError: The weight is not a number above zero, the kind is unknown, or ``layout`` is not a layout.

    Memory cost: one gradient of the prediction, and two volumes of one sample.

    Source: `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> target = torch.zeros(1, 1, 2, 2, 2)
        >>> target[0, 0, 0, 0, 0] = 1
        >>> loss = mk.OccupancyAwareLoss(occupied_weight=3.0)
        >>> round(loss(torch.zeros_like(target), target).item(), 6)  # 3 of 7 + 3
        0.3
    """

    def __init__(
        self, occupied_weight: float = 10.0, *, kind: VoxelKind = "l1", layout: VoxelLayout | None = None
    ) -> None:
        super().__init__()
        check = Checker("OccupancyAwareLoss(...)")
        self.occupied_weight = check.number("occupied_weight", occupied_weight, 1e-6, 1e6)
        self.kind = check.choice("kind", kind, _LOSSES)
        refuse_no_layout(check, layout)
        self.layout = layout

    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        if self.layout is not None and len(self.layout.channels) != prediction.shape[1]:
            raise InputError(
                self._call,
                got=f"volumes with {prediction.shape[1]} channels",
                expected=f"the channels of the layout: {', '.join(self.layout.channels)}",
                fix="name each channel in VoxelLayout(channels=[...]).",
            )
        return mean_of_samples(self._sum, prediction, target, chunk_size=1, call=self._call)

    def _sum(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one sample (1, C, D, H, W)."""
        is_occupied = (target[0] != 0).any(0) if self.layout is None else self.layout.occupied(target[0])
        weights = torch.where(is_occupied, self.occupied_weight, 1.0).to(prediction.dtype)
        # Average over the channels first, so that the weights need no memory per channel.
        losses = _LOSSES[self.kind](prediction[0], target[0], reduction="none").mean(0)
        return (losses * weights).sum() / weights.sum()
