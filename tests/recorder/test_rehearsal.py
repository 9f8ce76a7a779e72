"""A run for inspection in the middle of a training step."""

import warnings

import pytest
import torch
from torch import nn

import memkit as mk
from tests.helpers import one_in


@pytest.mark.parametrize("call", one_in(3, ["plan_training", "estimate_memory_usage", "advise"]))
def test_a_loss_that_simulates_another_step_can_be_rehearsed(call):
    batch, model = (torch.randn(8, 4), torch.randn(8, 2)), nn.Linear(4, 2)
    other = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    mean, statistics = other[1].running_mean, other[1].running_mean.clone()
    options = {"budget": "1MiB"} if call == "plan_training" else {}

    def plain(module, rows):
        return nn.functional.mse_loss(module(rows[0]), rows[1])

    def loss_fn(module, rows):
        getattr(mk, call)(other, batch, plain, **options)
        return plain(module, rows)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mk.MemkitWarning)
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2)
        assert trainer.train_step(batch, loss_fn).stepped
    assert other[1].running_mean is mean
    assert torch.equal(mean, statistics)
