"""Numbers that a step draws from Python or NumPy: another draw may take another branch, or another size."""

import queue
import random
import threading
from random import random as bare

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk

OWN = np.random.default_rng(0)


class Net(nn.Module):
    """Runs a part of it only if `is_deep` says so, on the rows that `cut` leaves."""

    def __init__(self, is_deep, cut):
        super().__init__()
        self.first, self.rest = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.is_deep, self.cut = is_deep, cut

    def forward(self, x):
        x = self.first(self.cut(x))
        return x + self.rest(x) if self.is_deep() else x


REPLAY = torch.zeros(8, 64)


def loss_of(model, x):
    return model(x).square().mean()


def whole(x):
    return x


def never():
    return False


DECIDING = {
    "random": (lambda: random.random() < 0.5, whole),
    "randint": (lambda: random.randint(0, 1) == 1, whole),
    "choice of objects": (lambda: random.choice([True, False]), whole),
    "numpy": (lambda: np.random.rand() < 0.5, whole),
    "numpy's choice": (lambda: np.random.choice(["deep", "flat"]) == "deep", whole),
    "an array of one": (lambda: np.random.rand(1)[0] < 0.5, whole),
    "imported before": (lambda: bare() < 0.5, whole),
    "its own generator": (lambda: OWN.random() < 0.5, whole),
    "made in the step": (lambda: np.random.default_rng().random() < 0.5, whole),
    "a size": (never, lambda x: x[: random.randint(1, 8)]),
}
ORDINARY = {
    "a factor": (never, lambda x: x * random.uniform(0.9, 1.1) + np.random.normal()),
    "a mix": (never, lambda x: (share := np.random.beta(1, 1)) * x + (1 - share) * x.flip(0)),
    "noise": (never, lambda x: x + torch.from_numpy(np.random.randn(64).astype(np.float32))),
    "an order": (never, lambda x: x[np.random.permutation(len(x))]),
    "a seed of its own": (never, lambda x: x * np.random.default_rng(0).random()),
    "a sample": (never, lambda x: x[random.sample(range(8), 4)]),
    "choices of tensors": (never, lambda x: x + torch.cat(random.choices(list(REPLAY[:, None]), k=8))),
    "a sample of tensors": (never, lambda x: x + torch.cat(random.sample([REPLAY[:3], REPLAY[3:]], 2))),
}


def estimate_of(is_deep, cut, target="cpu"):
    return mk.estimate_memory_usage(Net(is_deep, cut), torch.zeros(8, 64), loss_of, optimizer="sgd", target=target)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("how", DECIDING)
def test_a_draw_that_may_decide_is_not_known(how, seed):
    random.seed(seed)
    np.random.seed(seed)
    estimate = estimate_of(*DECIDING[how])
    assert estimate.confidence == "guessed"
    verdict = estimate.verdict("1TiB")
    assert verdict == "not known"
    is_followed = how not in {"an array of one", "imported before", "its own generator", "made in the step"}
    assert ("test_draws.py:" in verdict.reason and "a random number" in verdict.reason) is is_followed
    assert ("the step draws from " in verdict.reason) is not is_followed


@pytest.mark.parametrize("how", ORDINARY)
def test_a_draw_that_decides_nothing_does_not_matter(how):
    estimate = estimate_of(*ORDINARY[how])
    assert estimate.doubts == ()
    assert estimate.fits("1TiB")


def test_on_a_card():
    assert "a random number" in estimate_of(*DECIDING["random"], "T4").verdict("T4").reason
    assert estimate_of(*ORDINARY["a factor"], "T4").fits("T4")


def test_a_plan_is_warned_of():
    model = Net(*DECIDING["random"])
    with pytest.warns(mk.errors.MemkitWarning, match=r"may be wrong: .*test_draws\.py:\d+ in .*branches on a random"):
        plan = mk.plan_training(model, torch.zeros(8, 64), loss_of, "sgd", budget="1GiB")
    assert plan.estimate.verdict("1GiB") == "not known"


def test_other_threads_and_later_draws_are_as_ever():
    """The user's generators do not move, and a loader's thread gets plain numbers in the meantime."""
    random.seed(0)
    np.random.seed(0)
    expected = random.random(), np.random.rand()
    random.seed(0)
    np.random.seed(0)
    found = queue.SimpleQueue()  # memkit empties a list again

    def cut(x):
        thread = threading.Thread(target=lambda: found.put(type(random.choice([0.25, 0.5]))))
        thread.start()
        thread.join()
        found.put(type(random.random()))
        return x

    estimate_of(never, cut)
    assert (random.random(), np.random.rand()) == expected
    assert found.get_nowait() is float
    assert found.get_nowait() is not float
    assert random.random.__self__ is random._inst
