"""Estimates of steps that use chunked components: their checks of the first call need data, and wait for it."""

import pytest
import torch
from torch import nn

import memkit as mk
from memkit.chunk import chunked_loss

ROWS, INDEX = torch.randn(500, 6), torch.arange(500) % 50
STEPS = {
    "map": lambda model, x: mk.chunked_map(model, x, chunk_size=64).square().mean(),
    "segments": lambda model, x: (
        mk.chunked_segment_reduce(model, x, index=INDEX, num_segments=50, reduce="sum", chunk_size=64).square().mean()
    ),
    "loss": lambda model, x: chunked_loss(
        lambda rows: model(rows).square(), x, chunk_size=64, params=list(model.parameters())
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_first_call_may_be_an_estimate(name):
    step = STEPS[name]
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
    first = mk.estimate_memory_usage(model, ROWS, step, optimizer="sgd")
    step(model, ROWS).backward()
    model.zero_grad()
    assert first.doubts == ()
    assert first.peak_bytes == mk.estimate_memory_usage(model, ROWS, step, optimizer="sgd").peak_bytes


def test_an_estimate_does_not_stand_for_the_check():
    model = nn.Sequential(nn.Linear(6, 32), nn.Softmax(dim=0))
    mk.estimate_memory_usage(model, ROWS, STEPS["map"], optimizer="sgd")
    with pytest.raises(mk.errors.InputError, match="depends on other rows"):
        STEPS["map"](model, ROWS)


def test_tiles_need_a_call_with_data_first():
    def step(model, x):
        return mk.tiled_apply(model, x, 8).square().mean()

    model, x = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.GELU()), torch.randn(1, 1, 16, 16, 16)
    with pytest.raises(mk.errors.NotSimulatedError, match=r"call tiled_apply\(module, volume, tile\) once with data"):
        mk.estimate_memory_usage(model, x, step, optimizer="sgd")
    step(model, x)
    assert mk.estimate_memory_usage(model, x, step, optimizer="sgd").peak_bytes > 0
