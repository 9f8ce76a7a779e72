"""The cache of operators without data: what it answers is what torch's own shape functions say."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memkit._simulation.tensors import Tensors
from tests.planning.test_dryrun import build
from tests.planning.truth import dry_run


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own comparison
@pytest.mark.parametrize("name", ["resnet", "encoder_bfloat16", "message_passing", "lstm", "packed_lengths"])
def test_each_hit_is_what_torch_would_answer(name):
    dry_run(build(name))
    hits = FakeTensorMode.cache_hits
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):  # torch then compares each hit
        dry_run(build(name))
    assert FakeTensorMode.cache_hits > hits


def test_most_operators_of_a_second_estimate_are_hits():
    """Labels have values, and torch's own cache takes nothing that touches them."""
    for name in ("mlp", "resnet", "tied_decoder"):
        dry_run(build(name))
        hits, misses = FakeTensorMode.cache_hits, FakeTensorMode.cache_misses
        bypasses = sum(FakeTensorMode.cache_bypasses.values())
        dry_run(build(name))
        num_hits = FakeTensorMode.cache_hits - hits
        others = FakeTensorMode.cache_misses - misses + sum(FakeTensorMode.cache_bypasses.values()) - bypasses
        assert num_hits > 2 * others


def test_equal_numbers_of_other_types_and_other_values_are_no_hits():
    mode = Tensors()
    x = mode.stand_in(torch.zeros(2000, dtype=torch.int64))
    two, three = (mode.stand_in(torch.tensor(mask)) for mask in ([True, False, True], [True, True, True]))
    with mode:
        assert (x * 1).dtype is torch.int64
        assert (x * 1.0).dtype is torch.float32
        assert (x * True).dtype is torch.int64
        assert x[:3][two].shape == (2,)
        assert x[:3][three].shape == (3,)
        with torch.inference_mode():
            assert (x * 1).is_inference()
        assert not (x * 1).is_inference()
