"""Learning-rate schedules against their formulas, at each step, and after a resume."""

import math

import pytest
import torch

import memkit as mk
from memkit.train.schedules import make_schedule


def rates(decay, num, **settings):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    schedule = make_schedule(optimizer, decay, **settings)
    found = []
    for _ in range(num):
        found += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return found


FORMULAS = {
    "constant": lambda left: 1.0,
    "linear": lambda left: left,
    "cosine": lambda left: (1 + math.cos(math.pi * (1 - left))) / 2,
    "polynomial": lambda left: left**3,
}


@pytest.mark.parametrize("decay", FORMULAS)
def test_each_step(decay):
    settings = {} if decay == "constant" else {"final": 0.05}
    settings |= {"power": 3.0} if decay == "polynomial" else {}
    found = rates(decay, 120, num_steps=100, warmup_steps=10, **settings)
    for step, rate in enumerate(found):
        if step < 10:
            expected = (step + 1) / 11
        else:
            share = FORMULAS[decay](max(0.0, (100 - step) / 90))
            expected = share if decay == "constant" else 0.05 + 0.95 * share
        assert rate == pytest.approx(0.8 * expected, rel=1e-12), step
    assert found[10] == 0.8


def test_a_resumed_schedule_gives_the_same_rates():
    """The second one was made with other numbers: the state has them all, and loads with weights_only."""
    make = lambda **s: make_schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), **s)  # noqa: E731
    first, second = make(num_steps=30, warmup_steps=4), make(decay="linear", num_steps=99)
    for schedule in (first,):
        for _ in range(7):
            schedule.optimizer.step()
            schedule.step()
    second.load_state_dict(first.state_dict())
    for schedule in (first, second):
        schedule.optimizer.step()
        schedule.step()
    assert second.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"decay": "cosin", "num_steps": 3}, "decay='cosin'.*'constant', 'linear', 'cosine', 'polynomial'"),
        ({"num_steps": 3, "warmup_steps": 3}, "fewer than num_steps=3"),
        ({"num_steps": 3, "final": 2.0}, "from 0 to 1"),
        ({"num_steps": 3, "power": 0.0}, "above 0"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(mk.errors.ConfigError, match=text):
        rates(settings.pop("decay", "cosine"), 1, **settings)
