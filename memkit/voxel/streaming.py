"""Streaming metrics: float64 sums that accumulate over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor, distributed as dist

from memkit._core.errors import ConfigError, FileFormatError, StateError
from memkit._core.settings import Checker
from memkit.voxel.clouds import Cloud, ConventionName, chamfer_distance, hausdorff_distance, paired
from memkit.voxel.grids import Grid, count_voxels, scores_of_counts
from memkit.voxel.nearest import NearestBackend, NearestPoints, nearest_points
from memkit.voxel.recall import precision_recall

_VERSION = 1


class _Sums:
    """Named float64 sums on the CPU, with the number of samples.

    Args:
        names: Names of the sums.
        settings: Settings that the names do not encode, as plain types; sums with different settings cannot be merged.
    """

    def __init__(self, names: Sequence[str], **settings: float) -> None:
        self._names, self._settings = tuple(names), settings
        self._sums = torch.zeros(len(self._names), dtype=torch.float64)
        self._num_samples = 0

    @property
    def num_samples(self) -> int:
        """Number of samples seen."""
        return self._num_samples

    def reset(self) -> None:
        """Reset all sums."""
        self._sums.zero_()
        self._num_samples = 0

    def merge(self, other: Self) -> None:
        """Add the sums of another object with the same settings.

        Raises:
            StateError: Its settings differ.
        """
        if (other._names, other._settings) != (self._names, self._settings):
            raise StateError(
                f"{type(self).__name__}.merge(other)",
                got=f"metrics {', '.join(other._names)} with {other._settings}",
                expected=f"{', '.join(self._names)} with {self._settings}",
                fix="create both with the same settings.",
            )
        self._sums += other._sums
        self._num_samples += other._num_samples

    def sync(self, group: dist.ProcessGroup | None = None) -> None:
        """Sum over the ranks, so that all have the total. Call it once, before `compute`.

        In a single process without torch.distributed this does nothing.

        Args:
            group: The process group; None means all ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        everything = torch.cat([self._sums, torch.tensor([float(self._num_samples)], dtype=torch.float64)])
        device = torch.device("cpu") if dist.get_backend(group) != "nccl" else torch.device("cuda")
        everything = everything.to(device)
        dist.all_reduce(everything, group=group)
        self._sums = everything[:-1].cpu()
        self._num_samples = round(everything[-1].item())

    def compute(self) -> dict[str, float]:
        """Return the means over the samples and the counts, by name.

        Raises:
            StateError: There are no samples.
        """
        if not self._num_samples:
            raise StateError(
                f"{type(self).__name__}.compute()",
                got="no samples",
                expected="at least one sample",
                fix="call update(...) first.",
            )
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        return {name: value if name.startswith("num_") else value / self._num_samples for name, value in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain types."""
        return {
            "version": _VERSION,
            "settings": dict(self._settings),
            "sums": dict(zip(self._names, self._sums.tolist(), strict=True)),
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            FileFormatError: The state has a different version or different settings.
        """
        found = state.get("version"), tuple(state.get("sums", ())), state.get("settings")
        if found != (_VERSION, self._names, self._settings):
            raise FileFormatError(
                f"{type(self).__name__}.load_state_dict(state)",
                got=f"version {found[0]!r} of {', '.join(found[1])} with {found[2]}",
                expected=f"version {_VERSION} of {', '.join(self._names)} with {self._settings}",
                fix="load the state into metrics with the same settings.",
            )
        self._sums = torch.tensor(list(state["sums"].values()), dtype=torch.float64)
        self._num_samples = state["num_samples"]

    def _add(self, rows: Tensor) -> None:
        """Add rows of samples: (B, names)."""
        self._sums += rows.to("cpu", torch.float64).sum(0)
        self._num_samples += len(rows)


class PointCloudMetrics(_Sums):
    """Point-cloud distances over an evaluation, from one nearest-neighbor search per pair.

    Args:
        thresholds: Thresholds of precision, recall and F-score, in the unit of the coordinates.
        quantiles: Quantiles of the Hausdorff distance.
        conventions: Conventions of the Chamfer distance.
        empty_distance: Distance of a pair in which one cloud is empty; inf makes the mean inf, so that a model that
            predicts nothing cannot go unnoticed. Empty clouds are counted separately.
        backend: As for `nearest_points`.
        memory_budget: As for `nearest_points`.

    Raises:
        ConfigError: A setting is unknown, out of range, or repeated.

    Memory cost: one number per metric, regardless of the number of samples; `nearest_points` during `update`.

    Source: `docs/clouds.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> metrics = mk.voxel.PointCloudMetrics(thresholds=[0.1], quantiles=[1.0])
        >>> cloud = torch.tensor([[0.0, 0, 0], [1, 0, 0]])
        >>> metrics.update(cloud, cloud + torch.tensor([0.0, 0, 0.5]))
        >>> {name: round(value, 3) for name, value in metrics.compute().items() if value}
        {'chamfer_pytorch3d': 0.5, 'hausdorff': 0.5}
    """

    def __init__(
        self,
        *,
        thresholds: Sequence[float] = (0.1,),
        quantiles: Sequence[float] = (1.0, 0.95),
        conventions: Sequence[ConventionName] = ("pytorch3d",),
        empty_distance: float = math.inf,
        backend: NearestBackend = "auto",
        memory_budget: SupportsIndex | str = "16MiB",
    ) -> None:
        check = Checker("PointCloudMetrics(...)")
        self._thresholds = check.series("thresholds", thresholds)
        self._quantiles = check.series("quantiles", quantiles)
        self._conventions = check.items("conventions", conventions)
        self._empty_distance, self._search = empty_distance, (backend, memory_budget)
        shares = [f"{kind}_{_short(each)}" for kind in ("precision", "recall", "f_score") for each in self._thresholds]
        farthest = [f"hausdorff_{_short(each)}" if each < 1 else "hausdorff" for each in self._quantiles]
        empties = ["num_empty_predictions", "num_empty_targets", "num_both_empty"]
        names = [*(f"chamfer_{each}" for each in self._conventions), *farthest, *shares, *empties]
        if len(set(names)) < len(names):
            raise ConfigError(
                check.call,
                got=f"metrics {', '.join(names)}",
                expected="each threshold, quantile and convention once",
                fix="remove the repeated ones.",
            )
        super().__init__(names, empty_distance=empty_distance)
        empty = torch.zeros(0, 3)
        self._row(nearest_points(empty, empty, backend=backend, memory_budget=memory_budget))  # refuses wrong settings

    def update(self, prediction: Cloud | NearestPoints, target: Cloud | None = None) -> None:
        """Add a pair of clouds (N, D), (M, D), or a batch, as for `chamfer_distance`."""
        with torch.no_grad():
            pairs = paired("PointCloudMetrics.update(prediction, target)", prediction, target, *self._search)
            self._add(torch.stack([self._row(each) for each in pairs]))

    def _row(self, pairs: NearestPoints) -> Tensor:
        cap, are_empty = self._empty_distance, [not len(pairs.a), not len(pairs.b)]
        chamfer = [chamfer_distance(pairs, convention=each, empty_distance=cap) for each in self._conventions]
        farthest = [hausdorff_distance(pairs, quantile=each, empty_distance=cap) for each in self._quantiles]
        shares = torch.stack(precision_recall(pairs, threshold=self._thresholds)).flatten()
        counts = torch.tensor([*are_empty, all(are_empty)])
        return torch.cat([each.cpu().double() for each in (torch.stack(chamfer + farthest), shares, counts)])


def _short(number: float) -> str:
    return str(number).removesuffix(".0")  # not "g", in which close numbers would coincide


class VoxelMetrics(_Sums):
    """Occupancy scores over an evaluation.

    Args:
        threshold: Numbers above it count as occupied.

    Memory cost: one number per metric; `voxel_scores` during `update`.

    Source: `docs/clouds.md`.

    Example:
        >>> import torch
        >>> import memkit as mk
        >>> metrics = mk.voxel.VoxelMetrics()
        >>> metrics.update(torch.ones(2, 4, 4, 4), torch.ones(2, 4, 4, 4))
        >>> metrics.compute()["iou"], metrics.num_samples
        (1.0, 2)
    """

    def __init__(self, *, threshold: float = 0.5) -> None:
        self._threshold = threshold
        super().__init__(["iou", "precision", "recall", "f_score", "num_both_empty"], threshold=threshold)

    def update(self, prediction: Grid, target: Grid) -> None:
        """Add grids, as for `voxel_scores`; each sample counts once."""
        counts = count_voxels(prediction, target, threshold=self._threshold).cpu()
        are_empty = (counts[1] + counts[2] == 0).double()
        self._add(torch.cat([scores_of_counts(counts), are_empty[None]]).T)
