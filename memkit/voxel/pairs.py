"""What the losses of two volumes share: which pairs they take, and a mean over samples with the memory of a few."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memkit._core.errors import InputError, InputTypeError
from memkit._gradients.streamed import sum_of_chunks


class VolumeLoss(nn.Module):
    """A loss of two volumes, which are checked here and compared by the subclass."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compare two volumes.

        Args:
            prediction: (B, C, D, H, W), floating.
            target: The same shape, any real dtype; it gets no gradient.

        Returns:
            The loss, 0-dim, float32 or float64.

        Raises:
            InputTypeError: What came is no tensor of numbers, or a network that was given returns none.
            InputError: Shapes or devices differ, the volumes hold nothing, or have other channels than the loss.
            StateError: A network was converted to half precision; in backward with ``create_graph=True``.
        """
        return self._compare(*check_pair(self._call, prediction, target))

    @property
    def _call(self) -> str:
        return f"{type(self).__name__}(...)(prediction, target)"

    @abstractmethod
    def _compare(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss of two volumes that go together; the target has no graph."""


def check_pair(call: str, prediction: object, target: object) -> tuple[Tensor, Tensor]:
    """Return both volumes; the target without its graph, as losses here have no gradient for it.

    Raises:
        InputTypeError: One of them is no tensor, or the prediction is not floating.
        InputError: They are not two volumes (B, C, D, H, W) of one shape on one device, or they hold nothing.
    """
    prediction, target = _real(call, "prediction", prediction), _real(call, "target", target)
    if prediction.shape != target.shape or prediction.dim() != 5 or prediction.device != target.device:
        raise InputError(
            call,
            got=f"{tuple(prediction.shape)} on {prediction.device} and {tuple(target.shape)} on {target.device}",
            expected="two volumes (B, C, D, H, W) of one shape on one device",
            fix="add what is missing with volume[None] or volume[:, None]; move one of them.",
        )
    if not prediction.numel():
        raise InputError(
            call,
            got=f"volumes {tuple(prediction.shape)}, which hold nothing",
            expected="one sample at least, of one voxel at least",
            fix="skip this batch: a mean over nothing is no number.",
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
            got=f"{name}: {volume.dtype}" if isinstance(volume, Tensor) else f"{name}: a {type(volume).__name__}",
            expected="tensors of real numbers, the prediction floating",
            fix="convert with volume.float(); SparseVoxels with voxels.to_dense().",
        )
    return volume


def work_dtype(volume: Tensor) -> torch.dtype:
    """Float64 for float64; float32 for all else, half precision too."""
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
    """The mean over samples of a loss, some samples at a time, each chunk's gradient taken at once.

    Autocast is off inside, and a prediction in half precision comes as float32: its gradient stays in float32 until
    the upstream factor, a `GradScaler`'s too, was multiplied in.

    Args:
        loss_sum: Of (n, ...) and (n, ...): the sum of the samples' losses, 0-dim.
        prediction: (B, ...); the gradient is taken for it.
        target: (B, ...), without a graph.
        chunk_size: Samples at a time.
        call: The user's call, for messages.
        dtype: Compute in it; `work_dtype` without.
        behind: See `sum_of_chunks`.

    Memory cost: one chunk's graph, and one gradient of the prediction; in half precision its float32 copy.
    """
    dtype = work_dtype(prediction) if dtype is None else dtype

    def chunk_sum(ours: Tensor, theirs: Tensor) -> Tensor:
        with torch.autocast(ours.device.type, enabled=False):
            return loss_sum(ours, theirs.to(dtype))

    rows = (prediction.to(dtype), target)
    return sum_of_chunks(chunk_sum, rows, (), chunk_size=chunk_size, call=call, behind=behind) / len(prediction)
