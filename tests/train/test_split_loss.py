"""SplitLoss: a batch's gradient computed in parts, handed over by one usual backward, whatever runs out of memory."""

import contextlib
import copy
import functools
import gc
import itertools
import math
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit as mk
from tests.allocations import trace_allocations
from tests.helpers import assert_refused, assert_same, gradient_of, gradients, one_in
from tests.toys import NeuralODE, mean_square, square_error
from tests.train.faults import MODELS, FailingOperator

ROWS = 13


def rows(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(ROWS, 6, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).to(dtype),
    )


def make(name="mlp", dtype=torch.float64):
    torch.manual_seed(1)
    return MODELS[name]().to(dtype)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 50])
def test_loss_and_gradient_are_those_of_the_whole_batch(name, num_microbatches):
    model = make(name).eval()
    loss = square_error(model, rows())
    want = gradient_of((loss * 0.5), model)
    split = mk.SplitLoss(model, num_microbatches=num_microbatches)
    got = split(rows(), square_error)
    (got * 0.5).backward(retain_graph=True)
    (got * 0.0).backward()
    tolerance = 0.0 if num_microbatches == 1 else 1e-15
    assert_same(got.detach(), loss.detach(), tolerance)
    assert_same(gradients(model), want, tolerance)
    assert sum(split.sizes) == ROWS
    assert len(split.sizes) == min(num_microbatches, ROWS)


def test_gradients_add_up_over_batches_as_in_any_loop():
    model = make().eval()
    for _ in range(3):
        square_error(model, rows()).backward()
    want = gradients(model)
    model.zero_grad()
    split = mk.SplitLoss(model, num_microbatches=3)
    sum(split(rows(), square_error) for _ in range(2)).backward()
    split(rows(), square_error).backward()
    assert_same(gradients(model), want, 1e-15)


def recovered(name, *places, start=None):
    """Two batches, with a gradient there already or without."""
    model, batch = make(name).train(), rows()
    split = mk.SplitLoss(model, num_microbatches=2, probe=False)
    fault = FailingOperator(*places)
    sizes, states = [], []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None if start is None else torch.full_like(parameter, start)
        with fault:
            loss = split(batch, square_error)
        loss.backward()
        sizes.append(split.sizes)
        states.append((gradients(model), copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()))
    assert fault.num_failures == len(places)
    return sizes, states, fault.num_operators


@functools.cache
def undisturbed(name, sizes, start):
    """The same parts in a plain loop."""
    model = make(name).train()
    states = []
    for parts in sizes:
        for parameter in model.parameters():
            parameter.grad = None if start is None else torch.full_like(parameter, start)
        for x, y in zip(*(each.split(parts) for each in rows()), strict=True):
            (square_error(model, (x, y)) * (len(x) / ROWS)).backward()
        states.append((gradients(model), copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()))
    return states


def fail_in(name, start, num_places):
    num_operators = recovered(name, start=start)[2] // 2  # those of the first batch; the second has its own
    for place in range(1, num_operators + 1, max(1, num_operators // num_places)):
        sizes, states, _ = recovered(name, place, start=start)
        assert_same(states, undisturbed(name, tuple(sizes), start), 1e-14)


@pytest.mark.parametrize("start", [None, 0.25])
@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_fault_in_forward_or_backward_changes_only_sizes(name, start):
    """Dropout, buffers that a forward changes, gradients half added."""
    fail_in(name, start, num_places=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_repeated_faults_change_only_sizes(name):
    """At every operator of the small network, and at 40 or more of the others."""
    fail_in(name, 0.25, num_places=40 if name != "mlp" else 1000)


def test_result_differs_without_rollback(monkeypatch):
    from memkit._recovery import snapshot

    monkeypatch.setattr(snapshot.Rollback, "restore", lambda self: None)
    sizes, states, _ = recovered("mlp", 6)
    with pytest.raises(AssertionError):
        assert_same(states, undisturbed("mlp", tuple(sizes), None), 1e-14)


def test_weighting_parts_alike_is_not_the_batchs_gradient():
    model = make().eval()
    want = gradient_of(square_error(model, rows()), model)
    split = mk.SplitLoss(model, num_microbatches=5, reduction="sum", probe=False)
    split(rows(), lambda m, b: square_error(m, b) / 5).backward()
    with pytest.raises(AssertionError):
        assert_same(gradients(model), want, 1e-6)


def masked_loss(model, batch):
    x, y = batch
    valid = x[:, 0] > 0.3
    return mk.Loss(sum=F.mse_loss(model(x[valid]), y[valid], reduction="sum"), count=valid.sum())


def test_sum_is_weighted_by_its_count():
    model = make().eval()
    whole = masked_loss(model, rows()).average()
    want = gradient_of(whole, model)
    split = mk.SplitLoss(model, num_microbatches=ROWS)  # parts of one row: most of them count nothing
    loss = split(rows(), masked_loss)
    loss.backward()
    assert_same(loss.detach(), whole.detach(), 1e-15)
    assert_same(gradients(model), want, 1e-15)
    model.zero_grad()
    loss = split(rows(), lambda m, b: mk.Loss(sum=m(b[0]).sum() * math.nan, count=0))
    loss.backward()
    assert loss.item() == 0
    assert all(each.abs().max() == 0 for each in gradients(model))
    with torch.no_grad():
        assert_same(split(rows(), masked_loss), whole.detach())
        assert_same(split(rows(), square_error), square_error(model, rows()))


def test_already_divided_losses_add_up():
    model = make().eval()
    want = gradient_of(square_error(model, rows()), model)
    split = mk.SplitLoss(model, num_microbatches=4, reduction="sum", probe=True)
    split(rows(), lambda m, b: F.mse_loss(m(b[0]), b[1], reduction="sum") / ROWS).backward()
    assert_same(gradients(model), want, 1e-15)


def test_probe_warns_once_if_parts_do_not_add_up():
    norm = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    split = mk.SplitLoss(norm, num_microbatches=2)
    with pytest.warns(mk.MemkitWarning, match="SplitLoss.*In training mode 1 would see"):
        split(rows(), square_error)
    split(rows(), square_error)  # once
    with pytest.raises(mk.errors.ConfigError, match="do not add up"):
        mk.SplitLoss(make().eval(), num_microbatches=2, reduction="sum")(rows(), square_error)
    with pytest.raises(mk.errors.ConfigError, match="compares or mixes the rows"):
        mk.SplitLoss(make().eval(), num_microbatches=2)(rows(), lambda m, b: m(b[0]).var())


def test_a_statistic_of_a_single_row_is_named_as_what_is_not_finite():
    """Neither ``reduction="sum"`` nor the count is at fault."""

    def loss_fn(model, batch):
        out = model(batch[0])
        return mk.Loss(mean=out.square().mean() + out.var(0).mean(), count=len(out))

    three = tuple(each[:3] for each in rows())
    for reduction in ("sum", "mean"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mk.SplitLoss(make().eval(), num_microbatches=2, reduction=reduction)(three, loss_fn)
                told = " ".join(str(each.message) for each in caught)
            except mk.errors.ConfigError as error:
                told = str(error)
        assert "a variance of a single row is 0 / 0" in told
        assert "reduction=" not in told
        assert "inf" not in told


def test_packed_batches_are_cut_by_split_fn():
    model = make().eval()
    want = gradient_of(square_error(model, rows()), model)

    def cut(batch, n):
        edges = [round(i * len(batch["x"]) / n) for i in range(n + 1)]
        return [{k: v[a:b] for k, v in batch.items()} for a, b in itertools.pairwise(edges)]

    packed = dict(zip("xy", rows(), strict=True))
    split = mk.SplitLoss(model, num_microbatches=3, split_fn=cut)
    split(packed, lambda m, b: mk.Loss(mean=F.mse_loss(m(b["x"]), b["y"]), count=len(b["x"]))).backward()
    assert_same(gradients(model), want, 1e-15)
    assert split.sizes == (28, 35, 28)
    with pytest.raises(mk.errors.InputError, match="the weight of the part"):
        split(packed, lambda m, b: F.mse_loss(m(b["x"]), b["y"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    model = nn.Linear(6, 1).to(dtype)
    split = mk.SplitLoss(model, num_microbatches=ROWS, probe=False)
    split(rows(dtype), square_error, scale=1.0).backward()
    parts = []
    for x, y in zip(*(each.split(1) for each in rows(dtype)), strict=True):
        parts.append(
            torch.autograd.grad(square_error(model, (x, y)), model.weight, torch.tensor(1 / ROWS, dtype=dtype))[0]
        )
    assert model.weight.grad.dtype == dtype
    assert_same(model.weight.grad, torch.stack(parts).float().sum(0).to(dtype))
    assert not torch.equal(model.weight.grad, sum(parts))  # what sums in half precision would be


def test_a_scalers_scale_saves_gradients_from_vanishing_on_the_way():
    model = nn.Linear(6, 1).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def tiny(model, batch):
        return (square_error(model, batch).half() * 1e-8).float()  # below float16's smallest number without a scale

    scaler.scale(tiny(model, rows())).backward()
    want = model.weight.grad
    model.zero_grad()
    split = mk.SplitLoss(model, num_microbatches=3, probe=False)
    scaler.scale(split(rows(), tiny, scale=scaler.get_scale())).backward()
    torch.testing.assert_close(model.weight.grad, want, rtol=1e-2, atol=0)  # float16's own rounding
    model.zero_grad()
    with pytest.warns(
        mk.MemkitWarning, match=r"computed in float16, and no scale is given.*scale=scaler\.get_scale\(\)"
    ):
        loss = split(rows(), tiny)
    scaler.scale(loss).backward()
    assert model.weight.grad.abs().max() == 0
    model.zero_grad()
    scaler.scale(split(rows(), tiny)).backward()  # said once
    scaler.scale(mk.SplitLoss(model, probe=False)(rows(), tiny, scale=1.0)).backward()  # it is meant
    mk.SplitLoss(model, num_microbatches=3, probe=False)(rows(), square_error).backward()  # nothing of float16


def run_half(split, loss_fn, context):
    with context():
        split(rows(torch.float32), loss_fn)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_to_float16_without_a_scale_is_warned_of(where):
    model = nn.Linear(6, 1)
    split = mk.SplitLoss(model, num_microbatches=3, probe=False)
    split(rows(torch.float32), square_error)  # in full precision: nothing to say, and another precision later
    half = functools.partial(torch.autocast, "cpu", torch.float16)

    def inside(model, batch):
        with half():
            return square_error(model, batch).float()

    if where == "inside":
        split = mk.SplitLoss(model, num_microbatches=3, probe=False)
    with pytest.warns(mk.MemkitWarning, match="computed in float16, and no scale is given"):
        run_half(
            split, inside if where == "inside" else square_error, half if where == "around" else contextlib.nullcontext
        )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4, sparse=False)
        self.head = nn.Linear(4, 20, bias=False)
        self.head.weight = self.embed.weight
        self.sparse = nn.Embedding(20, 4, sparse=True)
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))  # share one gradient tensor
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens) + self.sparse(tokens) + (self.first + self.second)) * self.frozen


def test_tied_sparse_unused_and_shared_gradients():
    torch.manual_seed(0)
    model = Tied().double()
    tokens = torch.arange(12)

    def predict(model, tokens):
        return F.cross_entropy(model(tokens), tokens)

    want = gradient_of(predict(model, tokens), model)
    mk.SplitLoss(model, num_microbatches=5)(tokens, predict).backward()
    for got, plain in zip(gradients(model), want, strict=True):
        assert (got is None) == (plain is None)
        if got is not None:
            assert got.is_sparse == plain.is_sparse
            assert_same(got.to_dense() if got.is_sparse else got, plain.to_dense() if plain.is_sparse else plain, 1e-15)


def test_several_modules():
    model, criterion = nn.Linear(6, 1), nn.Linear(1, 1)
    split = mk.SplitLoss([model, criterion], num_microbatches=2, probe=False)
    split(rows(torch.float32), lambda pair, batch: pair[1](pair[0](batch[0])).square().mean()).backward()
    assert criterion.weight.grad is not None
    assert model.weight.grad is not None


def test_refusals_say_the_way_out():
    model = nn.Linear(6, 1).double()
    split = mk.SplitLoss(model)
    for _ in range(2):  # the second call is not let through
        with pytest.raises(mk.errors.InputError, match="use_reentrant=False"):
            split(rows(), lambda m, b: checkpoint(m, b[0].requires_grad_(), use_reentrant=True).sum())
    loss = split(rows(), square_error)
    with pytest.raises(mk.errors.StateError, match="create_graph=True"):
        torch.autograd.grad(loss, model.weight, create_graph=True)
    with pytest.raises(mk.errors.InputError, match=r"SplitLoss\(model\)\(batch, loss_fn\)"):
        split(rows(), lambda m, b: square_error(m, b).detach())
    with pytest.raises(mk.errors.ConfigError, match=r"SplitLoss: got num_microbatches=0;"):
        mk.SplitLoss(model, num_microbatches=0)
    batch = rows()
    with FailingOperator(*range(3, 400)), pytest.raises(mk.MemkitOutOfMemoryError, match="SplitLoss"):
        mk.SplitLoss(model)(batch, square_error)
    with FailingOperator(3), pytest.raises(torch.OutOfMemoryError):
        mk.SplitLoss(model, on_oom="raise")(batch, square_error)


def test_hooks_see_the_batchs_gradient_once():
    model = make().eval()
    square_error(model, rows()).backward()
    want = gradients(model)[0]
    model.zero_grad()
    weight, seen, stepped = model[0].weight, [], []

    def halve(gradient):
        seen.append(gradient.clone())
        return gradient / 2

    weight.register_hook(halve)
    weight.register_post_accumulate_grad_hook(lambda each: stepped.append(each.grad.clone()))
    mk.SplitLoss(model, num_microbatches=4)(rows(), square_error).backward()
    assert_same(seen, [want], 1e-15)
    assert_same(stepped, [want / 2], 1e-15)
    (weight.sum() * 3).backward()  # the hooks are back in their place
    assert len(seen) == len(stepped) == 2


def test_optimizer_in_backward_steps_once_with_batch_gradient():
    plain, model = make().eval(), make().eval()
    split = mk.SplitLoss(model, num_microbatches=4)
    for each, run in ((plain, lambda: square_error(plain, rows())), (model, lambda: split(rows(), square_error))):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        with mk.train.step_in_backward(optimizer):
            for _ in range(3):
                run().backward()
                optimizer.step()
    assert_same(list(model.parameters()), list(plain.parameters()), 1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_takes_one_set_of_gradients(num_microbatches):
    model = nn.Sequential(*[nn.Linear(200, 200, bias=False) for _ in range(10)])
    set_bytes, one_bytes = 10 * 160_000, 160_000
    x = torch.ones(8, 200)
    split = mk.SplitLoss(model, num_microbatches=num_microbatches, probe=False)

    def run():
        split(x, lambda m, x: m(x).square().mean()).backward()

    run()
    model.zero_grad()
    trace = trace_allocations(run)
    assert trace.live[-1] == set_bytes
    slack = 100_000  # activations of 8 rows, and counters
    assert trace.peak <= set_bytes + one_bytes + slack
    trace = trace_allocations(run)  # with .grad there: the set comes and goes
    assert trace.live[-1] == 0
    assert trace.peak <= set_bytes + one_bytes + slack


def test_a_gradient_penalty_inside_the_loss_function():
    model = make().eval()

    def penalized(model, batch):
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return square_error(model, batch) + slope.square().sum(1).mean()

    want = gradient_of(penalized(model, rows()), model)
    mk.SplitLoss(model, num_microbatches=3)(rows(), penalized).backward()
    assert_same(gradients(model), want, 1e-14)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_backward_that_differentiates_by_itself(num_microbatches):
    """Neural ODEs by the adjoint method: hooks on parameters run in the inner derivatives, too."""
    torch.manual_seed(0)
    model, x = NeuralODE(3).double(), torch.randn(7, 3, dtype=torch.float64)
    want = gradient_of(mean_square(model, x), model)
    mk.SplitLoss(model, num_microbatches=num_microbatches)(x, mean_square).backward()
    assert_same(gradients(model), want, 1e-14)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_batch_without_rows_has_the_functions_own_loss_and_no_gradient(num_microbatches):
    """As in the wrapper: the NaN of a mean is not told as a loss of 0, and does not reach the weights."""
    model = make()
    split = mk.SplitLoss(model, num_microbatches=num_microbatches)
    batch = [each[:0] for each in rows()]
    for scale in (None, 1024.0):
        recorded = warnings.catch_warnings(record=True, action="always")
        with recorded as warned:
            loss = split(batch, square_error, scale=scale)
        assert loss.isnan()
        loss.backward()
        assert all(not each.grad.any() for each in model.parameters())
        told = [str(each.message) for each in warned]
        assert len(told) == (scale is None)  # once
        assert all(
            "the batch has no rows: its gradient is 0, and the mean over its rows is NaN" in each for each in told
        )
    sums = mk.SplitLoss(model, num_microbatches=num_microbatches, reduction="sum")
    with pytest.warns(mk.MemkitWarning, match="the batch has no rows"):
        assert sums(batch, lambda model, batch: (model(batch[0]) - batch[1]).square().sum()) == 0
    assert split(rows(), square_error).isfinite()


def test_remembers_fitting_sizes():
    split = mk.SplitLoss(make(), probe=False)
    batch = rows()
    with FailingOperator(4):
        split(batch, square_error)
    assert split.num_ooms == 1
    again = mk.SplitLoss(make(), probe=False)
    again.load_state_dict(split.state_dict())
    again(rows(), square_error)
    assert again.num_ooms == 0
    assert max(again.sizes) <= max(split.sizes) < ROWS


def test_what_a_failed_attempt_changed_in_a_loss_is_told_of():
    """As the wrapper tells; a loop over `microbatches` has no loss function to look at."""
    center, failures = torch.zeros(4), []

    def loss_fn(model, x):
        loss = (model(x) - center).square().mean()
        center.add_(1.0)
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (a planted fault).")
        return loss

    split = mk.SplitLoss(nn.Linear(4, 4), num_microbatches=1)
    with pytest.warns(mk.errors.MemkitWarning, match="changed what loss_fn holds .* and that stays changed"):
        split(torch.randn(8, 4), loss_fn).backward()


class Upsampling(nn.Module):
    """A bias before a linear convolution, as in StyleGAN2: autograd has no gradient of it in a double backward."""

    def __init__(self):
        super().__init__()
        self.inner, self.bias = nn.Linear(4, 16), nn.Parameter(torch.zeros(1))

    def forward(self, z):
        image = self.inner(z).tanh().view(-1, 1, 4, 4) + self.bias
        return F.conv2d(image, torch.full((1, 1, 3, 3), 1 / 9, dtype=z.dtype), padding=1)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_path_length_penalty_alone(num_microbatches):
    def penalty(model, z):
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        return (slope.square().sum(1).sqrt() - 1).square().mean()

    def mixing_penalty(model, z):
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        lengths = slope.square().sum(1).sqrt()
        return (lengths - lengths.mean()).square().mean()

    torch.manual_seed(0)
    model, z = Upsampling().double(), torch.randn(8, 4, dtype=torch.float64)
    penalty(model, z).backward()
    right = gradients(model)
    assert right[0] is None
    model.zero_grad()
    mk.SplitLoss(model, num_microbatches=num_microbatches)(z, penalty).backward()
    assert_same(gradients(model), right, 1e-14)
    if num_microbatches > 1:
        split = mk.SplitLoss(model, num_microbatches=num_microbatches)
        assert_refused(lambda: split(z, mixing_penalty), mk.errors.ConfigError, "is off by")


def loss_with_inner_backward(model, batch):
    """The auxiliary term is accumulated by the function itself."""
    model(batch[0]).square().mean().backward()
    return square_error(model, batch)


@pytest.mark.parametrize("start", [None, 0.25])
def test_inner_backward_is_the_plain_loops_or_refused(start):
    plain, model = make().eval(), make().eval()
    for each in (plain, model):
        for parameter in each.parameters():
            parameter.grad = None if start is None else torch.full_like(parameter, start)
    before = copy.deepcopy(gradients(model))
    refusal = mk.errors.StateError, "inner backward", "return loss + auxiliary"
    if start is None:
        assert_refused(lambda: mk.SplitLoss(model, num_microbatches=2)(rows(), loss_with_inner_backward), *refusal)
        assert_same(gradients(model), before)
    loss_with_inner_backward(plain, rows()).backward()
    mk.SplitLoss(model)(rows(), loss_with_inner_backward).backward()
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("start", [None, 0.25])
def test_a_failed_attempt_leaves_no_gradient_of_an_inner_backward(start):
    is_out = iter([True])

    def loss_fn(model, batch):
        if next(is_out, False):
            model(batch[0]).square().mean().backward()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return square_error(model, batch)

    model = make().eval()
    for parameter in model.parameters():
        parameter.grad = None if start is None else torch.full_like(parameter, start)
    split = mk.SplitLoss(model, probe=False)
    if start is not None:  # the inner backward has written into it
        assert_refused(lambda: split(rows(), loss_fn), mk.errors.MemkitOutOfMemoryError, "gradients that were there")
        return
    with pytest.warns(mk.MemkitWarning, match="out of memory"):
        split(rows(), loss_fn).backward()
    want = make().eval()
    square_error(want, rows()).backward()
    assert_same(gradients(model), gradients(want), 1e-14)


def test_zeroing_after_an_attack_by_backward_is_no_change():
    """TRADES: the attack's backward reaches the parameters, whose gradients the function zeroes."""

    def loss_fn(model, batch):
        x = batch[0].clone().requires_grad_()
        model(x).square().sum().backward()
        model.zero_grad()
        return square_error(model, (batch[0] + 0.1 * x.grad.sign(), batch[1]))

    want, model = make().eval(), make().eval()
    loss_fn(want, rows()).backward()
    mk.SplitLoss(model, num_microbatches=3)(rows(), loss_fn).backward()
    assert_same(gradients(model), gradients(want), 1e-14)


def test_nothing_holds_a_split_loss_or_its_model():
    def references():
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(6, 1)).double()  # its split is checked, and told
        split = mk.SplitLoss(model, num_microbatches=2)
        split(rows(), square_error).backward()
        return [weakref.ref(each) for each in (model, split)]

    with pytest.warns(mk.MemkitWarning):
        references()  # torch keeps a process's first backward
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            assert [each() for each in references()] == [None] * 2
    finally:
        gc.enable()


class BackwardInside(torch.autograd.Function):
    """A reversible block, as several libraries write it: its backward runs another one, which accumulates."""

    @staticmethod
    def forward(ctx, x, block, *weights):
        ctx.block, ctx.num_weights = block, len(weights)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, slope):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, slope)
        return x.grad, None, *[None] * ctx.num_weights


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("start", [None, 0.25])
def test_gradients_of_reversible_blocks_are_those_of_the_loss(num_microbatches, start):
    def loss_fn(model, batch):
        x = BackwardInside.apply(model[:2](batch[0]), model[2], *model[2].parameters())
        return mk.Loss(sum=(x - batch[1]).square().sum(), count=2 * len(x))

    plain, model = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        for parameter in each.parameters():
            parameter.grad = None if start is None else torch.full_like(parameter, start)
    (loss_fn(plain, rows()).average() * 0.5).backward()
    (mk.SplitLoss(model, num_microbatches=num_microbatches)(rows(), loss_fn) * 0.5).backward()
    assert_same(gradients(model), gradients(plain), 1e-14)
