"""Augmentations in a call: fresh and recorded draws, samples of every form, other libraries' transforms."""

import copy
import dataclasses
import functools
import pickle
import random
import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import memkit as mk
from memkit.voxel.params import CallableParams
from tests.helpers import assert_refused
from tests.voxel.test_affine import SHAPE, MetaTensor, any_affine, numbered, world

BATCH = (3, 2, *SHAPE)
LAYOUT = mk.voxel.VoxelLayout(("intensity", "doppler"), sensor_origin=(3.0, 3.0, 2.0))
EACH = [
    mk.voxel.FlipAugmentation(),
    mk.voxel.RotateAugmentation(prob=0.9),
    mk.voxel.NoiseAugmentation(),
    mk.voxel.DropoutAugmentation(),
    mk.voxel.IntensityJitterAugmentation(layout=LAYOUT),
    mk.voxel.DopplerJitterAugmentation(layout=LAYOUT),
    mk.VoxelAugmentation(dropout_prob=0.1),
    mk.CutoutAugmentation(),
    mk.MixupAugmentation(),
    mk.ComposedAugmentation([mk.VoxelAugmentation(), mk.CutoutAugmentation()]),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speckle(mk.voxel.VoxelOperation):
    """A noise of one's own: one class."""

    std: float = 0.5
    layout: mk.voxel.VoxelLayout | None = None

    def draw(self, chance, shape, layout):
        return {"std": chance.uniform(0, self.std)}

    def change(self, values, noise, channel, draw):
        return values * (1 + draw.extra["std"] * noise.normal(channel))


class Image(dict):
    """Stands in for torchio's images."""

    def __init__(self, data, affine, kind="intensity"):
        super().__init__(data=data, affine=np.asarray(affine))
        self.type = kind

    data = property(lambda self: self["data"])
    affine = property(lambda self: self["affine"], lambda self, value: self.update(affine=value))
    spatial_shape = property(lambda self: tuple(self["data"].shape[1:]))

    def set_data(self, value):
        self["data"] = value

    def __copy__(self):
        return Image(self.data, self.affine, self.type)


class Subject(dict):
    """Stands in for torchio's subjects: a dict whose entries are attributes too."""

    def __init__(self, **entries):
        super().__init__(entries)
        self.update_attributes()

    def update_attributes(self):
        self.__dict__.update(self)

    def __copy__(self):
        return Subject(**self)


@pytest.mark.parametrize("aug", EACH, ids=lambda aug: type(aug).__name__)
class TestEveryAugmentation:
    def test_a_call_is_apply_with_the_recorded_draws(self, aug):
        x = torch.rand(BATCH)
        before = x.clone()
        y = aug(x)
        assert torch.equal(x, before)
        assert torch.equal(aug.apply(x, aug.last_params), y)
        again = mk.voxel.AugmentationParams.from_json(aug.last_params.to_json())
        assert torch.equal(aug.apply(x, again), y)

    def test_draws_are_fresh_and_follow_torchs_seed(self, aug):
        x = torch.rand(BATCH)
        torch.manual_seed(5)
        drawn = []
        for _ in range(3):
            aug(x)
            drawn.append(aug.last_params)
        torch.manual_seed(5)
        aug(x)
        assert aug.last_params == drawn[0]
        assert len(set(drawn)) == 3
        assert aug.sample(BATCH, seed=1) == aug.sample(BATCH, seed=1)  # not of these draws

    def test_can_be_copied_pickled_and_compared(self, aug):
        fresh = copy.copy(aug)
        aug(torch.rand(BATCH))
        for other in (copy.deepcopy(aug), pickle.loads(pickle.dumps(aug))):
            assert other.last_params == aug.last_params
        if dataclasses.is_dataclass(aug):
            assert fresh == aug


class TestOperations:
    def test_composition_matches_its_operations(self):
        layout = mk.voxel.VoxelLayout(("intensity", "scalar"))
        x = torch.rand(2, 6, 6, 4)
        params = mk.VoxelAugmentation(dropout_prob=0.2, noise_std=0.1, intensity_jitter=0.2, layout=layout).sample(
            x.shape, seed=3
        )
        draw = params.draws[0]
        whole = mk.VoxelAugmentation(layout=layout).apply(x, params)

        def only(**fields):
            return dataclasses.replace(params, draws=(mk.voxel.VoxelDraw(seed=draw.seed, **fields),))

        y = mk.voxel.IntensityJitterAugmentation(layout=layout).apply(x, only(intensity_gain=draw.intensity_gain))
        y = mk.voxel.NoiseAugmentation(layout=layout).apply(y, only(noise_std=draw.noise_std))
        y = mk.voxel.DropoutAugmentation(layout=layout).apply(y, only(dropout_prob=draw.dropout_prob))
        y = mk.voxel.FlipAugmentation(layout=layout).apply(y, only(flips=draw.flips))
        y = mk.voxel.RotateAugmentation(layout=layout).apply(y, only(turns=draw.turns))
        assert torch.equal(y, whole)

    def test_operation_rejects_draws_of_another(self):
        """It would leave out the rest of the record in silence."""
        x = torch.rand(2, *SHAPE)
        params = mk.VoxelAugmentation().sample(x.shape, seed=0)
        assert_refused(lambda: mk.voxel.FlipAugmentation().apply(x, params), mk.errors.InputTypeError, "noise_std=0.02")
        own = Speckle().sample(x.shape, seed=0)
        assert_refused(lambda: mk.VoxelAugmentation().apply(x, own), mk.errors.InputTypeError, "operation='Speckle'")
        flip = mk.voxel.FlipAugmentation(prob=1.0)
        assert torch.equal(mk.VoxelAugmentation().apply(x, flip.sample(x.shape, seed=0)), x.flip(1, 2, 3))

    def test_a_noise_of_ones_own_is_one_class(self):
        layout = mk.voxel.VoxelLayout(("occupancy", "scalar"), value_range=((0, 1), (0, 0.9)))
        aug = Speckle(std=0.5, layout=layout)
        x = torch.rand(2, 8, 8, 8)
        x[0] = (x[0] > 0.5).float()
        x[1] *= x[0]
        y = aug(x)
        assert torch.equal(y[0], x[0])
        assert torch.equal(y[1] == 0, x[0] == 0)  # empty voxels stay empty
        assert not torch.equal(y[1], x[1])
        assert y[1].max() <= 0.9
        params = mk.voxel.AugmentationParams.from_json(aug.last_params.to_json())
        assert params == aug.last_params
        assert torch.equal(aug.apply(x, params), y)
        voxels = mk.voxel.SparseVoxels.from_dense(x[None], mask=layout.occupied(x)[None])
        batch = dataclasses.replace(params, batched=True)
        assert torch.equal(aug.apply(voxels, batch).to_dense()[0], y)
        assert torch.equal(aug.apply(x, params.geometry()), x)
        assert not aug.moves_voxels(params)

    @pytest.mark.parametrize("extra", [{"std": "x"}, {"std": float("nan")}, [1]])
    def test_a_record_of_ones_own_holds_numbers(self, extra):
        assert_refused(lambda: mk.voxel.VoxelDraw(extra=extra), mk.errors.InputError, "extra")


class Fresh(Dataset):
    def __init__(self, aug):
        self.aug = aug

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.aug(torch.ones(1, 4, 4, 4))
        return torch.tensor(self.aug.last_params.draws[0].seed)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_from_their_own_seed_and_anew_in_each_epoch(persistent):
    def epochs():
        torch.manual_seed(1)
        loader = DataLoader(
            Fresh(mk.VoxelAugmentation()),
            num_workers=2,
            batch_size=2,
            persistent_workers=persistent,
            multiprocessing_context="fork",
        )
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    found = epochs()
    assert len({seed for epoch in found for seed in epoch}) == 16  # no two samples, workers or epochs share draws
    assert epochs() == found


class TestSamples:
    aug = mk.VoxelAugmentation(flip_prob=1.0, rotate_prob=0.0, noise_std=0.1)

    def test_a_dict_with_strings_labels_and_arrays(self):
        image = torch.rand(1, *SHAPE)
        sample = OrderedDict(image=image, mask=(image > 0.5).numpy(), name="case 1", label=3, box=torch.zeros(2, 6))
        with pytest.warns(mk.MemkitWarning, match=r"'box', a Tensor \(2, 6\)"):
            moved = self.aug(sample, photometric=["image"])
        assert type(moved) is OrderedDict
        assert list(moved) == list(sample)
        assert isinstance(moved["mask"], np.ndarray)
        np.testing.assert_array_equal(moved["mask"], np.flip(sample["mask"], (1, 2, 3)))
        assert not torch.equal(moved["image"], image.flip(1, 2, 3))  # noise
        assert (moved["name"], moved["label"], moved["box"] is sample["box"]) == ("case 1", 3, True)
        del sample["box"]
        clean = functools.partial(self.aug, photometric=[])(sample)
        assert torch.equal(clean["image"], image.flip(1, 2, 3))

    def test_several_arguments_and_tuples_move_together(self):
        image, mask = torch.rand(1, *SHAPE), torch.randint(0, 3, (1, *SHAPE))
        pair = namedtuple("pair", ("image", "mask"))
        for moved in (
            self.aug(image, mask),
            self.aug((image, mask)),
            self.aug([image, mask]),
            self.aug(pair(image, mask)),
        ):
            assert torch.equal(moved[1], mask.flip(1, 2, 3))
        assert type(self.aug(pair(image, mask))) is pair
        assert type(self.aug([image, mask])) is list

    def test_arrays_are_augmented_as_tensors_are(self):
        x = np.random.default_rng(0).random((2, *SHAPE), np.float32)
        y = self.aug(x[:, ::-1])  # torch cannot share the memory of a reversed array
        expected = self.aug.apply(torch.from_numpy(x[:, ::-1].copy()), self.aug.last_params)
        np.testing.assert_array_equal(y, expected.numpy())
        assert y.dtype == np.float32

    def test_images_and_subjects_of_torchio(self):
        x = numbered().as_subclass(torch.Tensor)
        labels = (x > 50).float()
        subject = Subject(image=Image(x, any_affine().numpy()), seg=Image(labels, any_affine().numpy(), "label"), age=7)
        moved = self.aug(subject)
        assert type(moved) is Subject
        assert moved.image is moved["image"]
        assert torch.equal(moved.seg.data, labels.flip(1, 2, 3))  # no noise on labels, though they are floats
        torch.testing.assert_close(
            world(x.flip(1, 2, 3), torch.as_tensor(moved.image.affine)), world(x, any_affine()), rtol=0, atol=1e-9
        )
        assert torch.equal(subject.image.data, x)
        assert np.array_equal(subject.image.affine, any_affine().numpy())
        assert moved.age == 7
        alone = self.aug(subject.image)
        assert isinstance(alone, Image)
        back = self.aug.inverse(self.aug(subject), self.aug.last_params)
        assert type(back) is Subject
        assert torch.equal(back.seg.data, labels)
        np.testing.assert_allclose(back.image.affine, any_affine().numpy(), atol=1e-9)

    def test_samples_are_moved_back(self):
        aug = mk.VoxelAugmentation(flip_prob=0.7, rotate_prob=0.7, noise_std=0.0)
        sample = {"image": torch.rand(2, *SHAPE), "seg": torch.rand(1, *SHAPE), "name": "scan"}
        moved = aug(sample)
        back = aug.inverse(moved, aug.last_params)
        assert back["name"] == "scan"
        assert torch.equal(back["image"], sample["image"])
        assert torch.equal(back["seg"], sample["seg"])
        pair = aug.inverse((moved["image"], moved["seg"]), aug.last_params)
        assert isinstance(pair, tuple)
        assert torch.equal(pair[1], sample["seg"])

    def test_a_label_map_moves_along_the_axes_of_the_layout(self):
        layout = mk.voxel.VoxelLayout(("scalar",), axes="ZYX")
        aug = mk.VoxelAugmentation(flip_prob=1.0, flip_axes="Z", rotate_prob=0.0, noise_std=0.0, layout=layout)
        x = torch.rand(1, *SHAPE)
        subject = Subject(image=Image(x, np.eye(4)), seg=Image(x, np.eye(4), "label"))
        moved = aug(subject)
        assert torch.equal(moved.seg.data, x.flip(1))
        assert torch.equal(moved.image.data, moved.seg.data)
        assert np.array_equal(moved.image.affine, moved.seg.affine)

    def test_metatensors_keep_class_and_affine(self):
        y = self.aug({"image": numbered(), "seg": numbered()})
        for each in y.values():
            assert type(each) is MetaTensor
        torch.testing.assert_close(y["image"].affine, y["seg"].affine)
        assert not torch.equal(y["image"].affine, any_affine())

    def test_affines_beside_the_volumes(self):
        affine = any_affine()
        batch = {"image": torch.rand(BATCH), "affine": torch.stack([affine] * 3), "original_affine": affine}
        moved = self.aug(batch)
        assert torch.equal(moved["affine"], self.aug.affine_after(batch["affine"], self.aug.last_params))
        assert torch.equal(moved["original_affine"], affine)  # that of the file

    @pytest.mark.parametrize(
        "places",
        [
            {"boxes": torch.zeros(2, 6)},
            {"gt_bboxes_3d": np.zeros((2, 7))},
            {"target": {"labels": torch.zeros(2), "landmarks": [torch.zeros(5, 3)]}},
            {"keypoints": torch.zeros(4, 2, dtype=torch.int64)},
        ],
    )
    def test_warns_of_unmoved_points(self, places):
        image = torch.rand(1, *SHAPE)
        with pytest.warns(mk.MemkitWarning, match="stays as it is while the volumes"):
            self.aug({"image": image, **places})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mk.voxel.NoiseAugmentation()({"image": image, **places})  # it moves nothing

    def test_other_numbers_are_not_taken_for_places(self):
        image = torch.rand(1, *SHAPE)
        with pytest.warns(mk.MemkitWarning, match="1, a Tensor"):
            self.aug(image, torch.rand(5, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.aug({"image": image, "spacing": torch.rand(3), "scores": torch.rand(5, 3), "points": torch.rand(5)})
            self.aug(image[None], torch.rand(1, 3))  # a target for each sample of a batch
            self.aug(image, torch.zeros(5, 3, dtype=torch.int64))

    @pytest.mark.parametrize(("name", "noisy"), [("Image", True), ("Mask", False)])
    def test_tensors_of_torchvision_keep_their_class(self, name, noisy):
        kind = type(name, (torch.Tensor,), {"__module__": "torchvision.tv_tensors"})
        x = torch.rand(1, *SHAPE)
        moved = self.aug(x.as_subclass(kind))
        assert type(moved) is kind
        assert torch.equal(moved.as_subclass(torch.Tensor), x.flip(1, 2, 3)) is not noisy

    def test_mixed_labels(self):
        mix = mk.MixupAugmentation()
        x, y = mix(torch.rand(BATCH), torch.arange(3))
        assert isinstance(y, mk.voxel.MixedLabels)
        assert y.second.tolist() == list(mix.last_params.partners)
        assert x.shape == BATCH


class TestForeignCallables:
    def test_each_step_gets_the_previous_result(self):
        aug = mk.ComposedAugmentation(
            [mk.VoxelAugmentation(flip_prob=1.0), lambda sample: sample | {"name": sample["name"].upper()}]
        )
        image = torch.rand(1, *SHAPE)
        moved = aug({"image": image, "name": "a"})
        assert moved["name"] == "A"
        assert torch.equal(moved["image"], mk.VoxelAugmentation().apply(image, aug.last_params.steps[0]))
        again = aug.apply_joint({"image": image, "name": "a"}, aug.last_params)
        assert torch.equal(again["image"], moved["image"])

    def test_a_function_of_the_volume(self):
        x = torch.rand(1, *SHAPE)
        aug = mk.ComposedAugmentation([mk.VoxelAugmentation(), lambda x: x * 2])
        y = aug(x)
        first = aug.last_params.steps[0]
        assert torch.equal(y, mk.VoxelAugmentation().apply(x, first) * 2)

    def test_random_ones_repeat_and_leave_the_global_generators_alone(self):
        def noisy(x):
            return x + torch.rand(()) + float(np.random.rand()) + random.random()

        class Seeded:
            def set_random_state(self, seed):
                self.chance = np.random.default_rng(seed)

            def __call__(self, x):
                return x + float(self.chance.random())

        x = torch.rand(1, *SHAPE)
        aug = mk.ComposedAugmentation([noisy, Seeded(), mk.VoxelAugmentation()])
        y = aug(x)
        params = aug.last_params
        assert not torch.equal(aug(x), y)
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        again = mk.voxel.AugmentationParams.from_json(params.to_json())
        assert torch.equal(aug.apply(x, again), y)
        assert torch.equal(torch.get_rng_state(), state[0])
        assert random.getstate() == state[1]
        assert np.random.get_state()[1].tolist() == state[2]

    def test_finds_stateful_transforms_inside_foreign_compose(self):
        class Seeded:
            def set_random_state(self, seed):
                self.chance = np.random.default_rng(seed)

            def __call__(self, x):
                return x + float(self.chance.random())

        class Compose:
            def __init__(self, transforms):
                self.transforms = transforms

            def __call__(self, x):
                return functools.reduce(lambda x, each: each(x), self.transforms, x)

        x = torch.rand(1, *SHAPE)
        pair = Compose([Seeded(), Seeded()])
        aug = mk.ComposedAugmentation([pair])
        y = aug(x)
        assert not torch.equal(aug(x), y)
        assert torch.equal(
            aug.apply(x, aug.last_params.__class__.from_json(aug.last_params.to_json())), aug.apply(x, aug.last_params)
        )
        first, second = (each.chance.random() for each in pair.transforms)
        assert first != second

    def test_a_generator_of_their_own_is_warned_about(self):
        class Own:
            def __init__(self):
                self.rng = np.random.default_rng(0)

            def __call__(self, x):
                return x + float(self.rng.random())

        rng = torch.Generator()
        nested = functools.partial(lambda x, inner: inner(x), inner=Own())
        for function in (Own(), lambda x: x + torch.rand((), generator=rng), nested, Own().__call__):
            with pytest.warns(mk.MemkitWarning, match="it holds rng, a random generator of its own"):
                mk.ComposedAugmentation([function])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mk.ComposedAugmentation(
                [lambda x: x + np.random.rand() + random.random(), mk.VoxelAugmentation(), torch.abs]
            )

    def test_results_are_not_overwritten(self):
        template = torch.ones(1, *SHAPE)
        aug = mk.ComposedAugmentation([lambda _: template, mk.VoxelAugmentation(noise_std=1.0)])
        x = torch.rand(1, *SHAPE)
        for call in (aug, lambda x: aug.apply(x, aug.sample(x.shape, seed=0))):
            call(x)
            assert torch.equal(template, torch.ones(1, *SHAPE))

    def test_a_crop_changes_the_grid_of_the_steps_behind_it(self):
        aug = mk.ComposedAugmentation([lambda x: x[..., :4, :4, :], mk.VoxelAugmentation(rotate_prob=1.0)])
        x = torch.rand(1, *SHAPE)
        y = aug(x)
        assert y.shape == (1, 4, 4, 4)
        assert torch.equal(aug.apply(x, aug.last_params), y)

    def test_there_is_no_way_back_through_them(self):
        aug = mk.ComposedAugmentation([mk.VoxelAugmentation(), torch.flip])
        params = aug.sample((1, *SHAPE), seed=0)
        assert isinstance(params.steps[1], CallableParams)
        for call in (
            lambda: aug.inverse(torch.rand(1, *SHAPE), params),
            lambda: params.geometry(),
            lambda: aug.affine_after(torch.eye(4), params),
        ):
            assert_refused(call, mk.errors.InputError, r"flip\(aug\(x\)\)")

    def test_a_data_set_takes_any_callable(self):
        volume = torch.rand(1, *SHAPE)
        assert torch.equal(mk.voxel.VoxelDataset([volume], augmentation=lambda x: x * 2)[0], volume * 2)
        noisy = mk.voxel.VoxelDataset([volume] * 2, augmentation=lambda x: x + torch.rand(()), seed=3)
        assert torch.equal(noisy[0], noisy[0])  # by seed, epoch and index
        assert not torch.equal(noisy[0], noisy[1])


def test_errors_name_the_user_call():
    aug = mk.VoxelAugmentation(on_nonsquare="error")
    with pytest.raises(mk.errors.InputError, match=r"^VoxelAugmentation\(\.\.\.\)\(x\): "):
        aug(torch.rand(1, 4, 6, 8))
    data = mk.voxel.VoxelDataset([torch.rand(1, 4, 6, 8)], augmentation=aug)
    with pytest.raises(mk.errors.InputError, match=r"^VoxelDataset\[0\]: "):
        data[0]


def test_a_simulation_keeps_its_own_error():
    with mk.VirtualGPU("RTX 4090"):
        flip = mk.voxel.FlipAugmentation()
        assert flip(torch.rand(1, 4, 4, 4, device="cuda")).shape == (1, 4, 4, 4)


def test_a_batch_of_images_is_not_taken_for_a_volume_in_silence():
    aug = mk.VoxelAugmentation(flip_prob=1.0, rotate_prob=0.0, noise_std=0.0)
    images = torch.rand(4, 3, 8, 8)
    with pytest.warns(mk.MemkitWarning, match=r"one volume \(C, D, H, W\) of depth 3"):
        aug(images)
    moved = aug(images.unsqueeze(2)).squeeze(2)  # as the warning says: colors stay in their order
    assert torch.equal(moved, images.flip(2, 3))
