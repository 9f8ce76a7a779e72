import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, StateError
from memkit.train.accumulate import GradientAccumulator
from memkit.voxel.clouds import chamfer_distance
from memkit.voxel.composite import CompositeLoss3D
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.losses import OccupancyAwareLoss, StructurePreservingLoss
from memkit.voxel.perceptual import Perceptual3DLoss
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.voxel.brain import crops, damaged
from tests.voxel.loss_inputs import fuzz
from tests.voxel.test_perceptual import gradient_of


def structure(prediction, target):
    """The loss as one would write it."""
    means = [(prediction.diff(dim=axis) - target.diff(dim=axis)).abs().mean() for axis in (2, 3, 4)]
    return sum(means) / 3


def occupancy(prediction, target, weight=10.0):
    weights = torch.where((target != 0).any(1, keepdim=True), weight, 1.0).expand_as(target)
    losses = (prediction - target).abs() * weights
    return (losses.flatten(1).sum(1) / weights.flatten(1).sum(1)).mean()


@pytest.mark.parametrize(
    ("loss", "formula"), [(StructurePreservingLoss(), structure), (OccupancyAwareLoss(), occupancy)]
)
def test_value_and_gradient_are_the_plain_ones(loss, formula):
    target = crops(3, 16)
    prediction = damaged(target)
    value, gradient = gradient_of(loss, prediction, target)
    truth, expected = gradient_of(formula, prediction.double(), target.double())
    assert abs(value / truth - 1) < 1e-6
    assert (gradient - expected).norm() / expected.norm() < 1e-5
    exact, exact_gradient = gradient_of(loss, prediction.double(), target)
    assert abs(exact / truth - 1) < 1e-13
    assert (exact_gradient - expected).norm() / expected.norm() < 1e-13


@pytest.mark.parametrize(
    ("loss", "formula", "num_grids"),
    [(StructurePreservingLoss(), structure, 1.8), (OccupancyAwareLoss(), occupancy, 2.1)],
)
def test_memory_is_the_gradient_and_one_sample(loss, formula, num_grids):
    """In grids of the batch, of which one is the gradient."""
    target = crops(4, 24)
    prediction = damaged(target).requires_grad_()
    ours, naive = (trace_allocations(lambda: each(prediction, target).backward()).peak for each in (loss, formula))  # noqa: B023
    assert ours <= num_grids * target.nbytes
    assert naive > 3.9 * target.nbytes


@pytest.mark.parametrize(
    "loss", [StructurePreservingLoss(), OccupancyAwareLoss(), Perceptual3DLoss(4, 2, num_levels=1)]
)
def test_a_half_precision_gradient_survives_the_scale_of_a_scaler(loss):
    """The gradient is held before the scale comes: in float16 it would be rounded to multiples of 6e-8 by then."""
    size = 12 if isinstance(loss, Perceptual3DLoss) else 32
    target = crops(1, size).expand(12, -1, -1, -1, -1)
    half = damaged(target).half().requires_grad_()
    scale = 2.0**15
    (loss(half, target) * scale).backward()
    expected = gradient_of(loss, half.float(), target)[1]
    error, late = ((each - expected).norm() / expected.norm() for each in (half.grad.float() / scale, expected.half()))
    assert error < 3e-4
    assert size == 12 or late > 5e-3


def test_an_offset_is_no_structure_and_an_axis_of_one_voxel_none():
    target = crops(1, 16)
    loss = StructurePreservingLoss()
    assert loss(target + 3, target) < 1e-6
    flat = target[:, :, :1]
    value, gradient = gradient_of(loss, damaged(flat), flat)
    two = [(damaged(flat).diff(dim=axis) - flat.diff(dim=axis)).abs().mean() for axis in (3, 4)]
    torch.testing.assert_close(value, sum(two) / 3)
    assert gradient.isfinite().all()
    value, gradient = gradient_of(loss, target[..., :1, :1, :1] + 1, target[..., :1, :1, :1])
    assert (value, gradient.abs().sum()) == (0, 0)


def test_logits_are_autocast_safe_and_finite_on_empty_grid():
    target = (crops(2, 12)[:, :1] > 0).float()
    logits = 30 * torch.randn(target.shape)
    loss = OccupancyAwareLoss(5.0, kind="bce")
    value, gradient = gradient_of(loss, logits, target)
    weights = torch.where(target > 0, 5.0, 1.0)
    each = F.binary_cross_entropy_with_logits(logits, target, weight=weights, reduction="none").flatten(1).sum(1)
    torch.testing.assert_close(value, (each / weights.flatten(1).sum(1)).mean())
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_gradient = gradient_of(loss, logits, target)
    assert torch.equal(cast, value)
    assert torch.equal(cast_gradient, gradient)
    for kind in ("bce", "l1", "mse"):
        value, gradient = gradient_of(OccupancyAwareLoss(kind=kind), logits * 0, target * 0)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_layout_defines_occupancy():
    """Scaled to [-1, 1] an empty voxel holds -1: it is not zero, and yet empty."""
    layout = VoxelLayout(["occupancy", "scalar"], empty_value=-1.0)
    target = torch.full((1, 2, 2, 2, 2), -1.0)
    target[0, :, 0, 0, 0] = torch.tensor([1.0, 0.0])
    prediction = torch.full_like(target, -1.0)
    wrong = OccupancyAwareLoss(3.0)(prediction, target)
    right = OccupancyAwareLoss(3.0, layout=layout)(prediction, target)
    assert right.item() == pytest.approx((2 + 1) / 2 * 3 / 10)
    assert wrong.item() == pytest.approx((2 + 1) / 2 / 8)
    with pytest.raises(InputError, match="occupancy, scalar"):
        OccupancyAwareLoss(layout=layout)(prediction[:, :1], target[:, :1])


def test_clouds_give_finite_loss_even_if_empty():
    a, b = torch.rand(7, 3), torch.rand(5, 3)
    predictions = [a.requires_grad_(), a[:0], a, a[:0]]
    value = chamfer_distance(predictions, [b, b, b[:0], b[:0]], empty_distance=8.0, convention="lidm")
    torch.testing.assert_close(value, (chamfer_distance(a, b, convention="lidm") + 8 + 8) / 4)
    value.backward()
    assert a.grad.abs().sum() > 0


def composite():
    return CompositeLoss3D(
        {
            "features": (Perceptual3DLoss(4, 4, num_levels=2), lambda step: 0.0 if step < 2 else 0.5),
            "edges": (StructurePreservingLoss(), 0.25),
            "voxels": (OccupancyAwareLoss(), lambda step: 1 / (1 + step)),
            "plain": (F.mse_loss, 2),
        }
    )


def test_the_total_is_the_weighted_sum_at_each_step():
    target = crops(2, 8)
    prediction = damaged(target).requires_grad_()
    loss = composite()
    assert loss(prediction, target) == loss.values["total"]
    assert set(loss.values) == {"edges", "voxels", "plain", "total"}
    loss.step()
    loss.step()
    total = loss(prediction, target)
    weights = {"features": 0.5, "edges": 0.25, "voxels": 1 / 3, "plain": 2.0}
    torch.testing.assert_close(total, sum(weights[name] * loss.values[name] for name in weights))
    assert not any(value.requires_grad for value in loss.values.values())
    total.backward()
    expected = sum(weight * gradient_of(loss.losses[name], prediction, target)[1] for name, weight in weights.items())
    torch.testing.assert_close(prediction.grad, expected)


def test_schedules_resume_where_they_were():
    loss, resumed = composite(), composite()
    for _ in range(5):
        loss.step()
    resumed.load_state_dict(loss.state_dict())
    assert resumed.weights() == loss.weights()
    assert list(loss.state_dict()) == ["_extra_state"]
    assert_refused(lambda: loss.load_state_dict({"_extra_state": {"version": 2}}), FileFormatError, "version 1")


def test_micro_batches_add_up_to_the_batch():
    target = crops(4, 8)
    gradients = []
    for steps in (1, 4):
        torch.manual_seed(0)
        model = nn.Conv3d(4, 4, 3, padding=1)
        accumulator = GradientAccumulator(torch.optim.SGD(model.parameters(), lr=1.0), accumulation_steps=steps)
        loss, before = composite(), model.weight.detach().clone()
        for part in target.split(4 // steps):
            accumulator.backward(loss(model(part), part), count=len(part))
            accumulator.step()
        gradients.append(before - model.weight.detach())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_composite_rejects_non_losses():
    a = torch.rand(1, 1, 2, 2, 2)
    for losses, words in [
        ({}, "at least one loss"),
        ({"total": (F.l1_loss, 1.0)}, "'total'"),
        ({"keys": (F.l1_loss, 1.0)}, "nn.ModuleDict"),
        ({"a": F.l1_loss}, "a pair (loss, weight)"),
        ({"a": (3, 1.0)}, "a function or module"),
        ({"a": (F.l1_loss, math.nan)}, "a finite number"),
    ]:
        assert_refused(partial(CompositeLoss3D, losses), ConfigError, words)
    for loss, schedule, error, words in [
        (lambda p, t: p - t, 1.0, InputTypeError, "a Tensor of shape (1, 1, 2, 2, 2), torch.float32 from 'a'"),
        (F.l1_loss, lambda step: "1", ConfigError, "at step 0"),
        (F.l1_loss, float, StateError, "all zero at step 0"),
    ]:
        assert_refused(partial(CompositeLoss3D({"a": (loss, schedule)}), a, a), error, words)


def test_generated_inputs_give_a_result_or_a_typed_error():
    """50,000 of them: benchmarks/results/voxel_losses.json."""
    counts = fuzz(300, seed=1)
    assert counts["results"] > 100
    assert counts["typed errors"] > 50
    assert counts["results"] + counts["typed errors"] == 300


@pytest.mark.parametrize("loss", [OccupancyAwareLoss(1.0, kind="mse"), StructurePreservingLoss()])
def test_tangents_and_transforms_are_refused(loss):
    """The gradient is taken in the forward, and a tangent would be lost."""
    prediction, target = torch.randn(2, 2, 1, 4, 4, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(prediction, torch.ones_like(prediction))
        assert_refused(lambda: loss(dual, target), StateError, "a tensor with a tangent", "without memkit")
    assert_refused(lambda: torch.func.grad(loss)(prediction, target), StateError, "a transform of torch.func")
    points = torch.randn(2, 5, 3, dtype=torch.float64)
    assert_refused(
        lambda: torch.func.grad(chamfer_distance)(*points), StateError, "a transform of torch.func", "torch.cdist"
    )
