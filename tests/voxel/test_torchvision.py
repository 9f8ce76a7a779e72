"""memkit's augmentations in torchvision's own Compose, both versions, and torchvision's transforms in ours."""

import importlib.util
import sys
import types
import warnings

import pytest
import torch

import memkit as mk

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)
if not torch.cuda.is_available():  # its wheel for CUDA registers operators that a torch for CPUs lacks
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("_meta_registrations"))

from torchvision import transforms, tv_tensors
from torchvision.transforms import v2

FLIP = mk.VoxelAugmentation(flip_prob=1.0, rotate_prob=0.0, noise_std=0.0)
VOLUME = torch.rand(3, 4, 8, 8)
FLIPPED = VOLUME.flip(1, 2, 3)
both = pytest.mark.parametrize("compose", [transforms.Compose, v2.Compose])


@both
def test_volumes_in_every_form(compose):
    mask = (VOLUME > 0.5).long()
    chain = compose([FLIP])
    assert torch.equal(chain(VOLUME), FLIPPED)
    image, label = chain((VOLUME, 3))
    assert torch.equal(image, FLIPPED)
    assert label == 3
    moved = chain({"image": VOLUME, "mask": tv_tensors.Mask(mask), "name": "a"})
    assert torch.equal(moved["mask"], mask.flip(1, 2, 3))
    assert moved["name"] == "a"
    assert "VoxelAugmentation" in repr(chain)


def test_tensors_keep_their_class():
    sample = {"image": tv_tensors.Image(VOLUME), "mask": tv_tensors.Mask(VOLUME)}
    moved = v2.Compose([mk.VoxelAugmentation(flip_prob=1.0, noise_std=0.5), v2.RandomHorizontalFlip(1.0)])(sample)
    assert [type(each).__name__ for each in moved.values()] == ["Image", "Mask"]
    assert sorted(moved["mask"].flatten().tolist()) == sorted(VOLUME.flatten().tolist())  # moved, without noise
    assert sorted(moved["image"].flatten().tolist()) != sorted(VOLUME.flatten().tolist())


@pytest.mark.parametrize("wrap", [transforms.RandomApply, v2.RandomApply, v2.RandomChoice, v2.RandomOrder])
def test_random_containers(wrap):
    options = {"p": 1.0} if wrap in (transforms.RandomApply, v2.RandomApply) else {}
    assert torch.equal(wrap([FLIP], **options)(VOLUME), FLIPPED)


def test_torchvision_transforms_repeat_in_composition():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they draw from torch's generator
        chain = mk.ComposedAugmentation(
            [mk.VoxelAugmentation(), v2.GaussianNoise(), transforms.RandomErasing(p=1.0), v2.RandomHorizontalFlip(0.5)]
        )
    moved = chain(VOLUME)
    assert torch.equal(chain.apply(VOLUME, chain.last_params), moved)
    assert not torch.equal(chain(VOLUME), moved)


def test_boxes_beside_a_volume_are_warned_about():
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[0.0, 0, 4, 4]]), format="XYXY", canvas_size=(8, 8))
    with pytest.warns(mk.MemkitWarning, match="1, a BoundingBoxes"):
        v2.Compose([FLIP])(VOLUME, boxes)
