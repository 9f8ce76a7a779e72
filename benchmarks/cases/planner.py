"""The planner against an exhaustive search: ten budgets; each plan run for real: memory, gradient and time.

Five models with real data: a transformer on the source of argparse, a 3D U-Net on the MNI152 brain, an MLP on
scikit-learn's digits, an MLP of the edges of fsaverage5, a vision transformer on slices of the brain. The exhaustive
search runs up to six numbers of micro-batches with every coarse treatment of the blocks: none, half or all of them
recomputed in whole or in part, all on the disk. Of each model two budgets: a half and a fifth of the way from the
smallest peak of that search to the plain step's. The plan is that of ``measure=True``; beside it stands the one that
predicted times alone would have chosen.

Memory is the allocator's events of a first and a warm step, with model, batch and state. Time is processor time, in
turns, the median of rounds. The gradient is compared in float64 with that of the whole batch at once.

Run: python -m benchmarks.cases.planner [MODEL ...]   (with names only these, kept beside earlier ones)
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nilearn import datasets, surface
from sklearn.datasets import load_digits
from torch import Tensor, nn

import memkit as mk
from benchmarks.models import DecoderBlock, Task, UNet, transformer
from benchmarks.result import read_result, write_result
from benchmarks.timing import in_turns
from memkit.predict.plan.plan import TrainingPlan
from memkit.predict.plan.search import micro_batch_counts
from memkit.recipes.planned import plan_training
from memkit.train.blocks import choose_blocks
from memkit.train.split import count_rows
from tests.allocations import trace_allocations

SHARES = (0.5, 0.2)  # of the way from the smallest peak to the plain step's
ROUNDS = 5
Settings = dict[str, Any]


# ------------------------------------------------------------------------------------------------------ five models


def brain() -> Tensor:
    volume = torch.from_numpy(datasets.load_mni152_template(resolution=2).get_fdata()).float()
    return (volume - volume.mean()) / volume.std()


def unet() -> Task:
    """Finds the brain's tissue in eight cubes of 16 voxels."""
    torch.manual_seed(0)
    cubes = brain()[16:48, 32:64, 24:56].unfold(0, 16, 16).unfold(1, 16, 16).unfold(2, 16, 16).reshape(8, 1, 16, 16, 16)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(UNet(8), (cubes.clone(), (cubes[:, 0] > 0.5).long()), loss_fn)


class Residual(nn.Module):
    """Two layers around a normalization, added to what came."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def residual_mlp(num_inputs: int, width: int, num_blocks: int, num_outputs: int) -> nn.Module:
    blocks = [Residual(width) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(num_inputs, width), *blocks, nn.Linear(width, num_outputs))


def digits() -> Task:
    """Reads 1,024 digits."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    batch = torch.from_numpy(images[:1024]).float() / 16, torch.from_numpy(labels[:1024]).long()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(residual_mlp(64, 128, 6, 10), batch, loss_fn)


def edges() -> Task:
    """Says for 8,000 edges of a brain's surface how the curvature changes along them."""
    torch.manual_seed(0)
    fsaverage = datasets.fetch_surf_fsaverage("fsaverage5")
    mesh = surface.load_surf_mesh(fsaverage["white_left"])
    points = torch.from_numpy(np.asarray(mesh.coordinates)).float() / 100
    curvature = torch.from_numpy(np.array(surface.load_surf_data(fsaverage["curv_left"]), dtype=np.float32))
    start, end = torch.from_numpy(np.asarray(mesh.faces)).long()[:8000, :2].T
    batch = torch.cat([points[start], points[end]], 1), (curvature[end] - curvature[start])[:, None]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return Task(residual_mlp(6, 64, 4, 1), batch, loss_fn)


class VisionTransformer(nn.Module):
    """Patches of 8 x 8 pixels through transformer blocks: (rows, 1, H, W) to (rows, 1)."""

    def __init__(self, num_patches: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 8, stride=8)
        self.position = nn.Parameter(0.02 * torch.randn(num_patches, width))
        self.blocks = nn.Sequential(*(DecoderBlock(width, num_heads=4) for _ in range(num_blocks)))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2) + self.position).mean(1))


def vision() -> Task:
    """Tells from 8 slices of the brain how high they were cut."""
    torch.manual_seed(0)
    slices = brain()[:96, :96, 20:84:8].permute(2, 0, 1)[:, None].contiguous()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return Task(VisionTransformer(144, 96, 4), (slices, torch.linspace(0, 1, 8)[:, None]), loss_fn)


TASKS: dict[str, Callable[[], Task]] = {
    "transformer": lambda: transformer(num_blocks=4),
    "unet": unet,
    "digits": digits,
    "edges": edges,
    "vision": vision,
}


# --------------------------------------------------------------------------------------------------------- real runs


@dataclass
class Run:
    """A training run of a copy of a task's model, through the wrapper."""

    task: Task
    settings: Settings
    peak_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.task.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.trainer = mk.MemoryEfficientTrainingWrapper(self.model, self.optimizer, probe=False, **self.settings)

    def step(self) -> None:
        self.trainer.train_step(self.task.batch, self.task.loss_fn)

    def measure_peak(self) -> None:
        first = trace_allocations(self.step).peak  # makes the state, so it counts from less
        self.step()
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        there = [*self.model.parameters(), *self.model.buffers(), *tensors_of(self.task.batch)]
        warm = num_bytes([*there, *state]) + trace_allocations(self.step).peak
        self.peak_bytes = max(warm, num_bytes(there) + first)


def tensors_of(batch: Any) -> list[Tensor]:
    return list(batch) if isinstance(batch, tuple) else [batch]


def num_bytes(tensors: list[Tensor]) -> int:
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def search_space(task: Task) -> list[Settings]:
    """Every number of micro-batches with every coarse treatment."""
    try:
        names = list(choose_blocks(task.model, "auto"))
    except mk.errors.ConfigError:
        names = []
    half = names[: len(names) // 2]
    treatments: list[dict[str, str] | None] = [None]
    treatments += [dict.fromkeys(names, each) for each in ("selective", "full", "offload") if names]
    treatments += [dict.fromkeys(half, each) for each in ("selective", "full") if half]
    return [
        {"accumulation_steps": count, "checkpoint": treatment}
        for count in micro_batch_counts(count_rows(task.batch))[:6]
        for treatment in treatments
    ]


def gradient_error(task: Task, settings: Settings) -> float:
    """Relative error of the planned step's gradient against that of the whole batch, in float64."""
    batch = tuple(each.double() if each.is_floating_point() else each for each in tensors_of(task.batch))
    batch = batch if isinstance(task.batch, tuple) else batch[0]
    plain, model = copy.deepcopy(task.model).double(), copy.deepcopy(task.model).double()
    task.loss_fn(plain, batch).backward()
    got: list[Tensor] = []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: got.extend(each.grad.clone() for each in model.parameters()))
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, probe=False, **settings) as trainer:
        trainer.train_step(batch, task.loss_fn)
    want = torch.cat([each.grad.flatten() for each in plain.parameters()])
    return float((torch.cat([each.flatten() for each in got]) - want).norm() / want.norm())


def measure(task: Task) -> dict[str, Any]:
    runs = [Run(task, settings) for settings in search_space(task)]
    for run in runs:
        run.measure_peak()
    peaks = [run.peak_bytes for run in runs]
    budgets = [int(min(peaks) + share * (peaks[0] - min(peaks))) for share in SHARES]  # the first run is the plain step
    plans = []
    for budget in budgets:
        start = time.process_time()
        plan = plan_training(task.model, task.batch, task.loss_fn, "adamw", budget=budget, measure=True)
        seconds = time.process_time() - start
        planned = [Run(task, settings) for settings in (plan.wrapper_settings(), settings_by_prediction(plan))]
        for run in planned:
            run.measure_peak()
        plans.append((plan, seconds, *planned))
    fitting = [run for run in runs if run.peak_bytes <= max(budgets)]
    time_all([*fitting, *(run for _, _, *planned in plans for run in planned)])
    return {
        "plain_peak_bytes": peaks[0],
        "num_searched": len(runs),
        "budgets": [
            judge(task, budget, *plan, [run for run in fitting if run.peak_bytes <= budget])
            for budget, plan in zip(budgets, plans, strict=True)
        ],
    }


def settings_by_prediction(plan: TrainingPlan) -> Settings:
    """The plan without real steps."""
    first = min((each for each in plan.candidates if each.fits), key=lambda each: each.seconds)
    return {"accumulation_steps": first.accumulation_steps, "checkpoint": dict(first.checkpoint) or None}


def time_all(runs: list[Run]) -> None:
    seconds = in_turns(dict(enumerate(run.step for run in runs)), ROUNDS)
    for number, run in enumerate(runs):
        run.seconds = statistics.median(seconds[number])


def judge(
    task: Task, budget: int, plan: TrainingPlan, seconds: float, run: Run, by_prediction: Run, fitting: list[Run]
) -> dict[str, Any]:
    best = min(fitting, key=lambda each: each.seconds)
    return {
        "budget_bytes": budget,
        "plan": describe(plan.wrapper_settings()),
        "num_tried": len(plan.candidates),
        "planning_seconds": seconds,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "required_bytes": plan.required_bytes,
        "measured_peak_bytes": run.peak_bytes,
        "fits": run.peak_bytes <= budget,
        "seconds": run.seconds,
        "predicted_over_measured": plan.predicted_seconds / run.seconds,
        "best": describe(best.settings),
        "best_seconds": best.seconds,
        "time_over_best": run.seconds / best.seconds,
        "by_prediction": describe(by_prediction.settings),
        "by_prediction_over_best": by_prediction.seconds / best.seconds,
        "gradient_error": gradient_error(task, run.settings),
    }


def describe(settings: Settings) -> str:
    treatments = list((settings["checkpoint"] or {}).values())
    blocks = ", ".join(f"{treatments.count(each)} {each}" for each in dict.fromkeys(treatments))
    return f"{settings['accumulation_steps']} micro-batches" + (f", {blocks}" if blocks else "")


def main() -> None:
    torch.set_num_threads(1)
    figures = read_result("planner")["figures"] if sys.argv[1:] else {}
    for name in sys.argv[1:] or TASKS:
        figures[name] = measure(TASKS[name]())
        for row in figures[name]["budgets"]:
            print(f"{name:12} {row}")
        print(write_result("planner", figures, peers=("nilearn", "scikit-learn")))


if __name__ == "__main__":
    main()
