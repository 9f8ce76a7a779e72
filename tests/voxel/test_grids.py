import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis.extra import numpy as arrays

from memkit._core.errors import InputError, InputTypeError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.voxel.grids import feature_mae, voxel_iou, voxel_scores
from tests.allocations import trace_allocations
from tests.helpers import assert_refused

grids = arrays.arrays("float32", (2, 2, 3, 2, 4), elements=st.sampled_from([0.0, 0.0, 1.0, 2.0]))


def sparse(volume):
    return SparseVoxels.from_dense(volume)


@hypothesis.given(grids, grids)
def test_dense_and_sparse_agree_with_sets_of_voxels(prediction, target):
    prediction, target = map(torch.from_numpy, (prediction, target))
    sets = [
        [{tuple(c) for c in (sample != 0).any(0).nonzero().tolist()} for sample in each]
        for each in (prediction, target)
    ]
    expected = torch.zeros(3, dtype=torch.float64)
    for found, truth in zip(*sets, strict=True):
        both = len(found & truth)
        wholes = len(found | truth), len(found), len(truth)
        expected += torch.tensor([1.0 if not wholes[0] else both / whole if whole else 0.0 for whole in wholes])
    of_sparse = voxel_scores(sparse(prediction), sparse(target))
    occupied = [(each != 0).any(1) for each in (prediction, target)]
    for scores in (of_sparse, voxel_scores(*occupied), voxel_scores(*(each[:, None] for each in occupied))):
        torch.testing.assert_close(torch.stack(scores[:3]), expected / 2)


def test_the_f_score_is_the_harmonic_mean():
    target = torch.zeros(4, 4, 4)
    target[0] = 1
    found = torch.zeros(4, 4, 4)
    found[:3, 0] = 1
    iou, precision, recall, score = voxel_scores(found, target)
    assert (iou, precision, recall) == (4 / 24, 4 / 12, 4 / 16)
    assert score == pytest.approx(2 * precision * recall / (precision + recall))


def test_empty_grids_have_a_stated_score():
    some, none = torch.ones(1, 2, 2, 2), torch.zeros(1, 2, 2, 2)
    assert voxel_iou(none, none) == 1
    assert voxel_iou(some, none) == voxel_iou(none, some) == 0
    empty = sparse(none[None])
    assert voxel_iou(empty, empty) == 1
    assert voxel_iou(empty, sparse(some[None])) == 0


def test_the_threshold_is_exclusive_and_adjustable():
    grid = torch.full((1, 2, 2, 2), 0.5)
    assert voxel_iou(grid, torch.ones(1, 2, 2, 2)) == 0
    assert voxel_iou(grid, torch.ones(1, 2, 2, 2), threshold=0.4) == 1


def test_takes_memory_of_one_boolean_sample():
    volumes = torch.rand(8, 64, 64, 64, generator=torch.Generator().manual_seed(0))
    peak = trace_allocations(lambda: voxel_iou(volumes, volumes)).peak
    assert peak < 4.1 * volumes[0].numel()  # four grids of bools; all eight samples at once would be 24


@hypothesis.given(grids, grids)
def test_mean_difference_covers_compared_voxels(prediction, target):
    prediction, target = map(torch.from_numpy, (prediction, target))
    occupied = [(each != 0).any(1) for each in (prediction, target)]
    shared = occupied[0] & occupied[1]
    difference = (prediction - target).abs().movedim(1, -1)[shared]
    if len(difference):
        expected = difference.mean(0)
    else:
        expected = torch.full((2,), 0.0 if not (occupied[0] | occupied[1]).any() else torch.inf)
    found = feature_mae(sparse(prediction), sparse(target), per_channel=True)
    torch.testing.assert_close(found, expected)
    if shared.any():
        torch.testing.assert_close(feature_mae(prediction, target, mask=shared, per_channel=True), expected)


def test_gradients_flow_and_a_mask_is_needed_as_bool():
    volume = torch.ones(1, 2, 2, 2, 2, requires_grad=True)
    feature_mae(volume, torch.zeros(1, 2, 2, 2, 2)).backward()
    assert volume.grad.abs().sum() == pytest.approx(1)
    assert_refused(lambda: feature_mae(volume, volume, mask=torch.ones(1, 2, 2, 2)), InputError, "bool")


def test_rejects_incomparable_inputs():
    volume = torch.ones(1, 1, 2, 2, 2)
    assert_refused(lambda: voxel_iou(sparse(volume), volume), InputTypeError, "a SparseVoxels and a Tensor")
    assert_refused(lambda: voxel_iou(volume, torch.ones(1, 1, 2, 2, 3)), InputError, "one shape")
    assert_refused(lambda: voxel_iou(torch.ones(1, 3, 2, 2, 2), volume), InputTypeError, "(1, 3, 2, 2, 2)")
    assert_refused(
        lambda: voxel_iou(sparse(volume), sparse(torch.ones(2, 1, 2, 2, 2))), InputError, "the same batch size"
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_labels_are_compared_as_numbers(dtype):
    low, high = torch.zeros(1, 1, 2, 2, 2, dtype=dtype), torch.ones(1, 1, 2, 2, 2, dtype=dtype)
    assert feature_mae(low, high) == feature_mae(high, low) == 1


def test_a_mask_is_for_dense_volumes():
    voxels, mask = sparse(torch.ones(1, 1, 2, 2, 2)), torch.zeros(1, 2, 2, 2, dtype=torch.bool)
    with pytest.raises(InputError, match=r"a mask for sparse volumes.*omit mask"):
        feature_mae(voxels, voxels, mask=mask)


def test_a_sample_with_nan_has_no_score():
    nan, full = torch.zeros(2, 1, 4, 4, 4), torch.ones(2, 1, 4, 4, 4)
    nan[1, 0, 0, 0, 0] = float("nan")
    for target in (full, torch.zeros_like(full)):
        for pair in ((nan, target), (target, nan)):
            assert all(each.isnan() for each in voxel_scores(*pair))
    assert voxel_iou(nan[:1], torch.zeros(1, 1, 4, 4, 4)) == 1.0
    assert voxel_iou(full * float("inf"), full) == 1.0
