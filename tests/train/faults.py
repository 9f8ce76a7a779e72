"""Faults at exact places: an out-of-memory raised by the n-th operator of a step, and models to raise it in."""

from __future__ import annotations

import ctypes

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.toys import out_of_memory


class FailingOperator(TorchDispatchMode):
    """Counts operators and raises an out-of-memory in place of those whose numbers are listed.

    Args:
        *places: Numbers of the operators that fail, counted over all attempts.
    """

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.places = set(places)
        self._counts = (ctypes.c_longlong * 2)()  # which no check puts back, whoever holds this object

    @property
    def num_operators(self):
        return self._counts[0]

    @property
    def num_failures(self):
        return self._counts[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            return func(*args, **(kwargs or {}))  # a view takes no memory
        self._counts[0] += 1
        if self.num_operators in self.places:
            self._counts[1] += 1
            out_of_memory()
        return func(*args, **(kwargs or {}))


class Short(FailingOperator):
    """From one operator on, what takes more than so many elements fails."""

    def __init__(self, place, num_elements):
        super().__init__()
        self._place, self._num_elements = place, num_elements
        self.num_refused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        takes_memory = any(each.alias_info is None and "Tensor" in str(each.type) for each in returns)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = result if isinstance(result, (list, tuple)) else [result]
        is_large = any(each.numel() > self._num_elements for each in tensors if isinstance(each, torch.Tensor))
        if takes_memory and self.num_operators >= self._place and is_large:
            self.num_refused += 1
            out_of_memory()
        return result


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


class ConvNet(nn.Module):
    """Convolution, frozen BatchNorm, dropout, and a counter that each forward changes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.frozen = nn.BatchNorm1d(4).requires_grad_(False).eval()
        self.frozen.running_mean.normal_()
        self.frozen.running_var.uniform_(0.5, 2)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(24, 1)
        self.register_buffer("mean_input", torch.zeros(()))
        self.register_buffer("table", torch.arange(6.0))

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        if self.training:
            self.mean_input.lerp_(x.mean(), 0.1)
        x = self.dropout(torch.relu(self.frozen(self.conv((x + self.table)[:, None]))))
        return self.head(x.flatten(1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x[:, :, None])).mean(1))


MODELS = {"mlp": mlp, "conv": ConvNet, "transformer": Transformer}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
