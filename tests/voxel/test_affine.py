"""The affine of a volume follows its voxels: a marked voxel lies at the same place in the world before and after."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import memkit as mk
from memkit.voxel.params import VoxelDraw, VoxelParams

SHAPE = (6, 6, 4)
DRAWS = [
    VoxelDraw(flips="".join(flips), turns=turns)
    for number in range(4)
    for flips in itertools.combinations("XYZ", number)
    for turns in range(4)
]


class MetaTensor(torch.Tensor):
    """Behaves like MONAI's class: metadata in the instance, copied to all results computed from it."""

    @staticmethod
    def __new__(cls, x, **_):
        return torch.as_tensor(x).as_subclass(cls)

    def __init__(self, x, affine=None, is_batch=False, operations=None):
        self._meta = {"affine": torch.eye(4, dtype=torch.float64) if affine is None else affine, "space": "RAS"}
        self._applied_operations, self._pending_operations = operations or [], []
        self.is_batch = is_batch

    @property
    def affine(self):
        return self._meta["affine"]

    @affine.setter
    def affine(self, value):
        self._meta["affine"] = torch.as_tensor(value, dtype=torch.float64)

    @property
    def applied_operations(self):
        return self._applied_operations

    @property
    def has_pending_operations(self):
        return len(self._pending_operations) > 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            source = next((each for each in args if isinstance(each, cls)), None)
            if source is not None and "_meta" in source.__dict__:
                result.__dict__.update({name: copy.copy(value) for name, value in source.__dict__.items()})
        return result


def any_affine(seed=0):
    """A rotation, other spacings, and a place."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(4, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    matrix[:3, :3] = rotation * torch.tensor([1.5, 1.5, 3.0])
    matrix[:3, 3] = torch.randn(3, generator=generator, dtype=torch.float64) * 100
    return matrix


def numbered(affine=None, channels=1):
    """Each voxel has a value of its own."""
    x = torch.arange(float(torch.tensor(SHAPE).prod() * channels)).reshape(channels, *SHAPE) + 1
    return MetaTensor(x, affine=any_affine() if affine is None else affine)


def world(volume, affine):
    """Where each value lies in the world, in the order of the values: (N, 3)."""
    plain = volume.as_subclass(torch.Tensor)
    places = (plain[0] > -1).nonzero()[plain[0].flatten().argsort()]
    places = torch.cat([places.double(), torch.ones(len(places), 1)], 1)
    return (places @ affine.T)[:, :3]


def params_of(*draws, shape=SHAPE, batched=False):
    return VoxelParams(shape, batched=batched, draws=draws)


class TestVoxelAugmentation:
    @pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: f"{draw.flips}{draw.turns}")
    @pytest.mark.parametrize("axes", ["XYZ", "ZYX"])
    def test_voxels_keep_their_world_position(self, draw, axes):
        layout = mk.voxel.VoxelLayout(("scalar",), axes=axes)
        shape = SHAPE if axes == "XYZ" else SHAPE[::-1]
        x = numbered()
        if axes == "ZYX":
            x = MetaTensor(x.as_subclass(torch.Tensor).reshape(1, *shape), affine=any_affine())
        aug, params = mk.VoxelAugmentation(layout=layout), params_of(draw, shape=shape)
        y = aug.apply(x, params)
        assert type(y) is MetaTensor
        torch.testing.assert_close(world(y, y.affine), world(x, x.affine), rtol=0, atol=1e-9)
        torch.testing.assert_close(aug.affine_after(x.affine, params), y.affine)
        back = aug.inverse(y, params)
        assert torch.equal(back.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor))
        torch.testing.assert_close(back.affine, x.affine, rtol=0, atol=1e-9)
        assert torch.equal(x.affine, any_affine())  # the source keeps its own

    def test_the_voxels_are_those_of_a_plain_tensor(self):
        """Values are changed as without metadata, and the rest of it is kept."""
        aug = mk.VoxelAugmentation(noise_std=0.1, dropout_prob=0.2, flip_prob=1.0)
        x = numbered(channels=2)
        params = aug.sample(x.shape, seed=0)
        y = aug.apply(x, params)
        assert torch.equal(y.as_subclass(torch.Tensor), aug.apply(x.as_subclass(torch.Tensor), params))
        assert y._meta["space"] == "RAS"
        assert y._meta is not x._meta

    def test_unmoved_images_keep_their_affine(self):
        aug = mk.VoxelAugmentation(flip_prob=0.0, rotate_prob=0.0, noise_std=0.1)
        x = numbered()
        x._pending_operations.append({})
        y = aug.apply(x, aug.sample(x.shape, seed=0))
        assert torch.equal(y.affine, x.affine)
        holes = mk.CutoutAugmentation(prob=1.0)
        assert torch.equal(holes.apply(x, holes.sample(x.shape, seed=0)).affine, x.affine)

    def test_several_in_a_row_and_back(self):
        steps = [mk.VoxelAugmentation(flip_prob=1.0, rotate_prob=1.0) for _ in range(3)]
        aug = mk.ComposedAugmentation([steps[0], mk.CutoutAugmentation(prob=0.0), *steps[1:]])
        x = numbered()
        for seed in range(5):
            params = aug.sample(x.shape, seed=seed).geometry()
            y = aug.apply(x, params)
            torch.testing.assert_close(world(y, y.affine), world(x, x.affine), rtol=0, atol=1e-9)
            torch.testing.assert_close(aug.affine_after(x.affine, params), y.affine)
            torch.testing.assert_close(aug.inverse(y, params).affine, x.affine, rtol=0, atol=1e-9)

    def test_a_target_moves_with_its_input(self):
        aug = mk.VoxelAugmentation(flip_prob=1.0, rotate_prob=1.0)
        labels = MetaTensor(torch.arange(144).reshape(1, *SHAPE) + 1, affine=any_affine())
        moved = aug.apply_joint({"x": numbered(), "y": labels}, aug.sample((1, *SHAPE), seed=1), photometric=["x"])
        torch.testing.assert_close(moved["x"].affine, moved["y"].affine)
        torch.testing.assert_close(world(moved["y"], moved["y"].affine), world(labels, labels.affine))

    def test_each_sample_of_a_batch_has_its_own(self):
        affines = torch.stack([any_affine(seed) for seed in range(3)])
        x = MetaTensor(torch.stack([numbered().as_subclass(torch.Tensor)] * 3), affine=affines, is_batch=True)
        aug, params = mk.VoxelAugmentation(), params_of(DRAWS[5], DRAWS[0], DRAWS[22], batched=True)
        y = aug.apply(x, params)
        plain = y.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor)
        for number in range(3):
            places = world(plain[0][number], y.affine[number]), world(plain[1][number], affines[number])
            torch.testing.assert_close(*places, rtol=0, atol=1e-9)

    def test_in_place(self):
        x = numbered()
        before = world(x, x.affine)
        y = mk.VoxelAugmentation().apply(x, params_of(DRAWS[7]), inplace=True)
        assert y.data_ptr() == x.data_ptr()
        torch.testing.assert_close(world(y, y.affine), before, rtol=0, atol=1e-9)

    def test_affine_as_array(self):
        x = numbered()
        x._meta["affine"] = any_affine().numpy().astype(np.float32)
        aug, params = mk.VoxelAugmentation(), params_of(DRAWS[9])
        y = aug.apply(x, params)
        torch.testing.assert_close(world(y, y.affine), world(x, any_affine()), rtol=1e-5, atol=1e-4)


class ReadOnly(MetaTensor):
    affine = property(lambda self: self._meta["affine"])


class TestUnsupportedAffines:
    def test_rejects_one_affine_for_different_moves(self):
        x = MetaTensor(torch.zeros(2, 1, *SHAPE), affine=any_affine())
        aug = mk.VoxelAugmentation()
        with pytest.raises(
            mk.errors.InputError, match=r"one affine for 2 volumes that are moved in different ways.*same_on_batch"
        ):
            aug.apply(x, params_of(DRAWS[1], DRAWS[2], batched=True))
        y = aug.apply(x, params_of(DRAWS[5], DRAWS[5], batched=True))
        torch.testing.assert_close(y.affine, aug.affine_after(x.affine, params_of(DRAWS[5])))

    @pytest.mark.parametrize("shape", [(3, 3), (5, 5), (2, 4, 4), ()])
    def test_an_affine_of_another_shape(self, shape):
        with pytest.raises(mk.errors.InputError, match="an affine of shape"):
            mk.VoxelAugmentation().apply(numbered(torch.zeros(shape)), params_of(DRAWS[5]))

    def test_pending_operations(self):
        x = numbered()
        x._pending_operations.append({})
        with pytest.raises(mk.errors.InputError, match="apply them first"):
            mk.VoxelAugmentation().apply(x, params_of(DRAWS[5]))

    def test_rejects_read_only_affine(self):
        x = ReadOnly(numbered().as_subclass(torch.Tensor), affine=any_affine())
        with pytest.raises(mk.errors.InputTypeError, match=r"cannot be set.*affine_after\(affine, params\)"):
            mk.VoxelAugmentation().apply(x, params_of(DRAWS[5]))


def test_move_is_listed_as_applied_until_undone():
    """Else MONAI would invert a resampling of voxels that have moved since."""
    x = numbered()
    x.applied_operations.append({"class": "Spacing", "id": 1})
    aug, params = mk.VoxelAugmentation(), params_of(DRAWS[22])
    y = aug.apply(x, params)
    assert [each["class"] for each in y.applied_operations] == ["memkit"]  # MONAI finds no Spacing to invert
    assert "augmentation.inverse" in y.applied_operations[-1]["extra_info"]["warn"]
    assert [each["class"] for each in x.applied_operations] == ["Spacing"]
    assert aug.inverse(y, params).applied_operations == x.applied_operations
    twice = aug.apply(y, params_of(DRAWS[5]))
    assert aug.inverse(aug.inverse(twice, params_of(DRAWS[5])), params).applied_operations == x.applied_operations
    spacing = [{"class": "Spacing"}]
    of_each = {"affine": torch.stack([any_affine()] * 3), "operations": ["none", spacing, "none"]}  # as MONAI collates
    batch = MetaTensor(torch.zeros(3, 1, *SHAPE), is_batch=True, **of_each)
    params = params_of(DRAWS[0], DRAWS[1], DRAWS[2], batched=True)
    moved = aug.apply(batch, params)
    assert [each if each == "none" else len(each) for each in moved.applied_operations] == ["none", 1, 1]
    assert aug.inverse(moved, params).applied_operations == ["none", spacing, []]


class TestDataSets:
    def config(self):
        return {"flip_prob": 1.0, "rotate_prob": 1.0, "noise_std": 0.0}

    def test_volumes_with_an_affine(self):
        dataset = mk.voxel.VoxelDataset(
            [{"image": numbered(), "mask": numbered()}] * 2, augmentation_config=self.config()
        )
        sample = dataset[1]
        for each in sample.values():
            torch.testing.assert_close(world(each, each.affine), world(numbered(), any_affine()), rtol=0, atol=1e-9)

    @pytest.mark.parametrize("kind", [lambda affine: affine, lambda affine: affine.numpy()])
    def test_an_affine_beside_the_volumes(self, kind):
        plain = numbered().as_subclass(torch.Tensor)
        source = [{"image": plain, "image_affine": kind(any_affine()), "meta": {"affine": kind(any_affine()), "id": 5}}]
        sample = mk.voxel.VoxelDataset(source, augmentation_config=self.config())[0]
        for each in (sample["image_affine"], sample["meta"]["affine"]):
            assert isinstance(each, type(kind(any_affine())))
            places = world(sample["image"], torch.as_tensor(each))
            torch.testing.assert_close(places, world(plain, any_affine()), rtol=0, atol=1e-9)
        assert sample["meta"]["id"] == 5

    @pytest.mark.parametrize(
        "other",
        [
            torch.zeros(SHAPE, dtype=torch.int64),
            np.zeros(SHAPE),
            torch.zeros(2, 1, *SHAPE),
            [torch.zeros(1, *SHAPE)],
            {"inner": np.zeros(SHAPE)},
            type("ScalarImage", (), {"spatial_shape": SHAPE, "affine": np.eye(4)})(),
        ],
    )
    def test_rejects_companions_it_cannot_move(self, other):
        """Labels without channels, arrays, images of torchio: beside a volume that is flipped they would be wrong."""
        source = [{"image": torch.zeros(1, *SHAPE), "mask": other}]
        with pytest.raises(mk.errors.InputTypeError, match=r"'mask'.*would not be moved.*mask\[None\]"):
            mk.voxel.VoxelDataset(source, augmentation_config=self.config())[0]
        holes = mk.voxel.VoxelDataset(source, augmentation=mk.CutoutAugmentation(prob=1.0))[0]
        assert holes["mask"] is other
        assert mk.voxel.VoxelDataset(source, use_augmentation=False)[0]["mask"] is other

    def test_labels_and_names_are_handed_on(self):
        source = [{"image": torch.zeros(1, *SHAPE), "label": torch.tensor(3), "box": torch.zeros(5, 6), "name": "a"}]
        with pytest.warns(mk.MemkitWarning, match="'box'"):
            sample = next(iter(DataLoader(mk.voxel.VoxelDataset(source, augmentation_config=self.config()))))
        assert sample["name"] == ["a"]
        assert sample["box"].shape == (1, 5, 6)


def test_gridless_data_loses_its_affine():
    """Rows of sparse voxels, and volumes of another resolution: plain tensors are accepted."""
    x = MetaTensor(torch.rand(1, 2, *SHAPE), affine=any_affine())
    voxels = mk.voxel.SparseVoxels.from_dense(x)
    assert type(voxels.features) is torch.Tensor
    assert type(voxels.to_dense()) is torch.Tensor
    rows = MetaTensor(torch.rand(3, 2), affine=any_affine())
    assert type(voxels.with_features(MetaTensor(voxels.features, affine=any_affine())).features) is torch.Tensor
    assert (
        type(mk.voxel.SparseVoxels.from_coords(torch.arange(9).reshape(3, 3) % 4, rows, shape=SHAPE).features)
        is torch.Tensor
    )
    resolution = mk.DynamicResolutionProcessor(max_active_voxels=3)
    resolution.choose((x.as_subclass(torch.Tensor)[0, 0] > 0).nonzero())
    assert type(resolution.apply(x)) is torch.Tensor
