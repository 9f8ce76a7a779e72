"""What the split check takes beside a plain step, on the models whose memory is predicted."""

import pytest
import torch

from memkit._core.units import KIB
from memkit._gradients.loss import read_loss
from memkit.train.split_check import Computation, Examination
from memkit.train.split_ways import ways_to_cut
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


@pytest.mark.parametrize("name", one_in(2, sorted(STEPS.keys() - WITHOUT_ROWS)))
def test_a_look_takes_no_more_memory_than_a_plain_step(name):
    step = make(name)
    plain = trace_allocations(plain_step(step)).peak
    step = make(name)
    assert trace_allocations(lambda: look(step)).peak <= plain + _SLACK_BYTES
