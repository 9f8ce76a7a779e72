"""CTC loss takes what its kernels take, on the virtual GPU and on the CPU, however its lengths come."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import memkit as mk
from memkit.errors import NotSimulatedError
from memkit.predict.virtual_gpu import VirtualGPU

LENGTHS = {
    "lists": lambda lengths: lengths,
    "tuples": tuple,
    "on the host": torch.tensor,
    "on the card": lambda lengths: torch.tensor(lengths, device="cuda"),
}


def rounded(num_bytes):
    return -(-num_bytes // 512) * 512


def peaks(num_steps, num_labels, lengths=torch.tensor, targets=None, **options):
    """Bytes that two rows take: the peak of the forward, what it leaves, and the peak of the backward."""
    with VirtualGPU("RTX 4090"):
        log_probs = torch.randn(num_steps, 2, num_labels, device="cuda").log_softmax(-1).requires_grad_()
        targets = torch.ones(2, 40, dtype=torch.long, device="cuda") if targets is None else targets
        sizes = lengths([num_steps, 9]), lengths([40, 20])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = functional.ctc_loss(log_probs, targets, *sizes, **options)
        forward, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        loss.sum().backward()
        assert log_probs.grad.shape == log_probs.shape
        return forward, after, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("num_steps", [100, 300], ids=["small", "large"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_sizes_are_those_of_the_kernels(num_steps, zero_infinity):
    """A blank is around each symbol of the longest target; the backward has as much again, and large problems more."""
    _, after, backward = peaks(num_steps, 32, reduction="none", zero_infinity=zero_infinity)
    saved = rounded(2 * num_steps * (2 * 40 + 1) * 4)
    gradient, steps, blanks = (rounded(2 * num_steps * each * 4) for each in (32, 1, 41))
    assert after == saved + 512 * (1 + 2 * zero_infinity)  # with the rows' losses, and those that `where` selects by
    inside = 3 * 512 + saved + gradient
    if num_steps == 300:
        of_blanks = 2 * blanks + 2 * steps
        inside += max(of_blanks, 2 * 512 + gradient) if zero_infinity else of_blanks
    assert backward - after == inside + 2 * 512  # the sum, and its gradient


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lengths_may_be_lists_or_tensors_anywhere(reduction):
    found = {name: peaks(100, 32, make, reduction=reduction) for name, make in LENGTHS.items()}
    assert len(set(found.values())) == 1


def test_the_shapes_are_those_of_the_plain_loss():
    log_probs, targets = torch.randn(20, 2, 8).log_softmax(-1), torch.ones(2, 5, dtype=torch.long)
    for reduction in ("none", "mean", "sum"):
        plain = functional.ctc_loss(log_probs, targets, [20, 18], [5, 3], reduction=reduction)
        with VirtualGPU("RTX 4090"):
            loss = functional.ctc_loss(log_probs.cuda(), targets.cuda(), [20, 18], [5, 3], reduction=reduction)
            assert (loss.shape, loss.dtype) == (plain.shape, plain.dtype)


def test_computed_lengths_are_refused():
    def lengths(numbers):
        return torch.rand(len(numbers), device="cuda").long()

    with pytest.raises(NotSimulatedError, match="depends on data"):
        peaks(20, 8, lengths)


def test_what_cudnn_would_run_is_refused():
    """Its kernel takes targets in one row as 32-bit integers; the way out leads to PyTorch's own."""
    targets = torch.ones(60, dtype=torch.int32)
    with pytest.raises(NotSimulatedError, match=r"Way out: write targets\.long\(\)"):
        peaks(100, 8, targets=targets)
    assert peaks(100, 8, targets=targets.long())
    assert peaks(100, 8, targets=targets, blank=7)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("make", [list, torch.tensor], ids=["lists", "tensors"])
def test_on_the_cpu_a_step_takes_what_was_estimated(make, reduction):
    """The backward takes as much as the forward has saved, which the longest target decides, here most of the peak."""
    model = nn.Linear(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(60, 3, 8), torch.ones(3, 50, dtype=torch.long)

    def loss_fn(model, batch):
        lengths = make([60, 59, 58]), make([50, 20, 10])
        loss = functional.ctc_loss(model(batch[0]).log_softmax(-1), batch[1], *lengths, reduction=reduction)
        return loss.mean()

    def step():
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with mk.Tracker(device="cpu", workspace=True) as tracker:
        step()
    estimate = mk.estimate_memory_usage(model, batch, loss_fn=loss_fn, optimizer=optimizer)
    least, most = estimate.peak_interval
    assert least < tracker.peak_bytes
    assert abs(most - tracker.peak_bytes) < 64  # lengths are copied as numbers
