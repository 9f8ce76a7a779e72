"""A loss in chunks equals the plain loss: value and gradients, for any weights of the chunks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import memkit as mk
from memkit.chunk.loss import chunked_loss
from tests.allocations import trace_allocations
from tests.helpers import assert_refused
from tests.toys import mlp


@pytest.fixture
def model():
    return mlp(6, 16, 5).double()


@pytest.fixture
def rows():
    return torch.randn(50, 6, dtype=torch.float64, requires_grad=True), torch.randint(5, (50,))


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@given(num_rows=st.integers(1, 40), chunk_size=st.integers(1, 50), width=st.sampled_from([None, 1, 3]))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_whole_loss(reduction, num_rows, chunk_size, width):
    weight = torch.linspace(-1, 1, 4 * (width or 1), dtype=torch.float64).reshape(4, -1).requires_grad_()
    x = torch.linspace(-2, 2, num_rows * 4, dtype=torch.float64).reshape(-1, 4).requires_grad_()

    def fn(x):
        losses = (x @ weight).sin()
        return losses.squeeze(1) if width is None else losses

    loss = chunked_loss(fn, x, chunk_size=chunk_size, reduction=reduction, params=[weight])
    whole = getattr(fn(x), reduction)()
    same(loss, whole)
    same(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(whole, (x, weight)))


def test_finds_parameters_through_method_and_partial(model, rows):
    x, _ = rows
    expected = torch.autograd.grad(model(x).mean(), [*model.parameters()])
    for fn in (model, model.forward, functools.partial(model)):
        same(torch.autograd.grad(chunked_loss(fn, x, chunk_size=8), [*model.parameters()]), expected)


def test_uneven_ignored_targets_are_exact(model, rows):
    x, y = rows
    y[3:17] = -100

    def summed(x, y):
        return mk.Loss(sum=F.cross_entropy(model(x), y, reduction="sum"), count=(y != -100).sum())

    def averaged(x, y):  # of the chunk whose targets are all ignored, NaN
        return mk.Loss(mean=F.cross_entropy(model(x), y), count=(y != -100).sum())

    whole = F.cross_entropy(model(x), y)
    for fn in (summed, averaged, lambda x, y: mk.Loss(mean=averaged(x, y).mean, count=int((y != -100).sum()))):
        loss = chunked_loss(fn, x, y, chunk_size=8, params=model.parameters())
        same(loss, whole)
        same(torch.autograd.grad(loss, x), torch.autograd.grad(whole, x, retain_graph=True))
    parts = [F.cross_entropy(model(a), b) for a, b in zip(x.split(8), y.split(8), strict=True) if (b != -100).any()]
    assert abs(float((sum(parts) / len(parts) - whole).detach())) > 1e-3


def test_class_weights_divide_by_their_sum(model, rows):
    x, y = rows
    weight = torch.tensor([1.0, 2, 3, 4, 0.1], dtype=torch.float64)

    def losses(x, y):
        return F.cross_entropy(model(x), y, weight=weight, reduction="none")

    whole = F.cross_entropy(model(x), y, weight=weight)
    loss = chunked_loss(losses, x, y, chunk_size=8, reduction="sum", params=model.parameters()) / weight[y].sum()
    same(loss, whole)
    same(torch.autograd.grad(loss, x), torch.autograd.grad(whole, x))


def test_counts_in_half_precision_do_not_stall():
    """256 + 1 is 256 in bfloat16."""
    x = torch.ones(600, 1, dtype=torch.bfloat16)
    loss = chunked_loss(lambda x: mk.Loss(sum=x.sum(), count=x.sum()), x, chunk_size=1)
    assert loss.dtype == torch.bfloat16
    assert float(loss) == 1


def test_half_precision_mean_does_not_overflow():
    x = torch.full((8, 1), 1000.0, dtype=torch.float16)
    loss = chunked_loss(lambda x: mk.Loss(mean=x.mean(), count=25 * len(x)), x, chunk_size=4)
    assert loss.dtype == torch.float16
    assert float(loss) == 1000


def test_one_number_from_the_function_is_refused(model, rows):
    x, y = rows
    with pytest.raises(mk.errors.InputError, match=r"one number from fn.*mean of the chunks' means.*reduction='none'"):
        chunked_loss(lambda x, y: F.cross_entropy(model(x), y), x, y, chunk_size=8, params=model.parameters())


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (torch.ones(1), r"shape \(1,\) from fn for 8 rows"),
        (3.0, "a float from fn"),
        (torch.ones(8) * 1j, r"a complex loss \(torch.complex64\).*loss.abs\(\)"),
        ((torch.ones(()), 8), r"a tuple from fn.*mk.Loss\(sum=loss_sum, count=n\)"),
        (mk.Loss(mean=torch.ones(())), "without its count from fn"),
        (mk.Loss(sum=torch.ones(()), count=8, outputs={}), r"mk.Loss\(outputs=...\) from fn.*chunked_map"),
    ],
)
def test_other_results_are_refused(returned, got, rows):
    # The check would refuse some of them before: they do not depend on the rows.
    assert_refused(lambda: chunked_loss(lambda x: returned, rows[0], chunk_size=8, check=False), mk.MemkitError, got)


def test_rejects_reduction_none(model, rows):
    """Summed gradients cannot be weighted per row afterwards: a wrapper that tries is silently wrong."""
    x, _ = rows
    with pytest.raises(mk.errors.ConfigError, match=r"reduction='none'.*too late.*Way out"):
        chunked_loss(model, x, chunk_size=8, reduction="none")
    params, upstream = list(model.parameters()), torch.linspace(-1, 2, 50, dtype=torch.float64)[:, None]
    exact = torch.autograd.grad((model(x) * upstream).sum(), params)
    inside = chunked_loss(lambda x, w: model(x) * w, x, upstream, chunk_size=8, reduction="sum", params=params)
    same(torch.autograd.grad(inside, params), exact)
    too_late = [g * upstream.mean() for g in torch.autograd.grad(model(x).sum(), params)]
    assert (too_late[0] - exact[0]).abs().max() > 0.1


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True, None])
def test_chunk_sizes(chunk_size, model, rows):
    with pytest.raises(mk.errors.ConfigError, match=r"chunk_size.*whole number of rows"):
        chunked_loss(model, rows[0], chunk_size=chunk_size)


def test_forgotten_parameters_are_refused(model, rows):
    """Inside an autograd function a closure's parameters silently get no gradient."""
    with pytest.raises(mk.errors.InputError, match=r"`model.0.bias` of shape \(16,\).*params="):
        chunked_loss(lambda x: model(x).square(), rows[0], chunk_size=8)


def test_other_arguments_reach_every_chunk(rows):
    x, _ = rows
    loss = chunked_loss(
        lambda x, s, none, t: x * s * t if none is None else x, x, 3, None, torch.tensor(2), chunk_size=8
    )
    same(loss, 6 * x.mean())


def test_containers_are_cut_too_as_chunked_map_cuts_them(model, rows):
    """Handed over whole they would fit every chunk of one row, by broadcasting, and the last chunk of none."""
    x, y = rows
    scale = torch.linspace(1, 2, 50, dtype=torch.float64, requires_grad=True)

    def fn(batch, more):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * more[0]

    whole = fn({"x": x, "y": y}, [scale]).mean()
    expected = torch.autograd.grad(whole, (x, scale))
    for chunk_size in (8, 1, "auto"):
        loss = chunked_loss(fn, {"x": x, "y": y}, [scale], chunk_size=chunk_size, params=model.parameters())
        same(loss, whole)
        same(torch.autograd.grad(loss, (x, scale)), expected)
    with pytest.raises(mk.errors.InputError, match=r"tensors with \[3, 50\] rows.*functools.partial"):
        chunked_loss(fn, {"x": x, "y": y}, [scale[:3]], chunk_size=8, params=model.parameters())


def test_rejects_params_of_wrong_type(model, rows):
    for wrong in (model[0].weight, model, [model], [*model.named_parameters()], torch.zeros(())):
        for call in (chunked_loss, mk.chunked_map):
            with pytest.raises(mk.errors.InputTypeError, match=r"got params as .*params=\[tensor\]"):
                call(model, rows[0], chunk_size=8, params=wrong)
        with pytest.raises(mk.errors.InputTypeError, match="ChunkedProcessor"):
            mk.ChunkedProcessor(model, params=wrong)


def test_no_rows_are_a_mean_over_nothing(model):
    x = torch.empty(0, 6, dtype=torch.float64, requires_grad=True)
    assert chunked_loss(model, x, chunk_size=8).isnan()
    total = chunked_loss(model, x, chunk_size=8, reduction="sum")
    total.backward()
    assert float(total.detach()) == 0
    assert x.grad.shape == x.shape


def test_a_mean_over_nothing_has_zero_gradients(model, rows):
    """As torch's: a batch without labels must not put NaN into the model."""
    x, y = rows

    def losses(x, y):
        return mk.Loss(sum=F.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum"), count=(y < 0).sum())

    for part, fn in ((slice(None), losses), (slice(0, 0), lambda x, y: model(x)), (slice(0, 0), losses)):
        loss = chunked_loss(fn, x[part], y[part], chunk_size=8, params=model.parameters())
        assert loss.isnan()
        for found in torch.autograd.grad(loss, list(model.parameters())):
            same(found, torch.zeros_like(found))


def test_a_learned_count_is_refused_and_the_ways_out_work(model):
    """Its part of the gradient would be missing."""
    gate, x = torch.nn.Linear(6, 1).double(), torch.randn(50, 6, dtype=torch.float64)
    params = [*model.parameters(), *gate.parameters()]

    def rowwise(x):
        return gate(x).sigmoid(), model(x).square().mean(1, keepdim=True)

    def loss_of(x, change):
        weights, losses = rowwise(x)
        return mk.Loss(sum=(weights * losses).sum(), count=change(weights.sum()))

    def run(change):
        return chunked_loss(lambda x: loss_of(x, change), x, chunk_size=16, params=params)

    weights, losses = rowwise(x)
    detached = torch.autograd.grad((weights * losses).sum() / weights.sum().detach(), params, retain_graph=True)
    whole = (weights * losses).sum() / weights.sum()
    assert_refused(lambda: run(lambda count: count), mk.errors.InputError, "a count that requires a gradient")
    with torch.no_grad():
        same(run(lambda count: count), whole)
    same(torch.autograd.grad(run(torch.Tensor.detach), params), detached)
    weights, losses = mk.chunked_map(rowwise, x, chunk_size=16, params=params)
    divided = (weights * losses).sum() / weights.sum()
    same(torch.autograd.grad(divided, params), torch.autograd.grad(whole, params))


def test_validation_keeps_no_graph(model, rows):
    with torch.no_grad():
        loss = chunked_loss(model, rows[0], chunk_size=8)
    assert not loss.requires_grad
    same(loss, model(rows[0]).mean())


def test_training_matches_plain_training(rows):
    """Ten steps of Adam with both, from the same start."""
    x, y = rows[0].detach(), rows[1]

    def train(loss_of):
        torch.manual_seed(1)
        model = mlp(6, 16, 5).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        return [each.detach() for each in model.parameters()]

    def in_chunks(model):
        def fn(x, y):
            return F.cross_entropy(model(x), y, reduction="none")

        return chunked_loss(fn, x, y, chunk_size=7, params=model.parameters())

    torch.testing.assert_close(train(in_chunks), train(lambda m: F.cross_entropy(m(x), y)), rtol=1e-9, atol=1e-11)


def test_sparse_embeddings_train_with_sparse_adam_as_plainly():
    numbers, y = torch.randint(30, (200,)), torch.randn(200, 1).double()

    def trained(loss_of):
        torch.manual_seed(0)
        table, head = nn.Embedding(30, 4, sparse=True).double(), nn.Linear(4, 1).double()
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)

        def errors(numbers, y):
            return (head(table(numbers)) - y).square()

        for _ in range(3):
            optimizer.zero_grad()
            loss_of(errors, [*table.parameters(), *head.parameters()]).backward()
            optimizer.step()
        return table.weight.detach()

    expected = trained(lambda errors, _: errors(numbers, y).mean())
    same(trained(lambda errors, params: chunked_loss(errors, numbers, y, chunk_size=64, params=params)), expected)


def test_takes_eighteen_times_less_memory_than_a_loop():
    model = nn.Sequential(
        nn.Linear(6, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)
    )
    x, y = torch.randn(20_000, 6), torch.randn(20_000, 64)

    def fn(x, y):
        return F.mse_loss(model(x), y, reduction="none")

    def peak(run):
        model.zero_grad()
        return trace_allocations(run).peak

    plain = peak(lambda: fn(x, y).mean().backward())
    loop = peak(
        lambda: (sum(fn(a, b).sum() for a, b in zip(x.split(512), y.split(512), strict=True)) / y.numel()).backward()
    )
    ours = peak(lambda: chunked_loss(fn, x, y, chunk_size=512, params=model.parameters()).backward())
    assert loop > 0.8 * plain
    assert ours < plain / 18


def hardest(errors):
    return mk.Loss(sum=errors.topk(len(errors) // 2).values.sum(), count=len(errors) // 2)


def above_median(errors):
    some = errors[errors > errors.detach().median()]
    return mk.Loss(mean=some.mean(), count=len(some))


def centred(errors):
    return mk.Loss(sum=(errors - errors.mean()).square().sum(), count=len(errors))


def with_penalty(errors):
    return mk.Loss(sum=errors.sum() + 3, count=len(errors))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduce", [hardest, above_median, centred, with_penalty])
def test_losses_that_mix_rows_are_refused(reduce, seed):
    torch.manual_seed(seed)
    net, x = torch.nn.Linear(3, 1).double(), torch.randn(100, 3, dtype=torch.float64)
    message = r"sum or count over 8 rows is not that of the first \d and that of the others together.*check=False"
    for call in (chunked_loss, lambda fn, x, **how: mk.ChunkedProcessor(fn, chunk_size=8).loss(x)):
        with pytest.raises(mk.errors.InputError, match=message):
            call(lambda x: reduce(net(x)[:, 0].square()), x, chunk_size=8, params=net.parameters())


def test_the_way_out_of_losses_that_mix_rows_works():
    net, x = torch.nn.Linear(3, 1).double(), torch.randn(100, 3, dtype=torch.float64)

    def loss_fn(x, threshold):
        errors = net(x)[:, 0].square()
        some = errors[errors > threshold]
        return mk.Loss(sum=some.sum(), count=len(some))

    errors = net(x)[:, 0].square()
    median = errors.detach().median()
    expected = errors[errors > median].mean()
    loss = chunked_loss(functools.partial(loss_fn, threshold=median), x, chunk_size=8, params=net.parameters())
    same(loss, expected)
    same(*(torch.autograd.grad(each, net.weight) for each in (loss, expected)))


def test_a_loss_with_noise_of_its_rows_passes():
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5)), torch.randn(100, 3)
    for noise in (torch.rand, lambda *size: torch.randperm(size[0])[:, None]):

        def loss_fn(x, noise=noise):
            return mk.Loss(sum=(net(x) * noise(len(x), 1)).square().sum(), count=len(x))

        assert chunked_loss(loss_fn, x, chunk_size=8, params=net.parameters()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_half_precision_is_no_sign_of_mixing(dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        net, x = mlp(3, 32, 1), torch.randn(100, 3)

        def loss_fn(net, x):
            errors = (net(x) - 1).square()
            return mk.Loss(sum=errors.sum(), count=len(errors))

        with torch.autocast("cpu", dtype):
            chunked_loss(functools.partial(loss_fn, net), x, chunk_size=8)
        low = net.to(dtype)
        loss = chunked_loss(functools.partial(loss_fn, low), x.to(dtype), chunk_size=8)
        torch.testing.assert_close(loss, loss_fn(low, x.to(dtype)).average(), rtol=0.05, atol=0.05)
