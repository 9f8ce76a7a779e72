"""A last product that no backward reads is not computed again; whatever reads it, or follows it, gets its numbers."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memkit._tape import unread
from memkit._torch.dispatch import current_modes
from memkit.chunk.engine import ChunkedCall
from memkit.chunk.map import Rows, chunked_map
from memkit.chunk.segments import chunked_segment_reduce
from tests.chunk.test_engine import ENDS, gradients
from tests.helpers import assert_same


@pytest.fixture
def _any_size(monkeypatch):
    monkeypatch.setattr(unread, "_LEAST_MULTIPLICATIONS", 0)


def net():
    return nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 4))


def flops(run):
    with FlopCounterMode(display=False) as count:
        run().sum().backward()
    return count.get_total_flops()


FIRST, LAST = 2 * 3 * 16, 2 * 16 * 4  # a row
ALL = (FIRST + LAST) + (FIRST + LAST) + (FIRST + 2 * LAST)  # forward, the same again, backward


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("chunk_size", [16, 25, 99])  # as many rows as features, too
def test_the_last_product_is_not_computed_again(chunk_size):
    module, x = net(), torch.randn(100, 3)
    assert flops(lambda: chunked_map(module, x, chunk_size=chunk_size, check=False)) == 100 * (ALL - LAST)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "softmax"])
def test_nor_with_weights(reduce):
    """Multiplied within the function, they would follow the product."""
    module, x, weight = net(), torch.randn(100, 3), torch.rand(100)
    index = torch.randint(60, (100,))  # so small that most rows win a maximum

    def run(weight):
        return chunked_segment_reduce(
            module, x, index=index, num_segments=60, reduce=reduce, weight=weight, chunk_size=16, check=False
        )

    assert flops(lambda: run(weight)) == 100 * (ALL - LAST)
    assert flops(lambda: run(weight.requires_grad_())) == 100 * ALL  # its gradient reads the messages


def test_small_products_are_computed_again():
    """Telling them from others takes as long."""
    module, x = net(), torch.randn(100, 3)
    assert flops(lambda: chunked_map(module, x, chunk_size=16, check=False)) == 100 * ALL
    large, rows = nn.Linear(256, 256), torch.randn(1024, 256)
    assert flops(lambda: chunked_map(large, rows, chunk_size=128, check=False)) == 2 * (2 * 1024 * 256 * 256)


def gradients_of(fn, layer, x, run=None):
    out = run() if run else fn(x)
    total = sum(each.sin().sum() for each in (out if isinstance(out, tuple) else (out,)))
    return [total.detach(), *torch.autograd.grad(total, [x, *layer.parameters()], allow_unused=True)]


def in_chunks(fn, layer, x):
    return lambda: ChunkedCall("test()", fn, Rows("test()", None), 16).run((x,), {}, params=layer.parameters())


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_gradients_are_those_of_plain_torch(end):
    layer, x = nn.Linear(3, 4).double(), torch.randn(100, 3, dtype=torch.float64, requires_grad=True)

    def fn(rows):
        return end(layer, rows)

    expected = gradients_of(fn, layer, x)
    assert_same(gradients_of(fn, layer, x, in_chunks(fn, layer, x)), expected, 1e-12)


@pytest.mark.usefixtures("_any_size")
def test_without_a_count_of_references_what_is_read_is_nan(monkeypatch):
    """The control: the last operator alone does not tell whether a backward reads its result."""
    for name in ("_references_if_unread", "_references_if_unread_again"):
        monkeypatch.setattr(unread, name, lambda: (0, 0, 0))
    monkeypatch.setattr(unread, "references", lambda *_: (0, 0, 0))
    layer, x = nn.Linear(3, 4).double(), torch.randn(100, 3, dtype=torch.float64, requires_grad=True)

    def fn(rows):
        return ENDS["read by a hook"](layer, rows)

    assert gradients_of(fn, layer, x, in_chunks(fn, layer, x))[1].isnan().any()


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("change", ["another operator", "another product", "a reader", "a mode", "no module"])
def test_chunks_may_run_other_operators_than_the_first(change):
    """As long as nothing is kept, they may."""
    first, layer = nn.Linear(3, 4).double(), nn.Linear(4, 4).double()
    x, held = torch.randn(100, 3, dtype=torch.float64, requires_grad=True), []
    is_of_first = x.detach()[0, 0].item()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def fn(rows):
        middle = first(rows).sigmoid()
        if rows[0, 0].item() == is_of_first and change != "no module":
            return layer(middle)
        if change == "a mode":
            with Mode():
                return layer(middle)
        out = nn.functional.linear(middle, layer.weight, layer.bias) if change == "no module" else layer(middle)
        if change == "another operator":
            return out.square()
        if change == "a reader":
            held.append(out)
        return layer(out) if change == "another product" else out

    both = nn.ModuleList([first, layer])
    run = in_chunks(fn, both, x)
    found = torch.autograd.grad(run().sin().sum(), [x, *both.parameters()])
    parts = torch.cat([fn(part) for part in x.split(16)])
    expected = torch.autograd.grad(parts.sin().sum(), [x, *both.parameters()])
    assert_same(found, expected, 1e-12)
    assert not any(each.isnan().any() for each in held)
    assert not current_modes()
    assert not layer._forward_pre_hooks


@pytest.mark.usefixtures("_any_size")
def test_a_retained_graph_gives_the_same_again():
    module, x = net().double(), torch.randn(100, 3, dtype=torch.float64)
    out = chunked_map(module, x, chunk_size=16)
    out.sum().backward(retain_graph=True)
    once = gradients(module)
    out.sum().backward()
    assert_same(gradients(module), once, 1e-12)


@pytest.mark.usefixtures("_any_size")
def test_autocast_may_cast_weights_in_one_forward_only():
    module, x = net(), torch.randn(100, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        plain = torch.cat([module(part) for part in x.split(16)])
    plain.float().square().sum().backward()
    expected = gradients(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = chunked_map(module, x, chunk_size=16)
    out.float().square().sum().backward()
    assert_same(gradients(module, x), expected, 2e-2)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_modules_are_not_hooked():
    module, x = net(), torch.randn(100, 3)
    compiled, graphs = torch.compile(module, backend=functools.partial(lambda graph, _: graph)), []
    torch.compiler.reset()
    chunked_map(compiled, x, chunk_size=25).sum().backward()
    graphs.append(gradients(module))
    module(x).sum().backward()
    assert_same(graphs[0], gradients(module), 1e-5)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_modules_take_no_hooks():
    module, x = net().double(), torch.randn(100, 3, dtype=torch.float64)
    module(x).sum().backward()
    expected = gradients(module)
    for scripted in (torch.jit.script(module), nn.Sequential(torch.jit.script(module))):
        chunked_map(scripted, x, chunk_size=16, check=False).sum().backward()
        assert_same(gradients(module), expected, 1e-12)
