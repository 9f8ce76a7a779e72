import contextlib
from functools import partial

import numpy as np
import pytest
import torch

from memkit._core.errors import ConfigError, InputError
from memkit._torch.versions import parse
from memkit.voxel.clouds import (
    CHAMFER_CONVENTIONS,
    ChamferConvention,
    chamfer_distance,
    hausdorff_distance,
)
from memkit.voxel.nearest import nearest_points
from memkit.voxel.recall import f_score, precision_recall
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.voxel.clouds import all_distances, two_clouds

# Each library's formula, written out on the table of all pairs.
FORMULAS = {
    "pytorch3d": lambda of_a, of_b: (of_a**2).mean() + (of_b**2).mean(),
    "kaolin": lambda of_a, of_b: (of_a**2).mean() + (of_b**2).mean(),
    "open3d": lambda of_a, of_b: of_a.mean() + of_b.mean(),
    "lidm": lambda of_a, of_b: ((of_a**2).mean() + (of_b**2).mean()) / 2,
    "occnet": lambda of_a, of_b: (of_a.mean() + of_b.mean()) / 2,
}


@pytest.mark.parametrize("backend", ["tiled", "pruned", "kdtree"])
@pytest.mark.parametrize("name", CHAMFER_CONVENTIONS)
def test_each_convention_is_its_librarys_formula_with_its_gradient(name, backend):
    a, b = (each.requires_grad_() for each in two_clouds(300, 200))
    table = all_distances(a, b)
    expected = FORMULAS[name](table.amin(1), table.amin(0))
    found = chamfer_distance(a, b, convention=name, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(found, (a, b)), torch.autograd.grad(expected, (a, b))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_conventions_differ_and_an_own_one_can_be_given():
    a, b = two_clouds(50, 40)
    values = {chamfer_distance(a, b, convention=name).item() for name in CHAMFER_CONVENTIONS}
    assert len(values) == 4  # pytorch3d's and kaolin's are one formula
    table = all_distances(a, b)
    own = chamfer_distance(a, b, convention=ChamferConvention(squared=False, combine="max"))
    torch.testing.assert_close(own, torch.maximum(table.amin(1).mean(), table.amin(0).mean()))
    with pytest.raises(ConfigError, match="'chamfer'; expected one of 'pytorch3d'"):
        chamfer_distance(a, b, convention="chamfer")


@pytest.mark.slow
def test_gradient_keeps_pairs_instead_of_the_table():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(20_000, 3, generator=generator, requires_grad=True) for _ in range(2))
    trace = trace_allocations(lambda: chamfer_distance(a, b, backend="pruned", memory_budget="8MiB").backward())
    assert trace.peak < 4 * 20_000**2 * 3 / 200  # a table of distances, its square root and its gradient: one 200th


def test_a_batch_and_a_sequence_give_the_mean_of_the_samples():
    clouds = [two_clouds(40, 40), two_clouds(40, 40)]
    clouds[1] = (clouds[1][0] + 3, clouds[1][1])
    one_by_one = torch.stack([chamfer_distance(*each) for each in clouds]).mean()
    a, b = map(torch.stack, zip(*clouds, strict=True))
    torch.testing.assert_close(chamfer_distance(a, b), one_by_one)
    ragged = chamfer_distance([clouds[0][0], clouds[1][0][:7]], [clouds[0][1], clouds[1][1]])
    assert ragged.isfinite()
    assert_refused(lambda: chamfer_distance(a, b[:1]), InputError, "two batches")


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5, 0.95, 1.0])
def test_hausdorff_is_the_larger_directed_quantile(quantile):
    a, b = two_clouds(333, 210)
    table = all_distances(a, b).numpy()
    expected = max(np.quantile(table.min(1), quantile), np.quantile(table.min(0), quantile))
    assert hausdorff_distance(a, b, quantile=quantile).item() == pytest.approx(expected, rel=1e-12)
    pooled = np.quantile(np.concatenate([table.min(1), table.min(0)]), quantile)
    assert quantile in {0, 1} or pooled != pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_hausdorff_of_more_values_than_torch_quantile_takes():
    values = torch.zeros(16_777_217, 1)
    values[-1] = 5
    pairs = nearest_points(values[:1], values[:1])
    wide = type(pairs)(values, values[:1], torch.zeros(len(values), dtype=torch.int64), pairs.b_to_a)
    assert hausdorff_distance(wide).item() == 5
    takes_all = parse(torch.__version__) >= (2, 14)
    with contextlib.nullcontext() if takes_all else pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values.flatten(), 0.5)


def test_precision_and_recall_count_points_below_threshold():
    a, b = two_clouds(400, 150)
    table = all_distances(a, b)
    limits = [1.0, 3.0, 8.0]
    precision, recall, score = precision_recall(a, b, threshold=limits)
    for column, limit in enumerate(limits):
        p, r = (table.amin(1) < limit).double().mean(), (table.amin(0) < limit).double().mean()
        torch.testing.assert_close(precision[column], p)
        torch.testing.assert_close(recall[column], r)
        torch.testing.assert_close(score[column], 2 * p * r / (p + r))
    torch.testing.assert_close(f_score(a, b, threshold=3.0), score[1])


def test_recall_counts_target_points_only():
    """Kaolin divides by found and missed together: a dense half of the scene scores better there than here."""
    target = two_clouds(1000, 1)[0]
    half = target[target[:, 0] > target[:, 0].median()]
    dense = half.repeat(6, 1) + 0.01
    assert precision_recall(dense, target, threshold=0.1).recall == precision_recall(half, target, threshold=0.1).recall
    assert precision_recall(half, target, threshold=0.1).recall == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("metric", [chamfer_distance, hausdorff_distance])
def test_empty_clouds_have_a_stated_distance(metric):
    some = torch.rand(4, 3)
    assert metric(some[:0], some[:0]) == 0
    assert metric(some, some[:0]) == metric(some[:0], some) == torch.inf


def test_empty_clouds_have_defined_score_and_distance():
    some = torch.rand(4, 3, requires_grad=True)
    assert f_score(some[:0], some[:0], threshold=1.0) == 1
    assert f_score(some[:0], some, threshold=1.0) == f_score(some, some[:0], threshold=1.0) == 0
    capped = chamfer_distance(some[:0], some, empty_distance=7.0)
    capped.backward()
    assert capped == 7
    assert some.grad.abs().sum() == 0


def test_pairs_found_once_serve_every_metric():
    a, b = two_clouds(200, 100)
    pairs = nearest_points(a, b)
    assert chamfer_distance(pairs) == chamfer_distance(a, b)
    assert hausdorff_distance(pairs, quantile=0.9) == hausdorff_distance(a, b, quantile=0.9)
    assert f_score(pairs, threshold=2.0) == f_score(a, b, threshold=2.0)


@pytest.mark.parametrize("threshold", [0.0, -1.0, [], [1.0, float("nan")]])
def test_an_invalid_threshold_is_refused(threshold):
    assert_refused(lambda: f_score(torch.rand(3, 3), torch.rand(3, 3), threshold=threshold), ConfigError, "above 0")
    for quantile in (95, None):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            hausdorff_distance(torch.rand(3, 3), torch.rand(3, 3), quantile=quantile)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor(1.0), torch.tensor(1.0)),
        (5, 6),
        (iter([torch.ones(1, 3)]), iter([torch.ones(1, 3)])),
        (nearest_points(torch.ones(1, 3), torch.ones(1, 3)), torch.ones(1, 3)),
    ],
)
def test_only_clouds_and_batches_are_accepted(a, b):
    calls = {
        "chamfer_distance": chamfer_distance,
        "hausdorff_distance": hausdorff_distance,
        "precision_recall": partial(precision_recall, threshold=1.0),
        "f_score": partial(f_score, threshold=1.0),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match="or one NearestPoints") as refused:
            call(a, b)
        assert refused.value.call.startswith(f"{name}(")
