import dataclasses
import warnings

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis.extra import numpy as arrays

from memkit._core.errors import InputError, InputTypeError, MemkitWarning
from memkit._core.sparse_voxels import SparseVoxels
from memkit.voxel.augment import VoxelAugmentation
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.params import VoxelDraw, VoxelParams
from memkit.voxel.samples import VoxelPoints
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.voxel.volumes import RADAR, brain, centers, cortex, radar_scene, radial, sparse, velocity

EVERYTHING = {"noise_std": 0.1, "dropout_prob": 0.3, "intensity_jitter": 0.5, "rotate_prob": 0.8}
CORTEX = VoxelLayout(("occupancy", "intensity"))


def one(shape, **draw):
    return VoxelParams(tuple(shape), False, (VoxelDraw(**draw),))


def as_torch_does(volume, draw):
    """Flips, then a turn: X, Y, Z along D, H, W."""
    flipped = volume.flip([1 + "XYZ".index(axis) for axis in draw.flips])
    return torch.rot90(flipped, draw.turns, (1, 2))


@hypothesis.given(
    arrays.arrays("float32", (2, 3, 3, 2), elements=st.integers(0, 9)),
    st.sampled_from(["", "X", "Y", "XY", "Z", "XZ", "XYZ"]),
    st.integers(0, 3),
)
def test_flips_and_turns_are_those_of_torch_and_come_back(volume, flips, turns):
    volume = torch.from_numpy(volume)
    params = one((3, 3, 2), flips=flips, turns=turns)
    aug = VoxelAugmentation()
    moved = aug.apply(volume, params)
    assert torch.equal(moved, as_torch_does(volume, params.draws[0]))
    assert torch.equal(aug.inverse(moved, params), volume)
    assert torch.equal(aug.apply(volume.long(), params), moved.long())


@pytest.mark.parametrize("axes", ["XYZ", "ZYX", "YZX"])
def test_axes_have_names(axes):
    layout = VoxelLayout(("scalar",), axes=axes)
    shape = [3, 3, 2]
    turned = VoxelAugmentation(layout=layout)
    volume = torch.rand(1, *(shape["XYZ".index(axis)] for axis in axes))
    params = one(volume.shape[1:], flips="X", turns=1)
    as_xyz = volume.permute(0, *(1 + axes.index(axis) for axis in "XYZ"))
    expected = torch.rot90(as_xyz.flip(1), 1, (1, 2)).permute(0, *(1 + "XYZ".index(axis) for axis in axes))
    assert torch.equal(turned.apply(volume, params), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sparse_equals_dense_bit_for_bit(dtype):
    layout = dataclasses.replace(CORTEX, value_range=(None, (0, 0.1)))
    volume = torch.stack([cortex(), cortex().flip(1)]).to(dtype)
    aug = VoxelAugmentation(**EVERYTHING, layout=layout)
    for index in range(4):
        params = aug.sample(volume.shape, seed=5, index=index)
        dense, few = aug.apply(volume, params), aug.apply(sparse(volume, layout), params)
        assert few.features.dtype == dtype
        assert torch.equal(few.to_dense(), dense)
        assert len(few.coords) == int((dense[:, 0] != 0).sum())
        shuffled = sparse(volume, layout)
        order = torch.randperm(len(shuffled.coords))
        again = SparseVoxels.from_coords(
            shuffled.coords[order], shuffled.features[order], shape=shuffled.shape, batch_size=2
        )
        assert torch.equal(aug.apply(again, params).to_dense(), dense)  # noise belongs to places, not to an order
        back = aug.inverse(aug.apply(again, params.geometry()), params)
        assert torch.equal(back.coords, again.coords)
        assert torch.equal(back.features, again.features)


def test_inverse_undoes_moves_but_not_noise():
    aug = VoxelAugmentation()
    params = one(brain().shape[1:], flips="XZ", turns=2, noise_std=0.1, dropout_prob=0.2, seed=7)
    still = one(brain().shape[1:], noise_std=0.1, dropout_prob=0.2, seed=7)
    assert torch.equal(aug.inverse(aug.apply(brain(), params), params), aug.apply(brain(), still))
    assert torch.equal(aug.inverse(aug.apply(brain(), params.geometry()), params), brain())


def test_noise_is_normal_and_dropout_takes_its_share():
    volume = torch.ones(2, 64, 64, 16)
    aug = VoxelAugmentation()
    noise = aug.apply(volume, one((64, 64, 16), noise_std=0.5, seed=3)) - 1
    assert noise.mean().abs() < 0.005
    assert noise.std() == pytest.approx(0.5, rel=0.01)
    assert (noise / 0.5).abs().gt(1.96).float().mean() == pytest.approx(0.05, rel=0.05)
    pairs = [(noise[0], noise[1]), (noise[:, 1:], noise[:, :-1]), (noise[..., 1:], noise[..., :-1])]
    for a, b in pairs:  # channels, neighbors along D and along W
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 0.02
    other = aug.apply(volume, one((64, 64, 16), noise_std=0.5, seed=4)) - 1
    assert torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1].abs() < 0.02
    dropped = aug.apply(volume, one((64, 64, 16), dropout_prob=0.3, seed=3))
    assert (dropped[0] == 0).float().mean() == pytest.approx(0.3, rel=0.02)
    assert torch.equal(dropped[0], dropped[1])  # one mask for all channels


@pytest.mark.parametrize(("axes", "origin"), [("XYZ", (-8, -8, -2)), ("ZYX", (-8, -8, -2)), ("XYZ", (0, -8, -2))])
def test_doppler_and_vectors_are_those_of_the_moved_scene(axes, origin):
    size = {"X": 16, "Y": 16, "Z": 8}
    shape = tuple(size[axis] for axis in axes)
    layout = VoxelLayout(RADAR, axes=axes, voxel_size=(1, 1, 0.5), origin=origin, sensor_origin=(0, 0, 0))
    volume = radar_scene(layout, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemkitWarning)
        aug = VoxelAugmentation(rotate_prob=1.0, layout=layout)
        drawn = [aug.sample(volume.shape, seed=0, index=index).geometry() for index in range(12)]
    worst = naive = 0.0
    for params in drawn:
        moved = aug.apply(volume, params)
        voxels = layout.occupied(moved).nonzero()
        values = moved[:, voxels[:, 0], voxels[:, 1], voxels[:, 2]].T
        places = centers(voxels, layout)
        here = VoxelPoints(places, torch.zeros(len(places), 6, dtype=torch.float64))
        before = aug.inverse(here, params).coords
        # The velocity of the moved scene: that of the place it came from, moved as the difference of two places.
        ahead = VoxelPoints(before + velocity(before), here.features)
        moving = aug.apply(ahead, params).coords - places
        seen = radial(places, moving, aug.sensor_after(params))
        worst = max(worst, float((values[:, 2] - seen).abs().max()), float((values[:, 3:] - moving).abs().max()))
        naive = max(naive, float((as_if_scalars(volume, params, axes)[3:] - moved[3:]).abs().max()))
    assert worst < 1e-12
    assert naive > 5  # m/s


def as_if_scalars(volume, params, axes):
    """What a flip does that knows no vectors."""
    scalars = VoxelLayout(("scalar",) * 6, axes=axes)
    return VoxelAugmentation(layout=scalars).apply(volume, params)


def test_warns_of_off_center_sensor():
    layout = VoxelLayout(RADAR, origin=(0, -8, -2), sensor_origin=(0, 0, 0))
    with pytest.warns(MemkitWarning, match=r"moves the sensor along X:.*flip_axes"):
        VoxelAugmentation(layout=layout, rotate_prob=0).sample((6, 16, 16, 4), seed=0)
    with pytest.warns(MemkitWarning, match="along X:"):
        VoxelAugmentation(layout=layout, flip_axes="").sample((6, 16, 16, 4), seed=0)
    VoxelAugmentation(layout=layout, flip_axes="Y", rotate_prob=0).sample((6, 16, 16, 4), seed=0)  # about the sensor


def test_only_half_turns_for_unequal_sides():
    volume = brain()
    half = VoxelAugmentation(rotate_prob=1.0)
    assert {half.sample(volume.shape, seed=0, index=i).draws[0].turns for i in range(20)} == {2}
    none = VoxelAugmentation(rotate_prob=1.0, on_nonsquare="skip")
    assert {none.sample(volume.shape, seed=0, index=i).draws[0].turns for i in range(20)} == {0}
    with pytest.raises(InputError, match="half_turns"):
        VoxelAugmentation(on_nonsquare="error").sample(volume.shape, seed=0)
    stretched = VoxelLayout(("scalar",), voxel_size=(1, 2, 1))
    assert VoxelAugmentation(rotate_prob=1.0, layout=stretched).sample((1, 8, 8, 8), seed=0).draws[0].turns == 2
    turns = [half.sample((1, 8, 8, 8), seed=0, index=i).draws[0].turns for i in range(600)]
    assert all(170 < turns.count(quarter) < 230 for quarter in (1, 2, 3))
    assert_refused(lambda: half.apply(volume, one(volume.shape[1:], turns=1)), InputError, "shape")


def test_empty_voxels_get_the_empty_value_and_no_noise():
    layout = VoxelLayout(("occupancy", "scalar"), empty_value=(-1, -1), value_range=((-1, 1), (-1, 1)))
    volume = 2 * torch.stack([cortex()[0], cortex()[0]]) - 1  # scaled to [-1, 1]
    aug = VoxelAugmentation(layout=layout)
    changed = aug.apply(volume, one(volume.shape[1:], noise_std=0.5, dropout_prob=0.5, seed=1))
    assert set(changed[0].unique().tolist()) == {-1.0, 1.0}  # the occupancy has no noise, and no 0 from a mask
    assert (changed[1][changed[0] == -1] == -1).all()
    assert changed[1].max() == 1.0  # within the range
    dense, few = changed[None], aug.apply(sparse(volume[None], layout), one_of_batch(changed, 0.5, 0.5))
    assert torch.equal(few.features.T, dense[0][:, *few.coords[:, 1:].unbind(1)])


def one_of_batch(volume, noise, dropout):
    return VoxelParams(tuple(volume.shape[1:]), True, (VoxelDraw(noise_std=noise, dropout_prob=dropout, seed=1),))


def test_a_doppler_of_zero_is_a_value():
    layout = VoxelLayout(("occupancy", "doppler"), sensor_origin=(0, 0, 0), value_range=(None, (-1, 1)))
    volume = torch.zeros(2, 4, 4, 4)
    volume[0, :2] = 1  # stands still: Doppler 0
    changed = VoxelAugmentation(layout=layout).apply(volume, one((4, 4, 4), doppler_std=0.1, noise_std=9.0, seed=2))
    assert (changed[1, :2] != 0).all()
    assert changed[1].abs().max() < 0.5  # noise_std is not for Doppler
    assert (changed[1, 2:] == 0).all()


def test_intensities_of_a_sample_get_one_factor_within_the_range():
    layout = VoxelLayout(("occupancy", "intensity"), value_range=(None, (0, 0.6)))
    volume = torch.rand(3, 2, 8, 8, 8)
    aug = VoxelAugmentation(flip_prob=0, rotate_prob=0, noise_std=0, intensity_jitter=0.5, layout=layout)
    params = aug.sample(volume.shape, seed=0)
    gains = [each.intensity_gain for each in params.draws]
    assert len(set(gains)) == 3
    assert all(0.5 <= gain <= 1.5 for gain in gains)
    expected = volume[:, 1] * torch.tensor(gains).view(3, 1, 1, 1)
    torch.testing.assert_close(aug.apply(volume, params)[:, 1], expected.clamp(0, 0.6))


def test_points_move_with_their_voxels():
    layout = VoxelLayout(RADAR, voxel_size=(0.5, 0.5, 0.25), origin=(-4, -4, -1), sensor_origin=(0, 0, 0))
    volume = radar_scene(layout, (16, 16, 8))
    voxels = layout.occupied(volume).nonzero()
    points = VoxelPoints(centers(voxels, layout), volume[:, *voxels.unbind(1)].T)
    aug = VoxelAugmentation(rotate_prob=1.0, layout=layout)
    for index in range(8):
        params = aug.sample(volume.shape, seed=1, index=index).geometry()
        moved, of_points = aug.apply(volume, params), aug.apply(points, params)
        places = ((of_points.coords + torch.tensor([4, 4, 1])) / torch.tensor([0.5, 0.5, 0.25])).floor().long()
        assert torch.equal(moved[:, *places.unbind(1)].T, of_points.features)
        back = aug.inverse(of_points, params)
        torch.testing.assert_close(back.coords, points.coords, rtol=0, atol=1e-12)
        assert torch.equal(back.features, points.features)
    dropped = aug.apply(points, one((16, 16, 8), dropout_prob=0.5, seed=1))
    assert 100 < len(dropped.coords) == len(dropped.features) < 200


def test_labels_move_unchanged_and_targets_may_skip_noise():
    x = {"radar": cortex(), "surface": cortex()[:1], "labels": cortex()[:1].to(torch.int32)}
    aug = VoxelAugmentation(layout=CORTEX)
    params = one((48, 48, 48), flips="X", turns=1, noise_std=0.1, dropout_prob=0.5, seed=1)
    layouts = {"surface": VoxelLayout(("occupancy",))}
    y = aug.apply_joint(x, params, photometric=["radar"], layouts=layouts)
    assert torch.equal(y["labels"], as_torch_does(x["labels"], params.draws[0]))
    assert torch.equal(y["surface"], y["labels"].float())
    assert y["radar"][0].sum() < 0.6 * y["surface"].sum()
    both = aug.apply_joint(x, params, layouts=layouts)
    assert torch.equal(both["surface"][0], both["radar"][0])  # the same dropout
    assert_refused(lambda: aug.apply_joint(x, params, photometric=["rader"], layouts=layouts), InputError, "'rader'")
    assert_refused(lambda: aug.apply_joint(x, params), InputError, "pass layout=")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_labels_of_unsigned_integers_move_as_signed_ones(dtype):
    labels = torch.randint(0, 60_000, (1, 48, 48, 48))
    aug, params = VoxelAugmentation(), one((48, 48, 48), flips="XZ", turns=1, seed=1)
    assert torch.equal(aug.apply(labels.to(dtype), params).long(), aug.apply(labels, params))


def test_the_callers_tensor_is_never_written_to_but_on_demand():
    volume = brain().clone()
    aug = VoxelAugmentation(noise_std=0.1)
    for flips in ("", "XY"):
        params = one(volume.shape[1:], flips=flips, noise_std=0.1, seed=1)
        expected = aug.apply(volume, params)
        assert torch.equal(volume, brain())
        assert expected.data_ptr() != volume.data_ptr()
        given = volume.clone()
        assert aug.apply(given, params, inplace=True).data_ptr() == given.data_ptr()
        assert torch.equal(given, expected)
    untouched = aug.apply(volume, one(volume.shape[1:]))
    assert untouched.data_ptr() != volume.data_ptr()
    few = sparse(volume[None], VoxelLayout(("scalar",)))
    before = few.features.clone(), few.coords.clone()
    aug.apply(few, one_of_batch(volume, 0.5, 0.5))
    assert torch.equal(few.features, before[0])
    assert torch.equal(few.coords, before[1])


def test_gradients_flow_through_all_forms():
    volume = (cortex()[:, ::4, ::4, ::4] + 0).double().requires_grad_()
    aug = VoxelAugmentation(layout=CORTEX)
    params = one((12, 12, 12), flips="Y", turns=1, intensity_gain=0.5, seed=1)
    aug.apply(volume, params).sum().backward()
    occupied = volume.detach()[0] != 0
    assert (volume.grad[1][occupied] == 0.5).all()
    assert (volume.grad[0] == 1).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_of_a_batch_are_those_of_torch(inplace):
    x = torch.rand(3, 2, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    draws = (VoxelDraw(flips="XZ", turns=1, intensity_gain=0.5, seed=1), VoxelDraw(), VoxelDraw(flips="Y", seed=2))
    layout = VoxelLayout(("intensity", "intensity"), value_range=(None, None))
    aug = VoxelAugmentation(layout=layout)
    found = aug.apply(x * 2, VoxelParams((4, 4, 3), True, draws), inplace=inplace)
    gains = (0.5, 1, 1)
    right = torch.stack(
        [as_torch_does(2 * gain * each, draw) for each, draw, gain in zip(x, draws, gains, strict=True)]
    )
    torch.testing.assert_close(found, right)
    upstream = torch.rand_like(right)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, upstream) for each in (found, right)))


def test_gradients_of_a_batch_with_every_change_are_those_of_its_samples():
    x = torch.rand(2, 2, 20, 20, 20, dtype=torch.float64, requires_grad=True)  # of two blocks or more
    aug = VoxelAugmentation(layout=CORTEX, **EVERYTHING)
    params = aug.sample(x.shape, seed=3)
    found = aug.apply(x * 1, params)
    each = [aug.apply(x[n] * 1, VoxelParams(params.shape, False, params.draws[n : n + 1])) for n in range(2)]
    torch.testing.assert_close(found, torch.stack(each))
    upstream = torch.rand_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream) for y in (found, torch.stack(each))))


@pytest.mark.parametrize("shape", [(1, 4, 64, 64, 64), (1, 64, 64, 64), (1, 256, 256, 6), (2, 6, 256, 256)])
def test_the_peak_is_the_result_and_little_beside_it(shape):
    volume = torch.rand(shape)  # every voxel is occupied: the most that noise can need
    axes = "XYZ" if shape[-3] == shape[-2] else "ZYX"
    aug = VoxelAugmentation(layout=VoxelLayout(("scalar",) * shape[-4], axes=axes))
    draw = VoxelDraw("XYZ", 1, noise_std=0.1, dropout_prob=0.1, seed=1)
    params = VoxelParams(tuple(shape[-3:]), len(shape) == 5, (draw,))
    aug.apply(volume, params)
    assert trace_allocations(lambda: aug.apply(volume, params)).peak <= 1.5 * volume.nbytes


def test_the_peak_of_sparse_voxels_is_the_result_and_half_of_it():
    mask = torch.rand(1, 128, 128, 64, generator=torch.Generator().manual_seed(0)) < 0.1
    few = SparseVoxels.from_dense(torch.rand(1, 4, 128, 128, 64), mask=mask)
    size = few.coords.nbytes + few.features.nbytes + 8 * len(few.coords)  # and their order
    aug = VoxelAugmentation()
    params = VoxelParams((128, 128, 64), True, (VoxelDraw("XYZ", 1, noise_std=0.1, dropout_prob=0.1, seed=1),))
    assert trace_allocations(lambda: aug.apply(few, params)).peak <= 1.5 * size


def test_rejects_input_without_matching_draws():
    aug = VoxelAugmentation()
    params = aug.sample((1, 8, 8, 8), seed=0)
    assert_refused(lambda: aug.apply(torch.zeros(1, 1, 8, 8, 8), params), InputError, "draw parameters for the shape")
    assert_refused(lambda: aug.apply(torch.zeros(1, 8, 8, 4), params), InputError, "(8, 8, 8)")
    sparse = SparseVoxels.from_coords(torch.zeros(1, 3).long(), torch.zeros(1, 0), shape=(8, 8, 8))
    points, values = torch.zeros(2, 3), torch.zeros(2, 1)
    assert_refused(lambda: aug.apply(VoxelPoints(points, torch.zeros(3, 1)), params), InputError, "one sample")
    assert_refused(lambda: aug.apply(sparse, params), InputError, "SparseVoxels of 1 samples")
    assert_refused(
        lambda: aug.apply(VoxelPoints(points, values), params), InputError, "place the grid among the points"
    )
    assert_refused(lambda: aug.apply(VoxelPoints([[0, 0, 0]], values[:1]), params), InputTypeError, "VoxelPoints")
    assert_refused(lambda: aug.apply({"x": torch.zeros(1, 8, 8, 8)}, params), InputTypeError, "apply_joint")
    assert_refused(lambda: aug.sensor_after(params), InputError, "sensor_origin")
    assert_refused(lambda: aug.sample((8, 8, 8), seed=0), InputError, "batch_size")
