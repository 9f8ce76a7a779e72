"""The page for those who come from Pointcept, on the transforms and the collate function of a real checkout.

Pointcept is no package: name a checkout in the environment variable ``POINTCEPT``. Its compiled parts are not needed.
"""

import importlib
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import memkit as mk

CHECKOUT = os.environ.get("POINTCEPT")
PAGE = Path(__file__).parents[2] / "docs" / "from" / "pointcept.md"
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="needs a checkout of Pointcept, named by POINTCEPT")


@pytest.fixture
def pointcept(monkeypatch):
    """Its modules of transforms and of collation, without the packages around them, which import everything."""
    root = Path(CHECKOUT) / "pointcept"
    stubs = {"torch_scatter": {"scatter_min": None}}  # of the pairs of images and points
    for name in ("pointcept", "pointcept.utils", "pointcept.datasets", "pointcept.models", "pointcept.models.utils"):
        stubs[name] = {"__path__": [str(root.joinpath(*name.split(".")[1:]))]}
    if not torch.cuda.is_available():  # torchvision's wheel for CUDA registers operators that a torch for CPUs lacks
        stubs["torchvision._meta_registrations"] = {}
    for name, attributes in stubs.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    misc = importlib.import_module("pointcept.models.utils.misc")
    sys.modules["pointcept.models.utils"].offset2batch = misc.offset2batch
    try:
        yield types.SimpleNamespace(
            transform=importlib.import_module("pointcept.datasets.transform"),
            collate_fn=importlib.import_module("pointcept.datasets.utils").collate_fn,
            offset2batch=misc.offset2batch,
        )
    finally:
        for name in [each for each in sys.modules if each.startswith("pointcept.")]:
            monkeypatch.delitem(sys.modules, name)


def raw_scene(n):
    chance = np.random.default_rng(n)
    return {
        "coord": chance.random((n, 3), np.float32),
        "color": chance.random((n, 3), np.float32) * 255,
        "segment": chance.integers(-1, 5, n),
        "name": f"room {n}",
    }


def scene(pointcept, n, *more):
    steps = [{"type": "NormalizeColor"}, *more, {"type": "ToTensor"}]
    collect = {"type": "Collect", "keys": ("coord", "segment", "name"), "feat_keys": ("coord", "color")}
    return pointcept.transform.Compose([*steps, collect])(raw_scene(n))


def test_the_blocks_of_the_page_run_on_pointcepts_batches(pointcept):
    first, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page = {}
    exec(first, page)
    page["collate_fn"] = pointcept.collate_fn
    page["scenes"] = [scene(pointcept, n) for n in (900, 100, 300, 250)]
    made_by_the_page, page["batch"] = page["batch"], pointcept.collate_fn(page["scenes"])
    assert made_by_the_page.keys() == page["batch"].keys()
    assert torch.equal(made_by_the_page["offset"], page["batch"]["offset"])
    for block in others:
        exec(block, page)
    assert page["result"].num_microbatches == 2


def test_parts_of_a_batch_are_the_batches_of_their_scenes(pointcept):
    scenes = [scene(pointcept, n) for n in (90, 10, 30, 25)]
    parts = mk.points.split_packed(pointcept.collate_fn(scenes), 2)
    cut = len(parts[0]["offset"])
    assert 0 < cut < len(scenes)
    for part, own in zip(parts, (scenes[:cut], scenes[cut:]), strict=True):
        expected = pointcept.collate_fn(own)
        assert part.keys() == expected.keys()
        assert all(torch.equal(part[key], expected[key]) for key in ("coord", "feat", "segment", "offset"))
        assert part["name"] == expected["name"]


def test_the_grid_has_the_cells_of_grid_sample(pointcept):
    thin = scene(pointcept, 900, {"type": "GridSample", "grid_size": 0.1, "mode": "train", "return_grid_coord": True})
    index = mk.GridIndex.from_coords(torch.from_numpy(raw_scene(900)["coord"]), grid_size=0.1)
    assert len(thin["coord"]) == index.num_cells
    batch = pointcept.collate_fn([thin, scene(pointcept, 100)])
    by_scene = mk.GridIndex.from_coords(batch["coord"], grid_size=0.1, batch=pointcept.offset2batch(batch["offset"]))
    by_offset = mk.GridIndex.from_coords(batch["coord"], grid_size=0.1, offsets=batch["offset"])
    np.testing.assert_array_equal(by_scene.cells, by_offset.cells)
