"""Maxima of large segments: only the rows that won something run again."""

import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import memkit as mk
from memkit.chunk.assembly import ChunkRows
from memkit.chunk.engine import _chunks_of
from tests.allocations import trace_allocations
from tests.chunk.scenes import vertices
from tests.helpers import one_in_product

NUM_CLOUDS, WIDTH = 3, 24
FIRST, LAST = 2 * 3 * 32, 2 * 32 * WIDTH  # multiplications and additions of a row


@functools.cache
def cloud():
    """Points (10242, 3), the cloud of each: neighbors on the surface are far apart in their order."""
    places = vertices().double() / 100
    return places, torch.arange(len(places)) % NUM_CLOUDS


@functools.cache
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, WIDTH)).double()


def plain(rows, cloud_of, sign=1):
    cut = [sign * (sign * network()(rows[cloud_of == each])).amax(0) for each in range(NUM_CLOUDS)]
    return torch.stack(cut)


def gradients(result, leaves):
    return torch.autograd.grad((result.sin() * torch.arange(1, 1 + WIDTH)).sum(), leaves)


def num_winners(reduce="max"):
    points, cloud_of = cloud()
    with torch.no_grad():
        values, sign = network()(points), 1 if reduce == "max" else -1
        best = plain(points, cloud_of, sign)[cloud_of]
    return int((values == best).any(1).sum())


@pytest.mark.parametrize(
    ("by", "chunk_size", "reduce"), one_in_product(3, ["index", "ptr"], [10, 1000, 20_000], ["max", "min"])
)
def test_the_gradients_are_those_of_all_rows(reduce, chunk_size, by):
    points, cloud_of = cloud()
    if by == "ptr":
        cloud_of = cloud_of.sort().values
    x, params = points.clone().requires_grad_(), list(network().parameters())
    ends = torch.tensor([0, *cloud_of.bincount().cumsum(0)])
    where = {"ptr": ends} if by == "ptr" else {"index": cloud_of, "num_segments": NUM_CLOUDS}
    found = mk.chunked_segment_reduce(network(), x, **where, reduce=reduce, chunk_size=chunk_size)
    wanted = plain(x, cloud_of, 1 if reduce == "max" else -1)
    assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    ours, theirs = gradients(found, [x, *params]), gradients(wanted, [x, *params])
    assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    with pytest.raises(AssertionError):  # so small a difference would be seen
        assert_close(ours[0], theirs[0].roll(1, 0), rtol=1e-11, atol=1e-12)


def test_of_gathered_rows_and_with_weights():
    points, cloud_of = cloud()
    nodes, pick = torch.randn(50, 3, dtype=torch.float64, requires_grad=True), torch.arange(len(points)) % 50
    weight = torch.rand(len(points), dtype=torch.float64) + 0.5

    def message(own, other):
        return network()(own * other)

    found = mk.chunked_segment_reduce(
        message, points, index=cloud_of, num_segments=NUM_CLOUDS, reduce="max", weight=weight, chunk_size=500,
        gather={"other": (nodes, pick)}, params=network().parameters(),
    )  # fmt: skip
    values = message(points, nodes[pick]) * weight[:, None]
    wanted = torch.stack([values[cloud_of == each].amax(0) for each in range(NUM_CLOUDS)])
    leaves = [nodes, *network().parameters()]
    assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert_close(gradients(found, leaves), gradients(wanted, leaves), rtol=1e-11, atol=1e-12)


def run_rows(run):
    """Count the rows of each call of the network."""
    rows = []
    with network()[0].register_forward_hook(lambda _module, args, _out: rows.append(len(args[0]))):
        run()
    return rows


@pytest.mark.parametrize("budget", [None, "4MiB"])
def test_rows_that_won_nothing_do_not_run_again(budget):
    points, cloud_of = cloud()
    setting = {"chunk_size": 1024} if budget is None else {"memory_budget": budget}
    processor = mk.ChunkedProcessor(network(), check=False, **setting)

    def step():
        result = processor.segment_reduce(points, index=cloud_of, num_segments=NUM_CLOUDS, reduce="max")
        result.sum().backward()

    step()  # finds its sizes
    rows, plan = run_rows(step), processor.last_plan
    assert num_winners() < len(points) // 50
    assert sum(rows) == len(points) + num_winners()
    if budget is None:
        # a few chunks in place of ten
        assert len(rows) == 11 + 1
    else:
        assert plan.num_kept + plan.num_partly_kept > 0  # what they kept is dropped
        assert trace_allocations(step).peak <= plan.predicted_peak_bytes + NUM_CLOUDS * WIDTH * 8
    with FlopCounterMode(display=False) as count:
        step()
    assert count.get_total_flops() <= len(points) * (FIRST + LAST) + 3 * num_winners() * (FIRST + LAST)


def test_all_rows_run_again_where_the_function_draws_numbers():
    """A row's numbers come after those of the rows before it."""
    points, cloud_of = cloud()
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def noisy(rows):
        return nn.functional.dropout(network()(rows * scale), 0.5)

    def step():
        return mk.chunked_segment_reduce(
            noisy, points, index=cloud_of, num_segments=NUM_CLOUDS, reduce="max", chunk_size=1024, check=False,
            params=[scale, *network().parameters()],
        )  # fmt: skip

    network()  # made by the first call, with random numbers
    torch.manual_seed(0)
    found = step()
    rows = run_rows(lambda: found.sum().backward())
    assert sum(rows) == len(points)
    torch.manual_seed(0)
    values = torch.cat([noisy(part) for part in points.split(1024)])
    wanted = torch.stack([values[cloud_of == each].amax(0) for each in range(NUM_CLOUDS)])
    assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    leaves = [scale, *network().parameters()]
    torch.manual_seed(0)
    assert_close(gradients(step(), leaves), gradients(wanted, leaves), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("width", [WIDTH, 512])
def test_an_estimate_takes_all_rows_and_is_not_too_small(width):
    """Which rows win is known once the step has run."""
    points, cloud_of = cloud()
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, width)).double()

    def step(model, batch):
        setting = {"index": cloud_of, "num_segments": NUM_CLOUDS, "reduce": "max", "chunk_size": 2000}
        return mk.chunked_segment_reduce(model, batch, **setting).sum()

    estimate = mk.estimate_memory_usage(net, points, step, optimizer="sgd")
    assert estimate.doubts == ()
    optimizer = torch.optim.SGD(net.parameters())

    def train():
        optimizer.zero_grad()
        step(net, points).backward()
        optimizer.step()

    train()
    with mk.Tracker(device="cpu") as tracker:
        train()
    assert 0.5 * estimate.peak_bytes < tracker.peak_bytes <= estimate.peak_bytes


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 7), st.randoms(use_true_random=False))
def test_every_marked_row_is_in_one_chunk(counts, last, chance):
    """No chunk of marked rows has more than half of a chunk."""
    lengths = [*(7 for _ in counts[:-1]), max(last, counts[-1])]
    marked, chunks = [], []
    for count, length in zip(counts, lengths, strict=True):
        flags = [True] * count + [False] * (length - count)
        chance.shuffle(flags)
        chunks.append(ChunkRows(len(marked), length))
        marked += flags
    found = list(_chunks_of(torch.tensor(marked), chunks, counts))
    for each in found:
        assert each.numbers is None or len(each.numbers) == each.length <= 3
    numbers = torch.cat([each.of(torch.arange(len(marked))) for each in found]) if found else torch.tensor([])
    left_out = sorted(set(range(len(marked))) - set(numbers.tolist()))
    assert len(set(numbers.tolist())) == len(numbers)
    assert not any(marked[each] for each in left_out)
    assert [each.start for each in found if each.numbers is None] == [
        each.start for each, count in zip(chunks, counts, strict=True) if count > each.length // 2
    ]
