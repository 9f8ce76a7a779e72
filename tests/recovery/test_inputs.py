"""A model or a loss that writes to its batch: nothing stays of trial runs, and no forward runs on a changed batch."""

import abc
import ctypes

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit._recovery.inputs import Contents
from tests.helpers import assert_refused, assert_same, one_in_product
from tests.toys import out_of_memory

WRITES = {
    "in place": lambda x: x.mul_(0.5),
    "through .data": lambda x: x.data.mul_(0.5),
    "another .data": lambda x: setattr(x, "data", x.data * 0.5),
    "by NumPy": lambda x: x.numpy().__imul__(0.5),
    "to an array": lambda x: x.__imul__(0.5),
}


def train(write, *, oom_in=None, before=None, **settings):
    """Three steps of a loss that writes to its batch; in the given one memory runs out after the write."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = (ctypes.c_longlong * 2)()  # which no check puts back: the step, and how often memory ran out

    def loss_fn(model, batch):
        WRITES[write](batch["x"])
        hidden = model[0](torch.as_tensor(batch["x"]))
        if oom_in == state[0] and not state[1]:
            state[1] = 1
            out_of_memory()
        return (model[1:](hidden) - torch.as_tensor(batch["y"])).square().mean()

    draw = np.random.RandomState(0)
    make = np.array if write == "to an array" else torch.tensor
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings) as trainer:
        for step in range(3):
            state[0] = step
            batch = {"x": make(draw.randn(16, 3)), "y": make(draw.randn(16, 1))}
            if before is not None:
                before(model, batch, loss_fn, optimizer)
            trainer.train_step(batch, loss_fn)
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("settings", "write"),
    [
        *(
            ({"accumulation_steps": 4}, write) for write in WRITES if write != "by NumPy"
        ),  # to a tensor: seen by nothing
        *(({"memory": "20KiB"}, write) for write in WRITES),
    ],
    ids=str,
)
def test_checks_and_trials_leave_the_batch_as_it_was(write, settings):
    assert_same(train(write, **settings), train(write), 1e-13)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("step", [0, 2])
def test_a_changed_batch_does_not_run_again(write, step):
    assert_refused(lambda: train(write, oom_in=step), mk.MemkitOutOfMemoryError, "changes the batch in place")


PREDICTIONS = {
    "estimate": lambda model, batch, loss_fn, optimizer: mk.estimate_memory_usage(model, batch, loss_fn=loss_fn),
    "check": lambda model, batch, loss_fn, optimizer: mk.train.check_split(model, batch, loss_fn),
    "measured plan": lambda *args: mk.plan_training(*args, budget="1MiB", measure=True),
}


@pytest.mark.parametrize(
    ("prediction", "write"), one_in_product(2, PREDICTIONS, [each for each in WRITES if each != "by NumPy"])
)
def test_predictions_leave_the_batch_as_it_was(write, prediction):
    make = np.ones if write == "to an array" else lambda shape: torch.ones(shape, dtype=torch.float64)
    batch = {"x": make((16, 3)), "y": make((16, 1))}
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    def loss_fn(model, batch):
        WRITES[write](batch["x"])
        return (model(torch.as_tensor(batch["x"])) - torch.as_tensor(batch["y"])).square().mean()

    PREDICTIONS[prediction](model, batch, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    assert float(batch["x"].min()) == float(batch["x"].max()) == 1.0


@pytest.mark.parametrize("write", WRITES)
def test_evaluation_does_not_run_again_on_a_changed_batch(write):
    batch = np.ones((8, 3)) if write == "to an array" else torch.ones(8, 3, dtype=torch.float64)
    model = nn.Linear(3, 3).double()

    def fn(model, rows):
        WRITES[write](rows)
        if len(rows) == 8:
            out_of_memory()
        return model(torch.as_tensor(rows))

    trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with trainer.evaluation() as evaluate:
        assert_refused(lambda: evaluate(batch, fn), mk.MemkitOutOfMemoryError, "changes the batch in place")


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_contents_tell_of_values_that_change_places(make):
    rows = make(12).reshape(4, 3)
    contents = Contents([rows])
    assert contents.are_same()
    rows[[0, 1]] = rows[[1, 0]]
    assert not contents.are_same()


class Graph:
    """A batch as an object."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("is_made", [False, True])
def test_attributes_that_a_model_sets_in_its_batch_are_set_back(is_made):
    """A metaclass that makes classes of batches, as PyG's, gives them its own module."""
    kind = abc.ABCMeta("MadeGraph", (Graph,), {"__module__": "abc"}) if is_made else Graph

    def train(fails):
        torch.manual_seed(0)
        model, has_failed = nn.Linear(3, 1).double(), (ctypes.c_bool * 1)()

        def loss_fn(model, graph):
            graph.x = graph.x * 2
            if fails and not has_failed[0]:
                has_failed[0] = True
                out_of_memory()
            return model(graph.x).square().mean()

        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        graph = kind(torch.randn(6, 3, dtype=torch.float64))
        before = graph.x
        trainer.train_step(graph, loss_fn)
        assert has_failed[0] == fails
        return [model.weight.detach(), graph.x - 2 * before]

    assert_same(train(fails=True), train(fails=False))


@pytest.mark.parametrize("settings", [{}, {"memory": "100MiB"}, {"accumulation_steps": 2}], ids=str)
def test_lazy_modules_keep_the_sizes_that_a_failed_or_a_trial_run_has_given_them(settings):
    def train(fails):
        torch.manual_seed(0)
        model, has_failed = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)).double(), (ctypes.c_bool * 1)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(6, 3, dtype=torch.float64)

        def loss_fn(model, x):
            loss = model(x).square().mean()
            if fails and len(x) == 6 and not has_failed[0]:
                has_failed[0] = True
                out_of_memory()
            return loss

        with mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings) as trainer:
            for _ in range(2):
                trainer.train_step(x, loss_fn)
        return [each.detach() for each in model.parameters()]

    assert_same(train(fails=True), train(fails=False), 1e-13)
