"""DensityInvariantTrainer: one training step on several densities of the same points, tied by a consistency loss."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._core.printable import described
from memkit._core.protocols import Closing, Uncopied
from memkit._core.settings import Checker
from memkit._core.words import guided
from memkit._gradients.loss import Loss, LossFn
from memkit._recovery.snapshot import StateWatch
from memkit._torch import pytree
from memkit._torch.autocast import graphs
from memkit.memory.manager import MemoryManager
from memkit.points.cells import Lengths
from memkit.points.nested import single_within
from memkit.points.sample import GridSample, Scenario
from memkit.points.sampler import GridAwareSampler
from memkit.recipes.density_records import (
    Clock,
    DensityStep,
    PointBatch,
    PointScene,
    ScenarioCloud,
    SceneLosses,
    mean_losses,
)
from memkit.train.check_attempt import CheckAttempt
from memkit.train.contrastive import run_again_in_backward
from memkit.train.models import device_of, unwrap_model
from memkit.train.row_mixers import scan_modules
from memkit.train.wrapper import MemoryEfficientTrainingWrapper

ConsistencyMode = Literal["joint", "cached", "stopgrad"]
Distance = Callable[[Any, Any], Tensor]

_ENTRIES = {  # names of entries in Pointcept's and PyG's scenes, by our name
    "coords": ("coord", "coords", "pos", "xyz", "points"),
    "features": ("feat", "feats", "features", "x"),
    "targets": ("segment", "targets", "target", "labels", "label", "y"),
}
_MODEL_NAMES = {"model", "net", "network", "module", "m"}  # first parameter of the wrapper's form of a loss function
_CALL = "DensityInvariantTrainer.train_step(scene)"


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)


_CONSISTENCIES: dict[str, Distance] = {"mse": F.mse_loss, "kl": _kl}


@guided(
    words={
        "trainer_or_model": "model trainer",
        "weight": "consistency_weight lambda_consistency",
        "consistency": "consistency_loss",
        "scenarios": "densities",
        "pass it to the sampler: GridAwareSampler(ratio=(0.3, 0.7))": "min_sample_ratio max_sample_ratio ratio",
        "pass it to the wrapper: MemoryEfficientTrainingWrapper({key}=...)": "accumulation_steps precision",
    },
    methods=("train_step",),
    absent={"trainer.train_step(scene), for each scene": "fit", "trainer.train_step(scene)": "step"},
)
class DensityInvariantTrainer(Uncopied, Closing):
    """Trains on several densities of each scene at once, so that predictions do not depend on the scan density.

    Each step thins out the scene by the cells of a grid: ``"half"`` keeps a random share of each cell, ``"single"``
    keeps one point per cell, chosen among those of ``"half"``; ``"dense"`` is the scene itself. All scenarios run
    through the model, and the loss is

    ``mean over scenarios of loss_fn(output, targets) + weight * mean over the sparser ones of
    consistency(their output, output of the densest at the same points)``

    After an out-of-memory error the wrapper runs fewer scenes at a time. A scene too large on its own needs
    ``mode="cached"``.

    Args:
        trainer_or_model: A `MemoryEfficientTrainingWrapper`, with its precision, clipping, schedule and recovery; or a
            module, with ``optimizer``. The model is called with a `PointBatch` and returns a tensor with one row per
            point, (M, ...), or a pytree of them. It must respect ``offsets``: clouds must not influence each other. A
            wrapper must not have a ``split_fn``: it splits the list of scenes.
        sampler: Draws the scenarios. Restore its `state_dict` to continue the same draws after a resume.
        loss_fn: ``loss_fn(output, targets)`` returns the mean loss of one cloud, 0-dim, or a `Loss`. An unlabeled cloud
            adds nothing to the task loss: one whose integer targets are all -100, or whose `Loss` has a count of 0.
        consistency: ``"mse"``; ``"kl"`` for logits in the last dimension, (M, C), in nats per point; or a function
            ``(sparse_output, dense_output)`` on the same points that returns a 0-dim mean.
        weight: Weight of the consistency loss.
        scenarios: Two or three of ``"dense"``, ``"half"``, ``"single"``.
        mode: ``"joint"``: one batched forward of all scenarios, with the exact gradient of all. ``"cached"``: the same
            gradient, one scenario at a time, recomputing its activations in the backward (GradCache). ``"stopgrad"``:
            the densest scenario is a teacher, which runs without gradient and without a task loss.
        optimizer: Required for a plain module.
        grid_size: Side of a cell in the unit of the coordinates, see `GridIndex.from_coords`.
        memory: Measures the phases. None creates one for the model's device.

    Raises:
        ConfigError: A setting is invalid, or two settings conflict.

    Memory cost: ``"joint"``: the activations of all scenarios; ``"cached"``: those of the largest one, and all outputs;
    ``"stopgrad"``: those of the sparser ones. Time cost: ``"cached"`` adds one forward. (``docs/points.md``.)

    Source: the scenarios are those of density-invariant training in CompressedSceneSplat; the cached gradient is
    Gao et al. 2021 (GradCache).

    Example:
        >>> import torch, memkit as mk
        >>> net = torch.nn.Linear(3, 2)
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = net
        ...     def forward(self, batch):
        ...         return self.net(batch.features)
        >>> model = Model()
        >>> trainer = mk.DensityInvariantTrainer(
        ...     model, mk.GridAwareSampler(seed=0), torch.nn.functional.cross_entropy, grid_size=0.25,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> coords = torch.rand(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> result = trainer.train_step(mk.recipes.PointScene(coords, coords, targets=(coords[:, 2] > 0.5).long()))
        >>> result.num_points["dense"], result.num_points["single"], list(result.consistency)
        (1000, 64, ['half', 'single'])
    """

    instead = "create another one around a trainer of its own; to save the state, use the trainer's state_dict()."

    def __init__(
        self,
        trainer_or_model: MemoryEfficientTrainingWrapper | nn.Module,
        sampler: GridAwareSampler,
        loss_fn: LossFn,
        consistency: Literal["mse", "kl"] | Distance = "mse",
        weight: float = 0.1,
        scenarios: Iterable[Scenario] = ("dense", "half", "single"),
        mode: ConsistencyMode = "joint",
        *,
        optimizer: Optimizer | None = None,
        grid_size: Lengths = 0.05,
        memory: MemoryManager | None = None,
    ) -> None:
        check = Checker("DensityInvariantTrainer(...)")
        self._scenarios = _by_density(check, scenarios)
        _check_pieces(check, sampler, loss_fn)
        self._mode: ConsistencyMode = _mode(check, mode)
        if not callable(consistency):
            check.choice(
                "consistency", consistency, tuple(_CONSISTENCIES), fix="pass one of these names, or a function."
            )
        check.number("weight", weight, 0)
        self._sampler, self._grid_size, self._weight = sampler, grid_size, weight
        self._loss_fn = loss_fn
        self._compare = consistency if callable(consistency) else _CONSISTENCIES[consistency]
        self._cleanup = contextlib.ExitStack()  # closes only what is created here
        if isinstance(trainer_or_model, MemoryEfficientTrainingWrapper):
            if optimizer is not None:
                name = type(optimizer).__name__
                raise check.refusal(
                    "optimizer",
                    name,
                    "no optimizer together with a wrapper, which has its own",
                    fix="write DensityInvariantTrainer(trainer, sampler, loss_fn)",
                )
            self._trainer = trainer_or_model
        else:
            if optimizer is None:
                raise check.refusal(
                    "optimizer",
                    None,
                    "an optimizer, because the model is a plain module without one",
                    fix="write DensityInvariantTrainer(model, sampler, loss_fn, optimizer=optimizer)",
                )
            self._trainer = self._cleanup.enter_context(MemoryEfficientTrainingWrapper(trainer_or_model, optimizer))
        self._model = self._trainer.model
        self._device = device_of(self._model)
        self._memory = memory or self._cleanup.enter_context(MemoryManager(self._device))
        self._watch = StateWatch(self._model)

    def train_step(self, scenes: PointScene | Sequence[PointScene]) -> DensityStep:
        """Run one optimizer step on one or more scenes, all weighted equally.

        Args:
            scenes: Several scenes are split by the wrapper's ``accumulation_steps`` and its recovery.

        Raises:
            InputError: A scene has no points, its tensors differ in length, or the model or a loss returns an invalid
                value.
            ConfigError: ``mode="cached"`` with a BatchNorm in training mode, which would see each scenario alone.
            MemkitOutOfMemoryError: One scene does not fit. After any error before the optimizer's step, the next call
                draws the points that this one did.
        """
        scenes = _as_list(scenes)
        self._check(scenes)
        before, num_steps = self._sampler.state_dict(), self._trainer.num_steps
        try:
            return self._step(scenes)
        except BaseException:
            if self._trainer.num_steps == num_steps:  # another try draws the same points
                self._sampler.load_state_dict(before)
            raise

    def _step(self, scenes: Sequence[PointScene]) -> DensityStep:
        clock = Clock(self._memory)
        losses: dict[int, SceneLosses] = {}
        with clock.phase("step"):
            with clock.phase("sampling"):
                clouds = [cloud for number, scene in enumerate(scenes) for cloud in self._draw(number, scene)]
            for attempt in self._trainer.microbatches(torch.arange(len(scenes))):
                with attempt as numbers:
                    chosen = [each for each in clouds if each.number in set(numbers.tolist())]
                    if isinstance(attempt, CheckAttempt):  # the split check: its losses and its time are not the step's
                        self._run(chosen, Clock(self._memory))
                    else:
                        losses |= self._run(chosen, clock)
            with clock.phase("optimizer"):
                stepped = self._trainer.step()
        whole, mean = clock.figures.pop("step"), mean_losses(list(losses.values()))
        return DensityStep(
            loss=torch.stack([each.total(self._weight) for each in losses.values()]).mean(),
            task={name: torch.tensor(math.nan) if loss is None else loss for name, loss in mean.task.items()},
            consistency=mean.consistency,
            num_points={each: sum(c.num_points for c in clouds if c.scenario == each) for each in self._scenarios},
            stepped=stepped,
            seconds=whole.seconds,
            phases=clock.figures,
        )

    def close(self) -> None:
        """Close the wrapper and the manager that were created here; objects passed in stay open."""
        self._cleanup.close()

    def _draw(self, number: int, scene: PointScene) -> Iterator[ScenarioCloud]:
        """Draw the scenarios of a scene, each a subset of the one before."""
        index = self._sampler.index(scene.coords, self._grid_size, key=scene.key)
        rows: Tensor | None = None
        half: GridSample | None = None
        for scenario in self._scenarios:
            if scenario == "half":
                half = self._sampler.sample_half_density(index)
                rows = half.indices
            elif scenario == "single" and half is not None:
                rows = single_within(self._sampler, index, half)
            elif scenario == "single":
                rows = self._sampler.sample_single_per_grid(index).indices
            yield ScenarioCloud(number, scene, scenario, rows)

    def _run(self, clouds: list[ScenarioCloud], clock: Clock) -> dict[int, SceneLosses]:
        """Run forward and backward for the clouds of some scenes; return the losses of each scene."""
        with clock.phase("data"):
            groups = self._groups(clouds)
            batches = [self._gather(group) for group in groups]
            targets = [each.take(each.scene.targets, self._device) for each in clouds]
        losses = {each.number: SceneLosses({}, {}) for each in clouds}
        with self._trainer.autocast():
            with clock.phase("forward"):
                outputs: dict[tuple[int, Scenario], Any] = {}
                for group, batch in zip(groups, batches, strict=True):
                    outputs |= zip([each.place for each in group], self._forward(group, batch), strict=True)
                for cloud, target in zip(clouds, targets, strict=True):
                    if not self._is_teacher(cloud):
                        losses[cloud.number].task[cloud.scenario] = self._task(cloud, outputs[cloud.place], target)
            with clock.phase("consistency"):
                densest = {each.number: each for each in clouds if self._is_densest(each)}
                for cloud in clouds:
                    if not self._is_densest(cloud):
                        denser = densest[cloud.number]
                        same_points = _take(outputs[denser.place], cloud.within(denser).to(self._device))
                        loss = self._compare(outputs[cloud.place], same_points)
                        losses[cloud.number].consistency[cloud.scenario] = _scalar(loss, "consistency")
                total = torch.stack([each.total(self._weight) for each in losses.values()]).mean()
        with clock.phase("backward"):
            self._trainer.backward(total)
        return {number: each.detached() for number, each in losses.items()}

    def _task(self, cloud: ScenarioCloud, output: Any, target: Tensor) -> Tensor | None:
        """The task loss of a cloud; None if none of its points has a label."""
        loss = self._loss_fn(output, target)
        if isinstance(loss, Loss):
            return loss.average() if bool(loss.weight) else None
        return None if cloud.is_unlabeled() else _scalar(loss, "loss_fn")

    def _is_densest(self, cloud: ScenarioCloud) -> bool:
        return cloud.scenario == self._scenarios[0]

    def _is_teacher(self, cloud: ScenarioCloud) -> bool:
        return self._mode == "stopgrad" and self._is_densest(cloud)

    def _groups(self, clouds: list[ScenarioCloud]) -> list[list[ScenarioCloud]]:
        """Group the clouds that run through the model together."""
        if self._mode == "joint":
            return [clouds]
        if self._mode == "cached":
            return [[each] for each in clouds]
        return [[each for each in clouds if self._is_densest(each) == is_densest] for is_densest in (True, False)]

    def _gather(self, clouds: list[ScenarioCloud]) -> PointBatch:
        return PointBatch(
            torch.cat([each.take(each.scene.coords, self._device) for each in clouds]),
            torch.cat([each.take(each.scene.features, self._device) for each in clouds]),
            torch.tensor([each.num_points for each in clouds]).cumsum(0).to(self._device, non_blocking=True),
        )

    def _forward(self, clouds: list[ScenarioCloud], batch: PointBatch) -> Iterator[Any]:
        """Run the model and yield each cloud's part of the output, as views that live as long as the step."""
        if self._mode == "cached":
            output = run_again_in_backward(self._model, batch, self._watch)
        else:
            with graphs(enabled=not self._is_teacher(clouds[0])):
                output = self._model(batch)
        leaves, structure = pytree.tree_flatten(output)
        _check_rows(leaves, len(batch.coords))
        sizes = [each.num_points for each in clouds]
        for parts in zip(*(leaf.split(sizes) for leaf in leaves), strict=True):
            yield pytree.tree_unflatten(parts, structure)

    def _check(self, scenes: list[PointScene]) -> None:
        lengths = [(len(each.coords), len(each.features), len(each.targets)) for each in scenes]
        wrong = [each for each in lengths if len(set(each)) > 1 or not each[0]]
        if wrong or not scenes:
            is_uneven = bool(wrong) and len(set(wrong[0])) > 1
            raise InputError(
                _CALL,
                got="{} coords, {} features and {} targets".format(*wrong[0]) if wrong else "no scene",
                expected="one row of coords, features and targets for each point, and at least one point",
                fix="pass coords, features and targets with the same number of rows."
                if is_uneven
                else "skip empty scenes.",
            )
        if self._mode == "cached" and (names := scan_modules(unwrap_model(self._model))):
            raise ConfigError(
                "DensityInvariantTrainer(mode='cached')",
                got=f"{', '.join(names[:5])} in training mode, which would see the statistics of each scenario alone",
                expected="a model that computes each cloud of a batch independently of the others",
                fix="use LayerNorm, freeze the statistics with .eval(), or use mode='joint'.",
            )


def _by_density(check: Checker, given: Iterable[Scenario]) -> list[Scenario]:
    scenarios = [given] if isinstance(given, str) else list(given)
    ordered = [each for each in get_args(Scenario) if each in scenarios]
    if len(ordered) != len(scenarios) or len(ordered) < 2:
        rule = f"two or three of {', '.join(map(repr, get_args(Scenario)))}"
        fix = "pass scenarios=('dense', 'half', 'single')."
        raise check.refusal("scenarios", scenarios, rule, fix=fix)
    return ordered


def _mode(check: Checker, mode: ConsistencyMode) -> ConsistencyMode:
    given: object = mode
    if isinstance(given, str) and given.lower().startswith("batch"):  # otherwise the nearest name would be "cached"
        raise check.refusal(
            "mode", given, f"one of {', '.join(map(repr, get_args(ConsistencyMode)))}", fix="pass mode='joint'."
        )
    return check.choice("mode", mode, get_args(ConsistencyMode), fix="pass mode='joint'.")


def _check_pieces(check: Checker, sampler: object, loss_fn: object) -> None:
    if not isinstance(sampler, GridAwareSampler):
        raise InputTypeError(
            check.call,
            got=f"sampler: a {type(sampler).__name__}",
            expected="a GridAwareSampler",
            fix="write DensityInvariantTrainer(trainer, GridAwareSampler(), loss_fn)",
        )
    check.function("loss_fn", loss_fn)
    try:
        names = list(inspect.signature(loss_fn).parameters)  # type: ignore[arg-type]  # it can be called
    except (TypeError, ValueError):
        return
    if len(names) == 2 and names[0] in _MODEL_NAMES:
        raise InputTypeError(
            check.call,
            got=f"loss_fn({', '.join(names)})",
            expected="loss_fn(output, targets): this trainer calls the model itself",
            fix="write loss_fn=lambda output, targets: criterion(output, targets)",
        )


def _as_list(scenes: object) -> list[PointScene]:
    """Return the scenes of a step as a list; refuse anything that is not a PointScene."""
    found: list[Any] = list(scenes) if isinstance(scenes, (list, tuple)) else [scenes]
    for each in found:
        if isinstance(each, PointScene):
            continue
        names = [name for name in each if isinstance(name, str)] if isinstance(each, Mapping) else []
        words = [
            f"{argument}=scene[{next((name for name in names if name in known), known[0])!r}]"
            for argument, known in _ENTRIES.items()
        ]
        raise InputTypeError(
            _CALL,
            got=f"a {type(each).__name__}" + (f" with {', '.join(names)}" if names else ""),
            expected="a PointScene, or a list of them",
            fix=f"write train_step(mk.recipes.PointScene({', '.join(words)}))"
            if isinstance(each, Mapping)
            else "write train_step(mk.recipes.PointScene(coords, features, targets))",
        )
    return found


def _take(output: Any, rows: Tensor) -> Any:
    return pytree.tree_map(lambda leaf: leaf.index_select(0, rows), output)


def _scalar(loss: object, name: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    got = f"{described(loss)} from {name}"
    raise InputError(_CALL, got=got, expected="a 0-dim tensor", fix="return the mean over the points.")


def _check_rows(leaves: list[Any], num_points: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != num_points:
            raise InputError(
                _CALL,
                got=f"{described(leaf)} from the model for {num_points} points",
                expected="tensors with one row for each point of the batch",
                fix="return only predictions or features of points.",
            )
