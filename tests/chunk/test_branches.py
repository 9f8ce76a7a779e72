"""Modules that branch in Python on values of their input: tiles decide alike, or the call is refused."""

import pytest
import torch
from torch import nn

from memkit import tiled_apply
from memkit.errors import InputError
from tests.helpers import assert_refused

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Branching(nn.Module):
    """Two convolutions after a function of the input."""

    def __init__(self, before):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.is_bright = before, False
        self.register_buffer("limit", torch.tensor(3.0))
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1)).double()

    def forward(self, x):
        return self.net(self.before(self, x))


def image(bright=255.0):
    torch.manual_seed(1)
    x = torch.rand(1, 1, 40, 40, dtype=torch.float64)
    x[..., 30:, 30:] *= bright
    return x


def filled(net, x):
    bright = x > 1
    if bright.any():
        x = torch.where(bright, x.log(), x)
    return x


def checked(net, x):
    assert x.shape[1] == 1
    assert not x.max() > 1000
    if x.min().item() < -100:
        raise ValueError("too small")
    return x / 255 if net.limit > 1 else x


DECIDING = {
    "maximum": lambda net, x: x / 255 if x.max() > 1 else x,
    "any": lambda net, x: x * 2 if (x.abs() > 2.5).any() else x,
    "number": lambda net, x: x / 255 if x.amax().item() > 1 else x,
    "all": lambda net, x: x if torch.all(x < 1) else x / 255,
    "equal": lambda net, x: x if torch.equal(x, x.clamp(max=1)) else x / 255,
}
HARMLESS = {
    "left out where nothing is to do": filled,
    "checks": checked,
    "clamped": lambda net, x: x.clamp(max=1) if x.max() > 1 else x,
    "an attribute": lambda net, x: x / 255 if net.is_bright else x,
}


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("way", DECIDING)
def test_tiles_that_decide_differently_are_refused(way, is_trained):
    net, x = Branching(DECIDING[way]), image()
    with torch.set_grad_enabled(is_trained):
        assert_refused(lambda: tiled_apply(net, x, 16), InputError, r"module\.is_bright = bool\(x\.max\(\) > 1\)")
        dark = image(bright=1.0)
        torch.testing.assert_close(tiled_apply(net, dark, 16), net(dark), **CLOSE)  # all tiles decide as the whole


@pytest.mark.parametrize("way", HARMLESS)
def test_what_decides_nothing_is_not_refused(way):
    net, x = Branching(HARMLESS[way]), image()
    net.is_bright = bool(x.max() > 1)
    y = tiled_apply(net, x, 16)
    torch.testing.assert_close(y, net(x), **CLOSE)
    found, right = (torch.autograd.grad(each.square().sum(), list(net.net.parameters())) for each in (y, net(x)))
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
