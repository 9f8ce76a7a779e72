import dataclasses
import json
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memkit._core.errors import ConfigError, FileFormatError, InputError, InputTypeError, MemkitError, MemkitWarning
from memkit.voxel.augment import VoxelAugmentation
from memkit.voxel.compose import ComposedAugmentation
from memkit.voxel.cutout import CutoutAugmentation
from memkit.voxel.dataset import VoxelDataset
from memkit.voxel.layout import VoxelLayout
from memkit.voxel.mix import MixupAugmentation
from memkit.voxel.params import AugmentationParams, VoxelDraw
from tests.helpers import assert_refused
from tests.voxel.volumes import cortex

BATCH = (3, 2, 8, 8, 8)
ALL = ComposedAugmentation([VoxelAugmentation(dropout_prob=0.1), CutoutAugmentation(prob=1.0), MixupAugmentation()])


def test_a_draw_is_a_function_of_seed_epoch_and_index_alone():
    for aug in (*ALL.augmentations, ALL):
        first = aug.sample(BATCH, seed=1, epoch=2, index=[3, 4, 5])
        state = torch.get_rng_state(), np.random.get_state()[1].tolist()
        torch.rand(1)
        np.random.rand()
        assert aug.sample(BATCH, seed=1, epoch=2, index=[3, 4, 5]) == first
        assert not torch.equal(torch.get_rng_state(), state[0])  # only ours moved it
        others = [
            aug.sample(BATCH, seed=2, epoch=2, index=[3, 4, 5]),
            aug.sample(BATCH, seed=1, epoch=3, index=[3, 4, 5]),
            aug.sample(BATCH, seed=1, epoch=2, index=[4, 5, 6]),
            aug.sample(BATCH, seed=1, epoch=2, index=3),
        ]
        assert first not in others
        assert len(set(others)) == 4


def test_batch_samples_draw_like_single_ones():
    aug = VoxelAugmentation(dropout_prob=0.1)
    batch = aug.sample(BATCH, seed=1, epoch=2, index=[7, 3, 9])
    alone = [aug.sample(BATCH[1:], seed=1, epoch=2, index=each).draws[0] for each in (7, 3, 9)]
    assert list(batch.draws) == alone
    x = torch.rand(BATCH)
    params = aug.sample(BATCH[1:], seed=1, epoch=2, index=3)
    assert torch.equal(aug.apply(x, batch)[1], aug.apply(x[1], params))


def test_large_numbers_and_short_ones_do_not_collide():
    aug = VoxelAugmentation()
    names = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**32, 0, 0), (0, 2**32, 0), (0, 0, 2**32), (2**63 - 1, 0, 0)]
    draws = {aug.sample((1, 8, 8, 8), seed=s, epoch=e, index=i).draws[0].seed for s, e, i in names}
    draws.add(aug.sample((1, 1, 8, 8, 8), seed=0, epoch=0, index=0).draws[0].seed)  # (0, 0, 0, first sample)
    assert len(draws) == len(names) + 1


def test_changing_one_probability_keeps_other_draws():
    settings = [{"flip_prob": 0.0}, {"rotate_prob": 0.0}, {"noise_std": 0.0, "dropout_prob": 0.5}]
    base = VoxelAugmentation(rotate_prob=1.0, flip_prob=1.0)
    for index in range(5):
        expected = base.sample((1, 8, 8, 8), seed=0, index=index).draws[0]
        for each in settings:
            found = dataclasses.replace(base, **each).sample((1, 8, 8, 8), seed=0, index=index).draws[0]
            assert found.seed == expected.seed
            assert found.turns == (0 if "rotate_prob" in each else expected.turns)


def test_draw_frequencies_match_probabilities():
    aug = VoxelAugmentation(flip_axes="XZ")
    draws = aug.sample((2000, 1, 8, 8, 8), seed=0).draws
    assert sum("X" in each.flips for each in draws) == pytest.approx(1000, abs=100)
    assert sum("Z" in each.flips for each in draws) == pytest.approx(1000, abs=100)
    assert sum(each.flips == "XZ" for each in draws) == pytest.approx(500, abs=80)  # independent of each other
    assert not any("Y" in each.flips for each in draws)
    assert sum(each.turns > 0 for each in draws) == pytest.approx(600, abs=80)
    alike = VoxelAugmentation(same_on_batch=True).sample((50, 1, 8, 8, 8), seed=0).draws
    assert len({(each.flips, each.turns) for each in alike}) == 1
    assert len({each.seed for each in alike}) == 50  # noise of their own


def test_records_go_through_json():
    params = ALL.sample(BATCH, seed=2**62, epoch=1, index=[1, 2, 3])
    again = AugmentationParams.from_json(params.to_json())
    assert again == params
    assert hash(again) == hash(params)
    x = torch.rand(BATCH)
    assert torch.equal(ALL.apply(x, again), ALL.apply(x, params))
    assert [each["kind"] for each in json.loads(params.to_json())["steps"]] == ["voxel", "cutout", "mixup"]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda d: d.update(version=2), FileFormatError, "version 1"),
        (lambda d: d.update(kind="warp"), FileFormatError, "kind"),
        (lambda d: d.update(kind=["voxel"]), FileFormatError, "kind"),
        (lambda d: d.update(color=1), InputError, "color"),
        (lambda d: d.pop("draws"), InputError, "draws"),
        (lambda d: d.update(draws=[]), InputError, "samples"),
        (lambda d: d.update(draws=[{"turns": 4}]), InputError, "turns=4"),
        (lambda d: d.update(draws=[{"turns": True}]), InputError, "turns=True"),
        (lambda d: d.update(draws=[{"flips": "XX"}]), InputError, "flips"),
        (lambda d: d.update(draws=[{"noise_std": float("inf")}]), InputError, "noise_std"),
        (lambda d: d.update(draws=[{"noise": 1}]), InputError, "write 'noise_std'"),
        (lambda d: d.update(shape=[8, 8]), InputError, "shape"),
        (lambda d: d.update(batched=1), InputError, "batched"),
    ],
)
def test_rejects_impossible_record(change, error, text):
    record = json.loads(VoxelAugmentation().sample((1, 8, 8, 8), seed=0).to_json())
    change(record)
    assert_refused(lambda: AugmentationParams.from_json(json.dumps(record)), error, text)


def test_rejects_text_without_record():
    for text in ("", "[1]", "{", "null", b"\xff", "[" * 100_000):
        assert_refused(partial(AugmentationParams.from_json, text), FileFormatError)
    for nothing in (None, {}, 3):
        assert_refused(partial(AugmentationParams.from_json, nothing), InputTypeError, "from_json(params.to_json())")


def test_the_sources_configuration_is_accepted():
    aug = VoxelAugmentation.from_config({"flip_prob": 0.5, "rotate_prob": 0.3, "noise_std": 0.02})
    assert aug == VoxelAugmentation()
    layout = {"channels": ["occupancy", "intensity"], "empty_value": -1}
    aug = VoxelAugmentation.from_config({"intensity_jitter": 0.1, "layout": layout})
    assert aug.layout == VoxelLayout(("occupancy", "intensity"), empty_value=-1)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"flip_probability": 0.5}, "key 'flip_probability'"),
        ({"flip_probability": 0.5}, "write 'flip_prob'"),
        ({"flip_prob": 1.5}, "flip_prob=1.5"),
        ({"flip_prob": "0.5"}, "flip_prob='0.5'"),
        ({"noise_std": -1}, "noise_std=-1"),
        ({"rotate_prob": True}, "rotate_prob=True"),
        ({"dropout_prob": float("nan")}, "dropout_prob=nan"),
        ({"flip_axes": "XW"}, "flip_axes"),
        ({"on_nonsquare": "resize"}, "on_nonsquare"),
        ({"same_on_batch": 1}, "same_on_batch=1"),
        ({"layout": ("occupancy",)}, "layout"),
        ({"layout": {"channels": ["occupancy"], "axis": "XYZ"}}, "write 'axes'"),
        ({3: 4}, "the key 3"),
        ([("flip_prob", 0.5)], "config"),
    ],
)
def test_error_names_invalid_configuration_key(config, text):
    assert_refused(lambda: VoxelAugmentation.from_config(config), ConfigError, text)


def test_warns_of_jitter_without_channel():
    with pytest.warns(MemkitWarning, match="doppler_jitter=0.1.*no effect"):
        VoxelAugmentation(doppler_jitter=0.1)


def test_records_are_for_their_augmentation():
    x = torch.rand(BATCH)
    params = CutoutAugmentation().sample(BATCH, seed=0)
    assert_refused(lambda: VoxelAugmentation().apply(x, params), InputTypeError, "CutoutParams")
    assert_refused(lambda: VoxelAugmentation().inverse(x, params), InputTypeError, "CutoutParams")
    composed = ComposedAugmentation([CutoutAugmentation()]).sample(BATCH, seed=0)
    assert_refused(lambda: ALL.apply(x, composed), InputError, "expected parameters of 3 augmentations")
    assert_refused(lambda: VoxelDraw(turns=5), InputError, "turns=5")


# ---- the data set


def named(number=8):
    return [
        {"radar": cortex().roll(each, 1), "labels": cortex()[:1].to(torch.uint8), "name": str(each)}
        for each in range(number)
    ]


def test_workers_match_single_process_in_every_epoch():
    dataset = VoxelDataset(
        named(), augmentation_config={"noise_std": 0.1, "dropout_prob": 0.2}, photometric=["radar"], seed=3
    )
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        batches = list(loader)
        assert [name for each in batches for name in each["name"]] == [str(each) for each in range(8)]
        epochs.append(torch.cat([each["radar"] for each in batches]))
        dataset.set_epoch(epoch)
        alone = torch.stack([dataset[index]["radar"] for index in range(8)])
        assert torch.equal(epochs[-1], alone)
    assert not torch.equal(*epochs)
    del loader


def test_volumes_move_together_and_the_source_stays_unchanged():
    source = named(2)
    before = source[0]["radar"].clone()
    dataset = VoxelDataset(
        source, augmentation_config={"rotate_prob": 1.0}, layout=VoxelLayout(("occupancy", "scalar"))
    )
    for epoch in range(4):
        dataset.set_epoch(epoch)
        sample = dataset[0]
        assert torch.equal(sample["radar"][0], sample["labels"][0].float())
        assert not torch.equal(sample["radar"], before)
    assert torch.equal(source[0]["radar"], before)
    dataset.set_epoch(3)
    assert dataset[-1]["name"] == dataset[1]["name"] == "1"
    dataset.set_epoch(3)
    assert torch.equal(dataset[-1]["radar"], dataset[1]["radar"])
    plain = VoxelDataset(source, use_augmentation=False)
    assert plain[0] is source[0]


def test_tuples_and_bare_volumes_are_samples():
    pairs = [(cortex(), cortex()[:1].long(), 5)]
    x, y, label = VoxelDataset(pairs, augmentation_config={"noise_std": 0.0, "flip_prob": 1.0})[0]
    assert torch.equal(x[0], y[0].float())
    assert label == 5
    pair = namedtuple("pair", ("x", "label"))
    for sample in (pair(cortex(), 5), [cortex(), 5]):
        augmented = VoxelDataset([sample])[0]
        assert type(augmented) is type(sample)
        assert augmented[1] == 5
    bare = VoxelDataset([cortex()], augmentation=ComposedAugmentation([CutoutAugmentation(prob=1.0, size=0.5)]))
    assert (bare[0][0].sum() < cortex()[0].sum()).item()
    assert_refused(lambda: VoxelDataset([torch.zeros(8, 8, 8)])[0], InputTypeError, "for an image")


@pytest.mark.parametrize(
    "settings",
    [
        {"augmentation_config": {"flip": 1}},
        {"augmentation": CutoutAugmentation(), "augmentation_config": {}},
        {"use_augmentation": "yes"},
        {"seed": -1},
    ],
)
def test_wrong_settings_of_a_data_set_are_refused(settings):
    assert_refused(lambda: VoxelDataset([cortex()], **settings), MemkitError)


def test_loop_ends_if_source_raises_no_index_error():
    class Endless:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.full((1, 2, 2, 2), float(index))

    dataset = VoxelDataset(Endless(), use_augmentation=False)
    assert [float(each.mean()) for each in dataset] == [0, 1, 2]
    assert float(dataset[-1].mean()) == -1  # the source says what it is


def test_gradients_of_a_cut_batch_are_zero_in_its_holes():
    x = torch.rand(2, 1, 6, 6, 6, dtype=torch.float64, requires_grad=True)
    aug = CutoutAugmentation(prob=1.0, size=0.5)
    params = aug.sample(x.shape, seed=0)
    kept = torch.ones_like(x)
    for sample, boxes in zip(kept.detach(), params.holes, strict=True):
        for (d0, h0, w0), (d1, h1, w1) in boxes:
            sample[:, d0:d1, h0:h1, w0:w1] = 0
    upstream = torch.rand_like(x)
    found = aug.apply(x * 2, params)
    torch.testing.assert_close(found, x * 2 * kept)
    torch.testing.assert_close(torch.autograd.grad(found, x, upstream), torch.autograd.grad(x * 2 * kept, x, upstream))
