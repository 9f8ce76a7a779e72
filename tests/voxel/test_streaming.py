import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from memkit._core.errors import ConfigError, FileFormatError, StateError
from memkit.voxel.clouds import chamfer_distance, hausdorff_distance
from memkit.voxel.grids import voxel_iou
from memkit.voxel.recall import f_score
from memkit.voxel.streaming import PointCloudMetrics, VoxelMetrics
from tests.helpers import assert_refused
from tests.ranks import join, leave


def samples():
    from tests.voxel.clouds import two_clouds  # not for the ranks: they read what this made

    a, b = two_clouds(700, 700)
    return [(a[start : start + 90 + start], b[start : start + 130]) for start in range(5)]


def test_means_over_an_evaluation_are_those_of_the_functions():
    metrics = PointCloudMetrics(thresholds=[2.0, 5.0], quantiles=[1.0, 0.95], conventions=["occnet", "lidm"])
    for pair in samples():
        metrics.update(*pair)
    found = metrics.compute()
    for name, function in {
        "chamfer_occnet": lambda a, b: chamfer_distance(a, b, convention="occnet"),
        "chamfer_lidm": lambda a, b: chamfer_distance(a, b, convention="lidm"),
        "hausdorff": hausdorff_distance,
        "hausdorff_0.95": lambda a, b: hausdorff_distance(a, b, quantile=0.95),
        "f_score_5": lambda a, b: f_score(a, b, threshold=5.0),
    }.items():
        assert found[name] == pytest.approx(sum(function(*pair).item() for pair in samples()) / 5, rel=1e-12)


def test_arrays_and_ranges_are_lists_of_numbers():
    pair = samples()[0]
    for arrays, lists in (
        ({"thresholds": np.linspace(2, 6, 3)}, {"thresholds": [2.0, 4.0, 6.0]}),
        ({"thresholds": range(2, 4), "quantiles": np.array([0.5])}, {"thresholds": [2, 3], "quantiles": [0.5]}),
    ):
        found, expected = PointCloudMetrics(**arrays), PointCloudMetrics(**lists)
        found.update(*pair)
        expected.update(*pair)
        assert found.compute() == expected.compute()
    for wrong in (0.1, "0.1", np.array(0.1), {0.1: 1}):
        assert_refused(
            partial(PointCloudMetrics, thresholds=wrong), ConfigError, "got thresholds=", "; expected a list"
        )


def test_float64_sums_do_not_lose_small_terms():
    """Ten thousand times 0.1 beside one large value: a float32 sum is off in the fourth digit."""
    metrics = VoxelMetrics()
    metrics._sums[0] = 2.0**24
    metrics._num_samples = 1
    for _ in range(100):
        metrics._add(torch.tensor([[0.25, 0, 0, 0, 0]]))
    assert metrics._sums[0] == 2.0**24 + 25


def test_empty_clouds_are_counted_and_never_dropped():
    some = torch.rand(5, 3)
    metrics = PointCloudMetrics()
    for pair in [(some, some), (some[:0], some), (some, some[:0]), (some[:0], some[:0])]:
        metrics.update(*pair)
    found = metrics.compute()
    assert found["chamfer_pytorch3d"] == math.inf
    assert found["f_score_0.1"] == 0.5
    assert [found[f"num_{each}"] for each in ("empty_predictions", "empty_targets", "both_empty")] == [2, 2, 1]
    capped = PointCloudMetrics(empty_distance=8.0)
    capped.update([some, some[:0]], [some, some])
    assert capped.compute()["hausdorff"] == 4


def test_merging_and_going_on_give_the_whole():
    whole, parts = PointCloudMetrics(), [PointCloudMetrics(), PointCloudMetrics()]
    for number, pair in enumerate(samples()):
        whole.update(*pair)
        parts[number % 2].update(*pair)
    resumed = PointCloudMetrics()
    resumed.load_state_dict(parts[0].state_dict())
    resumed.merge(parts[1])
    assert resumed.compute() == pytest.approx(whole.compute(), rel=1e-14)
    resumed.reset()
    assert_refused(resumed.compute, StateError, "no sample")


def test_other_settings_neither_merge_nor_load():
    other = PointCloudMetrics(thresholds=[0.5])
    assert_refused(lambda: PointCloudMetrics().merge(other), StateError, "f_score_0.5")
    assert_refused(lambda: PointCloudMetrics().load_state_dict(other.state_dict()), FileFormatError, "version 1 of")


def test_voxel_metrics_count_each_sample_once():
    generator = torch.Generator().manual_seed(0)
    volumes = [torch.rand(5, 4, 4, 4, generator=generator) for _ in range(2)]
    metrics = VoxelMetrics()
    metrics.update(volumes[0][:4], volumes[1][:4])
    metrics.update(volumes[0][4:], volumes[1][4:])
    assert metrics.compute()["iou"] == pytest.approx(voxel_iou(*volumes).item(), rel=1e-14)


def worker(rank, folder):
    join(rank, folder)
    metrics = PointCloudMetrics()
    for pair in torch.load(f"{folder}/samples.pt", weights_only=True)[rank::2]:  # three for one rank, two for the other
        metrics.update(*pair)
    metrics.sync()
    torch.save(metrics.compute(), f"{folder}/{rank}.pt")
    leave()


def test_two_ranks_have_what_one_process_has(tmp_path):
    torch.save(samples(), tmp_path / "samples.pt")
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    whole = PointCloudMetrics()
    for pair in samples():
        whole.update(*pair)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == pytest.approx(whole.compute(), rel=1e-14)


def test_what_names_do_not_say_counts_as_a_setting_too():
    assert_refused(lambda: VoxelMetrics().merge(VoxelMetrics(threshold=0.9)), StateError, "threshold", "0.9")
    capped = PointCloudMetrics(empty_distance=8.0).state_dict()
    assert_refused(lambda: PointCloudMetrics().load_state_dict(capped), FileFormatError, "empty_distance")
    assert_refused(lambda: VoxelMetrics().load_state_dict({"version": 1}), FileFormatError, "version 1 of")


def test_thresholds_that_lie_close_together_stay_apart():
    metrics = PointCloudMetrics(thresholds=[0.1, 0.10000001])
    cloud = torch.tensor([[0.0, 0, 0]], dtype=torch.float64)
    metrics.update(cloud, cloud + torch.tensor([0.1, 0, 0], dtype=torch.float64))
    found = metrics.compute()
    assert (found["f_score_0.1"], found["f_score_0.10000001"]) == (0, 1)
    resumed = PointCloudMetrics(thresholds=[0.1, 0.10000001])
    resumed.load_state_dict(metrics.state_dict())
    assert resumed.compute() == found


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"thresholds": [0.1, 0.1]}, "each threshold, quantile and convention once"),
        ({"thresholds": [-1.0]}, "a finite number above 0"),
        ({"thresholds": 0.1}, "got thresholds=0.1; expected a list"),
        ({"conventions": "pytorch3d"}, "got conventions='pytorch3d'; expected a list"),
        ({"quantiles": [1.5]}, "from 0 to 1"),
        ({"conventions": ["pytorch"]}, "'pytorch3d'"),
    ],
)
def test_wrong_settings_are_refused_before_the_first_sample(settings, text):
    assert_refused(lambda: PointCloudMetrics(**settings), ConfigError, text)


def test_one_process_has_nothing_to_add():
    metrics = VoxelMetrics()
    metrics.update(torch.ones(2, 2, 2), torch.ones(2, 2, 2))
    metrics.sync()
    assert metrics.num_samples == 1
