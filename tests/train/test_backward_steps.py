"""Stepping inside backward: bit-identical, without the gradients' memory, and refused where it is not exact."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import memkit as mk
from memkit.memory.census import take_census
from memkit.train.backward_steps import step_in_backward
from memkit.train.parameterwise import materialize_state
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same

KINDS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
}


class Tied(nn.Module):
    """One matrix used at both ends, as in language models, and a layer that only odd batches use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, odd):
        h = torch.tanh(self.hidden(self.embed(x)))
        return (self.sometimes(h) if odd else h) @ self.embed.weight.T


def train(kind, in_backward):
    torch.manual_seed(0)
    model = Tied()
    decayed, others = [model.embed.weight, model.hidden.weight], [model.hidden.bias, *model.sometimes.parameters()]
    optimizer = KINDS[kind]([{"params": decayed}, {"params": others, "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(None))

    def loop():
        for number in range(4):
            x = torch.arange(number, number + 6)
            nn.functional.cross_entropy(model(x, number % 2), x).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    if in_backward:
        with step_in_backward(optimizer):
            loop()
    else:
        loop()
    assert len(calls) == 4
    return list(model.state_dict().values()), optimizer.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_is_bit_identical_to_stepping_after_backward(kind):
    assert_same(train(kind, in_backward=True), train(kind, in_backward=False))


def test_the_gradients_are_never_there_all_at_once():
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    materialize_state(optimizer)
    x = torch.randn(2, 300)

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    all_gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert trace_allocations(step).peak >= all_gradients
    with step_in_backward(optimizer):
        assert trace_allocations(step).peak < 0.4 * all_gradients


def test_rejects_inexact_cases():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with step_in_backward(optimizer):
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(mk.errors.StateError, match=r"gradient that backward has stepped with.*no accumulation"):
            model(torch.ones(1, 3)).sum().backward()
        for make in (mk.GradientAccumulator, lambda each: mk.MemoryEfficientTrainingWrapper(model, each)):
            with pytest.raises(mk.errors.ConfigError, match="step_in_backward"):
                make(optimizer)
    assert model.weight.grad is None
    accumulator = mk.GradientAccumulator(optimizer)
    with step_in_backward(optimizer), pytest.raises(mk.errors.ConfigError, match="outside of step_in_backward"):
        accumulator.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(mk.errors.ConfigError, match="LBFGS"), step_in_backward(torch.optim.LBFGS(model.parameters())):
        pass


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_for_adversarial_inputs_does_not_step(set_to_none):
    """Scripts zero its gradients; the parameters would have been stepped with them."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(x):
        model(x).square().mean().backward()

    with step_in_backward(optimizer):
        for _ in range(2):  # way out: no gradient of the parameters
            x = torch.ones(4, 3, requires_grad=True)
            model.requires_grad_(requires_grad=False)
            backward(x)
            model.requires_grad_(requires_grad=True)
            backward(x.detach() + x.grad.sign())
            optimizer.step()
        backward(torch.ones(4, 3))
        if set_to_none:
            optimizer.zero_grad()
        before = model.weight.detach().clone()
        message = "second backward through parameters that" if set_to_none else "gradient that backward has stepped"
        with pytest.raises(mk.errors.StateError, match=message):
            backward(torch.ones(4, 3))
        assert_same(model.weight.detach(), before)


def test_a_parameter_that_autograd_calls_without_a_gradient_is_not_stepped():
    """As the bias before a fixed kernel in the double backward of StyleGAN2's path lengths."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bias = nn.Conv2d(2, 1, 3, padding=1), nn.Parameter(torch.zeros(1))

        def forward(self, z):
            return nn.functional.conv2d(self.conv(z).tanh() + self.bias, torch.ones(1, 1, 3, 3))

    def path_length(model, z):
        z = z.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        return gradient.square().mean()

    torch.manual_seed(0)
    plain, z = Net(), torch.randn(2, 2, 8, 8)
    model = copy.deepcopy(plain)
    for net, is_stepped in ((plain, False), (model, True)):
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
        with step_in_backward(optimizer) if is_stepped else contextlib.nullcontext():
            path_length(net, z).backward()
            optimizer.step()
    assert_same(list(model.parameters()), list(plain.parameters()))


def test_users_of_gradients_raise_after_the_step():
    """Neither a silent norm of zero nor torch's assertion that no infinity check was recorded."""

    def gradient_bytes():
        return take_census(torch.device("cpu"), 0).by_category.get("gradient", 0)

    before = gradient_bytes()  # of other tests
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with step_in_backward(optimizer):
        model(torch.ones(1, 3)).sum().backward()
        for foreach in (True, False):
            with pytest.raises(mk.errors.StateError, match="no clipping by the total norm"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        assert_refused(lambda: scaler.step(optimizer), mk.errors.StateError, "no loss scaler")
        assert gradient_bytes() <= before
        optimizer.zero_grad()
        assert model.weight.grad is None


def test_parameters_are_stepped_by_one_optimizer_in_one_context():
    model = nn.Linear(3, 1)
    first, second = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())
    with step_in_backward(first):
        for again in (first, second):
            with pytest.raises(mk.errors.ConfigError, match="already inside step_in_backward"), step_in_backward(again):
                pass
    with (
        pytest.raises(mk.errors.ConfigError, match="already inside step_in_backward"),
        step_in_backward([first, second]),
    ):
        pass
    assert not model.weight._post_accumulate_grad_hooks


def test_names_unstepped_parameter_without_stepping_twice():
    """Unfrozen in the block it has no hook: its gradient would add up from step to step."""
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with step_in_backward(optimizer):
        model.bias.requires_grad_(True)
        model(torch.ones(1, 3)).sum().backward()
        assert_refused(lambda: optimizer.step(), mk.errors.StateError, "unfrozen, added, or given a gradient by hand")
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "read", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.sum], ids=lambda read: read.__name__
)
def test_a_freed_gradient_cannot_be_read(read):
    model = nn.Linear(2, 1)
    with step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1)):
        model(torch.ones(1, 2)).sum().backward()
        assert_refused(lambda: getattr(model.weight.grad, read.__name__)(), mk.errors.StateError, "atomic_steps")
