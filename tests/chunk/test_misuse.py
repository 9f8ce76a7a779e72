"""Calls that newcomers make: each error ends in the line to write."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import memkit as mk
from memkit.errors import AbsentError, ConfigError, InputError, InputTypeError, MemkitWarning

Proc, Sparse, Resolution = mk.ChunkedProcessor, mk.SparsityAwareProcessor, mk.DynamicResolutionProcessor
cmap, reduce, tiled = mk.chunked_map, mk.chunked_segment_reduce, mk.tiled_apply
entropy, loss = mk.chunked_linear_cross_entropy, mk.chunk.chunked_loss

model, conv = nn.Linear(4, 3), nn.Conv3d(1, 1, 3, padding=1)
x, volume, cubes = torch.ones(8, 4), torch.ones(1, 1, 16, 16, 16), torch.ones(1, 1, 64, 64, 64)
pair = torch.ones(1, 2, 64, 64, 64)
nodes, e = torch.ones(5, 4), torch.ones(8, 4)
src, dst = torch.arange(8) % 5, torch.arange(8) % 3
edge_index = torch.stack([src, dst])
hidden, weight, y = torch.ones(8, 16), torch.ones(10, 16), torch.ones(8, dtype=torch.int64)
add = lambda edge, x_j: edge + x_j  # noqa: E731
same = lambda edge: edge  # noqa: E731
Rows = dataclasses.make_dataclass("Rows", ["x"])

MISUSES = [
    (
        lambda: cmap(lambda rows: rows.x, Rows(x), chunk_size=4),
        InputTypeError,
        "pass its tensors as arguments or in a dict, and build the dataclass inside the function.",
    ),
    (
        lambda: cmap(lambda rows: Rows(rows), x, chunk_size=4),
        InputTypeError,
        "return its tensors in a dict or a tuple, and build the dataclass from the result.",
    ),
    # the processor and the map
    (lambda: Proc(), InputTypeError, "write ChunkedProcessor(fn)"),
    (lambda: Proc(x), InputTypeError, "write ChunkedProcessor(fn)(x)"),
    (lambda: Proc(model, 512), InputTypeError, "write ChunkedProcessor(fn, chunk_size=512)"),
    (lambda: Proc(model, budget="1GiB"), InputTypeError, "write ChunkedProcessor(fn, memory_budget='1GiB')"),
    (lambda: Proc(model, batch_size=64), InputTypeError, "write ChunkedProcessor(fn, chunk_size=64)"),
    (
        lambda: Proc(model, num_chunks=4),
        InputTypeError,
        "chunk_size=-(-len(x) // num_chunks); write ChunkedProcessor(fn)",
    ),
    (lambda: Proc(model, chunk_size=0), ConfigError, "pass chunk_size='auto', or for example 4096."),
    (lambda: Proc(model, chunk_size=None), ConfigError, "pass chunk_size='auto', or for example 4096."),
    (lambda: Proc(model, chunk_size="Auto"), ConfigError, "pass chunk_size='auto'."),
    (lambda: Proc(model, chunk_size=128.0), ConfigError, "pass chunk_size=128."),
    (lambda: Proc(model, chunk_size="128"), ConfigError, "pass chunk_size=128."),
    (lambda: Proc(model, memory_budget=0.5), InputTypeError, "pass memory_budget='512MiB'."),
    (lambda: Proc(model, memory_budget="90%"), InputTypeError, "pass memory_budget='512MiB'."),
    (lambda: Proc(model, memory_budget=5e8), InputTypeError, "pass memory_budget=500000000."),
    (lambda: Proc(model)(x, chunk_size=4), InputTypeError, "write ChunkedProcessor(fn, chunk_size=chunk_size)(x)"),
    (
        lambda: Proc(model)(e, index=dst, num_segments=3),
        InputTypeError,
        "write ChunkedProcessor(fn).segment_reduce(x, index=index, num_segments=num_segments)",
    ),
    (
        lambda: Proc(model)(x, mask=x),
        InputTypeError,
        "functools.partial(fn, mask=mask); write ChunkedProcessor(...)(*rows)",
    ),
    (lambda: Proc(model)(), InputError, "pass tensors with the rows in dimension 0: torch.as_tensor(x) makes one."),
    (lambda: Proc(model)([1, 2]), InputError, "torch.as_tensor(x) makes one."),
    (lambda: Proc(model)(x.numpy()), InputTypeError, "pass torch.from_numpy(x)."),
    (lambda: Proc(model).forward(x), AbsentError, "write ChunkedProcessor(fn)(x)"),
    (
        lambda: Proc(model).parameters(),
        AbsentError,
        "write fn.parameters(): a processor holds no parameters of its own",
    ),
    (lambda: cmap(x, model), InputTypeError, "write chunked_map(fn, x)"),
    (lambda: cmap(), InputTypeError, "write chunked_map(fn)"),
    (lambda: cmap(model, x, batch_size=8), InputTypeError, "write chunked_map(fn, *rows, chunk_size=8)"),
    (lambda: cmap(model, x, dim=1), InputTypeError, "to cut dimension 1; write chunked_map(fn, *rows)"),
    (lambda: cmap(model, x, output_device="gpu"), ConfigError, "pass output_device='cuda'."),
    (lambda: loss(x, model), InputTypeError, "write chunked_loss(fn, x)"),
    (lambda: loss(model, x, reduce="sum"), InputTypeError, "write chunked_loss(fn, *rows, reduction='sum')"),
    # gather
    (
        lambda: cmap(lambda rows: rows, e, gather={"x_j": (nodes, src)}),
        InputTypeError,
        "add the argument: def fn(rows, x_j), or lambda rows, x_j: ...",
    ),
    (lambda: cmap(add, e, gather=[(nodes, src)]), InputTypeError, 'write gather={"x_j": (x, src)}'),
    (
        lambda: cmap(add, e, gather={"x_j": nodes}),
        InputError,
        "pass gather={'x_j': (x, src)}, which gives fn the rows x[src].",
    ),
    (lambda: cmap(add, e, gather={"x_j": (src, nodes)}), InputError, "swap the pair: gather={'x_j': (x, src)}"),
    (lambda: cmap(add, e, gather={"x_j": (nodes, edge_index)}), InputError, "write gather={'x_j': (x, edge_index[0])}"),
    (lambda: cmap(add, e, gather={"x_i": (nodes, edge_index)}), InputError, "write gather={'x_i': (x, edge_index[1])}"),
    (lambda: cmap(add, e, gather={"x_j": (nodes, src.float())}), InputError, "write gather={'x_j': (x, src.long())}"),
    (lambda: cmap(add, e, gather={"x_j": (nodes, src + 9)}), InputError, "every entry must index a row of x."),
    # segments
    (
        lambda: reduce(same, e, index=dst, num_segments=3, aggr="add"),
        InputTypeError,
        "write chunked_segment_reduce(fn, *edge_rows, index=index, num_segments=3, reduce='add')",
    ),
    (
        lambda: Proc(same).segment_reduce(e, index=dst, num_segments=3, aggr="add"),
        InputTypeError,
        "write segment_reduce(*edge_rows, index=index, num_segments=3, reduce='add')",
    ),
    (
        lambda: reduce(same, e, index=dst, dim_size=3),
        InputTypeError,
        "write chunked_segment_reduce(fn, *edge_rows, index=index, num_segments=3)",
    ),
    (
        lambda: reduce(same, e, edge_index=edge_index, num_nodes=3),
        InputTypeError,
        "write chunked_segment_reduce(fn, *edge_rows, index=edge_index[1], num_segments=3)",
    ),
    (
        lambda: reduce(same, e, index=edge_index),
        InputError,
        "pass index=edge_index[1], the node that each edge ends in.",
    ),
    (lambda: reduce(same, e, index=dst.float()), InputError, "pass index=index.long()."),
    (lambda: reduce(same, e, index=[0] * 8), InputTypeError, "pass index=torch.as_tensor(index)."),
    (lambda: reduce(same, e, index=dst, reduce="avg"), ConfigError, "pass reduce='mean'."),
    (lambda: reduce(same, e, index=dst, reduce="Sum"), ConfigError, "pass reduce='sum'."),
    (lambda: reduce(same, e, index=dst, reduce="mul"), ConfigError, "use 'sum', and divide or normalize the result."),
    # volumes
    (lambda: Proc(nn.Conv3d(2, 1, 3))(pair[0]), InputError, "mk.tiled_apply(module, x[None], tile_size=32)"),
    (lambda: tiled(conv, volume, roi_size=8), InputTypeError, "write tiled_apply(module, x, tile_size=8)"),
    (lambda: tiled(volume, 8, 4, conv), InputTypeError, "write tiled_apply(module, x, tile_size=32)"),
    (lambda: tiled(volume, conv, 8), InputTypeError, "write tiled_apply(module, x, tile_size=32)"),
    (lambda: tiled(conv, volume), InputTypeError, "write tiled_apply(module, x, tile_size=32)"),
    (
        lambda: tiled(conv, volume, 8, overlap=0.5),
        InputTypeError,
        "the overlap is measured, and exact; write tiled_apply(module, x, 8)",
    ),
    (lambda: tiled(conv, volume, 8, output_device="gpu"), ConfigError, "pass output_device='cuda'."),
    # sparse volumes, resolutions
    (lambda: Sparse(volume), InputTypeError, "write SparsityAwareProcessor(module)(volume)"),
    (lambda: Sparse(conv, tile_size=4), InputTypeError, "write SparsityAwareProcessor(fn, block_size=4)"),
    (lambda: Sparse(conv, mode="sparse"), ConfigError, "built from memkit.chunk.submanifold_conv3d."),
    (lambda: Sparse(conv)(volume[0, 0]), InputTypeError, "add the missing dimensions: volume[None, None]."),
    (lambda: Sparse(conv)(volume > 0), InputTypeError, "pass volume.float()."),
    (
        lambda: Sparse(conv)(torch.ones(9, 4)),
        InputTypeError,
        "write processor(SparseVoxels.from_coords(coords, features, shape=(D, H, W)))",
    ),
    (lambda: Sparse(conv)(volume, mode="dense"), InputTypeError, "write SparsityAwareProcessor(fn, mode=mode)(volume)"),
    (lambda: Sparse(conv).forward(volume), AbsentError, "write processor(volume)"),
    (lambda: Resolution()(volume), InputTypeError, "points of a volume: volume.nonzero()"),
    (
        lambda: Resolution().choose(volume),
        InputError,
        "at = (volume != 0).any(1).nonzero(); write choose(at[:, 1:], batch=at[:, 0])",
    ),
    (lambda: Resolution().choose(volume[0, 0]), InputError, "write choose(volume.nonzero())"),
    (lambda: Resolution().choose(torch.ones(9, 3) > 0), InputError, "write choose(mask.nonzero())"),
    (lambda: Resolution().choose(torch.ones(3, 9)), InputError, "write choose(coords.T)"),
    (lambda: Resolution().choose(torch.ones(9, 4)), InputError, "write choose(coords[:, 1:], batch=coords[:, 0])"),
    (lambda: Resolution().choose(np.ones((9, 3))), InputTypeError, "write choose(torch.as_tensor(coords))"),
    (lambda: Resolution(max_voxels=5), InputTypeError, "write DynamicResolutionProcessor(max_active_voxels=5)"),
    (lambda: Resolution().level, AbsentError, "write processor.choice.level"),
    # the cross-entropy
    (lambda: entropy(torch.ones(8, 10), y), InputTypeError, "write chunked_linear_cross_entropy(x, weight, targets)"),
    (
        lambda: entropy(hidden, weight, labels=y),
        InputTypeError,
        "write chunked_linear_cross_entropy(x, weight, targets=targets)",
    ),
    (
        lambda: entropy(hidden, lm_head=weight, targets=y),
        InputTypeError,
        "write chunked_linear_cross_entropy(x, head.weight, targets, head.bias)",
    ),
    # classes, modules and forms in other places
    (lambda: Proc(nn.Linear), InputTypeError, "write ChunkedProcessor(Linear(...))(x)"),
    (lambda: cmap(nn.Linear, x), InputTypeError, "write chunked_map(Linear(...), x)"),
    (lambda: cmap(model, x, chunk_size=-1), ConfigError, "pass chunk_size='auto', or for example 4096."),
    (lambda: cmap(model, x, params=model), InputTypeError, "pass params=[tensor] or params=module.parameters()."),
    (lambda: cmap(model, x, x[:3]), InputError, "are the same for all rows with functools.partial."),
    (lambda: tiled(nn.Conv3d, volume, 8), InputTypeError, "write tiled_apply(Conv3d(...), x, tile_size=32)"),
    (lambda: tiled(conv, volume, tile_size=(8, 8)), ConfigError, "pass tile_size=8."),
    (lambda: tiled(conv, volume, tile_size="8"), ConfigError, "pass tile_size=8."),
    (lambda: tiled(conv, volume, tile_size=0), ConfigError, "pass tile_size=32."),
    (lambda: tiled(conv, volume, 8, dims=-1), ConfigError, "pass dims=(-1,)."),
    (lambda: tiled(nn.Conv3d(2, 1, 3, padding=1), pair[0], 8), InputError, "tile_size=32), with a batch dimension."),
    (lambda: reduce(same, e, index=dst[:5]), InputError, "pass an index or a ptr for these 8 rows."),
    (
        lambda: reduce(same, e, index=dst, num_segments=2),
        InputError,
        "pass num_segments=3, or check how the edges were built.",
    ),
    (
        lambda: entropy(hidden, nn.Linear(16, 10), y),
        InputTypeError,
        "cross_entropy(x, head.weight, targets, head.bias)",
    ),
    (lambda: entropy(hidden, weight.T, y), InputError, "write chunked_linear_cross_entropy(x, weight.T, targets)"),
    (lambda: entropy(hidden, weight, y, reduction="avg"), ConfigError, "pass reduction='mean'."),
    (lambda: entropy(hidden, weight, None), InputTypeError, "pass the tensor as targets."),
    (lambda: entropy(hidden, None, y), InputTypeError, "pass the tensor as weight."),
    (lambda: entropy(None, weight, y), InputTypeError, "pass the tensor as x."),
    (lambda: entropy(hidden, weight, [1] * 8), InputTypeError, "pass torch.as_tensor(targets) as targets."),
    (lambda: tiled(conv, volume, 8, dims="HW"), ConfigError, "omit dims to cut all of them."),
    *(
        (lambda given=given: entropy(hidden, weight, y, ignore_index=given), ConfigError, "or pass the class.")
        for given in (1.5, float("nan"), float("inf"), 1j, True, None)
    ),
]


@pytest.mark.parametrize(("call", "error", "ending"), MISUSES)
def test_a_misuse_ends_in_the_line_to_write(call, error, ending):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).endswith(ending), str(caught.value)


def test_suggested_calls_work():
    assert Proc(model, chunk_size=4)(x).shape == (8, 3)
    assert Proc(same).segment_reduce(e, index=edge_index[1], num_segments=3, reduce="add").shape == (3, 4)
    assert cmap(add, e, gather={"x_j": (nodes, edge_index[0])}).shape == (8, 4)
    at = (volume != 0).any(1).nonzero()
    assert Resolution().choose(at[:, 1:], batch=at[:, 0]).level == 0
    assert Resolution().choose(volume[0, 0].nonzero()).level == 0
    assert tiled(conv, cubes[0][None], tile_size=32).shape == cubes.shape


@pytest.mark.parametrize("num_rows", [0, 1, 8])
def test_batches_of_few_rows(num_rows):
    rows = x[:num_rows].clone().requires_grad_()
    for settings in ({}, {"chunk_size": 3}, {"memory_budget": "1MiB"}):
        out = Proc(model, **settings)(rows)
        assert out.shape == (num_rows, 3)
        out.sum().backward()


def test_tiny_budget_error_explains_the_unit():
    with pytest.raises(InputError, match=r"write '512GiB', or '512B' if bytes are meant\.$"):
        Proc(model, memory_budget=512)
    with pytest.raises(ConfigError, match="pass a memory_budget of at least"):
        Proc(model, memory_budget="512B")(x.clone().requires_grad_())


def test_single_volume_error_suggests_tiles():
    with pytest.warns(MemkitWarning, match=r"1 row, so nothing is cut.*mk\.tiled_apply\(module, x, tile_size=32\)"):
        Proc(conv)(cubes)
    with pytest.raises(
        ConfigError, match=r"cut space, with the same result: mk\.tiled_apply.*; or pass a memory_budget"
    ):
        Proc(conv, memory_budget="1MiB")(cubes)


@pytest.mark.parametrize(("rows", "fn"), [(volume.expand(2, -1, -1, -1, -1), conv), (torch.ones(1, 4), model)])
def test_several_volumes_and_single_rows_are_no_mistake(rows, fn, recwarn):
    Proc(fn)(rows)
    Proc(conv, chunk_size=1)(volume)  # the user chose
    assert not [each for each in recwarn if issubclass(each.category, MemkitWarning)]


@pytest.mark.parametrize(("word", "ours"), [("add", "sum"), ("amax", "max"), ("amin", "min")])
def test_words_of_pyg_and_torch_for_reductions(word, ours):
    rows = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    found, wanted = (
        reduce(torch.tanh, rows, index=dst, num_segments=4, reduce=each, chunk_size=3) for each in (word, ours)
    )
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(each.square().sum(), rows)[0] for each in (found, wanted)]
    torch.testing.assert_close(*grads)
