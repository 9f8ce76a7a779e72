"""What loss function, model and data hold: a loop tells of what no state has, and its validation changes none of it."""

import collections
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Sampler, Subset, TensorDataset

import memkit as mk
from tests.helpers import one_in_product


class Regularized(nn.Module):
    """Early-learning regularization: a target for each sample, a running average of the predictions."""

    def __init__(self, is_buffer=True):
        super().__init__()
        targets = torch.zeros(24, 3, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("targets", targets)
        else:
            self.targets = targets

    def forward(self, index, output, labels):
        p = output.softmax(1).clamp(1e-4, 1 - 1e-4)
        self.targets[index] = 0.3 * self.targets[index] + 0.7 * p.detach()
        return F.cross_entropy(output, labels) + 3 * (1 - (self.targets[index] * p).sum(1)).log().mean()


class Teaching(nn.Module):
    """Compares with a teacher, which follows the model through ``.data`` or stays as it is."""

    def __init__(self, follows):
        super().__init__()
        self.teacher, self.follows = nn.Linear(5, 3, dtype=torch.float64).requires_grad_(requires_grad=False), follows

    def forward(self, index, output, labels):
        if self.follows:
            self.teacher.bias.data.add_(0.1)
        return F.cross_entropy(output + self.teacher.bias, labels)


def trained(folder, num_epochs, criterion, *, in_model=False):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5, dtype=torch.float64), torch.randint(3, (24,)), torch.arange(24))
    model = nn.Linear(5, 3, dtype=torch.float64)
    if in_model:
        model.criterion = criterion
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD([model.weight, model.bias], 0.1))

    def loss_fn(model, batch):
        return criterion(batch[2], model(batch[0]), batch[1])

    with mk.TrainingStateManager(folder) as state:
        loop = mk.MemoryEfficientTrainLoop(trainer, DataLoader(data, 8), loss_fn, state=state, progress=False)
        loop.run(num_epochs=num_epochs)
    return model.weight.detach().clone()


@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        (Regularized(), "Regularized.targets"),
        (Regularized(is_buffer=False), "Regularized.targets"),
        (Teaching(follows=True), "Linear.bias"),
    ],
)
def test_what_a_loss_holds_and_changes_is_told(criterion, name, tmp_path):
    with pytest.warns(mk.MemkitWarning, match=rf"what loss_fn, .* holds \({name}\), and that is not"):
        trained(tmp_path, 2, criterion)


def test_as_a_part_of_the_model_it_is_saved(tmp_path):
    """The way out of the warning: bit for bit as without the interruption."""
    whole = trained(tmp_path / "whole", 4, Regularized(), in_model=True)
    trained(tmp_path / "parts", 2, Regularized(), in_model=True)
    torch.testing.assert_close(trained(tmp_path / "parts", 4, Regularized(), in_model=True), whole, rtol=0, atol=0)


def test_a_teacher_that_stays_as_it_is_is_not_told_of(tmp_path):
    trained(tmp_path, 2, Teaching(follows=False))  # a warning would be an error here


class RunningClip:
    """Clips gradients to the running mean of their norm."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, model):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.mean)
        self.mean = 0.9 * self.mean + 0.1 * norm.item()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class Distilling:
    """A loss that is no module: it has one, which follows the model."""

    def __init__(self, model):
        self.teacher = copy.deepcopy(model)

    def __call__(self, model, x):
        with torch.no_grad():
            wanted = self.teacher(x) + 1
        return F.mse_loss(model(x), wanted)

    def follow(self, model):
        with torch.no_grad():
            for own, its in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(its, 0.3)


def trained_by(folder, kind, num_epochs, *, is_saved):
    """Train with a function of a step that keeps a state, and save it or not."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip, distilling, settings = RunningClip(), Distilling(model), {}
    objects, loss_fn = {"clip": clip}, lambda model, x: model(x).square().mean() * 10
    if kind == "on_gradients":
        settings["on_gradients"] = clip
    elif kind == "before a step":
        optimizer.register_step_pre_hook(lambda *_: clip(model))
    elif kind == "after a step":
        optimizer.register_step_post_hook(lambda *_: distilling.follow(model))
        objects, loss_fn = {"teacher": distilling.teacher}, distilling
    elif kind == "average":
        optimizer.register_step_post_hook(lambda *_: distilling.follow(model))
        objects = {"teacher": distilling.teacher}
    trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings)
    data = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    with mk.TrainingStateManager(folder) as state:
        loop = mk.MemoryEfficientTrainLoop(
            trainer, data, loss_fn, state=state, progress=False, objects=objects if is_saved else None
        )
        loop.run(num_epochs=num_epochs)
    return torch.cat([model.weight, distilling.teacher.weight]).detach()


FUNCTIONS_OF_A_STEP = {
    "on_gradients": "keeps \\(RunningClip.mean\\).*objects={'clip': clip}",
    "before a step": "keeps \\(RunningClip.mean\\).*objects={'clip': clip}",
    "after a step": "holds \\(Linear.weight, Linear.bias\\).*objects={'teacher': criterion.teacher}",
    "average": "holds \\(Linear.weight, Linear.bias\\).*objects={'teacher': criterion.teacher}",
}


@pytest.mark.parametrize(("kind", "told"), FUNCTIONS_OF_A_STEP.items())
def test_what_functions_of_a_step_keep_is_told(kind, told, tmp_path):
    with pytest.warns(mk.MemkitWarning, match=told):
        trained_by(tmp_path, kind, 1, is_saved=False)


@pytest.mark.parametrize("kind", FUNCTIONS_OF_A_STEP)
def test_what_functions_of_a_step_keep_goes_on_as_an_object(kind, tmp_path):
    """The way out of the warning: bit for bit as without the interruption."""
    whole = trained_by(tmp_path / "whole", kind, 4, is_saved=True)
    trained_by(tmp_path / "parts", kind, 2, is_saved=True)
    torch.testing.assert_close(trained_by(tmp_path / "parts", kind, 4, is_saved=True), whole, rtol=0, atol=0)


class Centering(nn.Module):
    """Subtracts a running mean, which is in a buffer; another one is a cache of the model."""

    def __init__(self, **kept):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64), **kept)
        self.register_buffer("range", torch.zeros(0), persistent=False)
        self.register_buffer("scale", torch.ones(5, dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.range = torch.arange(len(x))
        self.scale.copy_(torch.ones(5))
        self.mean.lerp_(x.mean(0), 0.1)
        return self.linear((x - self.mean) * self.scale)


class OwnState(Centering):
    def get_extra_state(self):
        return {"mean": self.mean}

    def set_extra_state(self, state):
        self.mean.copy_(state["mean"])


def trained_centering(folder, num_epochs, model):
    data = [torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) + 3 for i in range(3)]
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.01))
    with mk.TrainingStateManager(folder) as state:
        mk.MemoryEfficientTrainLoop(
            trainer, data, lambda model, x: (model(x) - 1).square().mean(), state=state, progress=False
        ).run(num_epochs=num_epochs)


def test_buffers_that_no_state_has_are_told_of(tmp_path):
    told = r"changed buffers with persistent=False \(Centering\.mean\), .* persistent=True\)"
    with pytest.warns(mk.MemkitWarning, match=told):
        trained_centering(tmp_path / "told", 1, Centering(persistent=False))
    trained_centering(tmp_path / "own", 1, OwnState(persistent=False))
    trained_centering(tmp_path / "buffer", 1, Centering())  # a warning would be an error here


class Balanced(nn.Module):
    """A loss divided by its running mean, of normalized outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.norm, self.calls, self.seen = nn.BatchNorm1d(3, affine=False, dtype=torch.float64), 0, []
        self.last = torch.zeros(3, dtype=torch.float64)

    def forward(self, output, labels):
        loss = F.cross_entropy(self.norm(output), labels)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        self.last.copy_(output.detach()[0])
        self.calls += 1
        self.seen.append(len(output))
        return loss / self.mean


class Noisy(Dataset):
    """Draws noise, from a generator of its own or from NumPy's."""

    def __init__(self, random):
        self.random = random

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index + self.random.normal()], dtype=torch.float64)


def weight_after(folder, num_epochs, data):
    torch.manual_seed(0)
    model = nn.Linear(1, 1, dtype=torch.float64)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 1e-3))
    with mk.TrainingStateManager(folder) as state:
        mk.MemoryEfficientTrainLoop(
            trainer, DataLoader(data, 4), lambda model, x: model(x).mean(), state=state, progress=False
        ).run(num_epochs=num_epochs)
    return model.weight.detach().clone()


def test_a_data_set_with_a_generator_of_its_own_is_told_of(tmp_path):
    with pytest.warns(mk.MemkitWarning, match="the data set has drawn from a random generator of its own"):
        weight_after(tmp_path, 1, Noisy(np.random.RandomState(0)))


class Counting(Noisy):
    """Counts what it has given, if asked to; told the epoch, as a data set may be."""

    def __init__(self, counts):
        self.counts, self.num_given, self.epoch = counts, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        self.num_given += self.counts
        return torch.tensor([index + self.num_given], dtype=torch.float64)


def test_a_data_set_that_counts_is_told_of(tmp_path):
    weight_after(tmp_path / "plain", 3, Counting(counts=False))  # a warning of its epoch would be an error here
    with pytest.warns(mk.MemkitWarning, match=r"reading samples changes Counting\.num_given, which no saved state has"):
        weight_after(tmp_path / "counts", 3, Counting(counts=True))


def test_a_data_set_that_draws_from_numpy_goes_on(tmp_path):
    """The way out of the warning."""
    np.random.seed(0)
    whole = weight_after(tmp_path / "whole", 4, Noisy(np.random))
    np.random.seed(0)
    weight_after(tmp_path / "parts", 2, Noisy(np.random))
    np.random.seed(7)
    torch.testing.assert_close(weight_after(tmp_path / "parts", 4, Noisy(np.random)), whole, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*evaluat.*:memkit.MemkitWarning")  # batch statistics in the loss
def test_a_validation_by_the_loss_changes_nothing_in_it():
    def run(*, validates):
        torch.manual_seed(0)
        train, val = (
            TensorDataset(scale * torch.randn(24, 5, dtype=torch.float64), torch.randint(3, (24,))) for scale in (1, 3)
        )
        model, criterion = nn.Linear(5, 3, dtype=torch.float64), Balanced()
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1))
        loop = mk.MemoryEfficientTrainLoop(
            trainer,
            DataLoader(train, 8),
            lambda model, batch: criterion(model(batch[0]), batch[1]),
            progress=False,
            val_loader=DataLoader(val, 8) if validates else None,
        )
        loop.run(num_epochs=3)
        return [*model.parameters(), *criterion.buffers(), criterion.last], criterion

    (expected, plain), (found, beside_it) = run(validates=False), run(validates=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (beside_it.calls, beside_it.seen) == (plain.calls, plain.seen) == (9, [8] * 9)


class Centered(nn.Module):
    """A loss with a running mean, as DINO's center, in various places."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.plain, self.held = kind, torch.zeros((), dtype=torch.float64), [0.0]
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, model, batch):
        lengths = model(batch[0]).norm(dim=1)
        before = {"buffer": self.mean, "attribute": self.plain, "list": self.held[0]}[self.kind]
        mean = 0.9 * before + 0.1 * lengths.detach().mean()
        if self.kind == "buffer":
            self.mean.copy_(mean)
        elif self.kind == "attribute":
            self.plain = mean
        else:
            self.held[0] = mean
        return (lengths - mean).square().mean()


class Plain:
    """The same without being a module."""

    def __init__(self, kind):
        self.criterion = Centered(kind)
        self.mean, self.cache = torch.zeros((), dtype=torch.float64), {}

    def __call__(self, model, batch):
        return self.criterion(model, batch)

    def with_own(self, model, batch):
        lengths = model(batch[0]).norm(dim=1)
        self.cache.setdefault(len(lengths), "a mask")
        self.mean = 0.9 * self.mean + 0.1 * lengths.detach().mean()
        return (lengths - self.mean).square().mean()


def weights_of_centered(loss_fn, val_fn):
    torch.manual_seed(0)
    train, val = (TensorDataset(torch.randn(rows, 4, dtype=torch.float64)) for rows in (16, 8))
    model = nn.Linear(4, 3, dtype=torch.float64)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 0.1))
    settings = {} if val_fn is None else {"val_loader": DataLoader(val, 8), "validate_every": 1, "val_fn": val_fn}
    mk.MemoryEfficientTrainLoop(trainer, DataLoader(train, 4), loss_fn, progress=False, **settings).run()
    return model.weight.detach()


def repeated(loss, batch):
    return {"loss": loss.detach().expand(len(batch[0]))}


@pytest.mark.parametrize("kind", ["buffer", "attribute", "list"])
@pytest.mark.parametrize("make", [Centered, Plain])
def test_a_val_fn_that_calls_the_loss_changes_nothing_in_it(kind, make):
    loss_fn, collected = make(kind), []

    def val_fn(model, batch):
        loss = loss_fn(model, batch)
        collected.append(loss)
        return repeated(loss, batch)

    found, expected = weights_of_centered(loss_fn, val_fn), weights_of_centered(make(kind), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(collected) == 4


def test_modules_that_the_loss_shares_with_val_fn_are_restored():
    criterion = Centered("buffer")
    found = weights_of_centered(
        lambda model, batch: criterion(model, batch), lambda model, batch: repeated(criterion(model, batch), batch)
    )
    expected = weights_of_centered(Centered("buffer"), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_generator_that_the_loss_shares_with_val_fn_is_restored():
    def weights(*, validates):
        generator = torch.Generator().manual_seed(0)

        def scores(model, batch):
            return model(batch[0])[:, 0] + torch.rand(len(batch[0]), generator=generator, dtype=torch.float64)

        val_fn = (lambda model, batch: {"loss": scores(model, batch)}) if validates else None
        return weights_of_centered(lambda model, batch: scores(model, batch).square().mean(), val_fn)

    torch.testing.assert_close(weights(validates=True), weights(validates=False), rtol=0, atol=0)


def test_objects_that_the_loss_shares_with_val_fn_are_told_of():
    shared = Plain("buffer")
    with pytest.warns(mk.MemkitWarning, match=r"changed what loss_fn holds \(Plain\.mean\), and") as told:
        weights_of_centered(shared.with_own, lambda model, batch: repeated(shared.with_own(model, batch), batch))
    assert len(told) == 1

    def val_fn(model, batch):  # a cache that grows would be an error here
        shared.cache[len(shared.cache) + 100] = "another mask"
        return {"loss": model(batch[0])[:, 0]}

    weights_of_centered(shared.with_own, val_fn)


class Annealed(nn.Linear):
    """A forward that depends on its own count of calls, or draws from a generator of its own."""

    def __init__(self, kind):
        super().__init__(1, 1, dtype=torch.float64)
        self.kind, self.count, self.generator = kind, 0, torch.Generator().manual_seed(0)

    def forward(self, x):
        if self.kind == "model's count":
            self.count += 1
        if self.kind == "model's generator":
            x = x * torch.rand(1, generator=self.generator, dtype=torch.float64)
        return super().forward(x) * (1 + self.count)


class WithState(Annealed):
    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


class Annealing:
    """The same for a loss function."""

    def __init__(self, kind):
        self.kind, self.count, self.generator = kind, 0, torch.Generator().manual_seed(0)

    def __call__(self, model, batch):
        if self.kind == "loss's count":
            self.count += 1
        noise = torch.rand(1, generator=self.generator, dtype=torch.float64) if self.kind == "loss's generator" else 1
        return (model(batch) * noise).square().mean() * (1 + self.count)


def annealed(folder, kind, num_epochs, make=Annealed):
    torch.manual_seed(0)
    model, generator, count = make(kind), torch.Generator().manual_seed(0), 0

    def collate(rows):
        nonlocal count
        count += kind == "collate_fn's count"
        drawn = torch.rand(1, generator=generator, dtype=torch.float64) if kind == "collate_fn's generator" else count
        return torch.stack(rows) + drawn

    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 1e-4))
    data = list(torch.arange(16, dtype=torch.float64).view(16, 1))
    loader = DataLoader(data, 4, shuffle=True, collate_fn=collate)
    with mk.TrainingStateManager(folder) as state:
        loop = mk.MemoryEfficientTrainLoop(trainer, loader, Annealing(kind), state=state, progress=False)
        loop.run(num_epochs=num_epochs)
    return model.weight.detach().clone()


@pytest.mark.parametrize("kind", ["model's generator", "loss's generator", "collate_fn's generator"])
def test_generators_go_on_in_a_resumed_run(kind, tmp_path):
    whole = annealed(tmp_path / "whole", kind, 3)
    annealed(tmp_path / "parts", kind, 1)
    torch.testing.assert_close(annealed(tmp_path / "parts", kind, 3), whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("model's count", "Annealed.count"),
        ("loss's count", "Annealing.count"),
        ("collate_fn's count", "the variable count"),
    ],
)
def test_numbers_that_no_state_has_are_told_of(kind, name, tmp_path):
    with pytest.warns(
        mk.MemkitWarning, match=rf"training has changed what the model, .* keeps \({name}\), and that is"
    ):
        annealed(tmp_path, kind, 1)


class Own(nn.Linear):
    """A user's module."""


class Averaging:
    """A loss that keeps a running mean of the outputs in the place that it is told to."""

    def __init__(self, kind, model):
        self.kind, self.weights, self.window = kind, list(model.parameters()), collections.deque(maxlen=4)
        self.dict, self.list, self.array = {"mean": 0.0}, [torch.zeros((), dtype=torch.float64)], np.zeros(1)
        model.tensor, model.dict, model.outputs, model.last = self.list[0], {"mean": 0}, [], None
        model.view, model.features = model.weight.detach().view(-1), {}

    def function(self):
        value = torch.zeros((), dtype=torch.float64)

        def loss_fn(model, batch):
            nonlocal value
            outputs = model(batch)
            mean = outputs.detach().mean()
            model.outputs.append(mean)
            model.last = model.features["last"] = outputs
            self.keep(model, loss_fn, mean)
            if self.kind == "variable":
                value = mean
            return outputs.square().mean()

        loss_fn.number = 0.0
        return loss_fn

    def keep(self, model, loss_fn, mean):
        if self.kind == "list":
            self.list[0] = mean
        elif self.kind == "another list":
            self.list = [mean, *self.list][:4]
        elif self.kind == "a longer list":
            self.list = [*self.list, mean]
        elif self.kind == "array":
            self.array[0] = mean
        elif self.kind == "window":
            self.window.append(mean)
        elif self.kind == "number of loss_fn":
            loss_fn.number = mean.item()
        elif self.kind == "tensor of the model":
            model.tensor = mean
        elif self.kind in ("dict", "dict of the model"):
            (self.dict if self.kind == "dict" else model.dict)["mean"] = mean


def trained_with_average(folder, kind):
    torch.manual_seed(0)
    model = Own(1, 1, dtype=torch.float64)
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 1e-3))
    loss_fn = Averaging(kind, model).function()
    with mk.TrainingStateManager(folder) as state:
        mk.MemoryEfficientTrainLoop(trainer, DataLoader(VALUES, 4), loss_fn, state=state, progress=False).run()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("variable", "the variable value"),
        ("dict", r"dict\['mean'\]"),
        ("list", r"list\[0\]"),
        ("another list", "Averaging.list"),
        ("array", "Averaging.array"),
        ("window", "a deque of at most 4"),
        ("number of loss_fn", "function.number"),
        ("tensor of the model", "Own.tensor"),
        ("dict of the model", r"dict\['mean'\]"),
    ],
)
def test_values_in_any_place_that_no_state_has_are_told_of(kind, name, tmp_path):
    with pytest.warns(mk.MemkitWarning, match=rf"what the model, .* keeps \({name}\), and"):
        trained_with_average(tmp_path, kind)


@pytest.mark.parametrize("kind", ["nothing", "a longer list"])
def test_logs_caches_and_views_of_weights_are_not_told_of(kind, tmp_path):
    trained_with_average(tmp_path, kind)  # a warning would be an error here


def test_a_count_in_the_extra_state_is_saved(tmp_path):
    """The way out of the warning."""
    whole = annealed(tmp_path / "whole", "model's count", 3, WithState)
    annealed(tmp_path / "parts", "model's count", 1, WithState)
    torch.testing.assert_close(annealed(tmp_path / "parts", "model's count", 3, WithState), whole, rtol=0, atol=0)


def test_a_model_with_other_generators_is_told_of(tmp_path):
    annealed(tmp_path, "nothing", 1)

    def without(kind):
        model = Annealed(kind)
        del model.generator
        return model

    with pytest.warns(mk.MemkitWarning, match="with 2 generators of the model and loss_fn, and now they hold 1"):
        annealed(tmp_path, "nothing", 2, without)


class Changing(nn.Module):
    """Divides by something that each forward changes, in evaluation too."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(1, 1, dtype=torch.float64), how
        self.calls, self.seen, self.counts, self.random = 0, [], np.zeros(2), np.random.default_rng(0)
        self.last, self.tensor = None, torch.zeros(1, dtype=torch.float64)
        self.register_buffer("small", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("large", torch.zeros(2**19, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) / (1 + getattr(self, self.how)())

    def number(self):
        self.calls += 1
        return self.calls

    def list_(self):
        self.seen.append(None)
        return len(self.seen)

    def array(self):
        self.counts += 1
        return self.counts[0]

    def attribute(self):
        self.tensor += 1
        return self.tensor

    def buffer(self):
        self.small += 1
        return self.small

    def replaced_buffer(self):
        self.small = self.small + 1
        return self.small

    def large_buffer(self):
        self.large += 1
        return self.large[0]

    def generator(self):
        return self.random.random()


VALUES = torch.arange(12, dtype=torch.float64).view(12, 1)


def weight_beside(train, val, model, **settings):
    """Train, with ``val`` as the data of validations or without any; return the model's parameters."""
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 1e-3))
    loop = mk.MemoryEfficientTrainLoop(
        trainer,
        train,
        lambda model, x: (model(torch.as_tensor(x[0] if isinstance(x, list) else x)) - 1).square().mean(),
        val_loader=val,
        progress=False,
        **settings,
    )
    loop.run(num_epochs=3)
    return [each.detach().clone() for each in model.parameters()]


def rows_of_figures(model, x):
    return {"loss": model(x[0]).square()}


@pytest.mark.parametrize(
    ("val_fn", "how"),
    one_in_product(
        3,
        [None, rows_of_figures],
        ["number", "list_", "array", "attribute", "buffer", "replaced_buffer", "large_buffer", "generator"],
    ),
)
def test_a_validation_changes_nothing_in_the_model(how, val_fn):
    def run(*, validates):
        torch.manual_seed(0)
        loader, model = DataLoader(TensorDataset(VALUES), 4), Changing(how)
        settings = {"val_fn": val_fn, "validate_every": 2} if validates else {}
        return [*weight_beside(loader, loader if validates else None, model, **settings), model.small, model.large]

    torch.testing.assert_close(run(validates=True), run(validates=False), rtol=0, atol=0)


def shared_loader():
    loader = DataLoader(TensorDataset(VALUES), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    return loader, loader


def shared_generator_of_samplers():
    data, generator = TensorDataset(VALUES), torch.Generator().manual_seed(0)
    return [DataLoader(data, 4, sampler=RandomSampler(data, generator=generator)) for _ in range(2)]


def parts_of_noisy():
    data = Noisy(np.random.RandomState(0))
    return DataLoader(Subset(data, range(8)), 4), DataLoader(Subset(data, range(8, 12)), 4)


def joined_parts_of_noisy():
    data = Noisy(np.random.default_rng(0))
    joined = ConcatDataset([TensorDataset(VALUES), Subset(data, range(8))])
    return DataLoader(
        joined, 4, collate_fn=lambda rows: torch.stack([torch.as_tensor(row[0]) for row in rows])[:, None]
    ), (DataLoader(data, 4))


def noise_of_collating():
    random = np.random.default_rng(0)

    def collate(rows):
        return torch.stack([row[0] for row in rows]) + random.normal()

    return [DataLoader(TensorDataset(VALUES), 4, collate_fn=collate) for _ in range(2)]


@pytest.mark.parametrize(
    "make",
    [shared_loader, shared_generator_of_samplers, parts_of_noisy, joined_parts_of_noisy, noise_of_collating],
)
def test_a_validation_draws_nothing_from_the_generators_of_the_training(make):
    def run(*, validates):
        torch.manual_seed(0)
        train, val = make()
        settings = {"validate_every": 2} if validates else {}
        return weight_beside(train, val if validates else None, nn.Linear(1, 1, dtype=torch.float64), **settings)

    torch.testing.assert_close(run(validates=True), run(validates=False), rtol=0, atol=0)


def test_counts_of_a_data_set_that_a_validation_reads_are_told_once():
    data = Counting(counts=True)
    train, val = DataLoader(Subset(data, range(8)), 4), DataLoader(Subset(data, range(8, 12)), 4)
    found = r"validation has changed what the training's data counts \(Counting\.num_given\), and"
    with pytest.warns(mk.MemkitWarning, match=found) as told:
        weight_beside(train, val, nn.Linear(1, 1, dtype=torch.float64))
    assert len(told) == 1
    own = DataLoader(Counting(counts=True), 4)  # the way out: a warning would be an error here
    weight_beside(train, own, nn.Linear(1, 1, dtype=torch.float64))


class Turning(Sampler):
    """Begins each pass with another sample."""

    num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter([(each + self.num_passes) % 12 for each in range(12)])

    def __len__(self):
        return 12


def test_counts_of_a_sampler_that_a_validation_shares_are_told():
    data, sampler = TensorDataset(VALUES), Turning()
    loader = DataLoader(data, 4, sampler=sampler)
    with pytest.warns(mk.MemkitWarning, match=r"what the training's data counts \(Turning\.num_passes\), and"):
        weight_beside(loader, loader, nn.Linear(1, 1, dtype=torch.float64))


class Recorder:
    """A user's own object: not a module."""

    def __init__(self):
        self.rows, self.num_calls = [], 0


def test_objects_that_the_model_holds_keep_what_a_validation_writes():
    model, losses = nn.Linear(1, 1, dtype=torch.float64), []
    model.recorder = Recorder()
    loader = DataLoader(TensorDataset(VALUES), 4)

    def val_fn(model, x):
        rows = (model(x[0]) - 1).square()
        losses.append(rows.sum().item())
        model.recorder.rows.append(losses[-1])
        return {"loss": rows}

    weight_beside(loader, loader, model, val_fn=val_fn)
    assert model.recorder.rows == losses
    assert len(losses) == 9

    def counting(model, x):
        model.recorder.num_calls += 1
        return {"loss": model(x[0])}

    with pytest.warns(mk.MemkitWarning, match=r"changed what the model holds \(Recorder\.num_calls\), and") as told:
        weight_beside(loader, loader, model, val_fn=counting)
    assert (model.recorder.num_calls, len(told)) == (9, 1)


def test_a_validation_before_the_first_step_leaves_a_lazy_model_initialized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(1, dtype=torch.float64))
    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), 1e-3))
    loader = DataLoader(TensorDataset(VALUES), 12)
    loop = mk.MemoryEfficientTrainLoop(trainer, loader, lambda model, x: model(x[0]).square().mean(), progress=False)
    figure = loop.validate(loader)["loss"]
    before = model[0].weight.detach().clone()
    assert figure == pytest.approx(model(VALUES).square().mean().item())
    gradient = torch.autograd.grad(model(VALUES).square().mean(), model[0].weight)[0]
    loop.run()
    torch.testing.assert_close(model[0].weight, before - 1e-3 * gradient)
