"""Data types of the density-invariant trainer: scenes, the model's batch, and the figures of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from memkit.memory.manager import MemoryManager
from memkit.memory.phases import larger, peak_by_record
from memkit.points.sample import Scenario

_IGNORED = -100  # torch's ignore_index


@final
@dataclass(frozen=True, slots=True, eq=False)
class PointScene:
    """The points of one scene, with features and targets. The tensors may be on the host.

    Attributes:
        coords: (N, A), positions.
        features: (N, F), the model's input for each point.
        targets: (N, ...), the targets of ``loss_fn``.
        key: The scene's name, so that its grid is computed only once: see `GridAwareSampler.index`.

    Example:
        >>> import torch, memkit as mk
        >>> coords = torch.rand(100, 3)
        >>> scene = mk.recipes.PointScene(coords, features=coords, targets=torch.zeros(100), key="room-1")
        >>> len(scene.coords)
        100
    """

    coords: Tensor
    features: Tensor
    targets: Tensor
    key: Hashable | None = None


@final
@dataclass(frozen=True, slots=True, eq=False)
class PointBatch:
    """The model's input: the points of one or more clouds, concatenated.

    Attributes:
        coords: (M, A), positions.
        features: (M, F).
        offsets: (B,) int64, the end of each cloud's points; the last is M.

    Example:
        >>> import torch, memkit as mk
        >>> coords = torch.rand(100, 3)
        >>> batch = mk.recipes.PointBatch(coords, features=coords, offsets=torch.tensor([60, 100]))
        >>> [len(cloud) for cloud in batch.coords.tensor_split(batch.offsets[:-1])]
        [60, 40]
    """

    coords: Tensor
    features: Tensor
    offsets: Tensor


class PhaseFigures(NamedTuple):
    """Time and peak memory of one phase of a step.

    Attributes:
        seconds: By the host's clock; an accelerator may still be working when a phase ends.
        peak_bytes: Peak allocated bytes in the phase; None if `MemoryManager` cannot measure them.
    """

    seconds: float
    peak_bytes: int | None


@final
@dataclass(frozen=True, slots=True, eq=False)
class DensityStep:
    """Result of a step. Its tensors are 0-dim and detached, and keep nothing else alive.

    Attributes:
        loss: The minimized loss: mean task loss + weight * mean consistency loss.
        task: The task loss of each scenario that was trained on, averaged over the scenes with a label in it; NaN if
            there is none, in which case `loss` omits it.
        consistency: The distance of each sparser scenario to the densest, averaged over the scenes.
        num_points: Points of each scenario, summed over the scenes.
        stepped: Whether the optimizer really stepped.
        seconds: The whole step, by the host's clock.
        phases: ``"sampling"``, ``"data"`` (gathering points, moving them to the device), ``"forward"`` (with the task
            losses), ``"consistency"``, ``"backward"``, ``"optimizer"``.
    """

    loss: Tensor
    task: dict[Scenario, Tensor]
    consistency: dict[Scenario, Tensor]
    num_points: dict[Scenario, int]
    stepped: bool
    seconds: float
    phases: dict[str, PhaseFigures]

    def line(self) -> str:
        """Return a readable line: the seconds, and each phase's share of them."""
        shares = (f"{name} {figures.seconds / self.seconds:.1%}" for name, figures in self.phases.items())
        return f"{self.seconds:.3f} s: {', '.join(shares)}"


class ScenarioCloud(NamedTuple):
    """One scenario of one scene.

    Attributes:
        number: The scene's index in the step.
        scene: The scene.
        scenario: The scenario.
        rows: (K,) int64, the points it keeps, ascending; None if it keeps all.
    """

    number: int
    scene: PointScene
    scenario: Scenario
    rows: Tensor | None

    @property
    def place(self) -> tuple[int, Scenario]:
        """Scene index and scenario, as a key."""
        return self.number, self.scenario

    @property
    def num_points(self) -> int:
        """Number of points it keeps."""
        return len(self.scene.coords if self.rows is None else self.rows)

    def take(self, values: Tensor, device: torch.device) -> Tensor:
        """Select its rows of one of the scene's tensors and move them to the device."""
        chosen = values if self.rows is None else values.index_select(0, self.rows.to(values.device))
        return chosen.to(device, non_blocking=True)

    def is_unlabeled(self) -> bool:
        """Whether none of its points has a label: all targets are torch's ``ignore_index``."""
        targets = self.scene.targets
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            return False
        chosen = targets if self.rows is None else targets.index_select(0, self.rows.to(targets.device))
        return bool((chosen == _IGNORED).all())

    def within(self, denser: ScenarioCloud) -> Tensor:
        """Rows of these points within a denser cloud of the same scene."""
        rows = cast("Tensor", self.rows)  # only the densest cloud may keep all points
        return rows if denser.rows is None else torch.searchsorted(denser.rows, rows)


@dataclass(frozen=True, slots=True, eq=False)
class SceneLosses:
    """The losses of one scene.

    Attributes:
        task: The task loss of each scenario that is trained on; None if no point has a label.
        consistency: The distance of each sparser scenario to the densest.
    """

    task: dict[Scenario, Tensor | None]
    consistency: dict[Scenario, Tensor]

    def total(self, weight: float) -> Tensor:
        """The loss to minimize."""
        distance = weight * torch.stack(list(self.consistency.values())).mean()
        tasks = [loss for loss in self.task.values() if loss is not None]
        return torch.stack(tasks).mean() + distance if tasks else distance

    def detached(self) -> SceneLosses:
        """Return copies without a graph: a loss may be a view of something large."""
        task = {name: None if loss is None else loss.detach().clone() for name, loss in self.task.items()}
        return SceneLosses(task, {name: loss.detach().clone() for name, loss in self.consistency.items()})


def mean_losses(scenes: Sequence[SceneLosses]) -> SceneLosses:
    """The mean of each loss over the scenes that have it."""

    def mean(losses: list[Tensor]) -> Tensor | None:
        return torch.stack(losses).mean() if losses else None

    tasks = {name: mean([loss for each in scenes if (loss := each.task[name]) is not None]) for name in scenes[0].task}
    distances = {
        name: torch.stack([each.consistency[name] for each in scenes]).mean() for name in scenes[0].consistency
    }
    return SceneLosses(tasks, distances)


class Clock:
    """Records time and peak memory of a step's phases; repeated phases add up."""

    def __init__(self, memory: MemoryManager) -> None:
        self._memory = memory
        self.figures: dict[str, PhaseFigures] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase."""
        phase = self._memory.phase(name)
        try:
            with phase:
                yield
        finally:
            seconds, peak_bytes = self.figures.get(name, PhaseFigures(0.0, None))
            peak = phase.peak or peak_by_record(phase.first.peak_bytes, phase.last.peak_bytes)
            seconds += (phase.end_ns - phase.start_ns) / 1e9
            self.figures[name] = PhaseFigures(seconds, larger(peak_bytes, peak.known))
