"""Dtypes that torch's kernels refuse are refused without data, too; those that they mix run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memkit as mk
from memkit._simulation.simulation import Host

REFUSED = {
    "product": lambda: ones(4, 8).bfloat16() @ ones(8, 8),
    "vector": lambda: ones(4, 8).double() @ ones(8),
    "linear": lambda: F.linear(ones(4, 8).bfloat16(), ones(8, 8), ones(8)),
    "bias": lambda: F.linear(ones(4, 8), ones(8, 8), ones(8).double()),
    "convolution": lambda: F.conv2d(ones(2, 8, 6, 6).double(), ones(3, 8, 3, 3)),
    "transposed convolution": lambda: F.conv_transpose2d(ones(2, 8, 6, 6).double(), ones(8, 3, 3, 3)),
    "integers as labels": lambda: F.cross_entropy(ones(4, 8), torch.ones(4).int()),
    "integers as labels of pixels": lambda: F.cross_entropy(ones(2, 8, 6), torch.ones(2, 6).int()),
    "weights of classes": lambda: F.cross_entropy(ones(4, 8), torch.ones(4).long(), weight=ones(8).double()),
    "probabilities": lambda: F.binary_cross_entropy(ones(4), ones(4).double()),
    "labels as probabilities": lambda: F.binary_cross_entropy(ones(4), torch.ones(4).long()),
    "layer norm": lambda: F.layer_norm(ones(4, 8).bfloat16(), (8,), ones(8).double(), ones(8).double()),
    "layer norm of doubles": lambda: F.layer_norm(ones(4, 8).double(), (8,), ones(8), ones(8)),
    "group norm": lambda: F.group_norm(ones(2, 8, 6), 2, ones(8).double(), ones(8).double()),
    "places": lambda: ones(4, 8).index_select(0, ones(2)),
    "added rows": lambda: ones(4, 8).index_add(0, torch.ones(2).long(), ones(2, 8).double()),
    "put rows": lambda: ones(4, 8).index_put((torch.ones(2).long(),), ones(2, 8).double()),
    "grid": lambda: F.grid_sample(ones(2, 8, 6, 6), ones(2, 3, 3, 2).double(), align_corners=False),
    "distances": lambda: torch.cdist(ones(4, 8), ones(4, 8).double()),
    "margins": lambda: F.multi_margin_loss(ones(4, 8), torch.ones(4).int()),
}
MIXED = {
    "sum": lambda: ones(4).double() + ones(4),
    "layer norm in half precision": lambda: F.layer_norm(ones(4, 8).bfloat16(), (8,), ones(8), ones(8)),
    "batch norm in half precision": lambda: F.batch_norm(
        ones(4, 8).bfloat16(), ones(8), ones(8), ones(8), ones(8), training=True
    ),
    "smaller places": lambda: ones(4, 8).index_select(0, torch.ones(2).int()),
    "a number": lambda: ones(4, 8).index_put((torch.ones(2).long(),), torch.tensor(1.0)),
    "squares": lambda: F.mse_loss(ones(4), ones(4).double()),
}


def ones(*sizes):
    return torch.ones(sizes)


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_kernels_refuse_are_refused(name):
    with pytest.raises(RuntimeError):
        REFUSED[name]()
    with Host().make_tensors(None), pytest.raises(RuntimeError, match="dtype"):
        REFUSED[name]()


@pytest.mark.parametrize("name", MIXED)
def test_dtypes_that_kernels_mix_run(name):
    dtype = MIXED[name]().dtype
    with Host().make_tensors(None):
        assert MIXED[name]().dtype is dtype


@pytest.mark.parametrize("target", ["cpu", "RTX 4090"])
def test_a_step_that_fails_on_every_device_is_not_said_to_fit(target):
    """NumPy's doubles in a model of floats."""
    model, batch = nn.Linear(8, 4), torch.ones(16, 8, dtype=torch.float64)

    def loss_fn(model, batch):
        return model(batch).square().mean()

    for call in (
        lambda: mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, target=target),
        lambda: mk.plan_training(model, batch, loss_fn, "sgd", budget="1GiB"),
    ):
        with pytest.raises(RuntimeError, match="the same dtype as the first, float32, but got float64") as caught:
            call()
        assert "fails on the same line" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError):
        loss_fn(model, batch)
