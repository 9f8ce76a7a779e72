"""Sparse volumes: round trips, gradients, and refusals."""

import pytest
import torch

from memkit._core.errors import InputError, InputTypeError
from memkit._core.sparse_voxels import SparseVoxels
from tests.chunk.scenes import brain_mask
from tests.helpers import assert_refused


def test_there_and_back_on_a_real_mask():
    mask = torch.stack([brain_mask(), brain_mask().flip(0)])
    volume = torch.randn(2, 3, *mask.shape[1:]) * mask[:, None]
    voxels = SparseVoxels.from_dense(volume)
    assert len(voxels.coords) == int(mask.sum())
    assert voxels.occupancy == pytest.approx(float(mask.float().mean()))
    assert torch.equal(voxels.to_dense(), volume)
    shuffled = torch.randperm(len(voxels.coords))
    same = SparseVoxels.from_coords(
        voxels.coords[shuffled].int(), voxels.features[shuffled], shape=voxels.shape, batch_size=2
    )
    assert torch.equal(same.to_dense(), volume)


def test_mask_keeps_zero_voxels_and_drops_others():
    volume = torch.ones(1, 2, 4, 4, 4)
    mask = torch.zeros(1, 4, 4, 4, dtype=torch.bool)
    mask[0, 1, 2, 3] = True
    volume[0, :, 1, 2, 3] = 0
    voxels = SparseVoxels.from_dense(volume, mask=mask)
    assert voxels.coords.tolist() == [[0, 1, 2, 3]]
    assert voxels.features.tolist() == [[0, 0]]


def test_nan_is_not_empty():
    volume = torch.zeros(1, 1, 2, 2, 2)
    volume[0, 0, 1, 1, 1] = torch.nan
    assert SparseVoxels.from_dense(volume).coords.tolist() == [[0, 1, 1, 1]]


def test_gradients_flow_both_ways():
    volume = torch.zeros(2, 2, 3, 4, 5, dtype=torch.float64)
    volume[1, :, 2, 3, 4] = 1
    volume[0, :, 0, 1, 0] = 2
    volume.requires_grad_()
    voxels = SparseVoxels.from_dense(volume)
    upstream = torch.randn_like(volume)
    (gradient,) = torch.autograd.grad(voxels.to_dense(), volume, upstream)
    assert torch.equal(gradient, upstream * (volume != 0))


def test_no_voxels():
    voxels = SparseVoxels.from_dense(torch.zeros(1, 2, 3, 3, 3))
    assert voxels.features.shape == (0, 2)
    assert voxels.occupancy == 0
    assert torch.equal(voxels.to_dense(), torch.zeros(1, 2, 3, 3, 3))


def test_rejects_invalid_coordinates_and_features():
    right, ones = torch.tensor([[0, 1, 2], [3, 3, 3]]), torch.ones(2, 1)

    def refused(*words, coords=right, features=ones, error=InputError, **options):
        options = {"shape": (4, 4, 4)} | options
        assert_refused(lambda: SparseVoxels.from_coords(coords, features, **options), error, *words)

    before = "1 repeated coordinates, the first (0, 3, 3, 3)"
    refused(before, coords=right[[1, 0, 1]], features=torch.ones(3, 1))
    refused("from 2 to 3 along axis 3; expected an extent of 3 cells from 0: 0 to 2", shape=(4, 4, 3))
    refused("from -1 to 2 along axis 1", coords=right - 1)
    two_of_four = torch.tensor([[0, 0, 0, 0], [3, 0, 0, 0]])
    refused("from 0 to 3 along axis 0; expected an extent of 2 cells", coords=two_of_four, batch_size=2)
    refused("coordinates of shape (2, 3) and", "; expected coordinates (N, 4)", batch_size=2)
    refused("dtype torch.float32; expected integers", coords=right.float(), error=InputTypeError)
    for features in (ones[:, 0], ones.long(), torch.ones(3, 1)):
        refused("expected floating-point features (2, C)", features=features, error=InputTypeError)
    refused("features on meta, coordinates on cpu", features=ones.to("meta"))
    refused("a volume of shape (4, 4)", shape=(4, 4))


def test_rejects_invalid_volumes_and_masks():
    volume, mask = torch.zeros(1, 1, 2, 2, 2), torch.ones(1, 2, 2, 2)
    no_volume, no_mask = "expected a floating point volume (B, C, D, H, W)", "expected a bool mask (1, 2, 2, 2)"
    assert_refused(lambda: SparseVoxels.from_dense(volume[0, 0]), InputTypeError, no_volume)
    assert_refused(lambda: SparseVoxels.from_dense(volume, mask=mask), InputTypeError, no_mask)
    assert_refused(lambda: SparseVoxels.from_dense(volume, mask=mask[None].bool()), InputTypeError, no_mask)
