"""Streaming metrics as a torchmetrics Metric: for MetricCollection, Lightning's log, and torchmetrics' own sync."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torchmetrics import Metric

from memkit.voxel.streaming import PointCloudMetrics, VoxelMetrics


class StreamingMetric(Metric):  # type: ignore[misc]  # torchmetrics is not there for every type check
    """A `PointCloudMetrics` or `VoxelMetrics` with the interface, states and synchronization of torchmetrics.

    The states are sums, which torchmetrics adds up over ranks: they do not grow with the evaluation. torchmetrics keeps
    them on the metric's device, in float64 except on Apple GPUs, which do not support it.

    Args:
        metrics: The metrics to accumulate; they are reset first.
        **options: For `torchmetrics.Metric`.

    Memory cost: one number per metric.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> from memkit.integrations.torchmetrics import StreamingMetric
        >>> metric = StreamingMetric(mk.voxel.VoxelMetrics())
        >>> metric.update(torch.ones(2, 4, 4, 4), torch.ones(2, 4, 4, 4))
        >>> metric.compute()["iou"].item()
        1.0
    """

    full_state_update = False  # update() does not need earlier samples
    is_differentiable = False
    higher_is_better = None

    def __init__(self, metrics: PointCloudMetrics | VoxelMetrics, **options: Any) -> None:
        super().__init__(**options)
        metrics.reset()
        self._metrics = metrics
        state = metrics.state_dict()
        self.add_state("sums", torch.zeros(len(state["sums"]), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        # A MetricCollection updates only one of several metrics whose states have equal names and values: other
        # settings must have another name.
        settings = zlib.crc32(repr((type(metrics), state["settings"], list(state["sums"]))).encode())
        self.add_state(f"settings_{settings:08x}", torch.zeros(()), dist_reduce_fx="sum")
        self.set_dtype(torch.float64)

    def update(self, *samples: Any) -> None:
        """Add samples, as for `PointCloudMetrics.update` or `VoxelMetrics.update`."""
        self._metrics.reset()
        self._metrics.update(*samples)
        seen = self._metrics.state_dict()
        self.sums += torch.tensor(list(seen["sums"].values()), dtype=self.sums.dtype, device=self.sums.device)
        self.num_samples += seen["num_samples"]

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the means over the samples, by name, and counts.

        Raises:
            StateError: There were no samples.
        """
        state = self._metrics.state_dict()
        state["sums"] = dict(zip(state["sums"], self.sums.tolist(), strict=True))
        self._metrics.load_state_dict(state | {"num_samples": int(self.num_samples)})
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self._metrics.compute().items()}
