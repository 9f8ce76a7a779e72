"""Parameters of optimizers."""

import torch
from torch import nn

from memkit.train.gradients import list_parameters


def test_parameters_are_listed_once_and_frozen_ones_are_not():
    first, second, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    frozen.requires_grad_(False)
    optimizers = [torch.optim.SGD([first, frozen], lr=1.0), torch.optim.SGD([second, first], lr=1.0)]
    listed = list_parameters(optimizers)
    assert [id(parameter) for parameter in listed] == [id(first), id(second)]
