"""The penalty equals the hand-written one, is twice differentiable, and is computed in float32 under any autocast."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit.errors import InputError
from memkit.train.checkpointing import Checkpointing
from memkit.train.penalty import gradient_penalty
from tests.helpers import assert_refused


def make_mlp(dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def make_conv(dtype=torch.float64):
    return nn.Sequential(nn.Conv2d(2, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 1)).to(dtype)


def gradients(model, value):
    """A parameter that the penalty does not see, such as the last bias, counts as zero."""
    return torch.autograd.grad(value, list(model.parameters()), allow_unused=True, materialize_grads=True)


def row_by_row(model, points):
    """Norm of each row's gradient, one autograd call per row, so that nothing is summed over rows."""
    norms = []
    for point in points:
        point = point.clone()[None].requires_grad_()
        (gradient,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)
        norms.append(gradient.square().sum().sqrt())
    return torch.stack(norms)


@pytest.mark.parametrize(("make", "shape"), [(make_mlp, (5, 6)), (make_conv, (4, 2, 9, 9))])
def test_r1_is_the_mean_squared_norm_with_its_gradient(make, shape):
    model, real = make(), torch.randn(shape, dtype=torch.float64)
    got, want = gradient_penalty(model, real), row_by_row(model, real).square().mean()
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradients(model, got), gradients(model, want), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("make", "shape"), [(make_mlp, (5, 6)), (make_conv, (4, 2, 9, 9))])
def test_wgan_gp_interpolates_between_pairs(make, shape):
    model = make()
    real, fake = torch.randn(2, *shape, dtype=torch.float64)
    got = gradient_penalty(model, real, fake, generator=torch.Generator().manual_seed(3))
    shares = torch.rand(len(real), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    points = torch.stack([(1 - share) * a + share * b for share, a, b in zip(shares, real, fake, strict=True)])
    want = (row_by_row(model, points) - 1).square().mean()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model, got), gradients(model, want), rtol=1e-10, atol=1e-13)


def test_gradcheck_through_the_parameters():
    model, real = make_mlp(), torch.randn(3, 6, dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def penalty(*tensors):
        call = lambda x: torch.func.functional_call(model, dict(zip(weights, tensors, strict=True)), (x,))  # noqa: E731
        return gradient_penalty(call, real)

    assert torch.autograd.gradcheck(penalty, tuple(weights.values()))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 3, 3)])
def test_every_output_shape_is_summed(shape):
    def discriminator(x):  # its gradient is 2x, whatever the shape of the output
        return (x.square().sum(1).view(4, *[1] * (len(shape) - 1)) / (9 if len(shape) == 4 else 1)).expand(shape)

    real = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(gradient_penalty(discriminator, real), 4 * real.square().sum(1).mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_fake", [False, True])
def test_autocast_changes_no_bit(dtype, with_fake):
    model, real = make_mlp(torch.float32), torch.randn(8, 6)
    fake = torch.randn(8, 6) if with_fake else None
    want = gradient_penalty(model, real, fake, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype):
        model(real)  # leaves half-precision weights in autocast's cache
        got = gradient_penalty(model, real, fake, generator=torch.Generator().manual_seed(0))
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    for a, b in zip(gradients(model, got), gradients(model, want), strict=True):
        assert torch.equal(a, b)


def test_the_naive_penalty_under_autocast_is_off():
    """Negative control for the test above."""
    model, real = make_mlp(torch.float32), torch.randn(8, 6)
    want = gradient_penalty(model, real)
    with torch.autocast("cpu", torch.bfloat16):
        points = real.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        naive = gradient.square().sum(1).mean()
    assert abs(naive / want - 1) > 1e-4


def test_half_precision_discriminator_runs_in_float32():
    model, real = make_mlp(torch.bfloat16), torch.randn(8, 6).bfloat16()
    wide = copy.deepcopy(model).float()
    got, want = gradient_penalty(model, real), gradient_penalty(wide, real.float())
    assert torch.equal(got, want)
    for a, b in zip(gradients(model, got), gradients(wide, want), strict=True):
        assert torch.equal(a, b.bfloat16())


def test_a_checkpointed_discriminator_gives_the_same():
    model, real = make_mlp(), torch.randn(5, 6, dtype=torch.float64)
    want = gradients(model, gradient_penalty(model, real))
    handle = Checkpointing(model, ["0", "2"])
    with torch.autocast("cpu", torch.bfloat16):
        got = gradient_penalty(model, real)
    for a, b in zip(gradients(model, got), want, strict=True):
        assert torch.equal(a, b)
    handle.close()


def test_adds_to_a_loss_and_leaves_inputs_unchanged():
    model = make_mlp()
    real, fake = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = F.softplus(-model(real.detach())).mean() + 10 * gradient_penalty(model, real, fake)
    loss.backward()
    assert real.grad is None
    assert fake.grad is None
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_of_zero_has_a_finite_penalty():
    """The square root of a sum of squares is NaN in backward there."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, -100.0)  # every unit is dead
    real, fake = torch.randn(2, 5, 3)
    penalty = gradient_penalty(model, real, fake)
    penalty.backward()
    assert penalty == 1
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_is_a_plain_number_without_gradients():
    model, real = make_mlp(), torch.randn(5, 6, dtype=torch.float64)
    with torch.no_grad():
        got = gradient_penalty(model, real)
    assert not got.requires_grad
    torch.testing.assert_close(got, gradient_penalty(model, real).detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.ones(3, 6, dtype=torch.int64),),
            r"real\): got a tensor of shape \(3, 6\) and torch.int64; .* embeddings",
        ),
        ((torch.ones(0, 6),), r"got a tensor of shape \(0, 6\)"),
        ((torch.ones(3, 6), torch.ones(2, 6)), r"got shapes \(3, 6\) and \(2, 6\); expected as many fake samples"),
        ((torch.ones(3, 6), torch.ones(3, 6, dtype=torch.bool)), r"fake\): got .* torch.bool"),
    ],
)
def test_wrong_inputs(arguments, message):
    assert_refused(lambda: gradient_penalty(make_mlp(torch.float32), *arguments), InputError, message)


@pytest.mark.parametrize("output", [lambda x: x.detach().sum(1), lambda x: torch.ones(3, requires_grad=True)])
def test_rejects_output_independent_of_input(output):
    with pytest.raises(InputError, match="an output that does not depend on the input"):
        gradient_penalty(output, torch.ones(3, 6))
