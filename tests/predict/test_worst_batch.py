"""The worst batch is that of an estimate of every batch, each kind is estimated once, the loader draws as before."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memkit as mk
from memkit.predict import worst_batch
from tests.helpers import assert_refused


def loss_fn(model, x):
    return model(x).square().mean()


MODEL = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


def test_it_is_the_largest_of_all_estimates():
    loader = [torch.ones(rows, 16) for rows in (40, 3, 400, 7, 400, 120)]
    worst = mk.predict.find_worst_batch(loader, MODEL, loss_fn)
    peaks = [mk.estimate_memory_usage(MODEL, batch, loss_fn).peak_bytes for batch in loader]
    assert worst.number == peaks.index(max(peaks))
    assert worst.batch is loader[2]
    assert worst.estimate.peak_bytes == max(peaks)
    assert worst.num_batches == 6
    assert {number: each.peak_bytes for number, each in worst.estimates.items()} == {
        number: peaks[number] for number in (2, 5, 0, 3, 1)
    }


def test_a_wide_batch_of_few_rows_may_be_the_worst_one():
    """The most rows are not the most memory: the naive choice fails here."""

    def attend(model, x):
        return (x @ x.mT).softmax(-1).sum() * model.weight.sum()

    loader = [torch.ones(64, 8, 4), torch.ones(2, 300, 4)]
    worst = mk.predict.find_worst_batch(loader, nn.Linear(4, 4), attend)
    assert worst.number == 1
    assert loader[0].shape[0] > loader[1].shape[0]


def test_equal_batches_are_estimated_once(monkeypatch):
    counted = []
    original = worst_batch.estimate_memory_usage
    monkeypatch.setattr(
        worst_batch, "estimate_memory_usage", lambda *args, **kwargs: counted.append(1) or original(*args, **kwargs)
    )
    rows = TensorDataset(torch.ones(40, 16))
    worst = mk.predict.find_worst_batch(DataLoader(rows, batch_size=16), MODEL, lambda model, b: loss_fn(model, b[0]))
    assert (len(counted), worst.num_batches, worst.number) == (2, 3, 0)


def test_kinds_see_structure_dtype_and_dataclasses():
    @dataclasses.dataclass
    class Graph:
        nodes: torch.Tensor

    kind = worst_batch._kind_of
    assert kind(Graph(torch.ones(3))) == kind(Graph(torch.zeros(3)))
    assert kind(Graph(torch.ones(3))) != kind(Graph(torch.ones(4)))
    assert kind((torch.ones(3),)) != kind([torch.ones(3)])
    assert kind(torch.ones(3)) != kind(torch.ones(3).half())
    assert kind({"x": torch.ones(3), "n": 3}) != kind({"x": torch.ones(3), "n": 4})


def test_the_loader_draws_as_it_would_have():
    loader = DataLoader(TensorDataset(torch.arange(40.0)[:, None].expand(40, 16)), batch_size=16, shuffle=True)
    torch.manual_seed(3)
    expected = [batch[0][:, 0].tolist() for batch in loader]
    torch.manual_seed(3)
    mk.predict.find_worst_batch(loader, MODEL, lambda model, b: loss_fn(model, b[0]), num_batches=2)
    assert [batch[0][:, 0].tolist() for batch in loader] == expected


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: mk.predict.find_worst_batch(MODEL, [torch.ones(2, 16)], loss_fn), "InputTypeError", "the model first"),
        (lambda: mk.predict.find_worst_batch(torch.ones(2, 16), MODEL, loss_fn), "InputTypeError", "loader = [batch]"),
        (lambda: mk.predict.find_worst_batch(3, MODEL, loss_fn), "InputTypeError", "a int as loader"),
        (lambda: mk.predict.find_worst_batch([], MODEL, loss_fn), "InputError", "an iterator is exhausted"),
        (lambda: mk.predict.find_worst_batch([1], MODEL, loss_fn, num_batches=0), "ConfigError", "num_batches=1"),
        (lambda: mk.predict.find_worst_batch([1], MODEL, loss_fn, gpu="T4"), "InputTypeError", "target='T4')"),
    ],
)
def test_misuse(call, kind, words):
    assert_refused(call, getattr(mk.errors, kind), words)
