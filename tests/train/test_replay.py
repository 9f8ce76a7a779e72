"""Rolling back buffers: the same objects with the values that they had, whoever owns them and whenever they came."""

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit.train.replay import BufferWatch


class Late(nn.Module):
    """Buffers that change in every way that a version counter does not show."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("made_later", None)
        self.register_buffer("last", torch.zeros(4, 3))
        self.register_buffer("table", torch.arange(3.0))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.last = x.detach()  # another object, and it is the caller's
        if self.num_calls > 2:
            self.ema.data.lerp_(x.detach().mean(0), 0.5)
            self.made_later = x.detach().mean(0) if self.made_later is None else self.made_later + 1
        return self.norm(self.linear(x))


def values(module):
    return {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()} | dict(
        module.norm.named_buffers()
    )


def test_everything_comes_back_and_nothing_of_the_caller_is_written():
    torch.manual_seed(0)
    model = Late()
    watch = BufferWatch(model)
    for _ in range(3):
        first = watch.snapshot()
        model(torch.randn(4, 3))
        watch.learn(first)
    snapshot = watch.snapshot()
    before = {name: value if value is None else value.clone() for name, value in values(model).items()}
    objects = dict(model._buffers)
    x = torch.ones(4, 3)
    model(x)
    assert not torch.equal(model.ema, before["ema"])
    snapshot.restore()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    assert all(model._buffers[name] is buffer for name, buffer in objects.items())
    assert x.eq(1).all()


def test_a_buffer_that_did_not_exist_is_gone_again():
    model = Late()
    model.num_calls = 2
    watch = BufferWatch(model)
    snapshot = watch.snapshot()
    model(torch.ones(4, 3))
    assert model.made_later is not None
    snapshot.restore()
    assert model.made_later is None


def test_large_buffers_that_stay_are_copied_once_and_guarded():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(600, 600))
    watch = BufferWatch(model)
    first = watch.snapshot()
    watch.learn(first)
    second = watch.snapshot()
    assert all(entry.copy is None for entry in second.entries.values())
    second.restore()
    model.mask[0] = 1
    with pytest.raises(mk.StateError, match="large buffer 'mask' of a Linear"):
        second.restore()


def test_model_edits_between_steps():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.LazyBatchNorm1d())
    model.register_buffer("cache", torch.ones(2))
    watch = BufferWatch(model)
    watch.snapshot().restore()
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    model.cache = None
    model(torch.randn(4, 3))
    watch.snapshot().restore()
    assert model.cache is None


@pytest.mark.parametrize("size", [6, 3])
def test_other_networks_in_the_loss_are_rolled_back_too(size):
    """A GAN: the discriminator's loss runs the generator, whose BatchNorm must not see the failed attempt."""

    def run(capacity):
        torch.manual_seed(0)
        disc, gen = nn.Linear(4, 1), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        trainer = mk.MemoryEfficientTrainingWrapper(disc, torch.optim.SGD(disc.parameters(), lr=0.1), probe=False)
        failures = []

        def loss_fn(disc, noise):
            with torch.no_grad():
                fake = gen(noise + 0.1 * np.random.normal())
            if len(noise) > capacity:
                failures.append(len(noise))
                raise MemoryError
            return disc(fake).pow(2).mean()

        results = [trainer.train_step(torch.ones(6, 2), loss_fn) for _ in range(2)]
        return gen, [part for result in results for part in result.sizes], failures

    gen, sizes, failures = run(size)
    assert bool(failures) == (size < 6)
    assert int(gen[1].num_batches_tracked) == len(sizes)


def test_frozen_first_and_trained_later():
    """BatchNorm frozen while warming up, then not: the first out-of-memory after that is survived."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=False)
    capacity = 6

    def loss_fn(model, x):
        out = model(x)
        if len(x) > capacity:
            raise MemoryError
        return out.pow(2).mean()

    x = torch.randn(6, 3)
    for _ in range(2):
        trainer.train_step(x, loss_fn)
    model.train()
    trainer.train_step(x, loss_fn)
    capacity = 3
    result = trainer.train_step(x, loss_fn)
    assert result.sizes == (3, 3)
    assert int(model[1].num_batches_tracked) == 3
