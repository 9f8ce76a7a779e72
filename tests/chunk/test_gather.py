"""Rows that an index picks, in a map: the result and gradients of indexing first, with the memory of one chunk."""

import pytest
import torch
from torch.testing import assert_close

import memkit as mk
from tests.allocations import trace_allocations
from tests.helpers import warm_peak_bytes
from tests.toys import mlp


def edges(num_nodes=40, num_edges=300, width=5, dtype=torch.float64):
    src, dst = torch.randint(num_nodes, (2, num_edges))
    x, e = (torch.randn(num, width, dtype=dtype, requires_grad=True) for num in (num_nodes, num_edges))
    return x, e, src, dst


@pytest.mark.parametrize("form", ["map", "call", "method"])
@pytest.mark.parametrize("settings", [{"chunk_size": 7}, {"chunk_size": 1000}, {"memory_budget": "200kB"}])
def test_equals_indexing_first(form, settings):
    x, e, src, dst = edges()
    module = mlp(15, 16, 5).double()

    class Update(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = module

        def forward(self, edge_attr, *, x_j, x_i):
            return edge_attr + self.mlp(torch.cat([x_i, x_j, edge_attr], 1))

    fn, gather = Update(), {"x_j": (x, src), "x_i": (x, dst.int())}
    if form == "map":
        ours = mk.chunked_map(fn, e, gather=gather, **settings)
    else:
        proc = mk.ChunkedProcessor(fn, **settings)
        ours = proc(e, gather=gather) if form == "call" else proc.map(e, gather=gather)
        assert proc.plan(e, gather=gather).num_chunks >= 1
    theirs = fn(e, x_j=x[src], x_i=x[dst])
    assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    upstream, inputs = torch.randn_like(theirs), [x, e, *module.parameters()]
    found, wanted = (torch.autograd.grad(out, inputs, upstream) for out in (ours, theirs))
    assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_rows_may_all_be_gathered_and_there_may_be_none():
    x, _, src, dst = edges()
    ours = mk.chunked_map(lambda x_j, x_i: x_j * x_i, gather={"x_j": (x, src), "x_i": (x, dst)}, chunk_size=11)
    assert_close(ours, x[src] * x[dst])
    assert mk.chunked_map(lambda x_j: x_j, gather={"x_j": (x, src[:0])}, chunk_size=11).shape == (0, 5)


def test_gathered_rows_exist_for_one_chunk_only():
    x, e, src, _ = edges(50, 20_000, 64, torch.float32)
    index_first = lambda: mk.chunked_map(torch.add, e, x[src], chunk_size=500).sum().backward()  # noqa: E731

    def ours():
        mk.chunked_map(lambda edge, x_j: edge + x_j, e, gather={"x_j": (x, src)}, chunk_size=500).sum().backward()

    gathered = len(src) * 64 * 4
    assert warm_peak_bytes(index_first, x, e) - warm_peak_bytes(ours, x, e) > 0.9 * gathered
    with torch.no_grad():
        forward = lambda: mk.chunked_map(lambda x_j: x_j.sum(1), gather={"x_j": (x, src)}, chunk_size=500)  # noqa: E731
        assert trace_allocations(forward).peak < gathered / 4


def test_half_precision_gradients_are_summed_in_float32():
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    src = torch.zeros(1000, dtype=torch.int64)
    mk.chunked_map(lambda x_j: x_j, gather={"x_j": (x, src)}, chunk_size=10).sum().backward()
    assert x.grad.tolist() == [[1000.0, 1000.0]]
    naive = torch.ones(1, 2, dtype=torch.bfloat16).zero_()
    for _ in range(1000):
        naive += 1
    assert naive[0, 0] < 1000  # the negative control: bfloat16 stops counting at 256
