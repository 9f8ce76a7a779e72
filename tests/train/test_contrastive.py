"""The gradient in two passes is the whole batch's, with one chunk's activations; a split loss is not."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

import memkit as mk
from memkit import ConfigError, InputError, InputTypeError
from memkit.train.contrastive import cached_backward

ROWS = 24


class Towers(nn.Module):
    """Two encoders of a dict batch, with a temperature that belongs to no row."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(48, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        return {"image": self.image(batch["image"]), "text": (self.text(batch["text"]),)}


class Tower(nn.Module):
    """One encoder of a tensor, called on two views."""

    def __init__(self, *extra):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), *extra, nn.Linear(32, 8))

    def forward(self, views):
        return self.layers(views[0]), self.layers(views[1])


def info_nce(embeddings, scale=5.0):
    a, b = (F.normalize(each) for each in embeddings)
    logits = scale * a @ b.T
    return F.cross_entropy(logits, torch.arange(len(a)))


def make_views(dtype=torch.float64):
    return torch.randn(ROWS, 6, dtype=dtype), torch.randn(ROWS, 6, dtype=dtype)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 23, 24, 100])
def test_every_chunk_size_gives_the_whole_batch_gradient(chunk_size):
    model, views = Tower().double(), make_views()
    want_loss = info_nce(model(views))
    want_loss.backward()
    want = gradient(model)
    model.zero_grad()
    loss = cached_backward(model, views, info_nce, chunk_size=chunk_size)
    assert relative_error(gradient(model), want) <= 1e-14
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want_loss.detach(), rtol=1e-14, atol=0)


def test_a_split_loss_has_another_gradient():
    """Negative control: the same chunks, each with the loss over its own rows."""
    model, views = Tower().double(), make_views()
    info_nce(model(views)).backward()
    want = gradient(model)
    model.zero_grad()
    for part in zip(*(view.split(8) for view in views), strict=True):
        (info_nce(model(part)) / 3).backward()
    assert relative_error(gradient(model), want) > 0.1


def test_two_towers_with_a_dict_batch_and_a_temperature():
    model = Towers().double()
    batch = {"image": torch.randn(ROWS, 6, dtype=torch.float64), "text": torch.randint(0, 20, (ROWS, 3))}

    def loss_on_embeddings(embeddings):
        return info_nce((embeddings["image"], embeddings["text"][0]), model.log_scale.exp())

    loss_on_embeddings(model(batch)).backward()
    want = gradient(model)
    model.zero_grad()
    cached_backward(model, batch, loss_on_embeddings, chunk_size=7)
    assert relative_error(gradient(model), want) <= 1e-14


class RandomScale(nn.Module):
    """Draws from Python's random state, which torch's checkpoint does not replay."""

    def forward(self, x):
        return x * (1 + random.random())


def test_random_draws_are_the_same_in_both_passes():
    model, views = Tower(nn.Dropout(0.5), RandomScale()).double(), make_views()
    chunks = list(zip(*(view.split(8) for view in views), strict=True))
    torch.manual_seed(5)
    random.seed(5)
    encoded = [model(chunk) for chunk in chunks]  # draws chunk after chunk, as cached_backward does
    info_nce([torch.cat(column) for column in zip(*encoded, strict=True)]).backward()
    want, state = gradient(model), (torch.get_rng_state(), random.getstate())
    model.zero_grad()
    torch.manual_seed(5)
    random.seed(5)
    cached_backward(model, views, info_nce, chunk_size=8)
    assert relative_error(gradient(model), want) <= 1e-14
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_batch_statistics_are_those_of_the_chunks_and_change_once():
    model, views = Tower(nn.BatchNorm1d(32)).double(), make_views()
    twin = copy.deepcopy(model)
    encoded = [twin(chunk) for chunk in zip(*(view.split(8) for view in views), strict=True)]
    info_nce([torch.cat(column) for column in zip(*encoded, strict=True)]).backward()
    cached_backward(model, views, info_nce, chunk_size=8)
    assert relative_error(gradient(model), gradient(twin)) <= 1e-14
    for got, want in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(got, want)
    assert model.layers[2].num_batches_tracked == 6  # three chunks with two views each


def test_under_autocast_both_passes_run_in_half_precision():
    model, views = Tower(), make_views(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = [model(chunk) for chunk in zip(*(view.split(8) for view in views), strict=True)]
        loss = info_nce([torch.cat(column).float() for column in zip(*encoded, strict=True)])
    loss.backward()
    want = gradient(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        got = cached_backward(model, views, lambda e: info_nce([each.float() for each in e]), chunk_size=8)
    assert torch.equal(got, loss.detach())
    assert torch.equal(gradient(model), want)
    model.zero_grad()
    cached_backward(model, views, info_nce, chunk_size=8)
    assert relative_error(gradient(model), want) > 1e-4  # in float32 it would have been another gradient


def test_an_accumulator_takes_the_loss():
    """It tells autograd to stop at its own parameters, which a second backward by hand would never reach."""
    model, views = Tower().double(), make_views()
    more = make_views()
    ((info_nce(model(views)) + 3 * info_nce(model(more))) / 4).backward()
    want = gradient(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient(model)))
    with mk.GradientAccumulator(optimizer, steps=2) as accumulator:
        for batch, weight in ((views, 1), (more, 3)):
            cached_backward(
                model,
                batch,
                info_nce,
                chunk_size=5,
                backward=lambda loss, weight=weight: accumulator.backward(loss, count=weight),
            )
            accumulator.step()
    assert relative_error(seen[0], want) <= 1e-14


def live_peak_bytes(step):
    with profile(profile_memory=True) as recorded:
        step()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_memory_is_one_chunks_in_both_passes():
    depth, width, rows, chunk_size = 12, 128, 256, 32
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])
    x = torch.randn(rows, width)

    def loss_fn(embeddings):
        return info_nce((embeddings, embeddings.roll(1, 0)))

    for parameter in model.parameters():  # gradients are there before and after: they are not counted
        parameter.grad = torch.zeros_like(parameter)
    whole = live_peak_bytes(lambda: loss_fn(model(x)).backward())
    chunked = live_peak_bytes(lambda: cached_backward(model, x, loss_fn, chunk_size=chunk_size))
    row_bytes = depth * width * 4
    on_embeddings = live_peak_bytes(lambda: loss_fn(torch.randn(rows, width, requires_grad=True)).backward())
    assert whole > rows * row_bytes
    # a chunk's activations, the loss's own need, and temporaries of one layer's gradient
    assert chunked < chunk_size * row_bytes + on_embeddings + 2 * rows * width * 4 + 2 * width * width * 4
    assert chunked < 0.75 * whole


@pytest.mark.parametrize("chunk_size", [0, -3, 2.0, True])
def test_a_wrong_chunk_size(chunk_size):
    with pytest.raises(ConfigError, match=r"cached_backward\(chunk_size=.*expected a whole number of rows, 1 or more"):
        cached_backward(Tower(), make_views(torch.float32), info_nce, chunk_size=chunk_size)


def test_wrong_arguments():
    views = make_views(torch.float32)
    with pytest.raises(InputTypeError, match="put the towers into one module"):
        cached_backward(lambda x: x, views, info_nce, chunk_size=4)
    with pytest.raises(InputError, match="got no rows"):
        cached_backward(Tower(), (torch.ones(0, 6), torch.ones(0, 6)), info_nce, chunk_size=4)

    class Pooled(Tower):
        def forward(self, views):
            return super().forward(views)[0].mean(0)

    with pytest.raises(InputError, match=r"a tensor of shape \(8,\) from the encoder for 4 rows"):
        cached_backward(Pooled(), views, info_nce, chunk_size=4)

    class Named(Tower):
        def forward(self, views):
            return super().forward(views)[0], 3.5

    with pytest.raises(InputTypeError, match="a float from the encoder"):
        cached_backward(Named(), views, info_nce, chunk_size=4)
