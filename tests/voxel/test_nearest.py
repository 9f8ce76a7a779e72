import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis.extra import numpy as arrays

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit.voxel.nearest import nearest_points
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, one_in
from tests.voxel.clouds import all_distances, two_clouds

BACKENDS = ["tiled", "pruned", "kdtree"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(3000, 2000), (1, 700), (64, 1), (129, 65)])
def test_every_back_end_finds_the_nearest(backend, sizes):
    a, b = two_clouds(*sizes)
    table = all_distances(a, b)
    of_a, of_b = nearest_points(a, b, backend=backend).distances()
    torch.testing.assert_close(of_a, table.amin(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(of_b, table.amin(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    clouds=st.tuples(st.integers(1, 90), st.integers(1, 90), st.sampled_from([2, 3])).flatmap(
        lambda form: st.tuples(
            *(
                arrays.arrays(
                    "float32", (rows, form[2]), elements=st.integers(-3, 3).map(float) | st.floats(-1e4, 1e4, width=32)
                )
                for rows in form[:2]
            )
        )
    )
)
def test_finds_coincident_and_collinear_points(backend, clouds):
    a, b = map(torch.from_numpy, clouds)
    table = all_distances(a.double(), b.double())
    pairs = nearest_points(a, b, backend=backend)
    found = (a.double() - b.double()[pairs.a_to_b]).norm(dim=1), (b.double() - a.double()[pairs.b_to_a]).norm(dim=1)
    for each, truth in zip(found, (table.amin(1), table.amin(0)), strict=True):
        torch.testing.assert_close(each, truth, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_budget_finds_the_same(backend):
    a, b = two_clouds(900, 1100, dtype=torch.float32)
    small = nearest_points(a, b, backend=backend, memory_budget="1B")
    large = nearest_points(a, b, backend=backend, memory_budget="1GiB")
    torch.testing.assert_close(small.distances(), large.distances(), rtol=0, atol=0)


@pytest.mark.parametrize("backend", one_in(2, ["pruned", "tiled"]))
@pytest.mark.parametrize("budget", [2**21, pytest.param(2**23, marks=pytest.mark.slow)])
def test_the_search_keeps_to_its_budget(backend, budget):
    a, b = two_clouds(9000, 8000, dtype=torch.float32)
    clouds = 4 * 3 * (len(a) + len(b))
    trace = trace_allocations(lambda: nearest_points(a, b, backend=backend, memory_budget=budget))
    assert trace.peak < budget + 6 * clouds  # sorted copies, keys, the result: all of them grow with N + M only
    assert trace.peak > budget / 8  # it uses what it may


def test_far_from_the_origin_float32_keeps_its_digits():
    """`torch.cdist`'s default goes through products of matrices: 1 cm at 500 m is lost there."""
    a = two_clouds(3000, 1)[0] / 200 + 500
    a32 = a.float()
    b32 = a32 + torch.tensor([0.0, 0.0, 0.01])
    truth = all_distances(a32.double(), b32.double()).amin(1).mean()
    for backend in BACKENDS:
        found = nearest_points(a32, b32, backend=backend).distances()[0].mean()
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=0)
    naive = torch.cdist(a32, b32).amin(1).mean().double()
    assert abs(naive / truth - 1) > 0.1


def test_half_precision_runs_in_float32_despite_autocast():
    a, b = (each.bfloat16() for each in two_clouds(300, 200))
    with torch.autocast("cpu", torch.bfloat16):
        of_a, _ = nearest_points(a, b, backend="tiled").distances()
    assert of_a.dtype == torch.float32
    torch.testing.assert_close(of_a, all_distances(a.float(), b.float()).amin(1))


def test_gradients_reach_both_clouds_and_stay_finite():
    a, b = two_clouds(40, 30)
    b[:5] = a[:5]
    a.requires_grad_(), b.requires_grad_()
    of_a, of_b = nearest_points(a, b).distances()
    (of_a.sum() + of_b.sum()).backward()
    assert a.grad.isfinite().all()
    assert b.grad.isfinite().all()
    assert a.grad[5:].abs().sum() > 0
    assert b.grad[5:].abs().sum() > 0
    assert torch.autograd.gradcheck(
        lambda x: nearest_points(x, b.detach()).squared_distances()[0], a.detach().requires_grad_()
    )


def test_an_empty_cloud_is_infinitely_far():
    a, b = two_clouds(5, 3)
    of_a, of_b = nearest_points(a, b[:0]).distances()
    assert of_a.tolist() == [torch.inf] * 5
    assert of_b.tolist() == []


def test_auto_uses_tree_if_scipy_is_installed(monkeypatch):
    a, b = two_clouds(4500, 4500, dtype=torch.float32)
    plain = nearest_points(a, b).distances()
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    torch.testing.assert_close(nearest_points(a, b).distances(), plain)
    with pytest.raises(ConfigError, match=r"scipy is not installed.*pip install scipy"):
        nearest_points(a, b, backend="kdtree")


@pytest.mark.parametrize(
    ("a", "b", "error", "text"),
    [
        (torch.ones(3, 3), torch.ones(3, 2), InputError, "(3, 3) on cpu and (3, 2)"),
        (torch.ones(3, 3), torch.tensor([[0, 0, torch.nan]]), InputError, "b: 1 points with a coordinate that is nan"),
        (torch.full((2, 3), 1e25), torch.zeros(1, 3), InputError, "a: 2 points with a coordinate that is nan or inf"),
        (torch.full((2, 3), 1e25), torch.zeros(1, 3), InputError, "or whose square overflows"),
        (torch.ones(3, dtype=torch.int64), torch.ones(1, 3), InputTypeError, "a: a Tensor of shape (3,), torch.int64"),
        ([[0.0]], torch.ones(1, 1), InputTypeError, "a: a list"),
    ],
)
def test_an_invalid_cloud_is_refused(a, b, error, text):
    assert_refused(lambda: nearest_points(a, b), error, text)


def test_rejects_unknown_or_unsuitable_back_end():
    a, b = torch.ones(2, 3), torch.ones(2, 5)
    assert_refused(lambda: nearest_points(a, a, backend="faiss"), ConfigError, "'faiss'; expected 'auto', 'tiled'")
    assert_refused(lambda: nearest_points(b, b, backend="pruned"), ConfigError, "for 5 coordinates")


@pytest.mark.parametrize("backend", ["tiled", "pruned", "kdtree"])
def test_largest_accepted_coordinates_have_finite_distances(backend):
    largest = (torch.finfo(torch.float32).max / 12) ** 0.5
    a = torch.tensor([[largest] * 3, [0.0] * 3])
    assert nearest_points(a[:1], -a, backend=backend).a_to_b.tolist() == [1]
    assert nearest_points(a[:1], -a[:1], backend=backend).distances()[0].isfinite().all()
