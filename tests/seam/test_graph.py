"""Backwards without torch's checks of each leaf: the same gradients, and torch's own path where its checks matter."""

import pytest
import torch
from torch import nn

from memkit._torch.graph import accumulate_gradients, gradients_of
from tests.helpers import FunctionsEntered
from tests.versions import lacks


def net(num_layers=3):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))).double()
    return model, list(model.parameters()), torch.randn(5, 4, dtype=torch.float64)


class Logged(torch.Tensor):
    """A subclass that sees torch's functions."""

    calls: list[object] = []  # noqa: RUF012 - of the class

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("slope", [None, 3.0])
def test_adds_what_torch_adds_to_the_leaves_alone(slope):
    model, parameters, x = net()
    leaves, others = parameters[2:], parameters[:2]
    root = None if slope is None else torch.tensor(slope, dtype=torch.float64)
    for _ in range(2):  # the second adds to the first
        torch.autograd.backward(model(x).square().mean(), root, inputs=leaves)
    wanted = [each.grad for each in leaves]
    model.zero_grad()
    for _ in range(2):
        accumulate_gradients(model(x).square().mean(), root, leaves)
    assert all(map(torch.equal, [each.grad for each in leaves], wanted))
    assert all(each.grad is None for each in others)


def test_a_graph_can_be_retained_and_is_freed_otherwise():
    model, parameters, x = net()
    loss = model(x).square().mean()
    accumulate_gradients(loss, None, parameters, retain_graph=True)
    accumulate_gradients(loss, None, parameters)
    with pytest.raises(RuntimeError, match="second time"):
        accumulate_gradients(loss, None, parameters)


def test_a_loss_without_a_graph_is_refused_as_torch_does():
    _, parameters, x = net()
    with pytest.raises(RuntimeError, match="does not require grad"):
        accumulate_gradients(x.sum(), None, parameters)


def test_refuses_within_a_transform():
    model, parameters, x = net()
    loss = model(x).square().mean()

    def inside(value):
        accumulate_gradients(loss, None, parameters)
        return value

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.vmap(inside)(torch.ones(2))


def test_a_subclass_sees_both_calls():
    model, parameters, x = net()
    torch.autograd.backward(model(x).mean().as_subclass(Logged))
    if torch.autograd.backward not in Logged.calls:
        pytest.skip(lacks("torch.autograd.backward that subclasses see", "the test is about it"))
    Logged.calls.clear()
    accumulate_gradients(model(x).square().mean().as_subclass(Logged), None, parameters)
    gradients_of([model(x).as_subclass(Logged)], [torch.ones(5, 4, dtype=torch.float64)], parameters)
    assert {torch.autograd.backward, torch.autograd.grad} <= set(Logged.calls)


def test_gradients_are_those_of_torch_and_none_where_unused():
    model, parameters, x = net()
    unused = torch.ones(3, requires_grad=True)
    results = [model(x), model[0](x)]
    slopes = [torch.randn_like(each) for each in results]
    wanted = torch.autograd.grad(results, [*parameters, unused], slopes, allow_unused=True, retain_graph=True)
    found = gradients_of(results, slopes, [*parameters, unused])
    assert found[-1] is None
    assert all(map(torch.equal, found[:-1], wanted[:-1]))
    with pytest.raises(RuntimeError, match="second time"):  # its graph is freed
        gradients_of(results, slopes, parameters)


def test_a_slope_of_another_shape_is_refused():
    model, parameters, x = net()
    with pytest.raises(RuntimeError, match="shape"):
        gradients_of([model(x)], [torch.ones(5, 3, dtype=torch.float64)], parameters)


def test_takes_no_step_of_python_for_each_leaf():
    counts = []
    for num_layers in (2, 50):
        model, parameters, x = net(num_layers)
        loss, result = model(x).square().mean(), model(x)
        with FunctionsEntered() as entered:
            accumulate_gradients(loss, None, parameters)
            gradients_of([result], [torch.ones_like(result)], parameters)
        counts.append(len(entered.all))
    assert counts[0] == counts[1] <= 20
