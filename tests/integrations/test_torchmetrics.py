import pickle

import pytest
import torch
import torchmetrics

import memkit as mk
from memkit.integrations.torchmetrics import StreamingMetric
from tests.ranks import join, leave, spawn


def clouds():
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(20 + n, 3, generator=generator), torch.rand(30, 3, generator=generator)) for n in range(5)]


def whole():
    metrics = mk.voxel.PointCloudMetrics(thresholds=[0.1])
    for pair in clouds():
        metrics.update(*pair)
    return metrics.compute()


def numbers(found):
    return {name: value.item() for name, value in found.items()}


def test_it_computes_what_the_metrics_do_also_in_a_collection_and_pickled():
    collection = torchmetrics.MetricCollection({"cloud": StreamingMetric(mk.voxel.PointCloudMetrics(thresholds=[0.1]))})
    for number, pair in enumerate(clouds()):
        if number == 2:
            collection = pickle.loads(pickle.dumps(collection))
        collection.update(*pair)
    assert numbers(collection["cloud"].compute()) == pytest.approx(whole(), rel=1e-14)
    collection.reset()
    with (
        pytest.raises(mk.errors.StateError, match="no sample"),
        pytest.warns(UserWarning, match="before the ``update``"),
    ):
        collection["cloud"].compute()


def test_forward_gives_the_batchs_value_and_keeps_the_sum():
    metric = StreamingMetric(mk.voxel.PointCloudMetrics(thresholds=[0.1]))
    for pair in clouds():
        assert metric(*pair)["chamfer_pytorch3d"].item() == pytest.approx(
            mk.voxel.chamfer_distance(*pair).item(), rel=1e-6
        )
    assert numbers(metric.compute()) == pytest.approx(whole(), rel=1e-14)


def worker(rank, folder):
    join(rank, folder)
    metric = StreamingMetric(mk.voxel.PointCloudMetrics(thresholds=[0.1]))
    for pair in clouds()[rank::2]:
        metric.update(*pair)
    torch.save(metric.compute(), f"{folder}/{rank}.pt")
    leave()


@pytest.mark.slow
def test_its_own_synchronisation_gives_two_ranks_the_whole(tmp_path):
    spawn(worker, tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert numbers(found) == pytest.approx(whole(), rel=1e-14)


def test_a_collection_keeps_metrics_of_other_settings_apart():
    collection = torchmetrics.MetricCollection(
        {name: StreamingMetric(mk.voxel.VoxelMetrics(threshold=limit)) for name, limit in (("low", 0.3), ("high", 0.7))}
    )
    ones = torch.ones(1, 2, 2, 2)
    collection.update(ones, ones)  # both are right: their sums are equal
    collection.update(ones * 0.5, ones)
    assert [collection[name].compute()["iou"].item() for name in ("low", "high")] == [1.0, 0.5]
