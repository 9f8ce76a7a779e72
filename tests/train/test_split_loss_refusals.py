"""SplitLoss refuses anything that would lose or misweigh a gradient, at any batch, and invalid arguments."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from tests.helpers import assert_refused, assert_same
from tests.toys import square_error

X, Y = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 24, torch.ones(8, 1, dtype=torch.float64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_parameter_of_another_module_is_found_at_any_batch(model, num_before):
    split, criterion = mk.SplitLoss(model, num_microbatches=2), nn.Linear(1, 1).double()
    for _ in range(num_before):
        split((X, Y), square_error).backward()
    with pytest.raises(mk.errors.InputError, match=r"SplitLoss\(\[model, criterion\]\)"):
        split((X, Y), lambda model, batch: F.mse_loss(criterion(model(batch[0])), batch[1]))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_rejects_batch_requiring_gradient(model, num_microbatches):
    split = mk.SplitLoss(model, num_microbatches=num_microbatches)
    x = X.clone().requires_grad_()
    with pytest.raises(mk.errors.InputError, match=r"a tensor of the batch, of shape \(8, 3\).*detach\(\)"):
        split((x, Y), square_error)
    split((x, Y), lambda model, batch: square_error(model, (batch[0].detach(), batch[1]))).backward()

    def forces(model, batch):  # asks for its own
        (slope,) = torch.autograd.grad(model(batch[0].requires_grad_()).sum(), batch[0], create_graph=True)
        return slope.square().mean()

    split((X.clone(), Y), forces).backward()


class Sac:
    def __init__(self):
        self.log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def loss(self, model, batch):
        return square_error(model, batch) * self.log_alpha.exp()


def test_names_trainable_tensor_in_loss_function(model):
    log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def loss(model, batch, alpha=None):
        return square_error(model, batch) * (log_alpha if alpha is None else alpha).exp()

    split = mk.SplitLoss(model, num_microbatches=2, probe=False)
    for fn, name in ((loss, "log_alpha"), (functools.partial(loss), "log_alpha"), (Sac().loss, "self.log_alpha")):
        with pytest.raises(
            mk.errors.InputError, match=rf"`{name}` in loss_fn, of shape \(1,\).*nn.Parameter of a module"
        ):
            split((X, Y), fn)
    split((X, Y), functools.partial(loss, alpha=log_alpha.detach())).backward()
    assert model.weight.grad is not None
    assert log_alpha.grad is None


def test_loss_function_may_have_unset_names_and_keep_its_batch(model):
    def loss(model, batch):
        return later if batch is None else square_error(model, batch)

    if model is None:
        later = 1.0

    class Forces:
        def loss(self, model, batch):
            self.x = batch[0].clone().requires_grad_()
            return torch.autograd.grad(model(self.x).sum(), self.x, create_graph=True)[0].square().mean()

    split = mk.SplitLoss(model, num_microbatches=2, probe=False)
    split((X, Y), loss).backward()
    (expected,) = torch.autograd.grad(square_error(model, (X, Y)), model.weight)
    assert_same(model.weight.grad, expected, 1e-14)
    split((X, Y), (forces := Forces()).loss).backward()
    split((X, Y), forces.loss).backward()
    assert len(forces.x) == 4


def test_many_modules_in_a_loss_function_are_not_walked_through(model, monkeypatch):
    criteria = nn.ModuleList(nn.Linear(1, 1).double() for _ in range(9))
    split = mk.SplitLoss(model, probe=False)
    monkeypatch.setattr(criteria, "named_parameters", None)
    split((X, Y), lambda model, batch: square_error(model, batch) + len(criteria)).backward()
    assert model.weight.grad is not None


def test_rejects_parts_with_mixed_counts(model):
    with pytest.raises(mk.errors.InputError, match="a count for some parts"):
        mk.SplitLoss(model, num_microbatches=2, probe=False)(
            (X, Y), lambda m, b: mk.Loss(sum=square_error(m, b), count=4) if b[0][0, 0] > 0 else square_error(m, b)
        )


def test_rejects_mean_among_additive_losses(model):
    split = mk.SplitLoss(model, num_microbatches=2, reduction="sum", probe=False)
    with pytest.raises(mk.errors.InputError, match=r"reduction='sum'.*mk.Loss\(mean=...\) without its count"):
        split((X, Y), lambda m, b: mk.Loss(mean=square_error(m, b)))
    split((X, Y), lambda m, b: mk.Loss(mean=square_error(m, b), count=len(b[0]))).backward()


def test_the_way_out_for_a_gradient_of_the_batch_works_again_and_again(model):
    def loss_fn(m, batch, detached):
        x = batch[0].detach().requires_grad_() if detached else batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return square_error(m, (x, batch[1])) + slope.square().sum(1).mean()

    split, batch = mk.SplitLoss(model, num_microbatches=1), (X.clone(), Y)
    for _ in range(2):
        plain = torch.autograd.grad(loss_fn(model, batch, True), list(model.parameters()), allow_unused=True)
        model.zero_grad()
        split(batch, lambda m, b: loss_fn(m, b, True)).backward()
        torch.testing.assert_close([each.grad for each in model.parameters()], list(plain))
    batch[0].requires_grad_()
    with pytest.raises(mk.errors.InputError, match=r"write x = x.detach\(\).requires_grad_\(\) inside loss_fn"):
        mk.SplitLoss(model, num_microbatches=1)(batch, lambda m, b: loss_fn(m, b, False))


def test_trainable_set_may_change_but_not_be_empty(model):
    split = mk.SplitLoss(nn.Sequential(model, nn.Linear(1, 1).double()), num_microbatches=2, probe=False)
    model.requires_grad_(False)
    split((X, Y), square_error).backward()
    assert model.weight.grad is None
    split._own.requires_grad_(False)
    with pytest.raises(mk.errors.InputError, match=r"without any parameter that requires a gradient.*unfreeze"):
        split((X, Y), square_error)


@pytest.mark.parametrize("wrong", [None, [], "net", nn.Linear(3, 1).parameters(), [torch.ones(3)], F.mse_loss])
def test_rejects_non_modules(wrong):
    assert_refused(lambda: mk.SplitLoss(wrong), mk.errors.InputTypeError, r"SplitLoss\(model\).*pass the module")


def test_zero_count_gives_zero_loss(model):
    split = mk.SplitLoss(model, num_microbatches=2)
    with torch.no_grad():
        assert split((X, Y), lambda m, b: mk.Loss(sum=square_error(m, b), count=0)).item() == 0
    loss = split((X, Y), lambda m, b: mk.Loss(mean=square_error(m, b), count=0))
    loss.backward()
    assert loss.item() == 0
    assert model.weight.grad.abs().max() == 0


@pytest.mark.parametrize("scale", [0, 0.0, -2.0, float("nan")])
def test_rejects_invalid_scale(model, scale):
    with pytest.raises(mk.errors.ConfigError, match=r"scale=.*above 0"):
        mk.SplitLoss(model)((X, Y), square_error, scale=scale)


def test_rejects_non_functions_before_running(model):
    with pytest.raises(mk.errors.InputTypeError, match=r"loss_fn=.*got a Tensor; expected a function"):
        mk.SplitLoss(model)((X, Y), square_error(model, (X, Y)))
    with pytest.raises(mk.errors.InputTypeError, match=r"SplitLoss\(split_fn=.*got a str"):
        mk.SplitLoss(model, split_fn="rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mk.errors.InputTypeError, match=r"split_fn=.*got a str"):
        mk.MemoryEfficientTrainingWrapper(model, optimizer, split_fn="rows")
    with pytest.raises(mk.errors.InputTypeError, match=r"train_step\(loss_fn=.*got a NoneType"):
        mk.MemoryEfficientTrainingWrapper(model, optimizer).train_step((X, Y), None)


def summed_rows(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1], reduction="sum")


def weight_penalty(model):
    return 1e-2 * model.weight.square().sum()


def split_loss_gradient(model, batch, loss_fn, **settings):
    mk.SplitLoss(model, num_microbatches=2, **settings)(batch, loss_fn).backward()
    return model.weight.grad


def train_step_gradient(model, batch, loss_fn):
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mk.MemoryEfficientTrainingWrapper(
        model, optimizer, accumulation_steps=2, on_gradients=lambda model: seen.append(model.weight.grad.clone())
    ).train_step(batch, loss_fn)
    return seen[0]


@pytest.mark.parametrize(
    "gradient_of",
    [split_loss_gradient, functools.partial(split_loss_gradient, reduction="sum"), train_step_gradient],
    ids=["SplitLoss", "SplitLoss, sum", "train_step"],
)
def test_a_penalty_on_the_weights_added_to_a_sum_has_a_way_out(gradient_of):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    batch = torch.randn(8, 4).double(), torch.randint(2, (8,)).double()
    num_rows = len(batch[0])
    total = summed_rows(model, batch) + weight_penalty(model)
    expected = torch.autograd.grad(total, model.weight)[0]
    way_out = re.escape("mk.Loss(sum=total * num_rows + penalty * n, count=n)")
    with pytest.raises(mk.errors.ConfigError, match=f"penalty on the weights to a sum over n rows, return {way_out}"):
        gradient_of(model, batch, lambda model, part: summed_rows(model, part) + weight_penalty(model))

    def mended(model, part):
        total, penalty, n = summed_rows(model, part), weight_penalty(model), len(part[0])
        return mk.Loss(sum=total * num_rows + penalty * n, count=n)

    model.zero_grad()
    got = gradient_of(model, batch, mended)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gradient_of", [split_loss_gradient, train_step_gradient])
def test_a_penalty_on_the_weights_added_to_a_counted_sum_has_a_way_out(gradient_of):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    batch = torch.randn(8, 4).double(), torch.randint(2, (8,)).double()
    expected = torch.autograd.grad(summed_rows(model, batch) / 8 + weight_penalty(model), model.weight)[0]

    def loss_fn(model, part, factor=1):
        n = len(part[0])
        return mk.Loss(
            sum=summed_rows(model, part) + weight_penalty(model) * (n if factor is None else factor), count=n
        )

    way_out = re.escape("for the mean over n items, mk.Loss(sum=total + penalty * n, count=n)")
    with pytest.raises(mk.errors.ConfigError, match=way_out):
        gradient_of(model, batch, loss_fn)
    model.zero_grad()
    got = gradient_of(model, batch, functools.partial(loss_fn, factor=None))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_uncut_batch_needs_no_common_rows(model):
    ragged = {"x": X, "y": Y, "lengths": torch.tensor([3, 5])}

    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"])

    loss(model, ragged).backward()
    expected, model.weight.grad = model.weight.grad, None
    mk.SplitLoss(model, on_oom="raise")(ragged, loss).backward()
    assert_same(model.weight.grad, expected)
    model.weight.grad, split = None, mk.SplitLoss(model)
    with pytest.warns(mk.MemkitWarning, match=r"cannot be cut: tensors with \[2, \d+\] rows.*split_fn=.*pass \(\)"):
        split(ragged, loss).backward()
    assert_same(model.weight.grad, expected)
    split(ragged, loss).backward()  # told once
    with pytest.raises(mk.errors.InputError, match="split_fn"):
        mk.SplitLoss(model, num_microbatches=2, on_oom="raise")(ragged, loss)
    weight = model.weight.detach() - 0.1 * expected
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    with pytest.raises(mk.errors.InputError, match=r"split_fn=..."):
        mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2).train_step(ragged, loss)
    result = mk.MemoryEfficientTrainingWrapper(model, optimizer, on_oom="raise").train_step(ragged, loss)
    assert result.num_microbatches == 1
    torch.testing.assert_close(model.weight.detach(), weight)
