"""Samplers with a state of their own: a resumed run has the batches of one that was not stopped, or says why not."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import memkit as mk
from tests.helpers import one_in_product

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


class InPlaceTensor(InPlace):
    """Keeps its order in a tensor."""

    def __init__(self):
        self.order = torch.arange(ROWS)

    def __iter__(self):
        self.order.copy_(self.order[torch.randperm(ROWS)])
        return iter(self.order.tolist())


UNSAVED["tensor"] = (InPlaceTensor, "InPlaceTensor.order")


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


@pytest.mark.parametrize(  # stopped in the second epoch, and at its end
    ("kind", "stop", "in_batches"), one_in_product(3, SAVED, [6, 8], [False, True])
)
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


class OwnLoader:
    """A loader that somebody writes: its samples in the order of a permutation that each epoch makes."""

    def __len__(self):
        return ROWS // BATCH

    def __iter__(self):
        for rows in self.next_order().split(BATCH):
            yield DATA[rows]


class CountingLoader(OwnLoader):
    epoch = 0

    def next_order(self):
        self.epoch += 1
        return torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch))


class SavedLoader(CountingLoader):
    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class ToldLoader(CountingLoader):
    def set_epoch(self, epoch):
        self.epoch = epoch


class GeneratorLoader(OwnLoader):
    def __init__(self):
        self.generator = seeded()

    def next_order(self):
        return torch.randperm(ROWS, generator=self.generator)


class ListLoader(OwnLoader):
    def __init__(self):
        self.order = list(range(ROWS))

    def next_order(self):
        random.shuffle(self.order)
        return torch.tensor(self.order)


class PermutingLoader(OwnLoader):
    """Permutes what the last epoch has permuted, in a new tensor or array."""

    def __init__(self, order):
        self.order = order

    def next_order(self):
        self.order = self.order[torch.randperm(ROWS)]
        return torch.as_tensor(self.order)


class FastLoader(OwnLoader):
    """Permutes its rows, as loaders of tensors in memory do, and is its own iterator."""

    def __init__(self):
        self.tensors = DATA.tensors

    def __iter__(self):
        order = torch.randperm(ROWS)
        self.tensors = [each[order] for each in self.tensors]
        self.start = 0
        return self

    def __next__(self):
        if self.start >= ROWS:
            raise StopIteration
        self.start += BATCH
        return [each[self.start - BATCH : self.start] for each in self.tensors]


class CountingDataLoader(DataLoader):
    epoch = 0

    def __iter__(self):
        self.epoch += 1
        torch.manual_seed(self.epoch)
        return super().__iter__()


UNSAVED_OF_LOADERS = {
    "count": (CountingLoader, "CountingLoader.epoch"),
    "list": (ListLoader, "ListLoader.order"),
    "tensor": (lambda: PermutingLoader(torch.arange(ROWS)), "PermutingLoader.order"),
    "array": (lambda: PermutingLoader(np.arange(ROWS)), "PermutingLoader.order"),
    "rows": (FastLoader, "FastLoader.tensors"),
    "DataLoader": (lambda: CountingDataLoader(DATA, BATCH, shuffle=True), "CountingDataLoader.epoch"),
}


def weight_of(folder, loader, num_epochs=3, stop=None):
    torch.manual_seed(0)
    random.seed(0)
    model, losses = nn.Linear(1, 1).double(), []

    def loss_fn(model, batch):
        losses.append((model(batch[0].double() / ROWS) - 1).square().mean())
        if len(losses) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return losses[-1]

    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with mk.TrainingStateManager(folder) as state:
        mk.MemoryEfficientTrainLoop(trainer, loader, loss_fn, state=state, progress=False).run(num_epochs=num_epochs)
    return model.weight.detach()


@pytest.mark.parametrize("kind", UNSAVED_OF_LOADERS)
def test_what_a_loader_keeps_is_told_of_once(kind, tmp_path):
    make, name = UNSAVED_OF_LOADERS[kind]
    with pytest.warns(mk.MemkitWarning) as caught:
        weight_of(tmp_path, make())
    (told,) = (str(each.message) for each in caught)
    assert f"an epoch changes what the loader keeps ({name}), and that is not saved" in told
    assert told.endswith("or give the loader state_dict() and load_state_dict(state).")


@pytest.mark.parametrize("stop", [6, 8])  # in the second epoch, and at its end
@pytest.mark.parametrize("make", [SavedLoader, ToldLoader, GeneratorLoader])
def test_a_loader_with_a_state_goes_on(make, stop, tmp_path):
    whole = weight_of(tmp_path / "whole", make())  # a warning would be an error
    weight_of(tmp_path / "parts", make(), stop=stop)
    torch.testing.assert_close(weight_of(tmp_path / "parts", make()), whole, rtol=0, atol=0)


class Drawn(OwnLoader):
    """Draws its order anew, and is its own iterator, with a place in the epoch."""

    def __init__(self):
        self.place, self.batches, self.order = 0, [], None

    def __iter__(self):
        before, self.order, self.batches = id(self.order), None, []
        drawn = [torch.randperm(ROWS)]
        while id(drawn[-1]) != before and len(drawn) < 1000:  # the new one mostly gets the old one's id
            drawn.append(torch.randperm(ROWS))
        self.order = drawn[-1]
        self.batches = list(self.order.split(BATCH))
        self.place = 0
        return self

    def __next__(self):
        if self.place == len(self.batches):
            raise StopIteration
        self.place += 1
        return DATA[self.batches[self.place - 1]]


class Derived(DataLoader):
    pass


class Endless(IterableDataset):
    """Of a length that a DataLoader notes when it is asked."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(DATA)


def prepared():
    return pytest.importorskip("accelerate").data_loader.prepare_data_loader(DataLoader(DATA, BATCH, shuffle=True))


def graphs():
    geometric = pytest.importorskip("torch_geometric")
    return geometric.loader.DataLoader([geometric.data.Data(x=each[0][None]) for each in DATA], BATCH, shuffle=True)


@pytest.mark.parametrize(
    "make",
    [
        Drawn,
        lambda: Derived(DATA, BATCH, shuffle=True),
        lambda: Derived(Endless(), BATCH),
        lambda: Derived(DATA, BATCH, shuffle=True, num_workers=1, persistent_workers=True),
        lambda: DataLoader(DATA, BATCH, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS)),
        prepared,
    ],
)
def test_loaders_that_keep_nothing_between_epochs_are_not_told_of(make, tmp_path):
    weight_of(tmp_path, make())  # a warning would be an error


def test_a_loader_of_graphs_is_not_told_of(tmp_path):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x)

    model = Net(1, 1)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with mk.TrainingStateManager(tmp_path) as state:
        loop = mk.MemoryEfficientTrainLoop(
            trainer, graphs(), lambda model, batch: model(batch).square().mean(), state=state, progress=False
        )
        loop.run(num_epochs=3)  # a warning would be an error
