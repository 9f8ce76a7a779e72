import itertools
from functools import partial

import pytest
import torch
from torch import nn

from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.voxel.perceptual import Perceptual3DLoss, SliceLoss
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.voxel.brain import crops, damaged


def plain(network, prediction, target):
    """The loss as one would write it."""
    total = 0
    for stage in network:
        prediction, target = stage(prediction), stage(target)
        a, b = (each / (each.square().sum(1, keepdim=True) + 1e-4).sqrt() for each in (prediction, target))
        total = total + (a - b).square().sum(1).mean()
    return total


def gradient_of(loss, prediction, target):
    prediction = prediction.detach().clone().requires_grad_()
    value = loss(prediction, target)
    value.backward()
    return value.detach(), prediction.grad


@pytest.mark.parametrize(("use_checkpoint", "chunk_size"), [(False, 1), (True, 2), (False, 8)])
def test_value_and_gradient_are_the_plain_ones_in_float64(use_checkpoint, chunk_size):
    target = crops(3, 12)
    prediction = damaged(target)
    loss = Perceptual3DLoss(4, 8, use_checkpoint=use_checkpoint, chunk_size=chunk_size)
    value, gradient = gradient_of(loss, prediction, target)
    network = Perceptual3DLoss(4, 8).double().network
    truth, expected = gradient_of(lambda p, t: plain(network, p, t), prediction.double(), target.double())
    assert abs(value / truth - 1) < 1e-5
    assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_nearly_equal_volumes_keep_their_digits():
    """|a|^2 + |b|^2 - 2ab would have none left here, and could be negative."""
    target = crops(1, 12)
    prediction = target + 1e-3 * torch.randn(target.shape)
    value, gradient = gradient_of(Perceptual3DLoss(4, 8), prediction, target)
    network = Perceptual3DLoss(4, 8).double().network
    truth, expected = gradient_of(lambda p, t: plain(network, p, t), prediction.double(), target.double())
    assert abs(value / truth - 1) < 1e-3
    assert (gradient - expected).norm() / expected.norm() < 1e-3
    assert Perceptual3DLoss(4, 8)(target, target).item() == 0


def peak(loss, num_samples):
    target = torch.rand(num_samples, 4, 32, 32, 32)
    prediction = torch.rand_like(target).requires_grad_()
    return trace_allocations(lambda: loss(prediction * 1, target).backward()).peak, target.nbytes


@pytest.mark.slow
def test_peak_is_a_quarter_and_grows_with_gradients_only():
    """One level; four of them at 64 voxels to a side are in benchmarks/results/voxel_losses.json."""
    loss = Perceptual3DLoss(4, 32, num_levels=1)
    trained = Perceptual3DLoss(4, 32, num_levels=1).network.requires_grad_()
    naive, _ = peak(lambda p, t: plain(trained, p, t), 4)
    ours, of_input = peak(loss, 4)
    assert ours <= naive / 4
    # The prediction, and its gradient.
    small = Perceptual3DLoss(4, 2, num_levels=1)
    assert peak(small, 8)[0] - peak(small, 2)[0] <= 6 / 4 * of_input * 2 * 1.01


def test_empty_volumes_have_finite_gradients():
    target = crops(1, 8)
    empty = torch.zeros_like(target)
    for a, b in itertools.product((empty, empty - 1, target), repeat=2):
        value, gradient = gradient_of(Perceptual3DLoss(4, 8), a, b)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 10
    assert gradient_of(Perceptual3DLoss(4, 8), empty, target)[1].abs().max() > 0


def test_detects_change_of_scale():
    """Without biases, unit features would be equal."""
    target = crops(1, 16)
    assert Perceptual3DLoss(4, 8)(target / 2, target) > 0.01


def test_the_random_network_comes_from_its_seed_alone():
    before = torch.get_rng_state()
    first, other = Perceptual3DLoss(2, 4), Perceptual3DLoss(2, 4, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    with torch.device("meta"):
        again = Perceptual3DLoss(2, 4)
    a, b = torch.rand(2, 1, 2, 6, 6, 6)
    assert torch.equal(first(a, b), again(a, b))
    assert not torch.equal(first(a, b), other(a, b))


def test_network_is_neither_trained_nor_saved():
    norm = nn.BatchNorm3d(3)
    loss = Perceptual3DLoss(extractor=nn.Sequential(nn.Conv3d(2, 3, 1), norm))
    model = nn.ModuleDict({"net": nn.Conv3d(2, 2, 1), "criterion": loss}).train().double()
    assert not norm.training
    assert norm.weight.dtype == torch.float64
    assert {name for name, _ in model.named_parameters()} == set(model.state_dict()) == {"net.weight", "net.bias"}
    mean = norm.running_mean.clone()
    a, b = torch.rand(2, 2, 2, 4, 4, 4, dtype=torch.float64)
    gradient_of(loss, a, b)
    assert torch.equal(norm.running_mean, mean)
    assert norm.weight.grad is None


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_autocast_changes_nothing(use_checkpoint):
    target = crops(2, 8)
    prediction = damaged(target)
    loss = Perceptual3DLoss(4, 8, use_checkpoint=use_checkpoint)
    value, gradient = gradient_of(loss, prediction, target)
    with torch.autocast("cpu", torch.bfloat16):
        cast_value, cast_gradient = gradient_of(loss, prediction, target)
    assert torch.equal(cast_value, value)
    assert torch.equal(cast_gradient, gradient)


def test_derivatives_once_and_again_but_not_second_ones():
    target = crops(1, 8)
    prediction = damaged(target).requires_grad_()
    value = Perceptual3DLoss(4, 8)(prediction, target)
    (once,) = torch.autograd.grad(value, prediction, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(3 * value, prediction)[0], 3 * once)
    with pytest.raises(StateError, match="create_graph=True"):
        torch.autograd.grad(Perceptual3DLoss(4, 8)(prediction, target), prediction, create_graph=True)
    with torch.no_grad():
        assert torch.equal(Perceptual3DLoss(4, 8)(prediction, target), value)


def test_an_extractor_may_return_a_list():
    class Both(nn.Module):
        def __init__(self, stages):
            super().__init__()
            self.stages = stages

        def forward(self, volume):
            first = self.stages[0](volume)
            return [first, self.stages[1](first)]

    stages = Perceptual3DLoss(4, 4, num_levels=2).network
    target = crops(2, 8)
    found = Perceptual3DLoss(extractor=Both(stages))(damaged(target), target)
    torch.testing.assert_close(found, plain(stages, damaged(target), target))


def test_wrong_inputs_and_settings_are_refused():
    volume = torch.zeros(1, 4, 4, 4, 4)
    loss = Perceptual3DLoss(4, 4)
    half, other_device = Perceptual3DLoss(4, 4).bfloat16(), volume.to("meta")
    for call, given, error, *words in [
        (loss, volume[0], InputError, "(4, 4, 4, 4)"),
        (loss, volume[:0], InputError, "which are empty"),
        (loss, volume[:, :3], InputError, "in_channels=4", "Perceptual3DLoss(in_channels=3)"),
        (loss, volume.long(), InputTypeError, "prediction: a Tensor of shape ", "torch.int64"),
        (loss, SparseVoxels.from_dense(volume), InputTypeError, "to_dense"),
        (loss, other_device, InputError, "volumes on meta, a network on cpu", "loss.to(device)"),
        (half, volume, StateError, "torch.bfloat16", "loss.float()"),
        (Perceptual3DLoss(extractor=lambda volume: {}), volume, InputTypeError, "a dict"),
        (Perceptual3DLoss(extractor=lambda volume: []), volume, InputTypeError, "a list"),
        (Perceptual3DLoss(extractor=lambda volume: volume[0, 0, 0, 0]), volume, InputTypeError, "of shape (4,)"),
    ]:
        assert_refused(partial(call, given, given), error, *words)
    assert_refused(lambda: loss(volume, volume[:, :, 1:]), InputError, "of the same shape")
    for settings in ({"in_channels": 0}, {"num_levels": 1.5}, {"chunk_size": True}, {"seed": -1}):
        assert_refused(partial(Perceptual3DLoss, **settings), ConfigError, next(iter(settings)))


class Images(nn.Module):
    """A small 2D LPIPS: one trained-looking layer, and a distance (n, 1, 1, 1)."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(4, 6, 3)

    def forward(self, a, b):
        return (self.features(a) - self.features(b)).square().mean((1, 2, 3), keepdim=True)


@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_a_2d_distance_on_all_slices(chunk_size):
    target = crops(2, 10)
    prediction, images = damaged(target), Images()
    value, gradient = gradient_of(SliceLoss(images, chunk_size=chunk_size), prediction, target)

    def looped(p, t):
        found = [images(p.select(axis, at), t.select(axis, at)).mean() for axis in (2, 3, 4) for at in range(10)]
        return torch.stack(found).mean()

    truth, expected = gradient_of(looped, prediction, target)
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-8)


def test_slices_of_a_mean_and_of_nonsense():
    a, b = torch.rand(2, 2, 1, 3, 4, 5)
    assert torch.allclose(SliceLoss(nn.L1Loss(), axes="H", chunk_size=3)(a, b), (a - b).abs().mean())
    with pytest.raises(InputTypeError, match=r"a Tensor of shape \(2, 1, 4, 5\), torch.float32 for 2 slices"):
        SliceLoss(lambda p, t: p - t, axes="D", chunk_size=2)(a, b)
    for axes in ("", "DD", "X"):
        assert_refused(partial(SliceLoss, nn.L1Loss(), axes=axes), ConfigError, "D, H and W")
