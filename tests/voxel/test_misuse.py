"""Calls as users of torchio, MONAI and albumentations write them: each error ends in what to write instead."""

import dataclasses

import pytest
import torch

import memkit as mk
from memkit.errors import ConfigError, InputError, InputTypeError

X = torch.rand(2, 6, 6, 4, generator=torch.Generator().manual_seed(0))
CLOUD = torch.rand(20, 3, generator=torch.Generator().manual_seed(1))
VOXEL = mk.VoxelAugmentation
KEYS = "functools.partial(aug, photometric=['image']); write VoxelAugmentation()"
OWN_PROB = "flip_prob, rotate_prob, dropout_prob; write VoxelAugmentation()"
LOSS = mk.StructurePreservingLoss()

CALLS = [
    (lambda: VOXEL(0.5), InputTypeError, "write VoxelAugmentation(flip_prob=0.5)"),
    (lambda: VOXEL(p=0.5), InputTypeError, OWN_PROB),
    (lambda: VOXEL(prob=0.5), InputTypeError, OWN_PROB),
    (lambda: VOXEL(keys=["image"]), InputTypeError, KEYS),
    (lambda: VOXEL(flip_probability=0.5), InputTypeError, "write VoxelAugmentation(flip_prob=0.5)"),
    (lambda: VOXEL(axes=(0, 1)), InputTypeError, "write VoxelAugmentation(flip_axes='XY')"),
    (lambda: VOXEL(spatial_axis=0), InputTypeError, "write VoxelAugmentation(flip_axes='X')"),
    (lambda: VOXEL(std=0.1), InputTypeError, "write VoxelAugmentation(noise_std=0.1)"),
    (lambda: VOXEL(noise_prob=0.1), InputTypeError, "or dropout_prob to empty voxels; write VoxelAugmentation()"),
    (lambda: VOXEL(max_k=3), InputTypeError, "by one, two or three quarters; write VoxelAugmentation()"),
    (lambda: VOXEL(flip_axes=(0, 1)), ConfigError, "pass flip_axes='XY'."),
    (lambda: VOXEL(flip_axes="xy"), ConfigError, "pass flip_axes='XY'."),
    (lambda: VOXEL(flip_axes=2), ConfigError, "pass flip_axes='Z'."),
    (lambda: VOXEL(flip_prob=50), ConfigError, "pass flip_prob=0.5."),
    (lambda: VOXEL(on_nonsquare="crop"), ConfigError, "pass on_nonsquare='half_turns'."),
    (lambda: VOXEL(layout=("intensity",)), ConfigError, "pass layout=mk.voxel.VoxelLayout(channels)."),
    (lambda: VOXEL.from_config({"noise_prob": 0.1}), ConfigError, "noise_std, or dropout_prob to empty voxels."),
    (lambda: VOXEL.from_config("medium"), ConfigError, "pass for example {'flip_prob': 0.5}."),
    (lambda: mk.voxel.FlipAugmentation(p=0.5), InputTypeError, "write FlipAugmentation(prob=0.5)"),
    (lambda: mk.voxel.FlipAugmentation(spatial_axis=0), InputTypeError, "write FlipAugmentation(axes='X')"),
    (lambda: mk.voxel.FlipAugmentation(axes=[0]), ConfigError, "pass axes='X'."),
    (lambda: mk.voxel.NoiseAugmentation(prob=0.1), InputTypeError, "set only its strength; write NoiseAugmentation()"),
    (lambda: mk.voxel.NoiseAugmentation(0.1), InputTypeError, "write NoiseAugmentation(std=0.1)"),
    (lambda: mk.voxel.NoiseAugmentation(std=-1), ConfigError, "pass std=0."),
    (lambda: mk.voxel.RotateAugmentation(degrees=90), InputTypeError, "three quarters; write RotateAugmentation()"),
    (lambda: mk.voxel.DropoutAugmentation(p=0.2), InputTypeError, "write DropoutAugmentation(prob=0.2)"),
    (lambda: mk.CutoutAugmentation(p=0.5), InputTypeError, "write CutoutAugmentation(prob=0.5)"),
    (lambda: mk.CutoutAugmentation(holes=2), InputTypeError, "write CutoutAugmentation(num_holes=2)"),
    (lambda: mk.MixupAugmentation(0.2), InputTypeError, "write MixupAugmentation(alpha=0.2)"),
    (lambda: VOXEL().sample(X.shape), InputTypeError, "write sample(shape, seed=...)"),
    (lambda: VOXEL().sample(X, seed=0), InputTypeError, "write sample(x.shape, seed=seed), or aug(x) for fresh draws."),
    (lambda: VOXEL().sample(4, seed=0), InputTypeError, "or aug(x) for fresh draws."),
    (lambda: VOXEL().apply(X), InputTypeError, "write apply(x, params)"),
    (
        lambda: VOXEL().apply({"image": X}, VOXEL().sample(X.shape, seed=0)),
        InputTypeError,
        "write aug.apply_joint(sample, params).",
    ),
    (lambda: VOXEL()(), InputTypeError, "write aug(x)."),
    (lambda: VOXEL()(X[0]), InputTypeError, "for an image (C, H, W)."),
    (lambda: VOXEL()("scan.nii"), InputTypeError, "for an image (C, H, W)."),
    (lambda: VOXEL()({"image": X, "mask": X[0]}), InputTypeError, "or remove it from the sample."),
    (lambda: VOXEL()({"image": X}, photometric=["imag"]), InputError, "write 'image'."),
    (lambda: VOXEL()({"image": X}, photometric="image"), InputError, "write photometric=['image']."),
    (lambda: mk.ComposedAugmentation([]), ConfigError, "write ComposedAugmentation([VoxelAugmentation()])"),
    (lambda: mk.ComposedAugmentation(VOXEL()), ConfigError, "write ComposedAugmentation([VoxelAugmentation(...)])"),
    (
        lambda: mk.ComposedAugmentation(VOXEL(), mk.CutoutAugmentation()),
        InputTypeError,
        "write ComposedAugmentation([VoxelAugmentation(...), CutoutAugmentation(...)])",
    ),
    (lambda: mk.ComposedAugmentation([VOXEL]), InputTypeError, "write VoxelAugmentation()."),
    (lambda: mk.ComposedAugmentation([VOXEL(), 3]), InputTypeError, "pass for example VoxelAugmentation()."),
    (lambda: mk.ComposedAugmentation([lambda x: None])(X), InputTypeError, "end the function with: return x."),
    (
        lambda: mk.voxel.VoxelDataset([X], transform=VOXEL()),
        InputTypeError,
        "write VoxelDataset(samples, augmentation=augmentation)",
    ),
    (lambda: mk.voxel.VoxelLayout(("intensty",)), ConfigError, "write 'intensity' for it."),
    (lambda: mk.voxel.VoxelLayout(("doppler",)), ConfigError, "in meters, in the frame of the points."),
    (lambda: mk.voxel.VoxelLayout(("scalar",), axes="XY"), ConfigError, "or axes='ZYX' if D is the height."),
    (
        lambda: mk.voxel.chamfer_distance(CLOUD.T, CLOUD.T),
        InputError,
        "for 3 points of 20 coordinates chamfer_distance(mk.voxel.nearest_points(a, b))",
    ),
    (
        lambda: mk.voxel.hausdorff_distance([CLOUD.T], [CLOUD.T]),
        InputError,
        "hausdorff_distance(mk.voxel.nearest_points(a, b))",
    ),
    (
        lambda: mk.voxel.chamfer_distance(CLOUD, CLOUD, convention="pytorch3D"),
        ConfigError,
        "pass convention='pytorch3d'.",
    ),
    (
        lambda: mk.voxel.hausdorff_distance(CLOUD, CLOUD, percentile=95),
        InputTypeError,
        "write hausdorff_distance(a, b, quantile=0.95)",
    ),
    (lambda: mk.voxel.f_score(CLOUD, CLOUD), InputTypeError, "write f_score(prediction, target, threshold=...)"),
    (
        lambda: mk.voxel.f_score(CLOUD, CLOUD, tau=0.1),
        InputTypeError,
        "write f_score(prediction, target, threshold=0.1)",
    ),
    (lambda: mk.voxel.feature_mae(X, X), InputError, "feature_mae(prediction[None], target[None])"),
    (
        lambda: mk.CompositeLoss3D([LOSS]),
        ConfigError,
        "write CompositeLoss3D({'edges': (StructurePreservingLoss(), 1.0)})",
    ),
    (lambda: mk.CompositeLoss3D({"a": LOSS}), ConfigError, "write {'a': (StructurePreservingLoss(), 1.0)}"),
    (lambda: mk.CompositeLoss3D({"a": (1.0, LOSS)}), ConfigError, "write {'a': (StructurePreservingLoss(), 1.0)}"),
    # forms of the arguments
    (lambda: VOXEL()(X, seed=0), InputTypeError, "aug.sample(shape, seed=seed); write VoxelAugmentation(...)(*sample)"),
    (lambda: VOXEL()([]), InputTypeError, "for an image (C, H, W)."),
    (lambda: VOXEL().apply_joint(X, VOXEL().sample(X.shape, seed=0)), InputTypeError, "write aug.apply(x, params)"),
    (
        lambda: VOXEL().apply_joint(None, VOXEL().sample(X.shape, seed=0)),
        InputTypeError,
        "aug.apply_joint({'image': x}, params)",
    ),
    (lambda: mk.ComposedAugmentation([VOXEL()]).apply_joint(X, None), InputTypeError, "write aug.apply(x, params)"),
    (lambda: VOXEL().sample(X, seed=0), InputTypeError, "write sample(x.shape, seed=seed), or aug(x) for fresh draws."),
    (lambda: VOXEL().sample(X.shape), InputTypeError, "write sample(shape, seed=...)"),
    (lambda: VOXEL(flip_prob="0.5"), ConfigError, "pass flip_prob=0.5."),
    (lambda: VOXEL(flip_prob=50), ConfigError, "pass flip_prob=0.5."),
    (lambda: VOXEL(on_nonsquare="raise"), ConfigError, "pass on_nonsquare='half_turns'."),
    (lambda: mk.ComposedAugmentation([VOXEL]), InputTypeError, "write VoxelAugmentation()."),
    (lambda: mk.ComposedAugmentation(VOXEL()), ConfigError, "write ComposedAugmentation([VoxelAugmentation(...)])"),
    (lambda: mk.voxel.VoxelLayout(), InputTypeError, "write VoxelLayout(('scalar',))"),
    (lambda: mk.voxel.VoxelLayout("scalar"), ConfigError, "pass channels=['scalar']."),
    (lambda: mk.voxel.VoxelLayout(["rgb"]), ConfigError, "write 'scalar' for it."),
    (lambda: mk.voxel.VoxelLayout(["scalar"], axes="DHW"), ConfigError, "pass axes='XYZ'."),
    (lambda: mk.voxel.VoxelDataset(5), InputTypeError, "write VoxelDataset(samples, ...)"),
    (lambda: mk.voxel.VoxelDataset(iter([X])), InputTypeError, "with samples = list(iterable)"),
    (
        lambda: mk.voxel.VoxelDataset([X])["image"],
        InputTypeError,
        "write dataset[0]['image'] for an entry of a sample.",
    ),
    (lambda: mk.voxel.feature_mae(X), InputTypeError, "write feature_mae(prediction, target)"),
    (lambda: mk.StructurePreservingLoss()(X[None]), InputTypeError, "StructurePreservingLoss(...)(prediction, target)"),
    (lambda: mk.StructurePreservingLoss(reduction="sum"), InputTypeError, "write StructurePreservingLoss()"),
    (lambda: mk.OccupancyAwareLoss(pos_weight=3), InputTypeError, "write OccupancyAwareLoss(occupied_weight=3)"),
    (lambda: mk.Perceptual3DLoss(in_channels=2, base_channels=8)(X[None]), InputTypeError, "(prediction, target)"),
    *(
        (lambda given=given: mk.voxel.voxel_iou(X[0], X[1], threshold=given), ConfigError, "=0.5, the usual one.")
        for given in (float("nan"), None, "0.5")
    ),
    (lambda: mk.voxel.feature_mae(X[None], X[None], mask="x"), InputError, "mask = occupancy[:, 0] > 0.5."),
    (lambda: mk.OccupancyAwareLoss(layout="x"), ConfigError, "pass layout=mk.voxel.VoxelLayout(channels)."),
    (lambda: mk.Perceptual3DLoss(4, 4, extractor="x"), InputTypeError, "pass extractor=model, an nn.Module."),
    (lambda: mk.CompositeLoss3D(), InputTypeError, "CompositeLoss3D({'edges': (StructurePreservingLoss(), 1.0)})"),
    (lambda: mk.CompositeLoss3D({"edges": LOSS}), ConfigError, "write {'edges': (StructurePreservingLoss(), 1.0)}"),
    (
        lambda: mk.CompositeLoss3D({"edges": (1.0, LOSS)}),
        ConfigError,
        "write {'edges': (StructurePreservingLoss(), 1.0)}",
    ),
]


@pytest.mark.parametrize(("call", "error", "end"), CALLS)
def test_a_wrong_call_ends_in_the_call_to_write(call, error, end):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).endswith(end), str(caught.value)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("forward", "write aug(x)"),
        ("transform", "write aug(x)"),
        ("replay", "write aug.apply(x, aug.last_params)"),
        ("set_random_state", "write torch.manual_seed(seed)"),
        ("invert", "write aug.inverse(y, aug.last_params)"),
    ],
)
@pytest.mark.parametrize("aug", [VOXEL(), mk.CutoutAugmentation(), mk.ComposedAugmentation([VOXEL()])])
def test_an_absent_name_has_its_counterpart(aug, name, end):
    with pytest.raises(mk.errors.AbsentError) as caught:
        getattr(aug, name)
    assert str(caught.value).endswith(end)


def test_small_clouds_and_other_coordinates_are_no_columns():
    assert mk.voxel.chamfer_distance(CLOUD[:3], CLOUD[:3]) == 0
    assert mk.voxel.chamfer_distance(CLOUD[:3].repeat(1, 2), torch.rand(9, 6)) > 0
    features = torch.rand(3, 20)
    assert mk.voxel.chamfer_distance(mk.voxel.nearest_points(features, features)) == 0


def test_settings_stay_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        VOXEL().flip_prob = 0.3


def test_empty_batches_and_integer_clouds_are_refused_with_the_way_out():
    with pytest.raises(mk.errors.InputError, match=r"an empty volume \(0, 1, 8, 8, 8\);.* Way out: skip empty batches"):
        mk.voxel.FlipAugmentation()(torch.zeros(0, 1, 8, 8, 8))
    with pytest.raises(mk.errors.InputTypeError, match=r"a: a Tensor of shape \(5, 3\).* Way out: pass a\.float\(\)"):
        mk.voxel.chamfer_distance(torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3))
