"""Samplers with a state of their own: a resumed run has the batches of one that was not stopped, or says why not."""

import os
import random
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import memkit as mk

ROWS, BATCH = 12, 3
DATA = TensorDataset(torch.arange(float(ROWS)).view(ROWS, 1))


class Counting(Sampler):
    """Shuffles by the number of epochs that it has begun; the count may have a state, or begin in the class."""

    num_begun = 0

    def __iter__(self):
        self.num_begun += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.num_begun)).tolist())

    def __len__(self):
        return ROWS


class Saved(Counting):
    def state_dict(self):
        return {"num_begun": self.num_begun}

    def load_state_dict(self, state):
        self.num_begun = state["num_begun"]


class Told(Counting):
    def set_epoch(self, epoch):
        self.num_begun = epoch


class InPlace(Sampler):
    """Shuffles what the last epoch has shuffled, as samplers of buckets do."""

    def __init__(self):
        self.buckets = [list(range(start, start + BATCH)) for start in range(0, ROWS, BATCH)]

    def __iter__(self):
        for bucket in self.buckets:
            random.shuffle(bucket)
        return iter([index for bucket in self.buckets for index in bucket])

    def __len__(self):
        return ROWS


class Drawing(InPlace):
    """Draws from a generator of Python's."""

    def __init__(self):
        self.random = random.Random(0)

    def __iter__(self):
        return iter(self.random.sample(range(ROWS), ROWS))


def seeded():
    return torch.Generator().manual_seed(4)


SAVED = {
    "random": lambda: RandomSampler(DATA, generator=seeded()),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(ROWS), generator=seeded()),
    "weighted": lambda: WeightedRandomSampler([1.0] * ROWS, ROWS, generator=seeded()),
    "state_dict": Saved,
    "set_epoch": Told,
}
UNSAVED = {"count": (Counting, "Counting.num_begun"), "list": (InPlace, "InPlace.buckets")}
UNSAVED["generator"] = (Drawing, "Drawing.random")


def trained(folder, sampler, *, in_batches=False, stop=None, num_epochs=3):
    """Return the samples of each step, of a run that is stopped in a step."""
    torch.manual_seed(0)
    model, seen = nn.Linear(1, 1).double(), []

    def loss_fn(model, batch):
        return (model(batch[0].double() / ROWS) - 1).square().mean()

    class Loader(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                seen.append(batch[0].flatten().int().tolist())
                if len(seen) == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    how = {"batch_sampler": BatchSampler(sampler, BATCH, drop_last=False)} if in_batches else {"sampler": sampler}
    loader = Loader(DATA, **how) if in_batches else Loader(DATA, BATCH, **how)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with mk.TrainingStateManager(folder) as state:
        loop = mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn, state=state, progress=False)
        loop.run(num_epochs=num_epochs)
    return seen, model.weight.detach()


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("stop", [6, 8])  # in the second epoch, and at its end
@pytest.mark.parametrize("kind", SAVED)
def test_a_resumed_run_has_the_batches_of_one_that_was_not_stopped(kind, stop, in_batches, tmp_path):
    _, whole = trained(tmp_path / "whole", SAVED[kind](), in_batches=in_batches)
    trained(tmp_path / "parts", SAVED[kind](), in_batches=in_batches, stop=stop)
    _, resumed = trained(tmp_path / "parts", SAVED[kind](), in_batches=in_batches)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.parametrize("kind", UNSAVED)
@pytest.mark.parametrize("in_batches", [False, True])
def test_what_a_sampler_keeps_beside_it_is_told_of(kind, in_batches, tmp_path):
    make, name = UNSAVED[kind]
    with pytest.warns(mk.MemkitWarning, match=rf"what a sampler of the loader keeps \({name}\), and that is not saved"):
        trained(tmp_path, make(), in_batches=in_batches, num_epochs=1)


def test_a_loader_with_other_samplers_is_told_of(tmp_path):
    trained(tmp_path, RandomSampler(DATA, generator=seeded()), num_epochs=1)
    with pytest.warns(mk.MemkitWarning, match="saved with 1 generator and .* the loader has 0 generators"):
        trained(tmp_path, RandomSampler(DATA), num_epochs=2)
