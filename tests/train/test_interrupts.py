"""Ctrl-C at any line of a step: the step is done or undone, nothing is mixed, and the next step and a save work."""

import random
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import memkit as mk
from memkit._machine import random_state
from tests.helpers import is_same
from tests.train.faults import MODELS
from tests.train.interrupts import InterruptedLine

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "nesterov, two groups": lambda p: torch.optim.SGD(
        [{"params": (each := list(p))[:2]}, {"params": each[2:], "lr": 0.02}], lr=0.05, momentum=0.9, nesterov=True
    ),
}
ROWS, PARTS, STEPS = 12, 2, 4
INTERRUPTED = 1  # the step


class Training:
    """A model in training, all of whose state can be compared."""

    def __init__(self, model_name, optimizer_name, *, is_kept=False):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        self.model = MODELS[model_name]()
        self.model.generator = torch.Generator().manual_seed(5)
        self.optimizer = OPTIMIZERS[optimizer_name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.trainer = mk.MemoryEfficientTrainingWrapper(
            self.model, self.optimizer, accumulation_steps=PARTS, max_grad_norm=1.0, scheduler=self.schedule,
            average=self.average, probe=False,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(7)
        self.batches = [
            (torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator)) for _ in range(STEPS)
        ]
        self.is_kept = is_kept

    def step(self, number):
        if not self.is_kept:
            return self.trainer.train_step(self.batches[number], self.loss)
        for attempt in self.trainer.microbatches(self.batches[number]):
            with attempt as micro:
                self.trainer.backward(self.loss(self.model, micro))
        return self.trainer.step()

    def loss(self, model, micro):
        x, y = micro
        noise = torch.randn(x.shape, generator=model.generator) + np.random.normal() + random.random()
        return F.mse_loss(model(x + 0.01 * noise), y)

    def state(self):
        randomness = random_state.capture().state_dict()
        randomness["numpy"] = randomness["numpy"][1:]
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": {
                number: {name: torch.as_tensor(value).clone() for name, value in state.items() if value is not None}
                for number, state in self.optimizer.state_dict()["state"].items()
            },
            "schedule": [group["lr"] for group in self.optimizer.param_groups],
            "average": {name: value.clone() for name, value in self.average.state_dict().items()},
            "random": randomness,
            "generator": self.model.generator.get_state(),
            "modes": [module.training for module in self.model.modules()],
            "gradients": [parameter.grad is None for parameter in self.model.parameters()],
            "num_steps": self.trainer.num_steps,
            "step": "step" in vars(self.optimizer),
            "hooks": [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in self.model.modules()],
        }


@pytest.fixture(scope="module")
def expected():
    """State after each number of steps, without the interrupted one too; by model and optimizer."""
    known = {}

    def find(*names, **settings):
        key = (*names, *settings.items())
        if key not in known:
            states = []
            for left_out in (None, INTERRUPTED):
                training = Training(*names, **settings)
                states.append([])
                for number in range(STEPS):
                    if number != left_out:
                        training.step(number)
                    states[-1].append(training.state())
            known[key] = states
        return known[key]

    return find


def interrupt(names, place, expected, **settings):
    """Interrupt a step at a line; say what is wrong afterwards, and whether the step was done."""
    done, undone = expected(*names, **settings)
    training = Training(*names, **settings)
    for number in range(INTERRUPTED):
        training.step(number)
    line = InterruptedLine(place)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), line.around():
        training.step(INTERRUPTED)
    if training.is_kept:
        training.trainer.discard()  # it may have come between the loop and its step, as docs/wrapper.md says
    wrong = []
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        wrong.append("gradients are off")
    if (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) != handlers:
        signal.signal(signal.SIGINT, handlers[0])
        signal.signal(signal.SIGTERM, handlers[1])
        wrong.append("handlers of signals are others")
    state = training.state()
    is_done = state["num_steps"] == INTERRUPTED + 1
    way = done if is_done else undone
    wrong += [name for name in state if name != "gradients" and not is_same(state[name], way[INTERRUPTED][name])]
    training.trainer.state_dict()  # a save
    for number in range(INTERRUPTED + 1, STEPS):
        training.step(number)
        last = training.state()
        wrong += [f"{name} after step {number}" for name in last if not is_same(last[name], way[number][name])]
    return is_done, [f"{line.where}: {each}" for each in wrong]


def count_lines(names, **settings):
    for _ in range(2):  # the first has lines that a process runs once
        training = Training(*names, **settings)
        for number in range(INTERRUPTED):
            training.step(number)
        with (line := InterruptedLine()).around():
            training.step(INTERRUPTED)
    return line.num_lines


def search(names, places, expected, **settings):
    num_done, num_undone, wrong = 0, 0, []
    for place in places:
        found = interrupt(names, place, expected, **settings)
        num_done, num_undone = num_done + found[0], num_undone + (not found[0])
        wrong += found[1]
    return num_done, num_undone, wrong


@pytest.mark.parametrize("is_kept", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("model_name", "optimizer_name"),
    [("mlp", "adamw"), pytest.param("conv", "nesterov, two groups", marks=pytest.mark.slow)],
)
def test_an_interrupt_at_a_line_of_a_step(model_name, optimizer_name, is_kept, expected):
    """A sample; all lines are in the slow test."""
    names = (model_name, optimizer_name)
    num_lines = count_lines(names, is_kept=is_kept)
    # The last line comes after the step, whose earlier part is nearly all of its lines.
    places = [*random.Random(f"{names} {is_kept}").sample(range(1, num_lines), 20), num_lines]
    num_done, num_undone, wrong = search(names, places, expected, is_kept=is_kept)
    assert wrong == []
    assert num_done > 0
    assert num_undone > 0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_an_interrupt_at_every_line_of_a_step(model_name, optimizer_name, expected):
    names = (model_name, optimizer_name)
    num_done, num_undone, wrong = search(names, range(1, count_lines(names) + 1), expected)
    assert wrong == []
    assert num_done > 20
    assert num_undone > 1000


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def raising_signal(request):
    """A signal whose handler raises KeyboardInterrupt."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(request.param, interrupt)
    yield request.param
    signal.signal(request.param, before)


def test_signal_waits_for_end_of_optimizer_step(raising_signal, expected):
    """The real thing: Python runs a handler between two lines, here before the schedule and the average follow."""
    names = ("mlp", "adamw")
    done, _ = expected(*names)
    training = Training(*names)
    training.step(0)
    handler = signal.getsignal(raising_signal)
    handle = training.optimizer.register_step_post_hook(lambda *_: signal.raise_signal(raising_signal))
    with pytest.raises(KeyboardInterrupt):
        training.step(1)
    handle.remove()
    assert signal.getsignal(raising_signal) is handler
    assert is_same(training.state(), done[1])
    training.step(2)
    assert is_same(training.state(), done[2])


def test_a_signal_in_a_forward_comes_at_once(raising_signal, expected):
    names = ("mlp", "adamw")
    _, undone = expected(*names)
    training = Training(*names)
    training.step(0)
    handle = training.model.register_forward_hook(lambda *_: signal.raise_signal(raising_signal))
    with pytest.raises(KeyboardInterrupt):
        training.step(1)
    handle.remove()
    assert is_same(training.state(), undone[1])
    training.step(2)
    assert is_same(training.state(), undone[2])


def test_negative_control_a_plain_loop_mixes_two_batches():
    """Ctrl-C between backward and step, in a loop that goes on: the next step has the gradients of two batches."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()
    model(torch.ones(1, 1)).sum().backward()  # and here it came
    (model(torch.ones(1, 1)) * 10).sum().backward()
    optimizer.step()
    assert before - model.weight.item() == pytest.approx(11.0)
