"""Training on several densities: what it does for accuracy, what its modes take, and sampling's share of a step.

The scene and the network are those of ``benchmarks/density.py``: points on the left hemisphere of fsaverage5,
judged on the right one, at the points of each density: how many are right, how many of the same points are right in
the dense scan's prediction (the difference is what the lower density costs), and how many both predict alike. Scores
are the mean of three seeds.

Peaks are those of the recorder, above what was there before the step. Times are processor time on one thread, the modes
in turns, the least of the rounds after a first step. The gradient's error is relative to ``"joint"``, in float64.
Sampling's share is of processor time too: the phase on its own against whole steps of ``"joint"``, index in the cache.

Run: python -m benchmarks.cases.density_training
"""

from __future__ import annotations

import copy
import time
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit as mk
from benchmarks.density import GRID_MM, PointNet, Score, load, scores, train
from benchmarks.result import write_result
from benchmarks.timing import in_turns, seconds_of
from memkit.points.nested import single_within

NUM_POINTS, NUM_STEPS, SEEDS = 30_000, 100, (0, 1, 2)
WAYS: dict[str, tuple[str, float] | None] = {
    "dense alone": None,
    "all densities": ("mse", 0.0),
    "mse, weight 0.1": ("mse", 0.1),
    "mse, weight 1": ("mse", 1.0),
    "mse, weight 10": ("mse", 10.0),
    "kl, weight 1": ("kl", 1.0),
}
MODES = ("joint", "cached", "stopgrad")
SIZES = (30_000, 100_000)
ROUNDS = 12


def training(left: mk.recipes.PointScene, right: mk.recipes.PointScene) -> dict[str, Any]:
    """Scores of the other hemisphere and losses, for each way; the mean of the seeds, and each seed's right points."""
    torch.manual_seed(SEEDS[0])
    rows: dict[str, Any] = {"untrained": {name: score._asdict() for name, score in scores(PointNet(), right).items()}}
    for way, consistency in WAYS.items():
        found, losses = [], []
        for seed in SEEDS:
            model, history, _ = train(left, NUM_STEPS, consistency, seed)
            found.append(scores(model, right))
            losses.append((history[0], history[-1]))
        rows[way] = {
            scenario: Score(*(mean(each) for each in zip(*(run[scenario] for run in found), strict=True)))._asdict()
            | {"right_of_seeds": [run[scenario].right for run in found]}
            for scenario in found[0]
        } | {"first_and_last_loss": [mean(each) for each in zip(*losses, strict=True)]}
    return rows


def trainer_of(model: nn.Module, mode: str, memory: mk.MemoryManager | None = None) -> mk.DensityInvariantTrainer:
    return mk.DensityInvariantTrainer(
        model,
        mk.GridAwareSampler(seed=0),
        F.cross_entropy,
        mode=mode,
        weight=1.0,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        grid_size=GRID_MM,
        memory=memory,
    )


def modes(scene: mk.recipes.PointScene) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    net = PointNet()
    rows: dict[str, dict[str, float]] = {}
    steps = {}
    for mode in MODES:
        with mk.MemoryManager("cpu") as memory, trainer_of(copy.deepcopy(net), mode, memory) as trainer:
            trainer.train_step(scene)
            with memory.track() as tracker:
                trainer.train_step(scene)
            rows[mode] = {"peak_bytes": tracker.peak_bytes}
        steps[mode] = trainer_of(copy.deepcopy(net), mode)
    seconds = in_turns(steps, ROUNDS, lambda trainer: seconds_of(lambda: trainer.train_step(scene)))
    for mode in MODES:
        rows[mode]["time_ratio"] = min(seconds[mode][1:]) / min(seconds["joint"][1:])
        rows[mode]["gradient_error"] = gradient_error(net, mode)
    return rows


def gradient_error(net: nn.Module, mode: str) -> float:
    """Of one step in float64, relative to the joint one."""
    scene = load("left", 2000)
    scene = mk.recipes.PointScene(scene.coords.double(), scene.features.double(), scene.targets)
    joint, other = (moved(net, each, scene) for each in ("joint", mode))
    return float((other - joint).norm() / joint.norm())


def moved(net: nn.Module, mode: str, scene: mk.recipes.PointScene) -> Tensor:
    model = copy.deepcopy(net).double()
    with trainer_of(model, mode) as trainer:
        trainer.train_step(scene)
    return torch.cat([(b - a).detach().flatten() for a, b in zip(net.parameters(), model.parameters(), strict=True)])


def sampling_share(num_points: int) -> dict[str, float]:
    scene = load("left", num_points)
    trainer = trainer_of(PointNet(), "joint")
    sampler = mk.GridAwareSampler(seed=0)
    index = sampler.index(scene.coords, GRID_MM, key=scene.key)
    sampling, step = [], []
    for _ in range(ROUNDS):
        start = time.process_time()
        index = sampler.index(scene.coords, GRID_MM, key=scene.key)
        single_within(sampler, index, sampler.sample_half_density(index))
        between = time.process_time()
        trainer.train_step(scene)
        sampling.append(between - start)
        step.append(time.process_time() - between)
    return {
        "num_cells": index.num_cells,
        "sampling_ms": 1e3 * min(sampling[1:]),
        "step_ms": 1e3 * min(step[1:]),
        "share": min(sampling[1:]) / min(step[1:]),
    }


def main() -> None:
    torch.set_num_threads(1)
    left, right = load("left", NUM_POINTS), load("right", NUM_POINTS)
    figures = {
        "num_points": NUM_POINTS,
        "modes": modes(left),
        "sampling": {str(num_points): sampling_share(num_points) for num_points in SIZES},
        "training": training(left, right),
    }
    print(write_result("density_training", figures, peers=("nilearn",)))


if __name__ == "__main__":
    main()
