"""A map in chunks equals the function: outputs and gradients, for all kinds of rows."""

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.testing import assert_close

from memkit._core.errors import InputError, MemkitWarning
from memkit._recovery.snapshot import RandomNumbers
from memkit._torch.tensors import strided_parts
from memkit.chunk.loss import chunked_loss
from memkit.chunk.map import chunked_map
from memkit.chunk.tiled import tiled_apply
from tests.helpers import assert_refused
from tests.toys import mlp

F64 = {"rtol": 1e-12, "atol": 1e-12}


class Several(nn.Module):
    """Rows of several kinds in, a container out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, points, scale=None, *, kind, mask, factor, extra):
        assert extra is None
        hidden = self.layer(points["a"] + self.embedding(kind)) * factor
        hidden = torch.where(mask[:, None], hidden, points["b"][0])
        return {"h": hidden.tanh(), "kind": kind + 1, "tuple": (hidden.sum(1), "text", None)}


@pytest.mark.parametrize("chunk_size", [1, 7, 30, 1000])
def test_containers_integers_and_none(chunk_size):
    module = Several().double()
    a, b = (torch.randn(30, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kind, mask = torch.randint(5, (30,)), torch.rand(30) > 0.5

    def fn(points, kind, mask, factor, extra):
        return module(points, kind=kind, mask=mask, factor=factor, extra=extra)

    def differentiate(result):
        loss = result["h"].square().sum() + result["tuple"][0].sin().sum()
        return torch.autograd.grad(loss, [a, b, *module.parameters()])

    rows = ({"a": a, "b": [b]}, kind, mask, 2.0, None)
    expected = fn(*rows)
    result = chunked_map(fn, *rows, chunk_size=chunk_size, params=module.parameters())
    assert result["tuple"][1:] == ("text", None)
    assert not result["kind"].requires_grad
    assert_close(result["kind"], expected["kind"])
    assert_close((result["h"], result["tuple"][0]), (expected["h"], expected["tuple"][0]), **F64)
    assert_close(differentiate(result), differentiate(expected), **F64)


def test_only_some_outputs_are_used():
    module = Several().double()
    x = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)

    def fn(x):
        return x.sin(), module.layer(x)

    first, _ = chunked_map(fn, x, chunk_size=3, params=module.parameters())
    first.sum().backward()
    assert_close(x.grad, x.cos())
    assert module.layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    module = mlp(3, 8, 2).to(dtype)
    x = torch.randn(50, 3, dtype=dtype, requires_grad=True)
    expected = module(x)
    (expected_x,) = torch.autograd.grad(expected.sum(), x)
    out = chunked_map(module, x, chunk_size=16)
    assert out.dtype == dtype
    out.sum().backward()
    tolerance = {torch.float64: F64, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}.get(
        dtype, {"rtol": 2e-2, "atol": 2e-2}
    )
    assert_close((out, x.grad), (expected, expected_x), **tolerance)


def test_layouts_and_the_same_tensor_twice():
    base = torch.randn(4, 30, dtype=torch.float64, requires_grad=True)
    x = base.t()[::2]  # neither dense nor in order
    line = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)

    def fn(a, b, c):
        return (a * b.sin()).sum(1) * c[:, 0]

    ours, plain = chunked_map(fn, x, x, line.expand(15, 4), chunk_size=4), fn(x, x, line.expand(15, 4))
    assert_close(ours, plain, **F64)
    ours, plain = (torch.autograd.grad(out.sum(), [base, line]) for out in (ours, plain))
    assert_close(ours, plain, **F64)


def test_gradcheck():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: chunked_map(module, x, chunk_size=3), (x, *module.parameters()))


@given(num_rows=st.integers(0, 20), chunk_size=st.integers(1, 25), kept=st.booleans())
def test_any_number_of_rows(num_rows, chunk_size, kept):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    x = torch.randn(num_rows, 3, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    out, expected = chunked_map(module, x, chunk_size=chunk_size), module(x)
    assert_close(out, expected, **F64)
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert_close(found, torch.autograd.grad(expected.square().sum(), inputs), **F64)
    with torch.no_grad():
        assert torch.equal(chunked_map(module, x, chunk_size=chunk_size), out)


def test_result_needs_no_gradient_without_gradient_inputs():
    x = torch.randn(10, 3)
    assert not chunked_map(torch.sin, x, chunk_size=4).requires_grad
    with torch.inference_mode():
        assert torch.equal(chunked_map(torch.sin, x, chunk_size=4), x.sin())


def test_output_device():
    """The result is put together on another device than the function's; meta is one without values."""
    x = torch.randn(10, 3, requires_grad=True)
    out = chunked_map(torch.sin, x, chunk_size=4, output_device="meta")
    assert out.device.type == "meta"
    assert out.shape == (10, 3)
    assert chunked_map(torch.sin, x, chunk_size=4, output_device="cpu").device.type == "cpu"


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_whole_numbers_of_other_libraries_are_numbers(number):
    x = torch.randn(9, 2, requires_grad=True)
    chunked_map(torch.sin, x, chunk_size=number).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_wrong_rows_are_refused():
    x = torch.randn(10, 3)
    assert_refused(lambda: chunked_map(torch.add, x, x[:9], chunk_size=4), InputError, r"shapes \(10, 3\), \(9, 3\)")
    with pytest.raises(InputError, match=r"\(\).*functools\.partial"):
        chunked_map(torch.add, x, torch.tensor(1.0), chunk_size=4)
    assert_refused(lambda: chunked_map(torch.add, 1, 2, chunk_size=4), InputError, "no tensor")


def test_reducing_functions_are_refused():
    """A mean over rows would be a mean of means."""
    x = torch.randn(10, 3)
    for fn in (torch.mean, lambda x: x.mean(0, keepdim=True), lambda x: None):
        with pytest.raises(InputError, match=r"chunked_map\(.*one row of output for each input row"):
            chunked_map(fn, x, chunk_size=4)


class Noisy(nn.Module):
    """Draws from generators of its own, torch's and NumPy's."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3).double()
        self.noise, self.numpy = torch.Generator(), np.random.default_rng(0)

    def forward(self, x):
        return self.lin(x) * torch.rand(x.shape, generator=self.noise, dtype=x.dtype) * float(self.numpy.random())


def drawn(run):
    """Gradient of the weights, and where the generators stand afterwards."""
    torch.manual_seed(0)
    module, x = Noisy(), torch.randn(8, 3, dtype=torch.float64)
    run(module, x).sum().backward()
    return module.lin.weight.grad, torch.rand(1, generator=module.noise), module.numpy.random()


def test_module_generators_repeat_their_draws(monkeypatch):
    want = drawn(lambda module, x: torch.cat([module(part) for part in x.split(2)]))
    found = drawn(lambda module, x: chunked_map(module, x, chunk_size=2, check=False))
    torch.testing.assert_close(found, want)
    monkeypatch.setattr(RandomNumbers, "again", lambda _: contextlib.nullcontext())
    without = drawn(lambda module, x: chunked_map(module, x, chunk_size=2, check=False))
    assert not torch.allclose(without[0], want[0])  # the negative control


def test_tiles_draw_the_same_again():
    class NoisyConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.noise = nn.Conv2d(1, 1, 1).double(), torch.Generator()

        def forward(self, x):
            if not self.training:  # as dropout
                return self.conv(x)
            return self.conv(x) * torch.rand(x.shape, generator=self.noise, dtype=x.dtype)

    def gradient(run):
        torch.manual_seed(0)
        module, x = NoisyConv(), torch.randn(1, 1, 8, 8, dtype=torch.float64)
        run(module, x).sum().backward()
        return module.conv.weight.grad

    rows = lambda module, x: torch.cat([module(part) for part in x.split(4, 2)], 2)  # noqa: E731
    tiled = lambda module, x: tiled_apply(module, x, (4, 8))  # noqa: E731
    torch.testing.assert_close(gradient(tiled), gradient(rows))


@pytest.mark.parametrize(
    "draw", [random.random, np.random.random, lambda: torch.rand([]).item()], ids=["python", "numpy", "torch"]
)
def test_warns_of_random_numbers_that_belong_to_all_rows(draw):
    """A layer that is skipped by chance would be skipped in some chunks only."""
    x = torch.randn(8, 4, requires_grad=True)

    def sometimes(x):
        return x * 2 if draw() < 0.5 else x

    for call in (
        lambda: chunked_map(sometimes, x, chunk_size=2),
        lambda: chunked_map(sometimes, x, chunk_size=2),  # another time, where the check is known to pass
        lambda: chunked_loss(sometimes, x, chunk_size=2),
    ):
        with pytest.warns(MemkitWarning, match="anew for each chunk.*Way out") as told:
            call()
        assert len(told) == 1
    with warnings.catch_warnings(record=True) as seen:
        chunked_map(sometimes, x, chunk_size=8)  # one chunk draws once, as the plain call does
        chunked_loss(sometimes, x, chunk_size=8)
        chunked_map(lambda x: torch.dropout(x, 0.5, train=True), x, chunk_size=2)
    assert not seen


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")  # torch's own
def test_sparse_rows_are_refused_and_the_way_out_works(layout):
    weight, dense = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(30, 5, dtype=torch.float64)
    x = (dense * (dense > 0.5)).to_sparse(layout=layout)
    fn = lambda rows: rows @ weight  # noqa: E731
    for call in (chunked_map, chunked_loss):
        message = rf"sparse tensor \({layout}\).*torch.arange\(len\(x\)\)"
        assert_refused(lambda: call(fn, x, chunk_size=8, params=[weight]), InputError, message)  # noqa: B023
    fn(x.to_dense()).square().sum().backward()
    expected, weight.grad = weight.grad, None
    x = x.to_sparse_coo()
    rows = torch.arange(len(x))
    chunked_map(lambda rows: fn(x.index_select(0, rows)), rows, chunk_size=8, params=[weight]).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected)


def test_nested_rows_are_refused_and_the_way_out_works():
    x = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(5, 2)], layout=torch.jagged)
    for call in (chunked_map, chunked_loss):
        message = r"nested tensor \(torch.jagged\).*torch.nested.to_padded_tensor\(x, 0.0\)"
        assert_refused(lambda: call(lambda rows: rows * 2, x, chunk_size=1), InputError, message)  # noqa: B023
    padded = torch.nested.to_padded_tensor(x, 0.0)
    assert float(chunked_map(lambda rows: rows * 2, padded, chunk_size=1).sum()) == 2 * 16


DTYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40,), (40, 3)], ids=str)
def test_rows_of_dtypes_with_few_operators(dtype, shape):
    x = torch.randint(0, 40, shape).to(dtype)
    assert_close(chunked_map(lambda rows: rows.double() + 1, x, chunk_size=7), x.double() + 1)
    (found, half) = chunked_map(lambda rows: (rows, rows.double().to(torch.float8_e5m2)), x, chunk_size=7)
    assert torch.equal(found, x)
    assert half.dtype is torch.float8_e5m2


def test_another_number_of_tensors_for_some_chunks_is_refused():
    def shorter(x):
        return x, None if len(x) < 7 else x

    x = torch.ones(50, 3)
    assert_refused(lambda: chunked_map(shorter, x, chunk_size=7), InputError, r"number of rows.*check=False\.$")
    message = r"returns 1 tensors for the chunk from row 49 on, and 2 for the first.*zeros_like\(x\)\.$"
    assert_refused(lambda: chunked_map(shorter, x, chunk_size=7, check=False), InputError, message)


@pytest.mark.parametrize("tied", [range(0), range(20), range(20, 40)], ids=["never", "first", "last"])
def test_the_sparse_gradient_of_a_table_has_each_of_its_rows_once(tied):
    """It grows with the rows of all chunks otherwise. Where a chunk gives a dense one, it is dense, as plainly."""
    table, numbers = nn.Embedding(7, 3, sparse=True).double(), torch.arange(40) % 7
    is_tied = torch.zeros(40, dtype=torch.bool)
    is_tied[list(tied)] = True

    def fn(numbers, is_tied):
        found = table(numbers).square()
        return found + table.weight.sin().sum() if is_tied.any() else found

    torch.cat([fn(*part) for part in zip(numbers.split(5), is_tied.split(5), strict=True)]).sum().backward()
    expected, table.weight.grad = table.weight.grad.to_dense(), None
    params = [table.weight]
    chunked_map(fn, numbers, is_tied, chunk_size=5, params=params, check=False).sum().backward()
    gradient = table.weight.grad
    assert_close(gradient.to_dense(), expected)
    assert gradient.is_sparse is (len(tied) == 0)
    assert len(strided_parts(gradient)[-1]) == 7
