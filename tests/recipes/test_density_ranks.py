"""Density-invariant training with two gloo processes under DDP, and of a compiled model: the plain loop's gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memkit.points.sampler import GridAwareSampler
from memkit.recipes.density import DensityInvariantTrainer
from tests.helpers import assert_same
from tests.ranks import join, leave, load, spawn
from tests.recipes.test_density import (
    GRID_MM,
    WEIGHT,
    model_of,
    moved,
    one_step,
    plain_gradient,
    relative_error,
    scene,
)
from tests.toys import mlp

MODES = ("joint", "cached", "stopgrad")


def scenes_of(rank):
    return [scene(300 + 100 * rank, seed=2 * rank), scene(250, seed=2 * rank + 1)]


def worker(rank, folder):
    join(rank, folder)
    parameters = {}
    for mode in MODES:
        plain = model_of()
        model = DistributedDataParallel(plain)
        with DensityInvariantTrainer(
            model,
            GridAwareSampler(seed=5),
            F.cross_entropy,
            weight=WEIGHT,
            mode=mode,
            optimizer=torch.optim.SGD(plain.parameters(), lr=1.0),
            grid_size=GRID_MM,
        ) as trainer:
            result = trainer.train_step(scenes_of(rank))
        parameters[mode] = plain.state_dict()
        parameters[f"loss {mode}"] = {"loss": result.loss}
    torch.save(parameters, f"{folder}/{rank}.pt")
    leave()


@pytest.mark.slow
def test_two_ddp_ranks_take_the_step_of_all_scenes(tmp_path):
    spawn(worker, tmp_path)
    first, second = load(tmp_path, "")
    for mode in MODES:
        before, after = model_of(), model_of()
        after.load_state_dict(first[mode])
        assert_same(first[mode], second[mode])
        gradients, losses = zip(*(plain_gradient(before, scenes_of(rank), mode) for rank in range(2)), strict=True)
        assert relative_error(moved(after, before), sum(gradients) / 2) < 1e-12
        assert relative_error(gradients[0], sum(gradients) / 2) > 1e-2  # what one rank alone would do
        got = [each[f"loss {mode}"]["loss"] for each in (first, second)]
        torch.testing.assert_close(got, list(losses), rtol=1e-12, atol=0)  # each rank says its own


class PerPoint(nn.Module):
    """Sees each point by itself."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 16, 2)

    def forward(self, batch):
        return self.net(batch.features)


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_model_takes_the_same_step(mode):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = PerPoint().double()
    before = copy.deepcopy(model)
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    result = one_step(torch.compile(model, backend=backend), [scene(), scene(seed=1)], mode)
    want, loss = plain_gradient(before, [scene(), scene(seed=1)], mode)
    assert calls  # it was compiled
    assert relative_error(moved(model, before), want) < 1e-12
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
