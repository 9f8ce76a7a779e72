"""Messages reduced in chunks equal plain torch: values, gradients, ties, empty segments, hubs."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.testing import assert_close

from memkit._core.errors import ConfigError, InputError, InputTypeError
from memkit.chunk.segments import chunked_segment_reduce
from tests.helpers import assert_refused, one_in, one_in_product, warm_peak_bytes
from tests.toys import mlp

F64 = {"rtol": 1e-11, "atol": 1e-12}
REDUCES = ["sum", "mean", "max", "min", "softmax"]
MIB = 2**20


class Message(nn.Module):
    """(e, 3) offsets and (e, 4) neighbors to (e, 4)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, offset, x_j=None):
        message = self.net(offset)
        return message if x_j is None else message * x_j


def reference(message, index, num_segments, reduce):
    """Segment by segment, by torch's own reductions; the first of equal edges is max's and min's."""
    rows = [message[index == segment] for segment in range(num_segments)]
    if reduce == "softmax":
        out = torch.zeros_like(message)
        for segment in range(num_segments):
            out = out.index_copy(0, (index == segment).nonzero().flatten(), rows[segment].softmax(0))
        return out
    found = []
    for part in rows:
        if not len(part):
            found.append(message.new_zeros(message.shape[1:]))
        elif reduce in ("max", "min"):
            first = (part == getattr(part, f"a{reduce}")(0)).int().argmax(0, keepdim=True)
            found.append(part.gather(0, first)[0])
        else:
            found.append(getattr(part, reduce)(0))
    return torch.stack(found) if found else message.new_zeros((0, *message.shape[1:]))


def edges(num_edges=200, num_segments=12, *, sort=False):
    """Half of the edges are one hub's; the last three segments have none."""
    index = torch.randint(num_segments - 3, (num_edges,))
    index[torch.rand(num_edges) < 0.5] = 4
    return index.sort().values if sort else index


def problem(index):
    num_edges, options = len(index), {"dtype": torch.float64, "requires_grad": True}
    x, src = torch.randn(9, 4, **options), torch.randint(9, (num_edges,))
    offset, weight = torch.randn(num_edges, 3, **options), torch.rand(num_edges, **options)
    return Message().double(), offset, weight, x, src


def differentiate(out, inputs, upstream, retain_graph=None):
    return torch.autograd.grad(out, inputs, upstream, retain_graph)


@pytest.mark.parametrize(("reduce", "form"), one_in_product(3, REDUCES, ["sorted", "unsorted", "int32", "ptr"]))
def test_equals_plain_torch(reduce, form):
    index = edges(sort=form in ("sorted", "ptr"))
    module, offset, weight, x, src = problem(index)
    inputs = [offset, weight, x, *module.parameters()]
    expected = reference(module(offset, x[src]) * weight[:, None], index, 12, reduce)
    upstream = torch.randn_like(expected)
    expected_gradients = differentiate(expected, inputs, upstream)
    where = {"index": index.int() if form == "int32" else index, "num_segments": 12}
    if form == "ptr":
        where = {"ptr": torch.cat([torch.zeros(1, dtype=torch.int64), index.bincount(minlength=12).cumsum(0)])}
    for chunk_size in (1, 7, 64, 1000):
        out = chunked_segment_reduce(
            module, offset, **where, reduce=reduce, gather={"x_j": (x, src)}, weight=weight,
            chunk_size=chunk_size,
        )  # fmt: skip
        assert_close(out, expected, **F64)
        assert_close(differentiate(out, inputs, upstream), expected_gradients, **F64)
        with torch.no_grad():
            again = chunked_segment_reduce(
                module, offset, **where, reduce=reduce, gather={"x_j": (x, src)}, weight=weight, chunk_size=chunk_size
            )
        assert_close(again, expected, **F64)


@given(
    index=st.lists(st.integers(0, 5), max_size=25),
    num_empty=st.integers(0, 2),
    chunk_size=st.integers(1, 30),
    reduce=st.sampled_from(REDUCES),
    as_ptr=st.booleans(),
)
def test_any_graph(index, num_empty, chunk_size, reduce, as_ptr):
    """No edges, one segment, empty ones, hubs, in any order."""
    num_segments = max(index, default=-1) + 1 + num_empty
    index = torch.tensor(sorted(index) if as_ptr else index, dtype=torch.int64)
    module, offset, _, _, _ = problem(index)
    inputs = [offset, *module.parameters()]
    if as_ptr:
        counts = index.bincount(minlength=num_segments)
        where = {"ptr": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])}
    else:
        where = {"index": index, "num_segments": num_segments}
    out = chunked_segment_reduce(module, offset, **where, reduce=reduce, chunk_size=chunk_size)
    expected = reference(module(offset), index, num_segments, reduce)
    assert_close(out, expected, **F64)
    assert_close(
        torch.autograd.grad(out.square().sum(), inputs),
        # Where no message is used the reference has no graph; ours gives zeros.
        torch.autograd.grad((expected.square().sum() + 0 * module(offset).sum()), inputs),
        **F64,
    )


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_gradient_of_equal_messages_goes_to_the_first_edge(reduce):
    index = torch.tensor([1, 0, 1, 0, 1, 1, 0])
    rows = torch.tensor([5.0, 1, 2, 1, 5, 2, 1]).view(7, 1).requires_grad_()
    first = {"max": [1, 1, 0, 0, 0, 0, 0], "min": [0, 1, 1, 0, 0, 0, 0]}[reduce]
    for chunk_size in (1, 2, 3, 7):
        out = chunked_segment_reduce(
            nn.Identity(), rows, index=index, num_segments=2, reduce=reduce, chunk_size=chunk_size
        )
        (gradient,) = torch.autograd.grad(out.sum(), rows)
        assert gradient.flatten().tolist() == first
    infinite = torch.full((7, 1), float("-inf") if reduce == "max" else float("inf"), requires_grad=True)
    out = chunked_segment_reduce(nn.Identity(), infinite, index=index, num_segments=2, reduce=reduce, chunk_size=2)
    assert torch.equal(out, infinite[:2])
    assert torch.autograd.grad(out.sum(), infinite)[0].flatten().tolist() == [1, 1, 0, 0, 0, 0, 0]


def test_finds_winners_with_flushed_denormals():
    """Ranks of edges are compared as floats; those of the first edges must not be so small."""
    rows = torch.tensor([[1.0], [2], [3], [2]], requires_grad=True)
    torch.set_flush_denormal(True)
    try:
        out = chunked_segment_reduce(nn.Identity(), rows, index=torch.zeros(4).long(), reduce="max", chunk_size=2)
        (gradient,) = torch.autograd.grad(out.sum(), rows)
    finally:
        torch.set_flush_denormal(False)
    assert gradient.flatten().tolist() == [0, 0, 1, 0]


def test_nan_is_not_taken_for_an_empty_segment():
    rows, index = torch.tensor([[1.0], [float("nan")], [2.0]]), torch.tensor([0, 0, 1])
    out = chunked_segment_reduce(nn.Identity(), rows, index=index, num_segments=3, reduce="max", chunk_size=1)
    assert_close(out, torch.tensor([[float("nan")], [2.0], [0.0]]), equal_nan=True)


@pytest.mark.parametrize("shape", [(1,), (3,), (3, 1), (1, 1), (3, 4)])
@pytest.mark.parametrize("reduce", ["sum", "max", "softmax"])
def test_a_weight_for_each_head(reduce, shape):
    """As attention over edges has it."""
    torch.manual_seed(0)
    index, layer = torch.randint(7, (50,)), nn.Linear(5, 12).double()
    x, weight = (torch.randn(50, *each, dtype=torch.float64).requires_grad_() for each in ((5,), shape))

    def heads(x):
        return layer(x).unflatten(1, (3, 4))

    ours = chunked_segment_reduce(
        heads, x, index=index, num_segments=7, weight=weight, reduce=reduce, chunk_size=8, params=layer.parameters()
    )
    wide = weight.reshape(50, *shape, *[1] * (2 - len(shape)))
    expected = reference(heads(x) * wide, index, 7, reduce)
    assert_close(ours, expected, rtol=0, atol=1e-12)
    inputs = [x, weight, *layer.parameters()]
    found, wanted = (torch.autograd.grad(each.square().sum(), inputs) for each in (ours, expected))
    assert_close(found, wanted, rtol=0, atol=1e-11)


def test_messages_of_integers_are_refused_with_the_way_out():
    rows, index = torch.randn(30, 4), torch.arange(30) % 3
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(InputError, match=r"returns torch.(int64|bool);.* Way out: return messages.float\(\)"):
            chunked_segment_reduce(lambda rows: (rows > 0).to(dtype), rows, index=index)  # noqa: B023
    with pytest.raises(InputError, match=r"returns tuple;.* Way out: concatenate the messages"):
        chunked_segment_reduce(lambda rows: (rows, rows), rows, index=index)


def test_a_weight_that_does_not_fit_is_refused():
    x, index = torch.randn(50, 3, 4), torch.zeros(50, dtype=torch.int64)
    with pytest.raises(InputError, match=r"a weight of shape \(4,\) and a message of \(3, 4\) for each edge"):
        chunked_segment_reduce(nn.Identity(), x, index=index, weight=torch.rand(50, 4))
    with pytest.raises(InputError, match=r"a weight of shape \(2,\) and a message of \(\) for each edge"):
        chunked_segment_reduce(nn.Identity(), x[:, 0, 0], index=index, weight=torch.rand(50, 2))
    one = chunked_segment_reduce(nn.Identity(), x[:, 0, 0], index=index, weight=torch.ones(50, 1))
    assert_close(one, x[:, 0, 0].sum()[None])
    with pytest.raises(InputTypeError, match=r"got a function.* multiply by it in fn"):
        chunked_segment_reduce(nn.Identity(), x, index=index, weight=lambda x: x)


def test_mean_divides_by_edges_not_by_chunks_or_weights():
    """A mean of chunks' means, and a division by the weights, both give something else here."""
    rows, weight = torch.tensor([[1.0], [2.0], [3.0], [10.0]]), torch.tensor([1.0, 1.0, 1.0, 3.0])
    index = torch.zeros(4, dtype=torch.int64)
    options = {"index": index, "reduce": "mean", "chunk_size": 3}
    assert chunked_segment_reduce(nn.Identity(), rows, **options).item() == 4
    assert chunked_segment_reduce(nn.Identity(), rows, weight=weight, **options).item() == 9


@pytest.mark.parametrize("reduce", one_in(6, REDUCES))
def test_gradcheck(reduce):
    index = edges(12, 6)
    module, offset, weight, x, src = problem(index)

    def fn(offset, weight, x, *_):
        return chunked_segment_reduce(
            module, offset, index=index, num_segments=6, reduce=reduce, gather={"x_j": (x, src)}, weight=weight,
            chunk_size=5,
        )  # fmt: skip

    assert torch.autograd.gradcheck(fn, (offset, weight, x, *module.parameters()))


def test_one_node_feature_gathered_twice():
    index = edges()
    _, _, _, x, src = problem(index)

    def fn(x_i, x_j):
        return (x_i - x_j).sin()

    gather = {"x_i": (x, index.clamp(max=8)), "x_j": (x, src)}
    ours = chunked_segment_reduce(fn, index=index, num_segments=12, gather=gather, chunk_size=32)
    plain = reference(fn(x[index.clamp(max=8)], x[src]), index, 12, "sum")
    assert_close(ours, plain, **F64)
    ours, plain = (torch.autograd.grad(out.square().sum(), x) for out in (ours, plain))
    assert_close(ours, plain, **F64)


def test_half_precision_hub_is_added_up_in_float32():
    """512 ones, one in each chunk: bfloat16 stops counting at 256, as plain torch does in the gradient."""
    rows, index = torch.ones(512, 2, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int64)
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (naive,) = torch.autograd.grad(x[index].sum(), x)
    assert naive.tolist() == [[256, 256]]
    out = chunked_segment_reduce(torch.mul, rows, index=index, gather={"other": (x, index)}, chunk_size=1)
    out.sum().backward()
    assert out.tolist() == x.grad.tolist() == [[512, 512]]
    assert out.dtype == x.grad.dtype == torch.bfloat16
    shares = chunked_segment_reduce(nn.Identity(), rows, index=index, reduce="softmax", chunk_size=1)
    assert_close(shares, rows / 512)


def test_messages_with_more_dimensions_or_fewer():
    index = edges()
    for shape in ((), (2, 3)):
        rows = torch.randn(200, *shape, dtype=torch.float64)
        for reduce in REDUCES:
            out = chunked_segment_reduce(torch.sin, rows, index=index, num_segments=12, reduce=reduce, chunk_size=33)
            assert_close(out, reference(rows.sin(), index, 12, reduce), **F64)


@pytest.mark.parametrize("reduce", one_in(2, [*REDUCES, "plain"]))
def test_peak_without_the_outputs_does_not_grow_with_the_edges(reduce):
    """Forward and backward. The control: a loop over chunks without running them again."""
    module = mlp(6, 64, 16)
    x = torch.randn(500, 16, requires_grad=True)
    above = []
    for num_edges in (8192, 32768):
        index, src = (torch.randint(500, (num_edges,)) for _ in range(2))
        rows = torch.randn(num_edges, 6)

        def fn(rows, x_j):
            return module(rows) * x_j

        shape = (num_edges if reduce == "softmax" else 500, 16)
        upstream = torch.randn(shape)

        def step(index=index, src=src, rows=rows, upstream=upstream):
            if reduce == "plain":
                out = torch.zeros(500, 16)
                for row, source, target in zip(rows.split(512), src.split(512), index.split(512), strict=True):
                    out = out.index_add(0, target, fn(row, x[source]))
            else:
                out = chunked_segment_reduce(
                    fn, rows, index=index, num_segments=500, reduce=reduce, gather={"x_j": (x, src)},
                    params=module.parameters(), chunk_size=512,
                )  # fmt: skip
            out.backward(upstream)
            module.zero_grad()
            x.grad = None

        above.append(warm_peak_bytes(step) - 4 * shape[0] * shape[1])
    assert (abs(above[1] - above[0]) < 0.05 * MIB) == (reduce != "plain")
    assert (above[1] < 1.5 * MIB) == (reduce != "plain")


def test_rejects_invalid_arguments():
    rows, index = torch.randn(6, 3), torch.tensor([0, 1, 1, 2, 0, 2])
    ptr = torch.tensor([0, 2, 4, 6])

    def call(fn=torch.sin, rows=rows, **options):
        chunked_segment_reduce(fn, rows, **{"index": index, "chunk_size": 4, **options})

    for message, options in {
        "neither index nor ptr": {"index": None},
        "both index and ptr": {"ptr": ptr},
        "an index from 0 to 2": {"num_segments": 2},
        "an index from -1 to 1": {"index": index - 1},
        "expected 5 rows": {"index": index[:5]},
        "torch.float32": {"index": index.float()},
        "does not start at 0 or decreases": {"index": None, "ptr": ptr.flip(0)},
        "does not start at 0": {"index": None, "ptr": ptr[:0]},
        "a ptr of 4 numbers": {"index": None, "ptr": ptr, "num_segments": 9},
        r"gather\['x_j'\]: \(6, 3\) in torch.float32 and \(5,\) in torch.int64; .* int64 or int32 \(6,\)": {
            "gather": {"x_j": (rows, index[:5])}
        },
        "gather.*: Tensor; expected a pair": {"gather": {"x_j": rows}},
        "gather.* in torch.float32": {"gather": {"x_j": (rows, index.float())}},
        r"gather.* and \(6, 1\)": {"gather": {"x_j": (rows, index[:, None])}},
        "gather.* with rows from 0 to 2; expected rows from 0 to 1": {"gather": {"x_j": (rows[:2], index)}},
        "gather.* with rows from -1 to 1": {"gather": {"x_j": (rows, index - 1)}},
        "returns torch.int64": {"fn": lambda rows: rows.long()},
        "returns tuple": {"fn": lambda rows: (rows, rows)},
        "one row of output for each input row": {"fn": torch.sum},
    }.items():
        with pytest.raises(InputError, match=message):
            call(**options)
    assert_refused(lambda: call(reduce="median"), ConfigError, "'softmax'")


def test_a_number_of_segments_is_whole():
    rows, index = torch.ones(6, 2), torch.arange(6) % 3
    assert_refused(
        lambda: chunked_segment_reduce(torch.tanh, rows, index=index, num_segments=3.5),
        ConfigError,
        r"num_segments=3\.5.*whole number.*pass num_segments=",
    )
    reduced = chunked_segment_reduce(torch.tanh, rows, index=index, num_segments=index.max() + 1)
    assert_close(reduced, 2 * torch.tanh(rows[:3]))
