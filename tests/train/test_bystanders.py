"""Parameters of other optimizers that a loss depends on: told of when they step without a gradient."""

import contextlib
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import memkit as mk


class CenterLoss(nn.Module):
    """A criterion with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))

    def forward(self, x, y):
        return (x - self.centers[y]).square().sum(1).mean()


def hooks():
    return len(_global_optimizer_pre_hooks)


def told_in(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(each.message) for each in caught]


def train(how):
    """Three steps of a model and its criterion; return all parameters."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(5, 4).double(), CenterLoss()
    optimizer, other = SGD(model.parameters(), lr=0.05), SGD(criterion.parameters(), lr=0.5)
    trainer = accumulator = None
    if how.startswith("wrapper"):
        trainer = mk.MemoryEfficientTrainingWrapper(model, [optimizer, other] if how == "wrapper, both" else optimizer)
    elif how == "accumulator":
        accumulator = mk.GradientAccumulator(optimizer)
    for _ in range(3):
        batch = torch.randn(6, 5).double(), torch.randint(3, (6,))
        other.zero_grad()
        if trainer is not None:
            trainer.train_step(batch, lambda model, batch: criterion(model(batch[0]), batch[1]))
        elif accumulator is not None:
            accumulator.backward(criterion(model(batch[0]), batch[1]), count=6)
            accumulator.step()
        else:
            optimizer.zero_grad()
            criterion(model(batch[0]), batch[1]).backward()
            optimizer.step()
        if how != "wrapper, both":
            other.step()
    return [*model.parameters(), *criterion.parameters()]


@pytest.mark.parametrize(
    ("how", "way_out"),
    [
        ("wrapper", "write MemoryEfficientTrainingWrapper(model, [optimizer, other])"),
        ("accumulator", "write GradientAccumulator([optimizer, other])"),
    ],
)
def test_a_criterion_that_gets_no_gradient_is_told_of_once(how, way_out):
    plain, before = train("plain"), hooks()
    found, told = told_in(lambda: train(how))
    assert not torch.allclose(found[-1], plain[-1])  # what it warns of
    [message] = told
    assert "another optimizer (SGD) steps without any gradient, though the loss depends on 1 of its" in message
    assert way_out in message
    gc.collect()
    assert hooks() == before


def test_the_way_out_is_the_plain_loop():
    found, told = told_in(lambda: train("wrapper, both"))
    assert not told
    torch.testing.assert_close(found, train("plain"), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("closes", [False, True])
def test_a_gan_is_not_told_of(closes):
    """The discriminator has a gradient, of its own loss, when it steps."""
    before = hooks()
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    others = SGD(critic.parameters(), lr=0.1)
    trainer = mk.MemoryEfficientTrainingWrapper(generator, SGD(generator.parameters(), lr=0.1))

    def run():
        trainer.train_step(torch.randn(4, 2), lambda model, x: critic(model(x)).mean())
        assert hooks() == before + 1
        if closes:
            trainer.close()
            return
        others.zero_grad()
        critic(torch.randn(4, 3)).mean().backward()
        others.step()

    _, told = told_in(run)
    assert not told
    trainer.close()
    assert hooks() == before


def test_a_parameter_that_no_optimizer_has_is_not_told_of():
    before = hooks()
    scale = nn.Parameter(torch.ones(1))

    def run():
        model, another = nn.Linear(2, 1), nn.Linear(2, 1)
        accumulator = mk.GradientAccumulator(SGD(model.parameters(), lr=0.1))
        accumulator.backward((scale * model(torch.randn(4, 2))).mean(), count=4)
        accumulator.step()
        SGD(another.parameters(), lr=0.1).step()  # without a gradient, but not of this loss

    _, told = told_in(run)
    assert not told
    gc.collect()
    assert hooks() == before  # it goes with the accumulator


def test_split_loss_tells_of_tensors_that_it_cannot_find():
    """Parameters outside of the model are refused at once; a plain tensor in an object may be anything."""
    model, held = nn.Linear(4, 1), {"log_alpha": torch.zeros(1, requires_grad=True)}
    split, other = mk.SplitLoss(model, num_microbatches=2), SGD([held["log_alpha"]], lr=0.1)
    before = hooks()

    def run():
        for _ in range(3):
            split(torch.randn(8, 4), lambda model, x: model(x).mean() + (held["log_alpha"] * x).mean()).backward()
            other.step()

    _, told = told_in(run)
    assert held["log_alpha"].grad is None
    [message] = told
    assert message.startswith("SplitLoss: another optimizer (SGD) steps without any gradient")
    assert "SplitLoss([model, module])" in message
    del run
    split = None
    gc.collect()
    assert hooks() == before


def test_other_hooks_on_all_optimizers_still_run():
    """A batch that becomes a leaf, and is gone by the next step, leaves nothing to watch while torch calls hooks."""
    model, steps = nn.Linear(1, 1), []

    def loss(model, x):
        return model(x.requires_grad_()).mean()

    trainer = mk.MemoryEfficientTrainingWrapper(model, SGD(model.parameters(), lr=0.1))
    trainer.train_step(torch.randn(4, 1), loss)
    with contextlib.ExitStack() as stack:
        for name in "ab":  # after the first one the hooks are gone through
            hook = register_optimizer_step_pre_hook(lambda *_, name=name: steps.append(name))
            stack.callback(hook.remove)
        for _ in range(2):
            trainer.train_step(torch.randn(4, 1), loss)
        other = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        other.step()
    assert steps == ["a", "b"] * 3


def stepping_inside_backward(parameters):
    """Torch's recipe: each parameter has its own optimizer, which a hook steps as soon as the gradient is complete."""
    optimizers = {each: SGD([each], lr=0.1) for each in parameters}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return [each.register_post_accumulate_grad_hook(step) for each in optimizers]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("wrapper", ["'0.bias'", "'0.weight'"]),
        ("accumulator", ["a tensor of shape (3,)", "a tensor of shape (3, 2)"]),
    ],
)
def test_optimizers_that_step_in_hooks_are_told_of_once(how, names):
    """No backward reaches their parameters, so that nothing calls these hooks."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    stepping_inside_backward(model[0].parameters())
    optimizer, before = SGD(model[1].parameters(), lr=0.1), model[0].weight.detach().clone()

    def run():
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer) if how == "wrapper" else None
        accumulator = mk.GradientAccumulator(optimizer)
        for _ in range(3):
            if trainer is not None:
                trainer.train_step(torch.randn(4, 2), lambda model, x: model(x).mean())
            else:
                accumulator.backward(model(torch.randn(4, 2)).mean(), count=4)
                accumulator.step()

    _, told = told_in(run)
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)  # what it warns of
    [message] = told
    assert "hooks on tensors that the loss depends on are never called here" in message
    assert all(each in message for each in names)
    assert "[optimizer, other])" in message
    assert "memkit.train.step_in_backward([optimizer, other])" in message


def test_a_hook_on_an_input_is_told_of():
    model, x, seen = nn.Linear(2, 1), torch.randn(4, 2, requires_grad=True), []
    x.register_hook(seen.append)
    accumulator = mk.GradientAccumulator(SGD(model.parameters(), lr=0.1))
    _, told = told_in(lambda: accumulator.backward(model(x).mean(), count=4))
    [message] = told
    assert not seen
    assert "they are on a tensor of shape (4, 2)" in message


def test_a_gan_whose_other_network_clamps_its_gradients_is_not_told_of():
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    for each in critic.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-1, 1))
    trainer = mk.MemoryEfficientTrainingWrapper(generator, SGD(generator.parameters(), lr=0.1))
    _, told = told_in(lambda: trainer.train_step(torch.randn(4, 2), lambda model, x: critic(model(x)).mean()))
    assert not told
