"""Sums, errors and weights of the gradients of a batch's parts, by numbers."""

import math

import numpy as np
import pytest

from memkit.train.part_gradients import PartGradient, errors_of, find_weights, is_one_sided, summed

ONE, OTHER = np.array([1.0, 2.0, 0.0]), np.array([0.0, 1.0, 3.0])
EXACT = np.zeros(1)  # nothing is rounded


def gradient(vector, count=1.0, loss=0.0, **how):
    return PartGradient([vector], count, loss, **how)


def test_a_sum_has_the_counts_and_losses_of_its_parts():
    total = summed([gradient(ONE, 2, loss=4.0), gradient(OTHER, 6, loss=12.0)])
    assert (total.count, total.mean_loss) == (8, 2.0)
    np.testing.assert_array_equal(total.mean()[0], (ONE + OTHER) / 8)


def test_parts_that_add_up_are_not_divided():
    total = summed([gradient(ONE, adds_up=True), gradient(OTHER, adds_up=True)])
    assert total.adds_up
    assert total.count == 1


def test_a_parameter_without_a_gradient_in_one_part_has_that_of_the_other():
    total = summed([gradient(None), gradient(ONE)])
    np.testing.assert_array_equal(total.vectors[0], ONE)
    assert summed([gradient(None), gradient(None)]).vectors == [None]


def test_nothing_to_divide_by_is_an_infinite_error():
    errors, _ = errors_of(gradient(ONE), gradient(None, count=0.0))
    assert np.isinf(errors).all()
    assert math.isnan(gradient(ONE, count=0.0).mean_loss)


def test_errors_are_those_of_means():
    errors, norms = errors_of(gradient(2 * ONE, 2), gradient(3 * ONE + 3 * OTHER, 3))
    np.testing.assert_allclose(errors, np.linalg.norm(OTHER))
    np.testing.assert_allclose(norms, np.linalg.norm(ONE))


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        (0.3 * ONE + 0.7 * OTHER, "weights"),
        (ONE + OTHER, "sum"),
        (2 * ONE + 2 * OTHER, "weights"),  # the same factor for both, which is not the sum's
        (2 * ONE - OTHER, None),  # no weights of a mean are below 0
        (ONE + np.array([3.0, 0.0, 1.0]), None),  # another direction: rows are compared
        (ONE, None),  # one part decides alone, as in a maximum
    ],
)
def test_weights_that_explain_the_whole_are_found(whole, expected):
    assert find_weights(gradient(whole), [gradient(ONE), gradient(OTHER)], EXACT) == expected


def test_a_part_without_items_is_a_matter_of_weights():
    """0 / 0: its gradient is not finite."""
    parts = [gradient(ONE), gradient(np.full(3, np.nan))]
    assert find_weights(gradient(ONE), parts, EXACT) == "weights"


def test_a_residual_within_rounding_is_explained():
    whole = 0.5 * ONE + 0.5 * OTHER + 0.005 * np.cross(ONE, OTHER)
    parts = [gradient(ONE), gradient(OTHER)]
    assert find_weights(gradient(whole), parts, EXACT) is None
    assert find_weights(gradient(whole), parts, np.array([0.005])) == "weights"


def test_one_part_with_a_gradient_is_sum_and_mean_alike():
    assert is_one_sided([gradient(ONE), gradient(0 * ONE)])
    assert not is_one_sided([gradient(ONE), gradient(OTHER)])
