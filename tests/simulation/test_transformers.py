"""The dry run of models that others wrote: `transformers` from a config, against the real CPU step."""

import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the models are built by transformers, which the extra [test] installs")

from memkit.predict.usage import estimate_memory_usage
from tests.helpers import one_in
from tests.predict.steps_transformers import STEPS, text
from tests.predict.truth import assert_equals_the_real_step

# Speech models write into a view, whose backward frees two blocks of the same size in another order.
OTHER_ORDER = {"wav2vec2"}
DRAWS = {"wav2vec2": "numpy.random.rand"}  # how many spans to mask


@pytest.mark.parametrize("name", one_in(8, STEPS))
def test_equals_the_real_step(name):
    assert_equals_the_real_step(STEPS[name], is_other_order=name in OTHER_ORDER, draws=DRAWS.get(name, ""))


def test_a_mask_without_padding_is_left_out_as_in_the_real_step():
    """Transformers makes no mask where there is no padding, but keeps it where it meets a tensor without data."""
    utils = sys.modules["transformers.utils.import_utils"]
    before = utils.is_fake_tensor
    step = STEPS["llama"]()

    def estimate(attention_mask):
        batch = {"input_ids": text(), "labels": text(), "attention_mask": attention_mask}
        return estimate_memory_usage(step.model, batch, loss_fn=step.loss_fn)

    whole, padded = (
        estimate(torch.ones(4, 64)),
        estimate((torch.arange(64) < torch.tensor([[64], [9], [9], [9]])).long()),
    )
    assert whole.peak_bytes < padded.peak_bytes
    assert utils.is_fake_tensor is before
