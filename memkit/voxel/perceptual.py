"""Perceptual losses: distances in the feature space of a frozen network, computed a few samples at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._gradients.streamed import Gradients, with_gradients
from memkit.voxel.extractor import FrozenNetworkLoss, levels_of, random_extractor
from memkit.voxel.pairs import mean_of_samples

_EPSILON = 1e-4  # under the square root of the norm: keeps an empty voxel's gradient finite, a few tens at most
_AXES = {"D": 2, "H": 3, "W": 4}


@guided(methods=("forward",))
class Perceptual3DLoss(FrozenNetworkLoss):
    """Perceptual distance of two volumes in the feature space of a frozen 3D network.

    Features are normalized to unit length in each voxel; the loss is the squared distance, averaged over voxels and
    samples and summed over the network's levels. The network needs no download: random convolutions compare structure
    at several scales. It is drawn from the seed, so it is the same on every rank and after a restart. Pass
    ``extractor`` to use a trained one.

    The gradient is computed inside the forward, ``chunk_size`` samples at a time, so that memory does not grow with the
    batch except for the gradient itself. Autocast is off inside: value and gradient are computed in float32.

    Args:
        in_channels: C of the volumes, for the random network.
        base_channels: Channels of its first level; each further level has twice as many.
        use_checkpoint: Whether to recompute the features inside a stage instead of keeping them; costs one more
            forward.
        num_levels: Levels of the random network; each but the first halves the size.
        extractor: A network to use instead of the random one. For an `nn.Sequential` the features after each stage are
            compared, otherwise the tensor or the list of tensors (B, C, ...) that it returns. It is frozen and put into
            eval mode.
        seed: Seed of the random network.
        chunk_size: Samples at a time.

    Raises:
        ConfigError: A setting is not a valid integer.

    Memory cost: a volume's features on all levels, for ``chunk_size`` samples, and one gradient of the prediction.

    Source: LPIPS (Zhang et al. 2018) in 3D; `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> loss = mk.Perceptual3DLoss(in_channels=4, base_channels=8)
        >>> target = (torch.rand(2, 4, 16, 16, 16) > 0.9).float()
        >>> prediction = torch.zeros_like(target, requires_grad=True)
        >>> loss(prediction, target).backward()
        >>> bool(prediction.grad.isfinite().all()), loss(target, target).item(), list(loss.state_dict())
        (True, 0.0, [])
    """

    def __init__(
        self,
        in_channels: int = 4,
        base_channels: int = 32,
        use_checkpoint: bool = False,  # noqa: FBT001, FBT002 - users pass it by position
        *,
        num_levels: int = 4,
        extractor: nn.Module | None = None,
        seed: int = 0,
        chunk_size: int = 1,
    ) -> None:
        check = Checker("Perceptual3DLoss(...)")
        given: object = extractor
        is_random = extractor is None
        if extractor is None:
            extractor = random_extractor(
                check.whole("in_channels", in_channels, 1),
                check.whole("base_channels", base_channels, 1),
                check.whole("num_levels", num_levels, 1),
                seed=check.whole("seed", seed),
            )
        elif isinstance(given, type) or not callable(given):
            raise InputTypeError(
                "Perceptual3DLoss(extractor=...)",
                got=f"the class {given.__name__}" if isinstance(given, type) else described(given),
                expected="a network, or None",
                fix="pass extractor=model, an nn.Module.",
            )
        super().__init__(extractor)
        self.in_channels = in_channels if is_random else None
        self.use_checkpoint = check.flag("use_checkpoint", use_checkpoint)
        self.chunk_size = check.whole("chunk_size", chunk_size, 1)

    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        if self.in_channels not in {None, prediction.shape[1]}:
            raise InputError(
                self._call,
                got=f"volumes with {prediction.shape[1]} channels",
                expected=f"in_channels={self.in_channels}, as the loss was created",
                fix=f"create the loss with Perceptual3DLoss(in_channels={prediction.shape[1]}).",
            )
        dtype = self._work_dtype(prediction)
        return mean_of_samples(
            self._sum, prediction, target, chunk_size=self.chunk_size, call=self._call, dtype=dtype, behind=self.network
        )

    def _sum(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the samples' summed loss. Both volumes run level by level, so target features are short-lived."""
        total = prediction.new_zeros(())
        theirs = levels_of(self.network, target, use_checkpoint=False, call=self._call)
        for features in levels_of(self.network, prediction, use_checkpoint=self.use_checkpoint, call=self._call):
            with torch.no_grad():
                wanted = next(theirs)
            total = total + feature_distance(features, wanted, call=self._call)
        return total


class SliceLoss(FrozenNetworkLoss):
    """A 2D image distance on all slices of two volumes, for example LPIPS if it is installed.

    ``SliceLoss(lpips.LPIPS(net="alex"))`` for volumes of three channels in [-1, 1]. The loss is the mean over the axes
    of the mean over slices; the gradient is computed inside the forward, ``chunk_size`` slices at a time.

    Args:
        distance: ``distance(prediction, target)`` takes two (n, C, H, W) and returns one distance per slice, in any
            shape, or their mean. A module is frozen and put into eval mode.
        axes: Axes across which slices are cut, among ``"D"``, ``"H"`` and ``"W"``.
        chunk_size: Slices at a time.

    Raises:
        ConfigError: An axis is unknown or repeated, or ``chunk_size`` is not a positive integer.

    Memory cost: one chunk's graph; a copy of both volumes and a gradient of the prediction per axis.

    Source: the 2.5D form of MONAI's PerceptualLoss; `docs/losses.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> loss = mk.voxel.SliceLoss(torch.nn.MSELoss(), axes="DW")
        >>> a, b = torch.rand(2, 1, 4, 5, 6), torch.rand(2, 1, 4, 5, 6)
        >>> torch.allclose(loss(a, b), (a - b).square().mean())
        True
    """

    def __init__(
        self, distance: Callable[[Tensor, Tensor], Tensor], *, axes: str = "DHW", chunk_size: int = 16
    ) -> None:
        check = Checker("SliceLoss(...)")
        given: Any = axes
        if not isinstance(given, str) or not axes or len(set(axes)) < len(axes) or set(axes) - _AXES.keys():
            raise check.refusal(
                "axes", axes, "a combination of the letters D, H and W, each at most once", fix="pass axes='DHW'."
            )
        super().__init__(distance)
        self.axes = axes
        self.chunk_size = check.whole("chunk_size", chunk_size, 1)

    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        means = [
            mean_of_samples(
                self._sum,
                *(each.movedim(_AXES[axis], 1).flatten(0, 1) for each in (prediction, target)),
                chunk_size=self.chunk_size,
                call=self._call,
                dtype=self._work_dtype(prediction),
                behind=self.network,
            )
            for axis in self.axes
        ]
        return torch.stack(means).mean()

    def _sum(self, prediction: Tensor, target: Tensor) -> Tensor:
        found = self.network(prediction, target)
        if not isinstance(found, Tensor) or found.numel() not in {1, len(prediction)}:
            raise InputTypeError(
                self._call,
                got=f"a distance that returns {described(found)} for {len(prediction)} slices",
                expected="one number for each slice, or their mean",
                fix="average over channels and positions inside the distance.",
            )
        return found.mean() * len(prediction)


def feature_distance(features: Tensor, target: Tensor, *, call: str) -> Tensor:
    """Compute the squared distance of normalized features, averaged over positions and summed over samples.

    The gradient reuses the memory of the difference and is the only tensor kept.

    Args:
        features: (n, C, ...).
        target: The same shape, without a graph.
        call: The user's call, for messages.
    """
    return with_gradients(functools.partial(_distance, features, target), [features], call=call)


@torch.no_grad()
def _distance(features: Tensor, target: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Gradients]:
    ours, theirs = (
        torch.linalg.vector_norm(each, dim=1, keepdim=True).square().add(_EPSILON).rsqrt()
        for each in (features, target)
    )
    difference = (features * ours).sub_(target * theirs)  # exactly zero for equal features
    squared = torch.linalg.vector_norm(difference, dim=1, keepdim=True).square()
    num_places = squared[0].numel()
    if not needs[0]:
        return squared.sum() / num_places, [None]
    # With a and b the normalized features: the gradient for the original features is 2 * ours * (a - b - a * <a, a -
    # b>), and 2 <a, a - b> = |a|^2 - |b|^2 + |a - b|^2, where |a|^2 = 1 - epsilon * ours^2.
    along = (squared + _EPSILON * (theirs.square() - ours.square())) / 2
    gradient = difference.addcmul_(features, along * ours, value=-1).mul_(ours * (2 / num_places))
    return squared.sum() / num_places, [gradient]
