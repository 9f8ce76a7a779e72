"""Levels are counted as `unique` counts them, the limits hold, and volumes come back."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from sklearn.datasets import load_digits, load_iris

from memkit._core.errors import ConfigError, InputError, InputTypeError, StateError
from memkit._core.sparse_voxels import SparseVoxels
from memkit.chunk.resolution import DynamicResolutionProcessor
from tests.chunk.scenes import brain_mask, vertices
from tests.helpers import assert_refused, assert_same


def by_unique(cells, levels, batch=None):
    """Occupied cells of the fullest sample at each level, the slow way."""
    batch = torch.zeros(len(cells), dtype=torch.int64) if batch is None else batch
    return tuple(
        max(len((cells[batch == sample] >> level).unique(dim=0)) for sample in batch.unique())
        for level in range(levels + 1)
    )


def choice_of(coords, batch=None, **limits):
    return DynamicResolutionProcessor(**{"max_active_voxels": 10**9} | limits).choose(coords, batch=batch)


@pytest.mark.slow
def test_one_sort_matches_unique_on_real_points():
    points = vertices()
    cells = ((points - points.amin(0)) * (1024 / (points.amax(0) - points.amin(0)).max())).long().clamp(max=1023)
    assert choice_of(points).num_active_by_level == by_unique(cells, 10)
    voxels = brain_mask().nonzero()
    assert choice_of(voxels).num_active_by_level == by_unique(voxels, 6)
    assert choice_of(voxels - 17, levels=4).num_active_by_level == by_unique(voxels - 17, 4)
    pixels = torch.from_numpy(load_digits().images[0]).nonzero()
    assert choice_of(pixels).num_active_by_level == by_unique(pixels, 3)
    iris = torch.from_numpy(load_iris().data[:, :3])
    batch = torch.from_numpy(load_iris().target)
    millimetres = (iris * 10).round().long()
    assert choice_of(millimetres, batch, levels=6).num_active_by_level == by_unique(millimetres, 6, batch)


@given(st.data(), st.integers(2, 3), st.integers(0, 18))
@settings(deadline=None)
def test_one_sort_matches_unique(data, num_axes, levels):
    far = 2 ** data.draw(st.integers(0, 17))
    cell = st.tuples(*[st.integers(-far, far)] * num_axes)
    coords = torch.tensor(data.draw(st.lists(cell, min_size=1, max_size=30)))
    batch = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(coords), max_size=len(coords))))
    found = choice_of(coords, batch, levels=levels, min_points_per_voxel=0)
    assert found.num_active_by_level == by_unique(coords, levels, batch)


def test_the_finest_level_within_the_limits():
    voxels = brain_mask().nonzero()
    counts = by_unique(voxels, 6)
    by_number = choice_of(voxels, max_active_voxels=counts[1])
    assert (by_number.level, by_number.num_active) == (1, counts[1])
    assert by_number.resolution == 23  # 46 voxels along the brain's longest side
    assert choice_of(voxels, max_active_voxels=counts[1] - 1).level == 2
    by_points = choice_of(voxels, min_points_per_voxel=7)
    density = [len(voxels) / count for count in counts]
    assert density[by_points.level] >= 7 > density[by_points.level - 1]
    assert choice_of(voxels, max_active_voxels=counts[2], min_points_per_voxel=1).level == 2
    with pytest.raises(InputError, match=rf"got {counts[2]} occupied voxels at the last level, 2"):
        choice_of(voxels, levels=2, max_active_voxels=counts[2] - 1)
    assert choice_of(torch.zeros(1, 3), min_points_per_voxel=2).level == 10  # one point: no level has two in a voxel


def test_the_fullest_sample_counts():
    few, many = torch.zeros(3, 3, dtype=torch.int64), torch.ones(4, 4, 4).nonzero()
    both, batch = torch.cat([few, many]), torch.tensor([0] * 3 + [2] * 64)  # sample 1 is empty
    assert choice_of(both, batch).num_active_by_level == (64, 8, 1)
    assert choice_of(both, batch, max_active_voxels=8).level == 1


def chosen(level, **choices):
    processor = DynamicResolutionProcessor(4, **choices)
    side = 2**level
    assert processor.choose(torch.ones(4 * side, 1, 1).nonzero()).level == level
    return processor


@pytest.mark.parametrize("level", [0, 1, 3])
def test_pooling_is_by_cells(level):
    """Sizes that are no multiple of the cell: the last cells are smaller, with the mean of their own voxels."""
    volume = torch.randn(2, 3, 9, 12, 7, dtype=torch.float64) * (torch.rand(2, 1, 9, 12, 7) < 0.3)
    size = 2**level
    expected = {name: [] for name in ("area", "sum", "max", "nearest")}
    for z in range(0, 9, size):
        for y in range(0, 12, size):
            for x in range(0, 7, size):
                cell = volume[:, :, z : z + size, y : y + size, x : x + size].flatten(2)
                expected["area"].append(cell.mean(2))
                expected["sum"].append(cell.sum(2))
                expected["max"].append(cell.amax(2))
                middle = [min(a + size // 2, b - 1) for a, b in ((z, 9), (y, 12), (x, 7))]
                expected["nearest"].append(volume[:, :, middle[0], middle[1], middle[2]])
    shape = (2, 3, *(-(-side // size) for side in (9, 12, 7)))
    for name, cells in expected.items():
        found = chosen(level, downsample=name).apply(volume)
        assert_same(found, torch.stack(cells, 2).view(shape), 1e-12)


def test_mean_over_occupied_voxels_keeps_thin_surface():
    """As the page on resolution has it. The naive mean of a surface that fills an eighth of its cells is an eighth."""
    volume = torch.zeros(1, 1, 8, 8, 8)
    volume[0, 0, ::2, ::2, ::2] = 5.0
    summed = chosen(1, downsample="sum")
    found = summed.apply(volume) / summed.apply((volume != 0).float()).clamp(min=1)
    assert found.unique().tolist() == [5.0]
    assert chosen(1).apply(volume).unique().tolist() == [0.625]


def test_pooled_occupancy_matches_count():
    mask = brain_mask()
    processor = DynamicResolutionProcessor(1000, downsample="max")
    choice = processor.choose(mask.nonzero())
    pooled = processor.apply(mask[None, None].float())
    assert len(SparseVoxels.from_dense(pooled).coords) == choice.num_active <= 1000


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_there_and_back_for_a_net_with_a_stride(mode):
    processor = chosen(1, stride=8)
    volume = torch.randn(1, 2, 18, 30, 16, requires_grad=True)
    pooled = processor.apply(volume)
    assert pooled.shape == (1, 2, 16, 16, 8)
    back = processor.restore(pooled, mode=mode)
    assert back.shape == volume.shape
    assert_same(back, F.interpolate(pooled, scale_factor=2, mode=mode)[:, :, :18, :30, :16])
    (gradient,) = torch.autograd.grad(back.sum(), volume)
    with pytest.raises(InputError, match=r"expected the spatial size that apply returned, \(16, 16, 8\)"):
        processor.restore(pooled[..., ::2])
    if mode == "nearest":
        torch.testing.assert_close(gradient, torch.ones_like(gradient))  # a mean, copied to all


def test_restores_result_from_its_level():
    """A loop may choose for the next volume before it restores the last one."""
    processor = DynamicResolutionProcessor(1000)
    volume = torch.randn(1, 1, 8, 8, 8)
    processor.choose(torch.ones(8, 8, 8).nonzero())
    pooled = processor.apply(volume)
    assert processor.choose(torch.ones(16, 16, 16).nonzero()).level == 1
    assert_same(processor.restore(pooled), volume)


def test_labels_and_pictures():
    labels = torch.arange(64).view(1, 1, 8, 8)
    processor = chosen(2, downsample="nearest")
    assert processor.apply(labels).flatten().tolist() == [18, 22, 50, 54]
    with pytest.raises(InputTypeError, match=r"got a tensor of shape \(1, 1, 8, 8\), torch.int64"):
        chosen(2).apply(labels)


def test_rejects_invalid_arguments():
    processor = DynamicResolutionProcessor(1000)
    for call in (processor.apply, processor.restore):
        with pytest.raises(StateError, match=r"first|before"):
            call(torch.zeros(1, 1, 8, 8, 8))
    for bad in (torch.zeros(0, 3), torch.zeros(3, 4), torch.zeros(3)):
        with pytest.raises(InputError, match=r"\(N, 3\) or \(N, 2\), one row for each point"):
            processor.choose(bad)
    with pytest.raises(InputError, match="not finite"):
        processor.choose(torch.tensor([[0.0, 0.0, torch.nan], [1.0, 0.0, 0.0]]))
    with pytest.raises(InputError, match="expected an extent of 2097152 cells"):
        processor.choose(torch.tensor([[0, 0, 0], [2**22, 0, 0]]))
    with pytest.raises(InputError, match="an extent of 1048577 cells, for 2 samples"):
        processor.choose(torch.tensor([[0, 0, 0], [2**20, 0, 0]]), batch=torch.tensor([0, 1]))
    for batch in (torch.tensor([0]), torch.tensor([0, -1]), torch.tensor([0.0, 1.0])):
        with pytest.raises(InputError, match=r"for 2 points; expected \(2,\) integers, 0 or more"):
            processor.choose(torch.zeros(2, 3), batch=batch)
    for wrong in (
        {"max_active_voxels": 0},
        {"max_active_voxels": "1000"},
        {"min_points_per_voxel": -1},
        {"levels": 21},
        {"stride": 0},
        {"downsample": "mean"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DynamicResolutionProcessor(**wrong)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
@pytest.mark.parametrize("num_axes", [2, 3])
def test_labels_come_back(dtype, num_axes):
    labels = torch.randint(0, 2, (2, 1, *(11, 16, 13)[:num_axes]))
    processor = DynamicResolutionProcessor(max_active_voxels=20, downsample="nearest")
    processor.choose(labels[0, 0].nonzero())
    restored = processor.restore(processor.apply(labels.to(dtype)))
    assert processor.choice.level > 0
    assert restored.dtype == dtype
    assert_same(restored.double(), processor.restore(processor.apply(labels.double())))
    coarse = processor.apply(labels.to(dtype))
    assert_refused(lambda: processor.restore(coarse, mode="trilinear"), InputTypeError, r'pass mode="nearest"\.$')


@pytest.mark.parametrize("way", ["area", "sum", "max", "nearest"])
def test_volumes_of_float16_are_pooled(way):
    processor = DynamicResolutionProcessor(max_active_voxels=20, downsample=way)
    processor.choose(torch.arange(9).repeat_interleave(9)[:, None].expand(-1, 3))
    volume = (torch.arange(2 * 9**3) % 7).reshape(2, 1, 9, 9, 9)
    pooled = processor.apply(volume.half())
    assert pooled.dtype is torch.float16
    assert_same([pooled.float()], [processor.apply(volume.float())], 1e-3)
