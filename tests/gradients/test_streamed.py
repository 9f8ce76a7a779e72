"""Gradients computed inside the forward: exact, once per parameter, nothing missing, nothing kept."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit as mk
from memkit._gradients.streamed import sum_of_chunks, with_gradients
from tests.allocations import mark, trace_allocations
from tests.toys import mlp


@pytest.fixture
def model():
    return mlp(3, 8, 2).double()


@pytest.fixture
def x():
    return torch.randn(23, 3, dtype=torch.float64, requires_grad=True)


def streamed(fn, *rows, params=(), chunk_size=5):
    return sum_of_chunks(fn, rows, list(params), chunk_size=chunk_size, call="sum_of_chunks(fn)")


def squares(model):
    return lambda rows: model(rows).square().sum()


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def naive(fn, rows, params, chunk_size):
    """The obvious way: a backward per chunk."""
    for part in rows.split(chunk_size):
        fn(part).backward()
    return [each.grad for each in params]


@pytest.mark.parametrize("chunk_size", [1, 5, 23, 100])
def test_value_and_gradients_are_the_whole_functions(model, x, chunk_size):
    fn, inputs = squares(model), [x, *model.parameters()]
    value = streamed(fn, x, params=model.parameters(), chunk_size=chunk_size)
    expected = fn(x)
    same(value, expected)
    same(torch.autograd.grad(3 * value.sin(), inputs), torch.autograd.grad(3 * expected.sin(), inputs))


def test_gradcheck(x):
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)  # 0-dim: no slice of it can be taken
    assert torch.autograd.gradcheck(
        lambda rows, s: streamed(lambda part: (part * s).sin().sum(), rows, params=[s]).exp(), (x / 10, scale)
    )


def test_retained_graph_repeats_gradient(model, x):
    value = 2 * streamed(squares(model), x, params=model.parameters())
    first = torch.autograd.grad(value, x, retain_graph=True)
    same(torch.autograd.grad(value, x), first)  # multiplying the buffer in place would have doubled it
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(value, x)


def test_without_a_retained_graph_no_second_gradient_is_allocated():
    x = torch.randn(1000, 256, requires_grad=True)

    def run():
        value = 2 * streamed(lambda rows: rows.square().sum(), x, chunk_size=50)
        with mark("backward"):
            value.backward()

    trace = trace_allocations(run)
    ((_, start, end),) = trace.marks
    assert trace.highest(start, end) - trace.at(start) < x.nbytes / 100
    torch.testing.assert_close(x.grad, 4 * x)


def test_unused_inputs_get_none_and_partly_used_ones_zeros(x):
    used, unused = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    other, never = (torch.ones(23, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def fn(rows, other, never):
        return (rows @ used).sum() + (other.sum() if bool((rows == x[10]).all(1).any()) else 0)

    value = streamed(fn, x, other, never, params=[used, unused])
    value.backward()
    assert unused.grad is None
    assert never.grad is None
    same(other.grad, (torch.arange(23) // 5 == 2).double())
    same(used.grad, x.detach().sum(0))


def test_a_value_without_any_gradient_requires_none(x):
    value = streamed(lambda rows: rows.detach().sum(), x)
    assert not value.requires_grad


class Counted(torch.autograd.Function):
    """Counts backwards, and sees whether a graph would be built."""

    num_backwards = 0

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.num_backwards += 1
        return gradient


@pytest.mark.parametrize("why", ["no_grad", "inference_mode", "nothing requires grad", "training"])
def test_no_gradients_computed_under_no_grad(why, x):
    Counted.num_backwards = 0
    seen = []

    def fn(rows):
        seen.append(rows.requires_grad)
        return Counted.apply(rows).square().sum()

    rows = x.detach() if why == "nothing requires grad" else x
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(why, torch.enable_grad)
    with context():
        value = streamed(fn, rows)
    is_training = why == "training"
    assert Counted.num_backwards == (5 if is_training else 0)
    assert value.requires_grad == is_training
    assert seen == [is_training] * 5


def test_second_derivatives_are_refused_with_the_way_out(model, x):
    value = streamed(squares(model), x, params=model.parameters())
    with pytest.raises(mk.errors.StateError, match=r"create_graph=True.*Way out.*checkpoint"):
        torch.autograd.grad(value, x, create_graph=True)


def test_captured_tensors_are_refused_with_their_shape(model, x):
    forgotten = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(mk.errors.InputError, match=r"`forgotten` of shape \(3, 4\).*Way out.*params="):
        streamed(lambda rows: (rows @ forgotten).sum(), x)
    with pytest.raises(mk.errors.InputError, match=r"shape \(3, 4\)"):  # no other input asks for a gradient
        streamed(lambda rows: (rows @ forgotten).sum(), x.detach())
    with pytest.raises(mk.errors.InputError, match=r"shape \(23, 3\)"):  # the whole of what is also given as rows
        streamed(lambda rows: (rows.sum(0) * x).sum(), x)
    late = iter(range(100))
    with pytest.raises(mk.errors.InputError, match=r"shape \(3, 4\)"):  # in the last chunk only
        streamed(lambda rows: (rows @ forgotten).sum() if next(late) == 4 else rows.sum(), x)
    with torch.no_grad():
        streamed(lambda rows: (rows @ forgotten).sum(), x)


def test_rejects_captured_result_by_its_shape(model, x):
    context = model(x).mean(0)  # its leaves are among the params, but its graph is another's
    with pytest.raises(mk.errors.InputError, match=r"shape \(2,\)"):
        streamed(lambda rows: (model(rows) * context).sum(), x, params=model.parameters())


def test_a_function_may_take_a_rows_own_gradient(model, x):
    """Forces: the derivative of an energy by the positions, in the loss."""

    def fn(rows):
        rows = rows.requires_grad_()
        (force,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        return force.square().sum()

    params = list(model.parameters())[:-1]  # a force does not depend on the last bias
    value = streamed(fn, x.detach(), params=model.parameters())
    same(torch.autograd.grad(value, params), torch.autograd.grad(fn(x.detach()), params))


def test_hooks_of_a_parameter_run_once_on_the_whole_gradient(x):
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def fn(rows):
        return (rows @ weight).square().sum()

    (expected,) = torch.autograd.grad(fn(x), weight)
    limit = float(expected.abs().min()) / 2
    seen, accumulated = [], []
    weight.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-limit, limit))
    weight.register_post_accumulate_grad_hook(accumulated.append)
    streamed(fn, x, params=[weight]).backward()
    assert len(seen) == len(accumulated) == 1
    same(seen[0], expected)
    same(weight.grad, expected.clamp(-limit, limit))
    seen.clear(), accumulated.clear()
    weight.grad = None
    (got,) = naive(fn, x.detach(), [weight], 5)
    assert len(seen) == len(accumulated) == 5
    assert (got - expected.clamp(-limit, limit)).abs().max() > limit


def test_random_numbers_are_drawn_as_by_the_plain_loop(x):
    dropout = nn.Dropout()
    torch.manual_seed(3)
    plain = sum(dropout(part).square().sum() for part in x.split(5))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    value = streamed(lambda rows: dropout(rows).square().sum(), x)
    same(value, plain)
    same(torch.autograd.grad(value, x), torch.autograd.grad(plain, x))
    assert torch.equal(torch.get_rng_state(), after)


def test_autocast_holds_in_the_chunks_and_twice_in_one_block():
    head, x = nn.Linear(4, 2), torch.randn(12, 4)
    dtypes = []

    def fn(rows):
        y = head(rows)
        dtypes.append(y.dtype)
        return y.float().square().sum()

    params = list(head.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (streamed(fn, x, params=params) for _ in range(2))  # autocast kept the converted weight
        expected = fn(x)
    assert set(dtypes) == {torch.bfloat16}
    (first + second).backward()
    torch.testing.assert_close(head.weight.grad, 2 * torch.autograd.grad(expected, params)[0], rtol=0.02, atol=0.02)


def test_half_precision_parameters_accumulate_in_float32():
    x = torch.rand(512 * 4, 16, dtype=torch.bfloat16)
    weight = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True)

    def fn(rows):
        return (rows @ weight).float().sum()

    exact = x.double().sum(0)

    def error(gradient):
        return float(((gradient.double() - exact) / exact).abs().max())

    streamed(fn, x, params=[weight], chunk_size=4).backward()
    assert weight.grad.dtype == torch.bfloat16
    assert error(weight.grad) < 2**-8
    weight.grad = None
    assert error(naive(fn, x, [weight], 4)[0]) > 0.03


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(model, x, use_reentrant):
    def fn(rows):
        return streamed(lambda part: nn.functional.dropout(model(part)).sum(), 2 * rows, params=model.parameters())

    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(fn(x), x)
    torch.manual_seed(3)
    checkpoint(fn, x, use_reentrant=use_reentrant).backward()
    same(x.grad, expected)


@pytest.mark.parametrize("tied", [range(0), range(20), range(20, 40)], ids=["never", "first", "last"])
def test_sparse_gradients_stay_sparse_unless_a_chunk_gives_a_dense_one(tied):
    table, numbers = nn.Embedding(7, 3, sparse=True).double(), torch.randint(7, (40,))
    is_tied = torch.zeros(40, dtype=torch.bool)
    is_tied[list(tied)] = True

    def loss_sum(numbers, is_tied):
        found = table(numbers).square().sum()
        return found + table.weight.sin().sum() if is_tied.any() else found

    for part in zip(numbers.split(5), is_tied.split(5), strict=True):
        loss_sum(*part).backward()
    expected, table.weight.grad = table.weight.grad.to_dense(), None
    loss = streamed(loss_sum, numbers, is_tied, params=[table.weight])
    loss.backward(retain_graph=True)
    assert table.weight.grad.is_sparse is (len(tied) == 0)
    same(table.weight.grad.to_dense(), expected)
    loss.backward()
    same(table.weight.grad.to_dense(), 2 * expected)


def test_memory_does_not_grow_with_the_rows():
    model = mlp(4, 64, 64, 1)

    def peak(num_rows):
        x = torch.randn(num_rows, 4)
        model.zero_grad()
        return trace_allocations(
            lambda: streamed(squares(model), x, params=model.parameters(), chunk_size=256).backward()
        ).peak

    assert peak(16 * 256) <= peak(2 * 256) * 1.01


def test_one_gradient_of_the_parameters_besides_their_accumulator():
    """A chunk's gradients must not outlive it: they are as large as the model."""
    weight = torch.randn(1000, 1000, requires_grad=True)
    x = torch.randn(4, 1000)
    peak = trace_allocations(lambda: streamed(lambda r: (r @ weight).sum(), x, params=[weight], chunk_size=1)).peak
    assert peak < 2.1 * weight.nbytes


def test_rejects_unequal_row_counts(x):
    for rows, got in (((x, x[:3]), r"\[3, 23\] rows"), ((1, None, torch.tensor(1.0)), "no tensor with rows")):
        with pytest.raises(mk.errors.InputError, match=got):
            streamed(lambda *chunk: chunk[0].sum(), *rows)


def test_a_value_computed_elsewhere_with_its_gradient():
    x = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
    asked = []

    def compute(needs):
        asked.append(list(needs))
        return x.detach().pow(3).sum(), [3 * x.detach() ** 2 if needs[0] else None, None]

    y = torch.ones(2)
    value = with_gradients(compute, [x, y], call="f()")
    (2 * value).backward()
    same(x.grad, 6 * x.detach() ** 2)
    with torch.no_grad():
        with_gradients(compute, [x, y], call="f()")
    assert asked == [[True, False], [False, False]]
