"""Augmentations of volumes: memory and time against the usual form, MONAI beside it, and inputs made at random.

Volumes are a batch of four: the MNI152 template at 2 mm, cut to a cube, and the pial surface of fsaverage5, both from
nilearn's wheel. Peaks are the CPU allocator's, by profiler events, above the input, of the second call. Times are
processor times of one thread, the least of five interleaved calls. Of the inputs about a third has a wrong part.

Run: KINETO_LOG_LEVEL=6 python -m benchmarks.cases.voxel_augmentation   (5 minutes)
"""

from __future__ import annotations

import functools
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.result import write_result
from benchmarks.timing import least_seconds
from memkit._core.errors import MemkitError, MemkitWarning
from memkit._core.sparse_voxels import SparseVoxels
from memkit.voxel.augment import VoxelAugmentation
from memkit.voxel.augment_base import Augmentation
from memkit.voxel.compose import ComposedAugmentation
from memkit.voxel.cutout import CutoutAugmentation
from memkit.voxel.layout import KINDS, VoxelLayout
from memkit.voxel.mix import MixupAugmentation
from memkit.voxel.params import AugmentationParams, VoxelDraw, VoxelParams
from memkit.voxel.samples import VoxelPoints
from tests.allocations import trace_allocations
from tests.voxel.clouds import hemisphere

SIZE = 96
CHANNELS = 4
NUM_INPUTS = 60_000
DRAW = VoxelDraw("XZ", 1, noise_std=0.02, dropout_prob=0.1, seed=1)


# ---- memory and time


def brain() -> Tensor:
    """(4, 4, 96, 96, 80): the template, which fills a third of its box, in each channel."""
    from nilearn.datasets import load_mni152_template

    whole = torch.from_numpy(load_mni152_template(resolution=2).get_fdata()).float()
    cube = whole[1 : 1 + SIZE, 10 : 10 + SIZE, 5:85]
    return cube.expand(4, CHANNELS, *cube.shape).contiguous()


def surface() -> Tensor:
    """(4, 4, 96, 96, 96): the voxels that hold a vertex, about one in a hundred."""
    places = ((hemisphere("left") + 128) * SIZE / 256).floor().long()
    volume = torch.zeros(4, CHANNELS, SIZE, SIZE, SIZE)
    volume[:, :, places[:, 0], places[:, 1], places[:, 2]] = 1.0
    return volume


def usual(x: Tensor) -> Tensor:
    """The same on the whole batch, as it is mostly written."""
    y = x.flip(2, 4).rot90(1, (2, 3))
    occupied = (y != 0).any(1, keepdim=True)
    y = y + torch.randn_like(y) * 0.02 * occupied
    return y * (torch.rand(len(y), 1, *y.shape[2:]) > 0.1)


def of_monai() -> Callable[[Tensor], Tensor]:
    from monai.transforms import Flip, RandGaussianNoise, Rotate90

    steps = Flip((0, 2)), Rotate90(1, (0, 1)), RandGaussianNoise(1.0, std=0.02)

    return lambda x: torch.stack([functools.reduce(lambda each, step: step(each), steps, sample) for sample in x])


def costs(x: Tensor) -> dict[str, Any]:
    params = VoxelParams(tuple(x.shape[2:]), batched=True, draws=(DRAW,) * len(x))
    few = SparseVoxels.from_dense(x)
    few_bytes = few.coords.nbytes + few.features.nbytes + 8 * len(few.coords)  # their order as well
    aug, monai = VoxelAugmentation(), of_monai()
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "the usual form": (lambda: usual(x), x.nbytes),
        "MONAI, no dropout": (lambda: monai(x), x.nbytes),
        "memkit": (lambda: aug.apply(x, params), x.nbytes),
        "memkit, flips and turns alone": (lambda: aug.apply(x, params.geometry()), x.nbytes),
        "memkit, sparse": (lambda: aug.apply(few, params), few_bytes),
    }
    ways = {name: call for name, (call, _) in calls.items()}
    least_seconds(ways, 1)  # what the first calls alone do
    times = least_seconds(ways, 5)
    rows = {}
    for name, (call, size) in calls.items():
        peak = trace_allocations(call).peak
        rows[name] = {
            "input_bytes": size,
            "peak_bytes": peak,
            "peak_of_input": peak / size,
            "time_ratio": times[name] / times["the usual form"],
        }
    assert torch.equal(aug.apply(few, params).to_dense(), aug.apply(x, params))
    assert torch.equal(aug.inverse(aug.apply(x, params.geometry()), params), x)
    return {"shape": list(x.shape), "occupancy": few.occupancy, "ways": rows}


# ---- inputs made at random


def pick(chance: random.Random, right: tuple[Any, ...], *wrong: Any) -> Any:
    """Mostly something right."""
    return chance.choice(wrong if wrong and chance.random() < 0.04 else right)


def some_layout(chance: random.Random, num_channels: int) -> VoxelLayout | None:
    if chance.random() < 0.3:
        return None
    kinds = [pick(chance, KINDS, "colour") for _ in range(num_channels)]
    if num_channels > 2 and chance.random() < 0.4:
        kinds[-2:] = pick(chance, (["vector:x", "vector:y"],), ["vector:x", "scalar"])
    return VoxelLayout(
        kinds,
        axes=chance.choice(("XYZ", "ZYX", "YXZ", "XZY")),
        voxel_size=chance.choice(((1, 1, 1), (0.5, 0.5, 1), (1, 2, 1))),
        origin=chance.choice(((0, 0, 0), (-2, -2, 1))),
        sensor_origin=pick(chance, ((0, 0, 0), (0.5, -1, 0)), None, (0, 0)),
        empty_value=pick(chance, (0, 0, -1, 0.25, [0] * num_channels), "0", []),
        value_range=pick(chance, (None, [(-1, 1)] * num_channels), [(1, -1)] * num_channels, 5),
    )


def some_augmentation(chance: random.Random, layout: VoxelLayout | None, depth: int = 0) -> Augmentation[Any]:
    kind = chance.random()
    if kind < 0.15 and depth < 2:
        return ComposedAugmentation(
            [some_augmentation(chance, layout, depth + 1) for _ in range(pick(chance, (1, 2, 3), 0))]
        )
    if kind < 0.3:
        return CutoutAugmentation(
            prob=chance.random(),
            num_holes=pick(chance, (1, 2, 3), 0, -1),
            size=pick(chance, (0.0, 0.3, 1.0), 1.1),
            layout=layout,
        )
    if kind < 0.45:
        return MixupAugmentation(alpha=pick(chance, (0.2, 1.0), 0.0), layout=layout)
    config = {
        name: chance.choice((0.0, 0.5, 1.0, chance.random()))
        for name in ("flip_prob", "rotate_prob", "noise_std", "dropout_prob", "intensity_jitter", "doppler_jitter")
    }
    config |= {
        "flip_axes": chance.choice(("XYZ", "XY", "Z", "")),
        "on_nonsquare": chance.choice(("half_turns", "skip")),
    }
    if chance.random() < 0.04:
        config[chance.choice((*config, "flip", "noise"))] = chance.choice((-1, 2.5, "0.5", None, float("nan"), True))
    return VoxelAugmentation.from_config(config, layout=layout)


def some_volume(chance: random.Random, shape: tuple[int, ...], layout: VoxelLayout | None) -> Any:
    dtype = chance.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool))
    sample = shape if chance.random() < 0.95 else (*shape[:-1], shape[-1] + 1)
    numbers = torch.Generator().manual_seed(chance.randrange(2**40))
    volume = torch.rand(sample, generator=numbers)
    place = len(shape) - 4
    occupied = torch.rand((*sample[:place], 1, *sample[place + 1 :]), generator=numbers) < chance.random()
    empties = torch.tensor(layout.empties if layout and len(layout.empties) == shape[place] else (0.0,))
    volume = torch.where(occupied, volume, empties.view(-1, 1, 1, 1)).to(dtype)
    form = chance.random()
    if form < 0.1:
        return VoxelPoints(10 * torch.rand(20, 3, generator=numbers), torch.rand(20, shape[place], generator=numbers))
    return pick(chance, (volume,), "text", None)


def refused(error: MemkitError) -> str:
    assert all((error.call, error.got, error.expected, error.fix)), str(error)
    return type(error).__name__


def judge(chance: random.Random) -> str:
    """One input: a result that keeps the laws, or a typed error."""
    shape = tuple(chance.randint(1, 5) for _ in range(3))
    shape = (shape[0],) * 3 if chance.random() < 0.4 else shape
    shape = (chance.randint(1, 4), *shape)
    shape = (chance.randint(1, 3), *shape) if chance.random() < 0.6 else shape
    try:
        layout = some_layout(chance, shape[-4])
        aug = some_augmentation(chance, layout)
        index = pick(chance, (0, 7, 2**62), -1, 1.5, list(range(shape[0])))
        params = aug.sample(shape, seed=pick(chance, (0, 1, 2**63 - 1), 2**63, None), epoch=3, index=index)
        x = some_volume(chance, shape, layout)
        y = aug.apply(x, params)
    except MemkitError as error:
        return refused(error)
    assert AugmentationParams.from_json(params.to_json()) == params
    check_laws(aug, x, y, params, layout or VoxelLayout(("scalar",) * shape[-4]))
    return "a result"


def check_laws(aug: Any, x: Any, y: Any, params: Any, layout: VoxelLayout) -> None:
    if isinstance(x, VoxelPoints):
        assert y.coords.shape == (len(y.features), 3)
        return
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.data_ptr() != x.data_ptr()
    if not isinstance(aug, (MixupAugmentation, ComposedAugmentation)):
        assert torch.equal(aug.inverse(aug.apply(x, params.geometry()), params), x)
    if x.dim() == 5 and x.is_floating_point() and not any(layout.empties):
        mask = torch.stack([layout.occupied(each) for each in x])
        few = aug.apply(SparseVoxels.from_dense(x, mask=mask), params)
        assert torch.equal(few.to_dense(), y)


def damaged(chance: random.Random, text: str) -> str:
    """A record with one character, number or word changed."""
    start = chance.randrange(len(text))
    new = chance.choice(("", "-1", "null", "[", "}", '"', "1e999", "true", "9" * 30, "{}", ","))
    return text[:start] + new + text[start + chance.randint(0, 4) :]


def read_record(chance: random.Random, records: list[str]) -> str:
    try:
        found = AugmentationParams.from_json(damaged(chance, chance.choice(records)))
        assert AugmentationParams.from_json(found.to_json()) == found
    except MemkitError as error:
        return refused(error)
    return "a result"


def fuzz(num_inputs: int, seed: int = 0) -> dict[str, Any]:
    """Inputs made at random; the same seed makes the same ones. Every sixth is a damaged record."""
    chance = random.Random(seed)
    parts = [VoxelAugmentation(), CutoutAugmentation(prob=1.0), MixupAugmentation()]
    records = [each.sample((2, 1, 4, 4, 4), seed=0).to_json() for each in (*parts, ComposedAugmentation(parts))]
    counts: Counter[str] = Counter()
    others: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemkitWarning)
        for number in range(num_inputs):
            try:
                counts[judge(chance) if number % 6 else read_record(chance, records)] += 1
            except Exception as error:  # noqa: BLE001 - this is what must not happen; it is counted and shown
                counts["anything else"] += 1
                others.add(repr(error)[:300])
    return {"num_inputs": num_inputs, "counts": dict(counts.most_common()), "anything_else": sorted(others)}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = {"costs": {"MNI152": costs(brain()), "fsaverage5": costs(surface())}, "fuzz": fuzz(NUM_INPUTS)}
    print(json.dumps(figures, indent=2))
    print(write_result("voxel_augmentation", figures, peers=("monai", "nilearn")))
    assert not figures["fuzz"]["anything_else"]


if __name__ == "__main__":
    main()
