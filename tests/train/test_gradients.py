"""The backward without torch.autograd's own Python: same gradients, and whoever overrides torch is still asked."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memkit.train.gradients import list_parameters, run_backward


def loss_and_leaves():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model(torch.randn(5, 3)).pow(2).mean(), list(model.parameters())


def test_gradients_are_those_of_torch_in_the_leaves_that_are_named_and_in_no_other():
    (ours, mine), (theirs, yours) = loss_and_leaves(), loss_and_leaves()
    root = torch.tensor(0.5)
    run_backward(ours, root, mine[:2], retain_graph=True)
    torch.autograd.backward(theirs, root, retain_graph=True, inputs=yours[:2])
    for a, b in zip(mine, yours, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)
    run_backward(ours, root, (), retain_graph=False)  # all leaves, on top
    torch.autograd.backward(theirs, root)
    for a, b in zip(mine, yours, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_function_mode_sees_the_backward():
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    loss, leaves = loss_and_leaves()
    with Watch():
        run_backward(loss, torch.tensor(1.0), leaves, retain_graph=False)
    assert torch.autograd.backward in seen
    assert all(leaf.grad is not None for leaf in leaves)


def test_parameters_are_listed_once_and_frozen_ones_are_not():
    first, second, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    frozen.requires_grad_(False)
    optimizers = [torch.optim.SGD([first, frozen], lr=1.0), torch.optim.SGD([second, first], lr=1.0)]
    listed = list_parameters(optimizers)
    assert [id(parameter) for parameter in listed] == [id(first), id(second)]
