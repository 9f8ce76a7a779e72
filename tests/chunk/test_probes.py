"""Runs for inspection leave nothing: no NaN in what the user's function keeps, no noise in what it trains."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import memkit as mk
from memkit.chunk.halo import find_reach
from memkit.chunk.probes import Probes, undone
from tests.helpers import assert_refused, assert_same


class Noting(nn.Module):
    """Keeps statistics of its inputs, on which no result depends."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.mean, self.running, self.seen = layer, 0.0, torch.zeros(()), []
        self.counts = np.zeros(2)

    def forward(self, x):
        self.running.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean())
        self.seen.append(float(x.detach().abs().max()))
        self.counts += [1, float(x.detach().sum())]
        return self.layer(x)

    @property
    def notes(self):
        return [self.running, self.mean, self.seen, torch.from_numpy(self.counts)]


told_of_average = pytest.mark.filterwarnings("ignore:.*writes into the tensor in its attribute 'running'")
X = torch.randn(50, 3, dtype=torch.float64)
CALLS = {
    "chunked_map": lambda fn: mk.chunked_map(fn, X, chunk_size=7),
    "a closure": lambda fn: mk.chunked_map(lambda x: fn(x) * X.mean(), X, chunk_size=7, params=fn.parameters()),
    "an argument": lambda fn: mk.chunked_map(lambda x, part: part(x), X, fn, chunk_size=7, params=fn.parameters()),
    "chunked_segment_reduce": lambda fn: mk.chunked_segment_reduce(fn, X, index=torch.arange(50) % 3, chunk_size=7),
    "chunked_loss": lambda fn: mk.chunk.chunked_loss(fn, X, chunk_size=7),
    "a processor": lambda fn: mk.ChunkedProcessor(fn, chunk_size=7)(X),
    "a loss of a processor": lambda fn: mk.ChunkedProcessor(fn, chunk_size=7).loss(X),
}


@told_of_average
@pytest.mark.parametrize("name", CALLS)
def test_only_the_chunks_leave_notes(name):
    rows, twin = (Noting(nn.Linear(3, 2)).double() for _ in range(2))
    CALLS[name](rows)
    for part in X.split(7):
        twin(part)
    assert_close(rows.notes, twin.notes)


@told_of_average
@pytest.mark.parametrize("name", ["chunked_map", "chunked_loss"])
def test_trials_of_sizes_leave_no_notes(name):
    fn = {"chunked_map": mk.chunked_map, "chunked_loss": mk.chunk.chunked_loss}[name]
    rows, twin = (Noting(nn.Linear(3, 2)).double() for _ in range(2))
    fn(rows, X)
    twin(X)  # 50 rows are one chunk
    assert_close(rows.notes, twin.notes)


def test_a_search_for_the_margin_leaves_no_notes():
    conv, volume = Noting(nn.Conv3d(1, 1, 3, padding=1)), torch.zeros(1, 1, 16, 16, 16)
    volume[0, 0, :2, :2, :2] = 1.0
    before = copy.deepcopy(conv.notes)
    find_reach(conv, volume, (-3, -2, -1))
    assert_same(conv.notes, before)
    processor, plain = mk.SparsityAwareProcessor(conv, mode="blocks"), conv.layer(volume)
    assert_close(processor(volume), plain)
    assert all(map(np.isfinite, conv.seen))
    assert max(conv.seen) == 1.0  # noise would be larger


class ActNorm(nn.Module):
    def __init__(self, num_channels):
        super().__init__()
        self.ready, self.bias = False, nn.Parameter(torch.zeros(1, num_channels, 1, 1, 1))

    def forward(self, x):
        if not self.ready:
            self.bias.data.copy_(-x.detach().mean((0, 2, 3, 4), keepdim=True))
            self.ready = True
        return x + self.bias


def test_a_volume_initializes_what_its_first_input_initializes():
    def made():
        torch.manual_seed(0)
        return nn.Sequential(ActNorm(2), nn.Conv3d(2, 1, 3, padding=1)).double()

    volume = torch.zeros(1, 2, 32, 16, 16, dtype=torch.float64)
    volume[..., :3, :3, :3] = 5.0
    plain, tiled, sparse = made(), made(), made()
    expected = plain(volume)
    refused = r"changes its parameter `0\.bias` \(ActNorm\).*call module\(x\) once before"
    assert_refused(lambda: mk.tiled_apply(tiled, volume, 8), mk.errors.InputError, refused)
    assert not tiled[0].ready
    assert_same(tiled[0].bias.data, torch.zeros(1, 2, 1, 1, 1, dtype=torch.float64))
    tiled(volume)  # the way out
    assert_close(mk.tiled_apply(tiled, volume, 8), expected)
    assert_close(mk.SparsityAwareProcessor(sparse)(volume), expected)
    assert_close(sparse[0].bias, plain[0].bias)


def test_changes_are_named_until_they_are_undone():
    class Changing(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("still", torch.zeros(2))

        def forward(self, x):
            with torch.no_grad():
                self.mean = self.mean + x.mean(0)
                self.count += 1
                self.still.mul_(2)
                self.bias.data = self.bias.data + 1
            return super().forward(x)

    model = nn.Sequential(Changing())
    before = copy.deepcopy(model.state_dict())
    probes = Probes(model)
    with probes.runs.run():
        model(torch.ones(3, 2))
    assert [each.path for each in probes.changed_buffers()] == ["0.mean"]
    assert [each.path for each in probes.changed_buffers(with_counters=True)] == ["0.mean", "0.count"]
    assert [each.path for each in probes.changed_parameters()] == ["0.bias"]
    probes.runs.close()
    assert_same(dict(model.state_dict()), dict(before))


def test_the_callers_grad_mode_stays():
    seen, x = [], torch.ones(3)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode(), undone(torch.tanh):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    assert seen == [(False, False), (True, False), (False, True)]
    with torch.inference_mode(), undone(torch.tanh):
        x.mul_(2)
    assert_same(x, torch.ones(3))
