"""Optimizers whose step needs a closure are refused, and the way out is exact."""

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import memkit as mk
from memkit._gradients.closures import refuse_closure
from tests.toys import mean_square


class SAM(Optimizer):
    """Sharpness-aware minimization, in the form of most public copies."""

    def __init__(self, params, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base = SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        (group,) = self.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        for p in group["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM requires closure, but it was not provided"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Raising(SGD):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("a closure")
        return super().step(closure)


class Calling(SAM):
    """Without a check."""

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


class CallingInside(SGD):
    def step(self, closure=None):
        if self.defaults["momentum"] > 1:
            return None
        with torch.enable_grad():
            loss = float(closure())
        super().step()
        return loss


class CallingWrapped(SGD):
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


class Asking(SGD):
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        super().step()
        return loss


class AskingFirst(SGD):
    def step(self, closure=None):
        loss = closure and closure()
        if closure is None:
            return super().step()
        closure()
        return loss


class Replacing(SGD):
    def step(self, closure=None):
        closure = closure or (lambda: None)
        loss = closure()
        super().step()
        return loss


class Nesting(SGD):
    def step(self, closure=None):
        def closure():
            return None

        return super().step(closure)


class Trying(SGD):
    def step(self, closure=None):
        try:
            closure()
        except TypeError:
            closure = None
        return super().step(closure)


class Deferring(SGD):
    def step(self, closure=None):
        run = lambda: closure()  # noqa: E731 - as somebody writes it
        if closure is not None:
            run()
        return super().step()


class Plain(SGD):
    def step(self, closure=None):
        """Step; assert closure is not None, as other optimizers do."""
        if closure is not None:
            raise RuntimeError("no closure")
        return super().step()


def make(kind, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return model, kind(model.parameters(), lr=0.1, **settings)


@pytest.mark.parametrize("kind", [LBFGS, SAM, Raising, Calling, CallingInside, CallingWrapped])
def test_a_step_that_needs_a_closure_is_refused_at_once(kind):
    model, optimizer = make(kind)
    told = rf"{kind.__name__}, whose step\(\) evaluates the loss again through a closure"
    for call in (
        lambda: mk.MemoryEfficientTrainingWrapper(model, optimizer),
        lambda: mk.GradientAccumulator(optimizer),
        lambda: mk.estimate_memory_usage(model, torch.ones(2, 4), loss_fn=mean_square, optimizer=optimizer),
    ):
        with pytest.raises(mk.errors.ConfigError, match=told):
            call()


@pytest.mark.parametrize(
    "kind", [SGD, Adam, Plain, Asking, AskingFirst, Replacing, Nesting, Trying, Deferring, torch.optim.Adagrad]
)
def test_a_step_that_can_do_without_a_closure_is_not(kind):
    _, optimizer = make(kind)
    refuse_closure(optimizer, "call", "instead")
    optimizer.step()


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_way_out_is_exact(by_hand):
    batch, found = torch.randn(8, 4, dtype=torch.float64), []
    for is_split in (False, True):
        model, optimizer = make(SAM, momentum=0.9)
        split = mk.SplitLoss(model, num_microbatches=4)

        def backward(model=model, split=split, is_split=is_split):
            (split(batch, mean_square) if is_split else mean_square(model, batch)).backward()

        for _ in range(2):
            backward()
            if by_hand:
                optimizer.first_step()
                backward()
                optimizer.second_step()
            else:
                optimizer.step(backward)
        found.append(dict(model.state_dict()))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
