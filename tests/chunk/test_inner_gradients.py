"""Functions that take gradients themselves, inside of a chunk: physics-informed losses, forces, torch.func."""

import functools

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import memkit as mk
from memkit._gradients.captured import CapturedTensors
from memkit._recovery.snapshot import RandomNumbers
from memkit.chunk.circumstances import Circumstances
from tests.helpers import assert_refused, one_in_product

EXACT = {"rtol": 1e-11, "atol": 1e-14}


def own_leaf(net, rows):
    """The slope of a network, as physics-informed losses take it."""
    rows = rows.detach().requires_grad_()
    return torch.autograd.grad(net(rows).sum(), rows, create_graph=True)[0]


def force(net, rows):
    return torch.autograd.grad(net(rows).sum(), rows, create_graph=True)[0]


def in_between(net, rows):
    """The gradient with respect to an intermediate result, which is not among the arguments."""
    hidden = net[0](rows)
    return torch.autograd.grad(net[1:](hidden).sum(), hidden, create_graph=True)[0]


def gradient(net, rows):
    return torch.func.vmap(torch.func.grad(lambda row: net(row).sum()))(rows)


def jacobian(net, rows):
    return torch.func.vmap(torch.func.jacrev(net))(rows).flatten(1)


def laplacian(net, rows):
    return torch.func.vmap(lambda row: torch.func.hessian(lambda each: net(each).sum())(row).trace())(rows)


FUNCTIONS = [own_leaf, force, in_between, gradient, jacobian, laplacian]


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


@pytest.fixture
def rows():
    return torch.randn(50, 4, dtype=torch.float64, requires_grad=True)


def same_gradients(ours, theirs, inputs):
    assert_close(ours, theirs, **EXACT)
    found, wanted = (
        torch.autograd.grad(out.square().sum(), inputs, allow_unused=True, retain_graph=True) for out in (ours, theirs)
    )
    assert [each is None for each in found] == [each is None for each in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is not None:
            assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize(
    ("function", "settings"),
    one_in_product(3, FUNCTIONS, [{"chunk_size": 7}, {"chunk_size": 50}, {"memory_budget": "60kB"}, {}]),
)
def test_in_a_map(function, settings, net, rows):
    fn = functools.partial(function, net)
    same_gradients(mk.ChunkedProcessor(fn, **settings)(rows), fn(rows), [rows, *net.parameters()])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_a_loss_and_over_segments(function, net, rows):
    fn, index = functools.partial(function, net), torch.arange(50) % 6
    loss = mk.chunk.chunked_loss(lambda each: fn(each).square(), rows, chunk_size=7, params=net.parameters())
    same_gradients(loss, fn(rows).square().mean(), list(net.parameters()))
    summed = mk.chunked_segment_reduce(fn, rows, index=index, num_segments=6, chunk_size=7)
    slopes = fn(rows)
    whole = torch.zeros(6, *slopes.shape[1:], dtype=torch.float64).index_add(0, index, slopes)
    same_gradients(summed, whole, list(net.parameters()))


@pytest.mark.parametrize("function", FUNCTIONS[:3])
def test_no_outer_gradient_needed(function, net, rows):
    fn = functools.partial(function, net.requires_grad_(False))
    x = rows if function is force else rows.detach()
    if function is in_between:
        fn = functools.partial(lambda net, each: own_leaf(net, each) + 1, net)
    assert_close(mk.chunked_map(fn, x, chunk_size=7).detach(), fn(x).detach(), **EXACT)


@pytest.mark.parametrize("function", [own_leaf, in_between])
def test_random_numbers_are_those_of_the_plain_loop(function, rows, monkeypatch):
    """A forward that had to start over, because a chunk had no graph, draws from the start again."""

    def drawn(run):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Tanh()).double()
        run(functools.partial(function, net)).square().sum().backward()
        return net[0].weight.grad, torch.rand(1)

    plain = drawn(lambda fn: torch.cat([fn(part) for part in rows.split(7)]))
    chunked = lambda fn: mk.chunked_map(fn, rows, chunk_size=7)  # noqa: E731
    assert_close(drawn(chunked), plain)
    if function is in_between:  # the negative control
        monkeypatch.setattr(Circumstances, "start_over", lambda self: self.kept.clear())
        assert not torch.allclose(drawn(chunked)[0], plain[0])


def test_a_function_without_inner_gradients_gets_one_graph(net, rows):
    """Only the first chunk has a graph in the forward: only functions that take gradients pay for one."""
    modes = []

    def fn(each):
        modes.append(torch.is_grad_enabled())
        return net(each)

    mk.chunked_map(fn, rows, chunk_size=10, params=net.parameters(), check=False)
    assert modes == [True, False, False, False, False]


class TestCaptured:
    """Leaves from outside are refused as before, also together with a leaf of the function's own."""

    @pytest.mark.parametrize("way", ["map", "loss"])
    @pytest.mark.parametrize("kind", ["leaf", "result", "both"])
    def test_refused(self, way, kind, net, rows):
        weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
        used = {"leaf": weight, "result": weight * 2, "both": weight * weight}[kind]

        def fn(each):
            return own_leaf(net, each) * used

        call = mk.chunked_map if way == "map" else mk.chunk.chunked_loss
        assert_refused(
            lambda: call(fn, rows, chunk_size=7, params=net.parameters()),
            mk.errors.InputError,
            r"`used` of shape \(4,\)",
        )

    def test_another_outside_leaf_in_each_call(self, rows):
        """Two runs see two leaves, as with leaves of the function's own; but these outlive the chunk."""
        weights = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(99)]
        left = iter(weights)
        assert_refused(
            lambda: mk.chunked_map(lambda each: each * next(left), rows, chunk_size=7), mk.errors.InputError, r"\(4,\)"
        )

    def test_leaf_kept_by_the_function(self, net, rows):
        kept = []

        def fn(each):
            kept.append(each.detach().requires_grad_())
            return net(kept[-1])

        assert_refused(
            lambda: mk.chunked_map(fn, rows, chunk_size=7, params=net.parameters()), mk.errors.InputError, "shape"
        )

    def test_without_the_look_at_survivors_an_outside_leaf_would_pass(self, net, rows, monkeypatch):
        weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
        monkeypatch.setattr(CapturedTensors, "refuse_survivors", lambda *_: None)
        out = mk.chunked_map(lambda each: net(each * weight), rows, chunk_size=7, params=net.parameters())
        out.sum().backward()
        assert weight.grad is None


def test_in_a_checkpoint_around_the_call(net, rows):
    def run(each):
        return mk.chunked_map(functools.partial(own_leaf, net), 2 * each, chunk_size=7).square().mean()

    ours = torch.autograd.grad(checkpoint(run, rows, use_reentrant=False), list(net.parameters())[:3])
    theirs = torch.autograd.grad(own_leaf(net, 2 * rows).square().mean(), list(net.parameters())[:3])
    assert_close(ours, theirs, **EXACT)


def test_detects_row_mixing_inside_torch_func(net, rows):
    def mixing(each):
        return gradient(net, each) - gradient(net, each).mean(0)

    assert_refused(
        lambda: mk.chunked_map(mixing, rows, chunk_size=7, params=net.parameters()),
        mk.errors.InputError,
        "depends on other rows",
    )


def test_the_state_is_as_after_the_plain_call(net, rows):
    """The short chunk that decides about leaves draws nothing from the caller's generator."""
    torch.manual_seed(3)
    mk.chunked_map(functools.partial(own_leaf, net), rows, chunk_size=7)
    after = RandomNumbers()
    torch.manual_seed(3)
    after.restore()
    assert not after.have_moved()
