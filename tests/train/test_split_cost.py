"""What the split check takes beside a plain step, on the models whose memory is predicted."""

import pytest
import torch

from memkit._core.units import KIB, MIB
from memkit._gradients.loss import read_loss
from memkit.train.split_check import Computation, Examination
from memkit.train.split_ways import _facts_of_rows, ways_to_cut
from tests.allocations import trace_allocations
from tests.helpers import one_in
from tests.predict.steps import STEPS
from tests.predict.truth import plain_step

# Sketches, at most 1 KiB for each parameter, and the rows in another order: of models of a few kilobytes that counts.
_SLACK_BYTES = 32 * KIB


def make(name):
    torch.manual_seed(0)
    return STEPS[name]()


def look(step):
    """The first look at a batch in two parts."""
    parameters = [each for each in step.model.parameters() if each.requires_grad]
    how = Computation(lambda: parameters, is_mixed=lambda: step.precision is not None)
    ways = ways_to_cut(step.batch, num_parts=2, is_first=True, is_widened=how.is_mixed())
    examination = Examination(step.model, how, [step.loss_fn], ways)
    for attempt in examination.attempts():
        has_autocast = step.precision is not None and not attempt.in_full_precision
        with attempt as micro:
            with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
                loss = step.loss_fn(step.model, micro)
            attempt.backward(read_loss(loss, call="loss_fn"))
    return examination.verdict


WITHOUT_ROWS = {"embedding_bag", "message_passing", "graph_attention", "unet3d", "unet3d_bfloat16"}  # or with one


@pytest.mark.parametrize("name", one_in(8, sorted(STEPS.keys() - WITHOUT_ROWS)))
def test_a_look_takes_no_more_memory_than_a_plain_step(name):
    step = make(name)
    plain = trace_allocations(plain_step(step)).peak
    step = make(name)
    assert trace_allocations(lambda: look(step)).peak <= plain + _SLACK_BYTES


def test_choosing_rows_takes_no_copy_of_the_batch():
    """The rows of a batch in channels-last order would be copied to be looked at as one line each."""
    images = torch.rand(64, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(5, (64, 64, 64))
    _facts_of_rows([images[:1], labels[:1]], 1)
    peak = trace_allocations(lambda: _facts_of_rows([images, labels], 64)).peak
    assert peak <= 4 * MIB < images.nbytes + labels.nbytes
    whole = [images.sum((1, 2, 3)).double(), labels.flatten(1).sum(1).double()]
    facts, num_discrete = _facts_of_rows([images, labels], 64)
    assert num_discrete == 4  # values that are not finite, below 0, equal to 0; the sum of labels
    torch.testing.assert_close(torch.from_numpy(facts[:, 3]), whole[1])
    torch.testing.assert_close(torch.from_numpy(facts[:, 5]), whole[0], rtol=1e-5, atol=1e-5)


def test_choosing_among_many_narrow_rows_takes_less_than_the_batch():
    batch = torch.rand(400_000, 6)
    batch[123_456] = float("nan")
    (way,) = [each for each in ways_to_cut(batch, num_parts=20, is_tight=True) if each.is_smaller][:1]
    way.make()
    chosen = []
    assert trace_allocations(lambda: chosen.append(way.make())).peak < batch.nbytes / 4
    assert chosen[0].whole.isnan().any()  # the rare row, wherever it is
