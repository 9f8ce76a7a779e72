"""Runs without gradients inside somebody's autocast: the weights' casts that they leave behind."""

import pytest
import torch
from torch.nn.functional import linear

from memkit._torch.autocast import KEEPS_CASTS_WITHOUT_GRAPHS, graphs, without_gradients


def after(context):
    """Whether a weight still gets a gradient after a run in a context."""
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with context():
            assert not linear(x, weight).requires_grad
        return linear(x, weight).requires_grad


def test_weight_used_under_no_grad_gets_a_gradient():
    assert after(without_gradients)


def test_torch_context_fails_on_named_versions():
    assert after(torch.no_grad) == (not KEEPS_CASTS_WITHOUT_GRAPHS)


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_cache_is_as_before_also_after_an_error(is_cached):
    torch.set_autocast_cache_enabled(is_cached)
    try:
        with pytest.raises(ZeroDivisionError), without_gradients():
            1 / 0  # noqa: B018 - for the error
        assert torch.is_autocast_cache_enabled() == is_cached
        assert torch.is_grad_enabled()
        with torch.no_grad(), graphs(enabled=True):
            assert torch.is_grad_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)
