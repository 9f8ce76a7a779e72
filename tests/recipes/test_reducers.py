"""Figures from batches equal those of all rows together, whatever the batches; a few numbers are all that is kept."""

import pytest
import torch
from hypothesis import given, strategies as st

import memkit as mk
from memkit.recipes.reducers import Accuracy, Mean, WeightedMean
from tests.helpers import assert_refused

CUTS = st.lists(st.integers(0, 60), max_size=6).map(sorted)


def pieces(tensors, cuts):
    return zip(*(torch.tensor_split(each, cuts) for each in tensors), strict=True)


@given(CUTS)
def test_every_cut_gives_the_same(cuts):
    generator = torch.Generator().manual_seed(0)
    values, weights = torch.randn(2, 60, generator=generator).double()
    weights = weights.abs()
    scores = torch.randn(60, 5, generator=generator)
    targets = torch.randint(0, 5, (60,), generator=generator)
    mean, weighted, accuracy = Mean(), WeightedMean(), Accuracy(top=2)
    for value, weight, score, target in pieces((values, weights, scores, targets), cuts):
        mean.update(value)
        weighted.update(value, weight)
        accuracy.update(score, target)
    assert mean.result() == pytest.approx(values.mean().item(), rel=1e-12)
    assert weighted.result() == pytest.approx(((values * weights).sum() / weights.sum()).item(), rel=1e-12)
    is_right = (scores.topk(2, dim=1).indices == targets[:, None]).any(1)
    assert accuracy.result() == is_right.double().mean().item()


def test_half_precision_does_not_lose_rows():
    """A float16 sum of 4,096 ones is 2,048 in naive order, and a float32 sum of 2^25 ones is 2^24."""
    mean = Mean()
    for _ in range(64):
        mean.update(torch.full((4096,), 30.0, dtype=torch.float16))
    assert mean.result() == 30.0


def test_a_weight_of_zero_hides_a_nan():
    mean = WeightedMean()
    mean.update(torch.tensor([float("nan"), 2.0]), torch.tensor([0.0, 3.0]))
    assert mean.result() == 2.0


def test_ignored_items_are_not_counted():
    targets = torch.tensor([0, -100, 1])
    accuracy = Accuracy(ignore_index=-100)
    accuracy.update(torch.tensor([[1.0, 0.0]] * 3), targets)
    assert accuracy.result() == 0.5


@pytest.mark.parametrize("reducer", [Mean(), WeightedMean(), Accuracy()])
def test_empty_result_is_none_and_reset_clears(reducer):
    values = (torch.rand(3, 2), torch.tensor([0, 1, 1])) if isinstance(reducer, Accuracy) else (torch.ones(3),) * 2
    reducer.update(*values)
    assert reducer.result() is not None
    reducer.reset()
    assert reducer.result() is None


@pytest.mark.parametrize(
    ("reducer", "values", "text"),
    [
        (WeightedMean(), (torch.ones(3), torch.ones(2)), "two tensors of the same shape"),
        (Accuracy(), (torch.ones(3), torch.ones(3)), r"scores \(N, C\)"),
        (Accuracy(), (torch.ones(2, 3), torch.tensor([1, -100])), r"target -100.*write Accuracy\(ignore_index=-100\)"),
        (
            Accuracy(ignore_index=-1),
            (torch.ones(2, 3), torch.tensor([-1, 3])),
            "target 3; expected .* from 0 to 2",
        ),
        (Accuracy(), (torch.ones(2, 3), torch.tensor([1.0, 0.0])), r"dtype torch.float32.*targets.long\(\)"),
    ],
)
def test_rejects_mismatched_inputs(reducer, values, text):
    assert_refused(lambda: reducer.update(*values), mk.errors.InputError, text)


def test_a_mean_takes_numbers():
    mean = Mean()
    mean.update(0.5, torch.tensor([1.5, 4.0]))
    assert mean.result() == 2.0
