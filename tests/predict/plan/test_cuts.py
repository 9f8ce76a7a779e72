"""Plans for what waits for backward: against every choice there is, against forwards that ran, and their refusals."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit._tape.notes import OperatorNote, ValueNote
from memkit.predict.plan.cuts import Recomputations
from memkit.predict.plan.host import HostTimes
from memkit.train.saved_tensors import treat_saved_tensors
from tests.allocations import count_flops, trace_allocations
from tests.helpers import assert_same, one_in


def mean_square(model, x):
    return model(x).square().mean()


class Encoder(nn.Module):
    """Layers with dropout in attention and behind it."""

    def __init__(self, dropout):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


def convolutions():
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


MODELS = {
    "encoder": (lambda: Encoder(0.1), (8, 64, 64)),
    "fused attention": (lambda: Encoder(0.0), (8, 64, 64)),
    "convolutions": (convolutions, (4, 8, 16, 16)),
}


# ------------------------------------------------------------------------------------------------ every choice there is


def forward_of(seed, num_operators=9):
    """A forward of random operators: with several results, in place, random ones, and some that must not run again."""
    draw = random.Random(seed)
    operators, values = [], []
    for number in range(num_operators):
        note = OperatorNote("", 0.0, draw.choice([0, 0, 3, 8]), draw.random() < 0.9, draw.random() < 0.2)
        note.sources = draw.sample(values, min(len(values), draw.randint(1, 2)))
        operators.append(note)
        if note.sources and draw.random() < 0.2:
            note.changes = [note.sources[0]]
            note.sources[0].makers.append(number)
        else:
            for _ in range(draw.randint(1, 2)):
                value = ValueNote(len(values), draw.randint(1, 30), [number], is_saved=draw.random() < 0.6)
                values.append(value)
                note.makes.append(value)
    return Recomputations(operators, values, 2, [10 * each.flops + draw.randint(1, 3) for each in operators])


def can_run(found, again):
    operators = [found.operators[number] for number in again]
    return all(each.repeats and all(again.issuperset(value.makers) for value in each.changes) for each in operators)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_all_costs_less(seed):
    found = forward_of(seed)
    numbers = range(len(found.operators))
    choices = [frozenset(each) for size in range(len(numbers) + 1) for each in itertools.combinations(numbers, size)]
    choices = [each for each in choices if can_run(found, each)]
    points = {(found.waiting_bytes(each), found.cost(each)) for each in choices}
    assert len(points) > 1
    assert found.least_bytes == min(points)[0]
    assert found.within(found.least_bytes - 1) is None
    for budget in {waiting for waiting, _ in points}:
        again = found.within(budget)
        assert can_run(found, again)
        assert found.waiting_bytes(again) <= budget
        assert found.cost(again) == min(cost for waiting, cost in points if waiting <= budget)


# ---------------------------------------------------------------------------------------------------- forwards that ran


def run_step(model, x, plan):
    """Bytes that wait after a forward, FLOPs of a step, and the gradients."""
    losses = []

    def forward():
        with treat_saved_tensors(plan):
            losses.append(mean_square(model, x))

    def step():
        forward()
        losses.pop().backward()

    torch.manual_seed(0)
    before = copy.deepcopy(model.state_dict())
    waiting_bytes = int(trace_allocations(forward).live[-1]) - losses.pop().nbytes
    flops = count_flops(step)
    model.load_state_dict(before)
    model.zero_grad()
    torch.manual_seed(1)
    step()
    return waiting_bytes, flops, [each.grad for each in model.parameters()] + [each.clone() for each in model.buffers()]


@pytest.mark.parametrize(
    "share", [pytest.param(0.7, marks=pytest.mark.slow), 0.4, pytest.param(0.15, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_forward_saves_the_planned_bytes_and_flops(name, share):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plan = mk.plan_training(model, x, mean_square, "sgd", activation_budget=share).saved_tensors
    whole_bytes, plain_flops, wanted = run_step(copy.deepcopy(model), x, None)
    waiting_bytes, flops, found = run_step(copy.deepcopy(model), x, plan)
    assert plan.saved_bytes == whole_bytes
    assert plan.waiting_bytes == waiting_bytes <= share * whole_bytes
    assert plan.recomputed_flops == flops - plain_flops
    assert plan.offloaded_bytes == 0
    assert_same(found, wanted)


@pytest.mark.slow
def test_recomputes_only_cheap_operators_if_sufficient():
    """Half of an encoder's saved bytes are results without FLOPs; a plan for time and peak runs products again, too."""
    model, x = Encoder(0.1), torch.randn(8, 64, 64)
    half = mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.5)
    by_peak = mk.plan_training(
        model, x, mean_square, "sgd", budget=half.required_bytes, micro_batch_size=8, treat="tensors"
    )
    assert half.saved_tensors.recomputed_flops == 0 <= by_peak.saved_tensors.recomputed_flops
    forward_flops = count_flops(lambda: mean_square(model, x))
    tenth = mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.1).saved_tensors
    assert 0 < tenth.recomputed_flops < forward_flops


@pytest.mark.slow
def test_the_plan_does_not_depend_on_measured_times(monkeypatch):
    model, x = Encoder(0.1), torch.randn(8, 64, 64)
    plans = []
    for seed in range(2):
        draw = random.Random(seed)
        monkeypatch.setattr(HostTimes, "seconds", lambda *_, draw=draw: draw.random())
        plans.append(mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.3).saved_tensors)
    assert plans[0] == plans[1]


def test_attention_without_dropout_keeps_no_random_state():
    model, x = Encoder(0.0), torch.randn(8, 64, 64)
    plan = mk.plan_training(model, x, mean_square, "sgd", activation_budget=0.1).saved_tensors
    again = {plan.operators[number] for number in plan.recomputed}
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in again
    assert plan.num_random == 0


def test_micro_batches_and_a_wrapper():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()), torch.randn(512, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"activation_budget": 0.5, "micro_batch_size": 128}
    with mk.prepare(model, optimizer, x, mean_square, **settings) as trainer:
        assert trainer.plan.accumulation_steps == 4
        assert trainer.plan.saved_tensors.saved_bytes < 128 * 4 * (256 + 256 + 64 + 64 + 64)
        trainer.train_step(x, mean_square)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"activation_budget": "1KiB"},
            ConfigError,
            r"leaves at least .* for its backward.*pass activation_budget='\d+B'",
        ),
        ({"activation_budget": 0.5, "treat": "blocks"}, ConfigError, "leave treat='blocks' out"),
        ({"activation_budget": 0.5, "curve": True}, ConfigError, "leave curve=True out"),
        ({"activation_budget": 0.5, "budget": "1MiB"}, ConfigError, "a plan that needs at most 1.00 MiB"),
        ({"activation_memory_budget": 0.5}, TypeError, r"activation_budget=0\.5"),
    ],
)
def test_refusals(settings, error, message):
    with pytest.raises(error, match=message):
        mk.plan_training(Encoder(0.1), torch.randn(8, 64, 64), mean_square, "sgd", **settings)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (1.5, ConfigError, r"a fraction in \(0, 1\]"),
        (0, ConfigError, "a size above zero"),
        ("half", InputError, "a number and a unit"),
        (True, InputTypeError, "bytes as an int, or text with a unit"),
    ],
)
def test_a_wrong_budget_is_refused_before_the_step_runs(budget, error, message):
    def never(model, batch):
        raise AssertionError

    with pytest.raises(error, match=message):
        mk.plan_training(Encoder(0.1), torch.randn(8, 64, 64), never, "sgd", activation_budget=budget)


def test_a_loader_is_refused():
    batches = torch.utils.data.DataLoader(torch.randn(16, 64, 64), batch_size=8)
    with pytest.raises(ConfigError, match="find_worst_batch"):
        mk.plan_training(Encoder(0.1), batches, mean_square, "sgd", activation_budget=0.5)
