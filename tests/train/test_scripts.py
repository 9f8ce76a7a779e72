"""TorchScript in blocks that run again in backward: the gradients of the plain model, from the first step on."""

import pytest
import torch
from torch import nn

import memkit as mk
from memkit._recovery import replay
from tests.helpers import assert_refused

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:`torch.jit")


def blocks():
    """Blocks with a scripted function at the end, in the middle, and a scripted module; none has run before."""

    def activation(x: torch.Tensor, weight: torch.Tensor):
        y = x * 0.5 * (1 + torch.erf(x / 1.4142))
        y = torch.tanh(y) * weight + torch.sigmoid(y)
        return y.sin() * y

    scripted = torch.jit.script(activation)

    class Block(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.first, self.weight, self.last = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), last

        def forward(self, x):
            return self.last(scripted(self.first(x), self.weight))

    module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.3), nn.Linear(4, 4)))
    return nn.Sequential(Block(nn.Identity()), Block(nn.Linear(4, 4)), Block(module), nn.Linear(4, 1)).double()


def gradients(model, steps=4):
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(8, 4, dtype=torch.float64)).square().sum().backward()
        found.append([each.grad.clone() for each in model.parameters()])
    return found


@pytest.mark.parametrize(
    "choice", ["auto", {"[012]": "selective"}, {"[012]": "offload"}, {"0": "selective", "1": "offload", "2": "full"}]
)
def test_gradients_are_the_plain_models(choice):
    torch.manual_seed(0)
    model = blocks()
    with mk.Checkpointing(model, choice):
        found = gradients(model)
    torch.testing.assert_close(found, gradients(model), rtol=1e-12, atol=1e-14)


def test_through_the_wrapper():
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mk.MemoryEfficientTrainingWrapper(model, optimizer, checkpoint=["[012]"]) as trainer:
        for _ in range(3):
            batch = torch.randn(8, 4, dtype=torch.float64)
            assert trainer.train_step(batch, lambda model, x: model(x).square().mean()).stepped


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("early_stop_through_handlers", RuntimeError, "TorchScript interpreter"),
        ("as_written", torch.utils.checkpoint.CheckpointError, "different metadata"),
    ],
)
def test_negative_control(name, error, words, monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(replay, name, nullcontext)
    model = blocks()
    with mk.Checkpointing(model, "auto"):
        assert_refused(lambda: gradients(model), error, words)


def test_an_error_of_the_script_itself_is_let_through():
    @torch.jit.script
    def fails(x: torch.Tensor, limit: int):
        if x.size(0) > limit:
            raise ValueError("too long")
        return x.sin()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.limit = nn.Linear(4, 4), 8

        def forward(self, x):
            return fails(self.layer(x), self.limit)

    model = nn.Sequential(Block(), Block())
    with mk.Checkpointing(model, ["*"]):
        out = model(torch.randn(8, 4))
        for block in model:
            block.__dict__["limit"] = 0
        assert_refused(lambda: out.sum().backward(), (RuntimeError, torch.jit.Error), "")
