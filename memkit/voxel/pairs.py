"""Base of losses on two volumes: input checks, and a mean over samples with the memory of a few."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._core.printable import described
from memkit._gradients.streamed import sum_of_chunks


class VolumeLoss(nn.Module):
    """A loss on two volumes, which are checked here and compared by the subclass."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compare two volumes.

        Args:
            prediction: (B, C, D, H, W), floating point.
            target: The same shape, any real dtype; it gets no gradient.

        Returns:
            The loss, 0-dim, float32 or float64.

        Raises:
            InputTypeError: An argument is not a tensor of real numbers, or a given network does not return one.
            InputError: Shapes or devices differ, the volumes are empty, or their channels do not match the loss.
            StateError: A network was converted to half precision; or in the backward pass with ``create_graph=True``.
        """
        return self._compare(*check_pair(self._call, prediction, target))

    @property
    def _call(self) -> str:
        return f"{type(self).__name__}(...)(prediction, target)"

    @abstractmethod
    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the loss of two checked volumes; the target has no graph."""


def check_pair(call: str, prediction: object, target: object) -> tuple[Tensor, Tensor]:
    """Check and return both volumes; the target is detached, since these losses have no gradient for it.

    Raises:
        InputTypeError: An argument is not a tensor, or the prediction is not floating point.
        InputError: They are not two volumes (B, C, D, H, W) of the same shape on the same device, or they are empty.
    """
    prediction, target = _real(call, "prediction", prediction), _real(call, "target", target)
    if prediction.shape != target.shape or prediction.dim() != 5 or prediction.device != target.device:
        raise InputError(
            call,
            got=f"{tuple(prediction.shape)} on {prediction.device} and {tuple(target.shape)} on {target.device}",
            expected="two volumes (B, C, D, H, W) of the same shape on one device",
            fix="add missing dimensions with volume[None] or volume[:, None]; move one volume to the other's device.",
        )
    if not prediction.numel():
        raise InputError(
            call,
            got=f"volumes {tuple(prediction.shape)}, which are empty",
            expected="at least one sample with at least one voxel",
            fix="skip this batch: a mean over no voxels is undefined.",
        )
    return prediction, target.detach()


def _real(call: str, name: str, volume: object) -> Tensor:
    if (
        not isinstance(volume, Tensor)
        or volume.is_complex()
        or (name == "prediction" and not volume.is_floating_point())
    ):
        raise InputTypeError(
            call,
            got=f"{name}: {described(volume)}",
            expected="tensors of real numbers, with a floating-point prediction",
            fix="convert tensors with volume.float(), and SparseVoxels with voxels.to_dense().",
        )
    return volume


def work_dtype(volume: Tensor) -> torch.dtype:
    """Return float64 for float64, otherwise float32, also for half precision."""
    return torch.float64 if volume.dtype == torch.float64 else torch.float32


def mean_of_samples(
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    prediction: Tensor,
    target: Tensor,
    *,
    chunk_size: int,
    call: str,
    dtype: torch.dtype | None = None,
    behind: Callable[..., object] | None = None,
) -> Tensor:
    """Average a loss over samples, a few at a time, taking each chunk's gradient immediately.

    Autocast is off inside, and a half-precision prediction is converted to float32: its gradient stays in float32 until
    the upstream factor, including a `GradScaler`'s, has been applied.

    Args:
        loss_sum: Maps (n, ...) and (n, ...) to the sum of the samples' losses, 0-dim.
        prediction: (B, ...); the gradient is taken with respect to it.
        target: (B, ...), without a graph.
        chunk_size: Samples at a time.
        call: The user's call, for messages.
        dtype: Computation dtype; None for `work_dtype`.
        behind: As for `sum_of_chunks`.

    Memory cost: one chunk's graph, and one gradient of the prediction; in half precision its float32 copy.
    """
    dtype = work_dtype(prediction) if dtype is None else dtype

    def chunk_sum(ours: Tensor, theirs: Tensor) -> Tensor:
        with torch.autocast(ours.device.type, enabled=False):
            return loss_sum(ours, theirs.to(dtype))

    rows = (prediction.to(dtype), target)
    return sum_of_chunks(chunk_sum, rows, (), chunk_size=chunk_size, call=call, behind=behind) / len(prediction)
