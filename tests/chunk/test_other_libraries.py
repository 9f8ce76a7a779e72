"""Layers of PyG and neuraloperator in pieces: the result and gradients of their own forward, with less memory."""

import functools

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

import memkit as mk
from tests.allocations import trace_allocations
from tests.helpers import assert_same
from tests.toys import mlp


@pytest.fixture(scope="module")
def graph():
    """The 12 nearest neighbors of each of 1797 digits: features (n, 64), edges (2, e) from neighbor to center."""
    x = torch.from_numpy(load_digits().data).double() / 16
    near = NearestNeighbors(n_neighbors=12).fit(x.numpy()).kneighbors_graph(mode="connectivity").tocoo()
    return x, torch.stack([torch.from_numpy(near.col).long(), torch.from_numpy(near.row).long()])


def same(ours, theirs, inputs, tolerance=1e-11):
    assert_same(ours, theirs, tolerance)
    upstream = torch.randn_like(theirs)
    found, wanted = (torch.autograd.grad(out, inputs, upstream, retain_graph=True) for out in (ours, theirs))
    assert_same(found, wanted, tolerance)


@pytest.mark.parametrize("aggr", ["max", pytest.param("mean", marks=pytest.mark.slow), "sum"])
def test_pygs_edge_convolution(aggr, graph):
    layers = pytest.importorskip("torch_geometric.nn")
    x, edges = graph
    x = x.clone().requires_grad_()
    conv = layers.EdgeConv(mlp(128, 64, 32), aggr=aggr).double()
    src, dst = edges

    def in_pieces():
        return mk.chunked_segment_reduce(
            conv.message,  # a method: its module's parameters are known
            index=dst,
            num_segments=len(x),
            gather={"x_i": (x, dst), "x_j": (x, src)},
            reduce=aggr,
            memory_budget="6MiB",
        )

    same(in_pieces(), conv(x, edges), [x, *conv.parameters()])
    theirs, ours = (
        trace_allocations(lambda fn=fn: fn().sum().backward()).peak for fn in (lambda: conv(x, edges), in_pieces)
    )
    assert ours < 8 * 2**20 < theirs / 5


@pytest.mark.parametrize("edge_dim", [None, 3])
def test_pygs_gine_convolution(edge_dim, graph):
    """The recipe of docs/from/pyg.md: its message takes the nodes first, so that a partial puts the edges in place."""
    layers = pytest.importorskip("torch_geometric.nn")
    x, edges = graph
    x = x.clone().requires_grad_()
    conv = layers.GINEConv(mlp(64, 64, 32), train_eps=True, edge_dim=edge_dim).double()
    edge_attr = torch.randn(edges.shape[1], edge_dim or 64, dtype=torch.float64, requires_grad=True)
    src, dst = edges

    def message(conv, edge_attr, x_j):
        return conv.message(x_j, edge_attr)

    def in_pieces():
        summed = mk.chunked_segment_reduce(
            functools.partial(message, conv),
            edge_attr,
            index=dst,
            num_segments=len(x),
            gather={"x_j": (x, src)},
            reduce=conv.aggr,
            chunk_size=500,
        )
        return conv.nn(summed + (1 + conv.eps) * x)

    same(in_pieces(), conv(x, edges, edge_attr), [x, edge_attr, *conv.parameters()])


def test_neuraloperators_integral_transform(graph):
    module = pytest.importorskip("neuralop.layers.integral_transform")
    features, edges = graph[0].float(), graph[1]  # without torch_scatter it adds up in float32 whatever it is given
    order = edges[1].argsort(stable=True)
    src, dst = edges[:, order]
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), dst.bincount(minlength=len(features)).cumsum(0)])
    places, values = features[:, :3].contiguous(), features[:, 3:11].clone().requires_grad_()
    layer = module.IntegralTransform(channel_mlp_layers=[6, 64, 64, 8], transform_type="linear", reduction="mean")

    def message(y_j, x_i, f_j):
        return layer.channel_mlp(torch.cat([y_j, x_i], dim=-1)) * f_j

    ours = mk.chunked_segment_reduce(
        message,
        ptr=ptr,
        reduce="mean",
        gather={"y_j": (places, src), "x_i": (places, dst), "f_j": (values, src)},
        params=layer.parameters(),
        memory_budget="4MiB",
    )
    theirs = layer(y=places, neighbors={"neighbors_index": src, "neighbors_row_splits": ptr}, f_y=values)
    same(ours, theirs, [values, *layer.parameters()], tolerance=1e-4)
