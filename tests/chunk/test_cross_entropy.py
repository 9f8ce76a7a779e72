"""Cross-entropy over a large vocabulary, in chunks of logits: torch's numbers, with the memory of the gradients."""

import argparse
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memkit as mk
from memkit._core.errors import InputError, InputTypeError
from memkit._torch.versions import parse
from memkit.chunk.cross_entropy import choose_chunk_size, chunked_linear_cross_entropy
from tests.allocations import trace_allocations
from tests.helpers import assert_refused


def make(num_rows=40, width=6, num_classes=23, dtype=torch.float64):
    x, weight, bias = (
        torch.randn(*shape, dtype=dtype, requires_grad=True)
        for shape in ((num_rows, width), (num_classes, width), (num_classes,))
    )
    targets = torch.randint(num_classes, (num_rows,))
    targets[2 : num_rows // 3] = -100
    return x, weight, bias, targets


def whole(x, weight, targets, bias=None, **options):
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), targets.flatten(), **options)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk_size", [1, 7, 40, None, "auto"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_torchs(chunk_size, label_smoothing, reduction):
    x, weight, bias, targets = make()
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    loss = chunked_linear_cross_entropy(x, weight, targets, bias, chunk_size=chunk_size, **options)
    expected = whole(x, weight, targets, bias, **options)
    same(loss, expected)
    inputs = (x, weight, bias)
    same(torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs))


def test_gradcheck():
    x, weight, bias, targets = make(9, 3, 5)
    assert torch.autograd.gradcheck(
        lambda *inputs: chunked_linear_cross_entropy(*inputs[:2], targets, inputs[2], chunk_size=4).exp(),
        (x, weight, bias),
    )


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_only_wanted_gradients(needed):
    *inputs, targets = make()
    for index, each in enumerate(inputs):
        each.requires_grad_(index in needed)
    x, weight, bias = inputs
    chunked_linear_cross_entropy(x, weight, targets, bias, chunk_size=7).backward()
    got = [each.grad for each in inputs]
    for each in inputs:
        each.grad = None
    whole(x, weight, targets, bias).backward()
    for mine, each in zip(got, inputs, strict=True):
        assert (mine is None) == (each.grad is None)
        if mine is not None:
            same(mine, each.grad)


def test_sequences_and_another_ignored_index():
    x, weight, _, _ = make()
    x, targets = x.reshape(4, 10, 6), torch.randint(23, (4, 10))
    targets[0] = 0
    loss = chunked_linear_cross_entropy(x, weight, targets, ignore_index=0, chunk_size=7)
    expected = whole(x, weight, targets, ignore_index=0)
    same(loss, expected)
    same(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x))
    same(chunked_linear_cross_entropy(x[0, 0], weight, targets[1, 0]), whole(x[0, 0][None], weight, targets[1, :1]))


@pytest.mark.parametrize("value", [-1, 23, 10**6])
def test_a_target_out_of_range_is_refused_and_the_way_out_works(value):
    x, weight, _, _ = make()
    targets = torch.arange(len(x)) % 23
    targets[:2] = value

    def call(**how):
        return chunked_linear_cross_entropy(x, weight, targets, chunk_size=7, **how)

    message = rf"2 of {len(x)} targets out of range, the first of them {value};.*ignore_index={value} if"
    assert_refused(call, InputError, message)
    same(call(ignore_index=value), whole(x, weight, targets, ignore_index=value))


def test_a_mean_of_chunk_means_would_be_wrong():
    x, weight, _, targets = make()
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk_size=10)
    parts = [whole(a, weight, b) for a, b in zip(x.split(10), targets.split(10), strict=True)]
    assert abs(float((sum(parts) / len(parts) - loss).detach())) > 1e-2


def test_all_ignored_gives_nan_mean_and_zero_gradients():
    x, weight, _, targets = make()
    for loss_of in (chunked_linear_cross_entropy, whole):
        loss = loss_of(x, weight, torch.full_like(targets, -100))
        assert loss.isnan()
        assert all(bool((each == 0).all()) for each in torch.autograd.grad(loss, (x, weight)))


def test_no_rows():
    _, weight, _, targets = make()
    assert chunked_linear_cross_entropy(torch.empty(0, 6, dtype=torch.float64), weight, targets[:0]).isnan()


def test_large_logits_do_not_overflow():
    x, weight, _, targets = make(dtype=torch.float32)
    large = (300 * x).detach().requires_grad_()
    loss = chunked_linear_cross_entropy(large, weight, targets, chunk_size=7)
    expected = whole(large, weight, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, large), torch.autograd.grad(expected, large))


def test_autocast_holds_and_is_as_precise_as_torchs():
    x, weight, bias, targets = make(200, 32, 50, torch.float32)
    exact = torch.autograd.grad(whole(x.double(), weight.double(), targets, bias.double()), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_linear_cross_entropy(x, weight, targets, bias, chunk_size=7)
        expected = whole(x, weight, targets, bias)
    assert loss.dtype == expected.dtype == torch.float32
    ours, torchs = (torch.autograd.grad(each, (x, weight)) for each in (loss, expected))
    for mine, other, truth in zip(ours, torchs, exact, strict=True):
        assert 0.5 * (other - truth).norm() < (mine - truth).norm() < 1.1 * (other - truth).norm()


def test_half_precision_weights_accumulate_in_float32():
    x, weight, _, targets = make(6000, 8, 4, torch.bfloat16)
    truth = torch.autograd.grad(whole(x.double(), weight.double(), targets), weight)[0].double()
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk_size=2)
    (ours,) = torch.autograd.grad(loss, weight)
    assert loss.dtype == ours.dtype == torch.bfloat16
    naive = torch.zeros_like(weight)
    for rows, part in zip(x.split(2), targets.split(2), strict=True):
        naive += torch.autograd.grad(whole(rows, weight, part, reduction="sum"), weight)[0]
    naive = naive.double() / (targets != -100).sum()
    assert (ours.double() - truth).norm() < 0.01 * truth.norm()
    assert (naive - truth).norm() > 0.03 * truth.norm()


def test_a_retained_graph_and_second_derivatives():
    x, weight, _, targets = make()
    loss = chunked_linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss, x, retain_graph=True)
    same(torch.autograd.grad(loss, x, retain_graph=True), first)
    with pytest.raises(mk.errors.StateError, match=r"chunked_linear_cross_entropy.*create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(loss, x)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, x)


def test_validation_allocates_no_gradient():
    x, weight, _, targets = make(2000, 64, 10, torch.float32)

    def run():
        with torch.no_grad():
            assert not chunked_linear_cross_entropy(x, weight, targets, chunk_size=10).requires_grad

    assert trace_allocations(run).peak < x.nbytes / 4


def test_wrong_calls_are_refused():
    x, weight, bias, targets = make()
    for arguments, got in [
        ((x, weight.t(), targets), r"weight of shape \(6, 23\)"),
        ((x, weight, targets[:-1]), r"targets of shape \(39,\)"),
        ((x, weight, targets, bias[:-1]), r"bias of shape \(22,\)"),
        ((x, weight, targets.int()), "targets of torch.int32"),
        ((x, weight, torch.rand(40, dtype=torch.float64)), "targets of torch.float64"),
    ]:
        with pytest.raises(mk.errors.InputError, match=got):
            chunked_linear_cross_entropy(*arguments)
    for options, got in [
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"chunk_size": 0}, "whole number of rows"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
    ]:
        with pytest.raises(mk.errors.ConfigError, match=got):
            chunked_linear_cross_entropy(x, weight, targets, **options)


@given(st.integers(0, 10**6), st.integers(1, 300_000), st.integers(1, 8192), st.sampled_from([4, 8]))
def test_chunk_size_is_bounded_by_existing_tensors(num_rows, num_classes, width, itemsize):
    rows = choose_chunk_size(num_rows, num_classes, width, itemsize=itemsize)
    gradients = (num_rows + num_classes) * width * itemsize
    assert 1 <= rows <= max(num_rows, 1)
    assert rows * num_classes * itemsize <= max(gradients / 2, 2**20, 64 * num_classes * itemsize)


def test_peak_is_the_gradients_and_half_as_much():
    """Torch's own needed the weight's gradient twice, whatever its chunk; so does every sum over chunks by autograd."""
    x, weight, _, targets = make(512, 128, 8000, torch.float32)
    gradients = x.nbytes + weight.nbytes

    def peak(loss_of):
        x.grad = weight.grad = None
        return trace_allocations(lambda: loss_of(x, weight, targets).backward()).peak

    options = nn.LinearCrossEntropyOptions(batch_chunk_size=64, chunking_method=None)
    assert peak(chunked_linear_cross_entropy) < 1.6 * gradients
    factor = 1.9 if parse(torch.__version__) < (2, 14) else 1.4  # since then as memkit
    assert peak(lambda *inputs: F.linear_cross_entropy(*inputs, options=options)) > factor * gradients
    assert peak(whole) > 9 * gradients


def test_a_language_model_of_real_text_trains_alike():
    """A tied head over the words of argparse's source; lines of unequal length, padded: chunks of unequal weight."""
    lines = [re.findall(r"\w+|\S", line) for line in inspect.getsource(argparse).splitlines()]
    lines = [line[:12] for line in lines if len(line) > 3][:160]
    words = {word: number for number, word in enumerate(sorted({word for line in lines for word in line}))}
    tokens = torch.full((len(lines), 12), -100)
    for row, line in zip(tokens, lines, strict=True):
        row[: len(line)] = torch.tensor([words[word] for word in line])
    assert len(words) > 200

    def train(loss_of):
        torch.manual_seed(0)
        embedding = nn.Embedding(len(words), 16).double()
        mixer = nn.GRU(16, 16, batch_first=True).double()
        optimizer = torch.optim.Adam([*embedding.parameters(), *mixer.parameters()], lr=0.02)
        losses = []
        for batch in tokens.split(40) * 3:
            hidden, _ = mixer(embedding(batch[:, :-1].clamp(min=0)))
            loss = loss_of(hidden, embedding.weight, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    chunked = train(lambda *inputs: chunked_linear_cross_entropy(*inputs, chunk_size=50))
    torch.testing.assert_close(chunked, train(whole), rtol=1e-10, atol=0)
    assert chunked[-1] < 0.9 * chunked[0]


def test_a_list_of_targets_is_refused():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert_refused(
        lambda: chunked_linear_cross_entropy(x, weight, [1, 2, 3]), InputTypeError, "targets as a list", "as_tensor"
    )


def masked(share, rows=400, width=16, num_classes=300):
    torch.manual_seed(0)
    x = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(num_classes, width, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(num_classes, (rows,))
    targets[torch.randperm(rows)[: round(share * rows)]] = -100
    return x, weight, targets


@pytest.mark.parametrize("chunk_size", [1, 60, 400, "auto"])
@pytest.mark.parametrize("share", [0.2, 0.3, 0.9, 0.9975])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_without_the_ignored_rows_are_torchs(share, chunk_size, smoothing):
    x, weight, targets = masked(share)
    loss = chunked_linear_cross_entropy(x, weight, targets, chunk_size=chunk_size, label_smoothing=smoothing)
    expected = whole(x, weight, targets, label_smoothing=smoothing)
    same(loss, expected)
    same(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight)))


@pytest.mark.parametrize("num_classes", [300, 64])
@pytest.mark.parametrize("chunk_size", [20, 100, 400, 10_000])
def test_ignored_rows_take_no_time_and_no_memory(chunk_size, num_classes):
    def run(share):
        x, weight, targets = masked(share, num_classes=num_classes)

        def step():
            loss = chunked_linear_cross_entropy(x, weight, targets, chunk_size=chunk_size)
            return torch.autograd.grad(loss, (x, weight))

        step()
        with FlopCounterMode(display=False) as count:
            step()
        return count.get_total_flops(), trace_allocations(step).peak

    (all_flops, all_peak), (some_flops, some_peak) = run(0.0), run(0.75)
    assert all_flops == 4 * some_flops
    assert some_peak <= all_peak


def test_an_estimate_knows_the_ignored_rows_of_its_batch():
    x, _, targets = masked(0.75)
    model = nn.Linear(16, 300, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return chunked_linear_cross_entropy(batch[0], model.weight, batch[1], chunk_size=100)

    batch = x.detach(), targets
    estimate = mk.estimate_memory_usage(model, batch, loss_fn, optimizer=optimizer)
    assert estimate.doubts == ()
    with mk.Tracker(device="cpu") as tracker:
        loss_fn(model, batch).backward()
        optimizer.step()
    assert abs(estimate.peak_bytes - tracker.peak_bytes) <= 64
    computed = mk.estimate_memory_usage(
        model, batch, lambda model, batch: loss_fn(model, (batch[0], batch[1].double().long())), optimizer=optimizer
    )
    assert computed.doubts == ()  # of targets without data all rows count
    assert estimate.peak_bytes < computed.peak_bytes
