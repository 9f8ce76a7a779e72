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


class Cut(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))
        self.rows = mk.ChunkedProcessor(self.mlp, **how)

    def forward(self, x):
        return self.rows(x).square().mean()


def cut_step(model, x):
    return model(x)


def real_peak(model, x):
    for _ in range(2):
        with mk.Tracker(device="cpu") as tracker:
            cut_step(model, x).backward()
            model.zero_grad()
    return tracker.peak_bytes


def test_chunks_that_only_an_estimate_has_measured_are_doubted():
    x, model = torch.randn(4096, 16), Cut(memory_budget="1MiB")
    first = mk.estimate_memory_usage(model, x, cut_step, optimizer="sgd")
    assert first.confidence == "guessed"
    assert "call it once with data before, or pass chunk_size=" in first.doubts[0]
    assert model.rows.last_plan is None

    peak, plan = real_peak(model, x), model.rows.last_plan
    assert plan == Cut(memory_budget="1MiB").rows.plan(x)  # as without the estimate
    then = mk.estimate_memory_usage(model, x, cut_step, optimizer="sgd")
    assert (then.peak_bytes, then.confidence, then.doubts) == (peak, "exact", ())
    assert model.rows.last_plan is plan


@pytest.mark.parametrize(("how", "num_rows"), [({"memory_budget": "64MiB"}, 64), ({"chunk_size": 2048}, 6000)])
def test_other_chunks_are_estimated_exactly(how, num_rows):
    """All rows in one chunk, or a size that is given; the second backward leaves out the last product."""
    x, model = torch.randn(num_rows, 16), Cut(**how)
    first = mk.estimate_memory_usage(model, x, cut_step, optimizer="sgd")
    assert (first.peak_bytes, first.confidence, first.doubts) == (real_peak(model, x), "exact", ())
