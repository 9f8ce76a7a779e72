"""Frozen feature extractors for losses: a random network drawn from a seed, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from memkit._core.errors import InputError, InputTypeError, StateError
from memkit._core.printable import described
from memkit._torch.modules import apply_to
from memkit.voxel.pairs import VolumeLoss, work_dtype


class FrozenNetworkLoss(VolumeLoss):
    """A loss that compares volumes with a network that is never trained.

    The network moves to other devices with the loss, but is otherwise not part of it: its parameters are not among
    the loss's parameters, ``train()`` does not affect its normalization layers, and the state_dict omits it.

    Args:
        network: The network, or a function. A module is frozen and put into eval mode.
    """

    def __init__(self, network: Callable[..., Any]) -> None:
        super().__init__()
        if isinstance(network, nn.Module):
            network.eval().requires_grad_(False)  # noqa: FBT003 - torch's own signature
        self._frozen = (network,)  # in a tuple, as a module would be registered

    @property
    def network(self) -> Callable[..., Any]:
        """The network used to compare volumes."""
        return self._frozen[0]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch's
        if isinstance(self.network, nn.Module):
            apply_to(self.network, fn, recurse=recurse)
        return self

    def _work_dtype(self, volume: Tensor) -> torch.dtype:
        """Return the network's dtype, or the work dtype of the volume if it has no parameters.

        Raises:
            InputError: The volume is on another device.
            StateError: The network was converted to half precision.
        """
        network = self.network
        weight = next(iter(network.parameters()), None) if isinstance(network, nn.Module) else None
        if weight is None:
            return work_dtype(volume)
        if weight.device != volume.device:
            raise InputError(
                self._call,
                got=f"volumes on {volume.device}, a network on {weight.device}",
                expected="both on one device",
                fix="move the loss like a model: loss.to(device).",
            )
        if weight.dtype != torch.promote_types(weight.dtype, torch.float32):
            raise StateError(
                self._call,
                got=f"a network that was converted to {weight.dtype}",
                expected="float32 or float64: in half precision small gradients inside the network are lost",
                fix="convert the loss back with loss.float(); autocast around the loss is fine.",
            )
        return weight.dtype


def random_extractor(in_channels: int, base_channels: int, num_levels: int, *, seed: int) -> nn.Sequential:
    """Build stages of two convolutions; each but the first halves the size and doubles the channels.

    Weights depend only on the seed: they are the same on every rank and device, and the global random state is neither
    used nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    stages, channels = [], in_channels
    for level in range(num_levels):
        width = base_channels * 2**level
        first = _convolution(channels, width, 2 if level else 1, generator)
        second = _convolution(width, width, 1, generator)
        stages.append(nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True)))
        channels = width
    return nn.Sequential(*stages)


def levels_of(network: Callable[..., Any], volume: Tensor, *, use_checkpoint: bool, call: str) -> Iterator[Tensor]:
    """Yield the features (B, C, ...) to compare: after each stage of an `nn.Sequential`, or the network's results.

    Raises:
        InputTypeError: The network does not return such features.
    """
    stages: list[Callable[..., Any]] = list(network) if isinstance(network, nn.Sequential) else [network]
    for stage in stages:
        if use_checkpoint:
            found = checkpoint(stage, volume, use_reentrant=False, preserve_rng_state=False)
        else:
            found = stage(volume)
        is_list = isinstance(found, list | tuple) and len(found) > 0 and len(stages) == 1
        for level in found if is_list else [found]:
            if not isinstance(level, Tensor) or level.dim() < 2 or len(level) != len(volume) or not level.numel():
                raise InputTypeError(
                    call,
                    got=f"an extractor that returns {described(level)} for a volume {tuple(volume.shape)}",
                    expected="features (B, C, ...), or a list of them; one tensor from each stage of an nn.Sequential",
                    fix="wrap it in a module that returns the feature maps to compare.",
                )
            yield level
        volume = found


def _convolution(channels: int, width: int, stride: int, generator: torch.Generator) -> nn.Module:
    # skip_init: torch's own initialization would draw from the global random state.
    convolution: nn.Conv3d = skip_init(  # type: ignore[no-untyped-call] # torch's
        nn.Conv3d, channels, width, 3, stride=stride, padding=1, device="cpu", dtype=torch.float32
    )
    weight, bias = convolution.parameters()
    nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
    # Without a bias, scaling a volume would not change the direction of its features, so the loss would not notice.
    nn.init.uniform_(bias, -0.1, 0.1, generator=generator)
    return convolution
