from functools import partial

import pytest
import torch

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit.voxel.augment import VoxelAugmentation
from memkit.voxel.compose import ComposedAugmentation
from memkit.voxel.cutout import CutoutAugmentation
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.mix import MixupAugmentation
from memkit.voxel.params import CutoutParams, MixupParams
from memkit.voxel.samples import VoxelPoints
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.voxel.volumes import cortex, sparse

LAYOUT = VoxelLayout(("occupancy", "scalar"), empty_value=(0, 0))


def batch():
    return torch.stack([cortex(), cortex().flip(1), cortex().roll(5, 2), torch.zeros_like(cortex())])


def test_mixup_unites_occupancy_and_averages_overlap():
    x = torch.zeros(2, 2, 2, 2, 2)
    x[0, :, 0, 0, 0] = torch.tensor([1.0, 4.0])  # the first sample alone
    x[1, :, 1, 1, 1] = torch.tensor([1.0, 2.0])  # the second alone
    x[0, :, 0, 1, 0] = torch.tensor([1.0, 10.0])
    x[1, :, 0, 1, 0] = torch.tensor([1.0, 20.0])  # both
    mix = MixupAugmentation(layout=LAYOUT)
    y = mix.apply(x, MixupParams((2, 2, 2), (1, 0), (0.75, 1.0)))
    assert y[0, :, 0, 0, 0].tolist() == [1, 4]  # not 3: what the other lacks does not thin it out
    assert y[0, :, 1, 1, 1].tolist() == [1, 2]
    assert y[0, :, 0, 1, 0].tolist() == [1, 12.5]
    assert y[0, 0].sum() == 3
    assert y[1, :, 0, 1, 0].tolist() == [1, 20]


def test_mixup_with_an_empty_value_of_its_own():
    layout = VoxelLayout(("occupancy", "scalar"), empty_value=-1)
    x = 2 * batch() - 1
    params = MixupAugmentation(layout=layout).sample(x.shape, seed=0)
    y = MixupAugmentation(layout=layout).apply(x, params)
    assert set(y[:, 0].unique().tolist()) == {-1.0, 1.0}
    scaled = MixupAugmentation(layout=LAYOUT).apply(batch(), params)
    torch.testing.assert_close(y, 2 * scaled - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cls", [MixupAugmentation, CutoutAugmentation])
def test_sparse_equals_dense_bit_for_bit(cls, dtype):
    x = batch().to(dtype)
    aug = cls(layout=LAYOUT) if cls is not CutoutAugmentation else cls(prob=1.0, size=0.5, num_holes=2)
    for index in range(3):
        params = aug.sample(x.shape, seed=0, index=index)
        before = x.clone()
        dense, few = aug.apply(x, params), aug.apply(sparse(x, LAYOUT), params)
        assert torch.equal(few.to_dense(), dense)
        assert not torch.equal(dense, x)
        assert torch.equal(x, before)
        assert len(few.coords) == int((dense[:, 0] != 0).sum())
        undone = aug.inverse(x, params)  # nothing is moved, so nothing comes back
        assert torch.equal(undone, x)
        assert undone.data_ptr() != x.data_ptr()


def test_labels_come_in_pairs_with_a_weight_for_each_sample():
    aug = MixupAugmentation(alpha=0.4)
    params = aug.sample((4, 1, 8, 8, 8), seed=1)
    first, second, weight = aug.labels(torch.arange(4), params)
    assert first.tolist() == [0, 1, 2, 3]
    assert tuple(second.tolist()) == params.partners
    assert sorted(params.partners) == [0, 1, 2, 3]
    assert weight.tolist() == list(params.weights)
    assert len(set(params.weights)) > 1
    assert_refused(partial(aug.labels, torch.arange(3), params), InputError, "4 samples")


def test_mixes_targets_with_inputs_without_blending_labels():
    mix = MixupAugmentation()
    params = mix.sample((2, 1, 8, 8, 8), seed=0)
    x, target = torch.rand(2, 1, 8, 8, 8), torch.rand(2, 1, 8, 8, 8)
    y = mix.apply_joint({"x": x, "target": target}, params, photometric=["x"])
    assert torch.equal(y["target"], mix.apply(target, params))
    assert_refused(lambda: mix.apply(torch.zeros(2, 1, 8, 8, 8, dtype=torch.int64), params), InputTypeError, "labels()")
    with pytest.raises(InputTypeError, match="batch"):
        mix.apply(VoxelPoints(torch.zeros(1, 3), torch.zeros(1, 1)), params)
    assert_refused(lambda: mix.sample((1, 8, 8, 8), seed=0), InputError, "batch")
    assert_refused(lambda: MixupAugmentation(alpha=0), ConfigError, "alpha")


def test_fills_holes_with_empty_values_and_keeps_target():
    layout = VoxelLayout(("occupancy", "scalar"), empty_value=(-1, 7))
    x = torch.ones(2, 16, 16, 16)
    cut = CutoutAugmentation(prob=1.0, size=0.5, layout=layout)
    params = cut.sample(x.shape, seed=0)
    y = cut.apply(x, params)
    hole = y[0] == -1
    assert hole.sum() == 8**3
    assert (y[1][hole] == 7).all()
    assert (y[:, ~hole] == 1).all()
    joint = cut.apply_joint({"x": x, "y": x, "labels": x.long()}, params, photometric=["x"])
    assert torch.equal(joint["y"], x)
    assert torch.equal(joint["labels"], x.long())
    share = sum(bool(each) for each in CutoutAugmentation(prob=0.3).sample((1000, 1, 4, 4, 4), seed=0).holes)
    assert share == pytest.approx(300, abs=60)


def test_points_in_a_hole_are_left_out():
    layout = VoxelLayout(("scalar",), axes="ZYX", voxel_size=(1, 2, 0.5), origin=(-4, 0, 0))
    params = CutoutParams((8, 8, 8), False, ((((0, 0, 0), (4, 8, 2)),),))  # Z below 2 m, X below -2 m
    coords = torch.tensor([[-3.0, 5, 1], [-3, 5, 3], [-1, 5, 1], [-2.01, 15.9, 0], [-2.0, 0, 0], [9, 9, 9]])
    kept = CutoutAugmentation(layout=layout).apply(VoxelPoints(coords, coords[:, :1]), params)
    assert torch.equal(kept.coords, coords[[1, 2, 4, 5]])
    assert torch.equal(kept.features, kept.coords[:, :1])


def test_a_composition_applies_in_order_and_comes_back_in_reverse():
    steps = [VoxelAugmentation(rotate_prob=1.0, noise_std=0.0), CutoutAugmentation(prob=1.0), VoxelAugmentation()]
    aug = ComposedAugmentation(steps)
    x = torch.rand(2, 3, 8, 8, 6)
    for index in range(5):
        params = aug.sample(x.shape, seed=0, index=index)
        expected = x
        for step, drawn in zip(steps, params.steps, strict=True):
            expected = step.apply(expected, drawn)
        before = x.clone()
        assert torch.equal(aug.apply(x, params), expected)
        assert torch.equal(x, before)
        assert torch.equal(aug.inverse(aug.apply(x, params.geometry()), params), x)
    first, _, third = params.steps
    assert first.draws[0].seed != third.draws[0].seed  # two of a kind draw their own
    assert_refused(lambda: ComposedAugmentation([]), ConfigError, "at least one augmentation")
    assert_refused(lambda: ComposedAugmentation(["flip"]), InputTypeError, "functions")


def test_peaks_are_the_result_and_little_beside_it():
    x = torch.rand(2, 4, 48, 48, 48)
    for aug in (
        MixupAugmentation(),
        CutoutAugmentation(prob=1.0),
        ComposedAugmentation([VoxelAugmentation(), CutoutAugmentation(prob=1.0), CutoutAugmentation()]),
    ):
        params = aug.sample(x.shape, seed=0)
        aug.apply(x, params)
        assert trace_allocations(lambda aug=aug, params=params: aug.apply(x, params)).peak <= 1.5 * x.nbytes


def test_sample_paired_with_itself():
    x = torch.rand(1, 1, 4, 4, 4)
    for seed in range(5):
        torch.testing.assert_close(MixupAugmentation().apply(x, MixupAugmentation().sample(x.shape, seed=seed)), x)
