"""Weights without a gradient multiply messages outside of the function: same values, gradients, dtypes and refusals."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from memkit._core.errors import InputError
from memkit.chunk.segments import chunked_segment_reduce
from tests.chunk.test_segments import F64, REDUCES, differentiate, edges, problem, reference
from tests.helpers import warm_peak_bytes


@pytest.mark.parametrize("reduce", REDUCES)
def test_equals_plain_torch(reduce):
    index = edges()
    module, offset, weight, x, src = problem(index)
    weight = weight.detach()
    inputs = [offset, x, *module.parameters()]
    expected = reference(module(offset, x[src]) * weight[:, None], index, 12, reduce)
    upstream = torch.randn_like(expected)
    options = {"index": index, "num_segments": 12, "reduce": reduce, "gather": {"x_j": (x, src)}, "weight": weight}
    for chunk_size in (7, 64, 1000):
        out = chunked_segment_reduce(module, offset, **options, chunk_size=chunk_size)
        assert_close(out, expected, **F64)
        assert_close(
            differentiate(out, inputs, upstream), differentiate(expected, inputs, upstream, retain_graph=True), **F64
        )


@pytest.mark.parametrize(
    ("messages", "weights"),
    [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float32, torch.int64)],
)
def test_dtypes_are_those_of_the_product(messages, weights):
    layer, rows = nn.Linear(3, 4).to(messages), torch.randn(50, 3, dtype=messages)
    weight, index = torch.ones(50).to(weights), torch.zeros(50, dtype=torch.int64)
    out = chunked_segment_reduce(layer, rows, index=index, num_segments=1, weight=weight, chunk_size=16)
    assert out.dtype == torch.promote_types(messages, weights)
    out.sum().backward()
    assert_close(layer.bias.grad, torch.full((4,), 50, dtype=messages))


def test_a_function_may_return_its_argument():
    """A product in place would change the rows."""
    rows = torch.randn(50, 3, requires_grad=True)
    before, weight = rows.detach().clone(), torch.rand(50)
    index = torch.zeros(50, dtype=torch.int64)
    chunked_segment_reduce(lambda x: x, rows, index=index, weight=weight, chunk_size=16).sum().backward()
    assert torch.equal(rows, before)
    assert_close(rows.grad, weight[:, None].expand(50, 3))


def test_a_change_before_the_backward_is_refused():
    rows, weight = torch.randn(50, 3, requires_grad=True), torch.rand(50)
    out = chunked_segment_reduce(
        lambda x: x * 2, rows, index=torch.zeros(50, dtype=torch.int64), weight=weight, chunk_size=16
    )
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("weight", [torch.rand(49), torch.rand(2, 50)])
def test_other_numbers_of_weights_are_refused(weight):
    with pytest.raises(InputError, match="50 rows in dimension 0"):
        chunked_segment_reduce(nn.Identity(), torch.randn(50, 3), index=torch.zeros(50).long(), weight=weight)


def test_no_message_stays_for_its_weight():
    """While the next chunk runs, neither the last message nor its product does."""
    layer, rows, index = nn.Linear(3, 512), torch.randn(4096, 3), torch.zeros(4096, dtype=torch.int64)

    def peak(weight):
        return warm_peak_bytes(
            lambda: (
                chunked_segment_reduce(
                    layer, rows, index=index, num_segments=1, weight=weight, chunk_size=1024, check=False
                )
                .sum()
                .backward()
            )
        )

    messages = 1024 * 512 * 4
    assert peak(torch.rand(4096)) < peak(torch.rand(4096).requires_grad_()) - 0.9 * messages
