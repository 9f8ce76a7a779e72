"""Accumulation equals the full batch, in float64, for every split and every weight; the naive forms do not."""

import copy
import functools
import math
import warnings
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkit as mk
from memkit._torch.optimizers import has_step_hooks
from memkit.recipes.state.objects import without_pending
from memkit.train import gradient_sum
from tests.helpers import (
    assert_refused,
    assert_same,
    flat_gradient,
    gradient_of,
    gradients,
    one_in_product,
    relative_error,
)
from tests.toys import mean_square, out_of_memory

ROWS, TOKENS, CLASSES = 48, 6, 7


class TokenModel(nn.Module):
    """(N, T, C) -> (N, T, classes), with a residual (gradient sums inside the graph) and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, CLASSES)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        x = x + F.gelu(self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2))
        return self.head(x)


def make_problem():
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    model = TokenModel().double()
    x = torch.randn(ROWS, TOKENS, 5, dtype=torch.float64, generator=generator)
    y = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    lengths[7:12] = 0  # rows without any label: alone in a micro-batch their mean is 0 / 0
    y[torch.arange(TOKENS)[None] >= lengths[:, None]] = -100
    weight = torch.rand(CLASSES, dtype=torch.float64, generator=generator) + 0.1
    return model, x, y, weight


def row_loss(model, x, y, weight):
    return model(x).pow(2).mean(), float(len(x))


def token_loss(model, x, y, weight):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten()), float((y != -100).sum())


def class_weighted_loss(model, x, y, weight):
    valid = y[y != -100]
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), weight=weight), float(weight[valid].sum())


def device_count_loss(model, x, y, weight):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten()), (y != -100).sum()


def token_sum_loss(model, x, y, weight):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), (y != -100).sum()


MEAN_LOSSES = [row_loss, token_loss, class_weighted_loss, device_count_loss]


def full_batch_gradient(loss_fn):
    model, *batch = make_problem()
    loss_fn(model, *batch)[0].backward()
    return flat_gradient(model)


def stepped_gradient(accumulator, model, microbatches):
    """Run one group and return the gradient that the optimizer was given."""
    seen = []
    handle = accumulator._sum.optimizers[0].register_step_pre_hook(lambda *_: seen.append(flat_gradient(model)))
    for arguments, keywords in microbatches:
        accumulator.backward(*arguments, **keywords)
        accumulator.step()
    accumulator.flush()
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def accumulated_gradient(loss_fn, sizes, *, steps=None, reduction="mean", **keywords):
    model, x, y, weight = make_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = mk.GradientAccumulator(optimizer, steps or len(sizes), **keywords)

    def microbatches():
        for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
            yield loss_fn(model, part_x, part_y, weight), {"reduction": reduction}

    return stepped_gradient(accumulator, model, microbatches())


@pytest.mark.parametrize(("size", "loss_fn"), one_in_product(3, range(1, ROWS + 1), MEAN_LOSSES))
def test_every_size_of_micro_batch_gives_the_full_batch_gradient(loss_fn, size):
    sizes = [size] * (ROWS // size) + ([ROWS % size] if ROWS % size else [])
    assert relative_error(accumulated_gradient(loss_fn, sizes), full_batch_gradient(loss_fn)) <= 1e-14


@given(cuts=st.sets(st.integers(1, ROWS - 1)), loss_fn=st.sampled_from(MEAN_LOSSES), spare=st.integers(0, 3))
def test_any_split_gives_the_full_batch_gradient(cuts, loss_fn, spare):
    edges = [0, *sorted(cuts), ROWS]
    sizes = [b - a for a, b in pairwise(edges)]
    # spare > 0: the group is longer than the data, and flush() ends it
    got = accumulated_gradient(loss_fn, sizes, steps=len(sizes) + spare)
    assert relative_error(got, full_batch_gradient(loss_fn)) <= 1e-14


@given(cuts=st.sets(st.integers(1, ROWS - 1)))
def test_sums_with_their_count_give_the_full_batch_mean(cuts):
    edges = [0, *sorted(cuts), ROWS]
    sizes = [b - a for a, b in pairwise(edges)]
    got = accumulated_gradient(token_sum_loss, sizes, reduction="sum")
    assert relative_error(got, full_batch_gradient(token_loss)) <= 1e-14


@pytest.mark.parametrize("sizes", [[48], [13, 13, 13, 9], [5] * 9 + [3]])
def test_sum_objective_gives_the_gradient_of_the_sum(sizes):
    want = full_batch_gradient(token_sum_loss)
    got = accumulated_gradient(token_sum_loss, sizes, reduction="sum", objective="sum")
    assert relative_error(got, want) <= 1e-14
    # a mean with its count is the same sum
    got = accumulated_gradient(token_loss, sizes, objective="sum")
    assert relative_error(got, want) <= 1e-14


@pytest.mark.parametrize("loss_fn", [token_loss, class_weighted_loss])
def test_the_mean_of_means_is_wrong(loss_fn):
    """Negative control: what most loops do."""
    model, x, y, weight = make_problem()
    keep = torch.arange(ROWS) // 6 != 1  # without the rows that have no label, whose mean is NaN
    parts = list(zip(x[keep].split(7), y[keep].split(7), strict=True))
    for part_x, part_y in parts:
        (loss_fn(model, part_x, part_y, weight)[0] / len(parts)).backward()
    naive = flat_gradient(model)
    assert relative_error(naive, full_batch_gradient(loss_fn)) > 0.01


def test_class_weighted_mean_weighed_by_tokens_is_wrong():
    """Negative control: the weight of a class-weighted mean is the sum of the class weights, not the token count."""

    def by_tokens(model, x, y, weight):
        return class_weighted_loss(model, x, y, weight)[0], float((y != -100).sum())

    with pytest.warns(mk.MemkitWarning, match=r"means over different numbers of items.*count=n"):
        got = accumulated_gradient(by_tokens, [7] * 6 + [6])
    assert relative_error(got, full_batch_gradient(class_weighted_loss)) > 1e-3


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_zero_count_contributes_nothing_even_with_nan_mean(count, position):
    def run(with_empty):
        model, x, y, weight = make_problem()
        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3)
        parts = [token_loss(model, x[:7], y[:7], weight), token_loss(model, x[20:], y[20:], weight)]
        if with_empty:
            empty = F.cross_entropy(model(x[7:12]).flatten(0, 1), y[7:12].flatten())
            assert empty.isnan()
            parts.insert(position, (empty, count))
        return stepped_gradient(accumulator, model, ((part, {}) for part in parts))

    assert_same(run(with_empty=True), run(with_empty=False))


def losses_with_clamped_gradients(model, x):
    h = model(x)
    h.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return h.pow(2)


@pytest.mark.parametrize("form", ["no counts", "equal counts", "announced", "sums"])
def test_a_hook_that_clamps_sees_the_gradient_of_the_whole_batch(form):
    """In the second group too, whose counts are not those of the first."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    reduction = "sum" if form == "sums" else "mean"
    reduced = torch.sum if form == "sums" else torch.mean
    accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.0), 3, objective=reduction)
    for sizes in (1, 1, 1), (2, 5, 3) if form in {"announced", "sums"} else (5, 5, 5):
        x = torch.randn(sum(sizes), 4).double()
        whole = gradient_of(reduced(losses_with_clamped_gradients(model, x)), model, flat=True)
        if form == "announced":
            accumulator.expect(len(x))
        counts = sizes if form in {"equal counts", "announced"} else [None] * 3
        microbatches = (
            ((reduced(losses_with_clamped_gradients(model, part)), count), {"reduction": reduction})
            for part, count in zip(x.split(sizes), counts, strict=True)
        )
        assert relative_error(stepped_gradient(accumulator, model, microbatches), whole) < 1e-14


def test_weightless_group_does_not_step():
    model, x, y, weight = make_problem()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = copy.deepcopy(model.state_dict())
    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
    for _ in range(2):
        accumulator.backward(token_loss(model, x[7:9], y[7:9], weight)[0], count=0)
        assert accumulator.step() is False
    assert accumulator.num_steps == 0
    assert accumulator.num_microbatches == 0
    assert_same(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize(("num_batches", "steps"), [(13, 4), (5, 3), (1, 4)])
def test_tail_group_has_the_right_size(num_batches, steps):
    """52 samples in micro-batches of 4, steps=4: accelerate and Lightning give the last group 0.25 of its gradient."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    data = torch.randn(num_batches * 4, 3, dtype=torch.float64)
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(model)))
    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=steps)
    for x in data.split(4):
        accumulator.backward(model(x).pow(2).mean(), count=len(x))
        accumulator.step()
    accumulator.flush()
    groups = data.split(4 * steps)
    assert len(seen) == len(groups) == accumulator.num_steps
    for got, group in zip(seen, groups, strict=True):
        model.zero_grad()
        model(group).pow(2).mean().backward()
        assert abs((got.norm() / flat_gradient(model).norm()).item() - 1) <= 1e-12


@pytest.mark.parametrize(("num_parts", "size"), [(4, 8), (3, 5)])
def test_equal_counts_are_bit_identical_to_the_plain_loop(num_parts, size):
    model, x, _, _ = make_problem()
    plain = copy.deepcopy(model).float()
    model = model.float()
    accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), num_parts)
    parts = x[: num_parts * size].float().split(size)
    for part in parts:
        (plain(part).pow(2).mean() / num_parts).backward()
    got = stepped_gradient(accumulator, model, (((model(part).pow(2).mean(), size), {}) for part in parts))
    assert_same(got, flat_gradient(plain))


@pytest.mark.parametrize("settings", [{"count": 5}, {"count": torch.tensor(7)}, {"count": 3, "reduction": "sum"}, {}])
def test_a_micro_batch_by_itself_has_the_plain_backward(settings):
    """A hook that clips sees the gradient as it is, not multiplied by a count."""
    optimized = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
        for each in model.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = model(x).square().mean()
        if is_plain:
            loss.backward()
            optimizer.step()
        else:
            accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=1)
            factor = 3 if settings.get("reduction") == "sum" else 1
            accumulator.backward(loss * factor, **settings)
            accumulator.step()
        optimized.append(list(model.parameters()))
    assert_same(*optimized, 1e-15)


def test_default_count_weighs_micro_batches_equally():
    model, x, _, _ = make_problem()
    got = stepped_gradient(
        mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3),
        model,
        (((model(part).pow(2).mean(),), {}) for part in x.split(16)),
    )
    assert relative_error(got, full_batch_gradient(row_loss)) <= 1e-14


def test_half_precision_sums_do_not_overflow():
    """Counts of 60,000: undivided, the float16 sum of gradients would pass 65,504."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    accumulator = mk.GradientAccumulator(torch.optim.SGD([weight], lr=0.0), accumulation_steps=4)
    for _ in range(4):
        accumulator.backward((weight * 3).sum(), count=60_000)
    assert accumulator.num_microbatches == 4
    naive = weight.detach().clone().requires_grad_()
    for _ in range(4):
        ((naive * 3).sum() * 60_000).backward()
    assert naive.grad.isinf().all()
    assert weight.grad.isfinite().all()
    seen = []
    accumulator._sum.optimizers[0].register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    accumulator.step()
    torch.testing.assert_close(seen[0], torch.full_like(weight, 3), rtol=2**-10, atol=0)


def test_float32_accumulation_of_bfloat16_gradients():
    def run(accumulate_dtype):
        torch.manual_seed(0)
        model = nn.Linear(16, 8).bfloat16()
        x = torch.randn(96, 16).bfloat16()
        reference = copy.deepcopy(model).double()
        reference(x.double()).pow(2).mean().backward()
        accumulator = mk.GradientAccumulator(
            torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=96, accumulate_dtype=accumulate_dtype
        )
        got = stepped_gradient(accumulator, model, (((model(row).pow(2).mean(), 1), {}) for row in x.split(1)))
        assert got.dtype == torch.bfloat16
        accumulator.close()
        assert all(p.grad_dtype == torch.bfloat16 for p in model.parameters())
        return relative_error(got.double(), flat_gradient(reference))

    assert run(torch.float32) < 3e-3 < 8e-3 < run(None)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_norm_of_bfloat16_gradients_is_measured_in_float32(num_parts):
    torch.manual_seed(0)
    model = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = mk.GradientAccumulator(optimizer, num_parts, max_grad_norm=1e9, accumulate_dtype=torch.float32)
    for part in torch.randn(8, 64).bfloat16().chunk(num_parts):
        accumulator.backward(model(part).float().pow(2).sum(), count=8, reduction="sum")
    accumulator.expect(8)
    factor = accumulator._sum.predivisor / (8 * num_parts)
    norm = torch.cat([each.grad.double().flatten() for each in model.parameters()]).norm() * factor
    accumulator.step()
    torch.testing.assert_close(accumulator.grad_norm.double(), norm, rtol=1e-6, atol=0)  # in bfloat16: 4e-3


class TestScaler:
    def make(self, accumulation_steps=2, **keywords):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **keywords)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps, scaler=scaler, max_grad_norm=0.25)
        return model, optimizer, scaler, accumulator

    def test_unscales_before_clipping_and_updates_once(self):
        model, _, scaler, accumulator = self.make()
        reference = copy.deepcopy(model)
        x = torch.randn(7, 4)
        for part in x.split([5, 2]):
            accumulator.backward(model(part).pow(2).mean(), count=len(part))
            stepped = accumulator.step()
        assert stepped is True
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        reference(x).pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
        optimizer.step()
        torch.testing.assert_close(accumulator.grad_norm, norm)
        torch.testing.assert_close(model.weight, reference.weight)
        assert scaler.get_scale() == 1024.0

    @pytest.mark.parametrize("fused", [False, True])
    def test_an_infinity_skips_the_step_and_says_so(self, fused):
        model, _, scaler, accumulator = self.make(fused=fused)
        before = model.weight.detach().clone()
        accumulator.backward(model(torch.ones(1, 4)).sum())
        assert accumulator.step() is False
        accumulator.backward(model(torch.full((1, 4), float("inf"))).sum())
        assert accumulator.step() is False
        assert accumulator.num_steps == 0
        assert scaler.get_scale() == 512.0
        assert_same(model.weight, before)
        for _ in range(2):
            accumulator.backward(model(torch.ones(1, 4)).sum())
            stepped = accumulator.step()
        assert stepped is True
        assert accumulator.num_steps == 1

    def test_two_optimizers_share_one_update(self):
        """The second optimizer's gradients are unscaled by the same factor although the first one overflowed."""
        torch.manual_seed(0)
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second)]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        accumulator = mk.GradientAccumulator(optimizers, scaler=scaler)
        before = second.bias.detach().clone()
        loss = first(torch.full((1, 2), float("inf"))).sum() + second(torch.ones(1, 2)).sum()
        accumulator.backward(loss)
        assert accumulator.step() is True
        torch.testing.assert_close(second.bias, before - 1.0)
        assert scaler.get_scale() == 512.0

    def test_an_optimizer_without_gradients_is_left_alone(self):
        """GradScaler itself stops with an AssertionError there."""
        used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (used, unused)]
        accumulator = mk.GradientAccumulator(optimizers, scaler=torch.amp.GradScaler("cpu"))
        accumulator.backward(used(torch.ones(1, 2)).sum())
        assert accumulator.step() is True

    def test_float16_parameters_need_float32_accumulation(self):
        model = nn.Linear(2, 2).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with pytest.raises(mk.errors.ConfigError, match="float16 parameters"):
            mk.GradientAccumulator(optimizer, scaler=scaler)
        with mk.GradientAccumulator(optimizer, scaler=scaler, accumulate_dtype=torch.float32) as accumulator:
            before = model.bias.detach().clone()
            accumulator.backward(model(torch.ones(1, 2).half()).sum())
            assert accumulator.step() is True
            torch.testing.assert_close(model.bias, before - 0.5)


class TestSideBySide:
    def test_gan_accumulators_never_mix(self):
        """Interleaved micro-batches: the generator's loss runs through the discriminator, and adds nothing to it."""

        def run(interleaved):
            torch.manual_seed(0)
            disc, gen = nn.Linear(3, 1).double(), nn.Linear(2, 3).double()
            noise, real = torch.randn(6, 2).double(), torch.randn(6, 3).double()
            acc_d = mk.GradientAccumulator(torch.optim.SGD(disc.parameters(), lr=0.1), accumulation_steps=3)
            acc_g = mk.GradientAccumulator(torch.optim.SGD(gen.parameters(), lr=0.1), accumulation_steps=3)
            seen = {}
            acc_d._sum.optimizers[0].register_step_pre_hook(lambda *_: seen.update(d=flat_gradient(disc)))
            acc_g._sum.optimizers[0].register_step_pre_hook(lambda *_: seen.update(g=flat_gradient(gen)))

            def d_part(i):
                fake = gen(noise[2 * i : 2 * i + 2]).detach()
                acc_d.backward(F.softplus(disc(fake)).mean() + F.softplus(-disc(real[2 * i : 2 * i + 2])).mean(), 2)

            def g_part(i):
                acc_g.backward(F.softplus(-disc(gen(noise[2 * i : 2 * i + 2]))).mean(), 2)

            for i in range(3):
                d_part(i)
                if interleaved:
                    g_part(i)
            if not interleaved:
                for i in range(3):
                    g_part(i)
            acc_g.step()
            acc_d.step()
            return seen

        got, want = run(interleaved=True), run(interleaved=False)
        torch.testing.assert_close(got["d"], want["d"], rtol=1e-14, atol=0)
        torch.testing.assert_close(got["g"], want["g"], rtol=1e-14, atol=0)

    def test_other_leaves_get_no_gradient(self):
        model, latent = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mk.GradientAccumulator(optimizer).backward(model(latent).sum())
        assert latent.grad is None

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointed_blocks(self, use_reentrant):
        """A reentrant checkpoint refuses a backward that is told where to stop; the graph is searched for it."""
        model, x, _, _ = make_problem()

        def loss(rows):
            hidden = checkpoint(model, rows.clone().requires_grad_(), use_reentrant=use_reentrant)
            return hidden.pow(2).mean()

        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=4)
        got = stepped_gradient(accumulator, model, (((loss(part), len(part)), {}) for part in x.split(13)))
        assert relative_error(got, full_batch_gradient(row_loss)) <= 1e-14

    @pytest.mark.parametrize("settings", [{}, {"on_oom": "raise"}, {"accumulation_steps": 2}], ids=str)
    def test_checkpoints_of_other_libraries_that_refuse_given_inputs(self, settings):
        """As in memcnn's reversible networks."""

        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, fn, x, *weights):
                ctx.fn, ctx.num_weights = fn, len(weights)
                ctx.save_for_backward(x)
                with torch.no_grad():
                    return fn(x)

            @staticmethod
            def backward(ctx, gradient):
                if not torch.autograd._is_checkpoint_valid():
                    raise RuntimeError("not compatible with .grad()")
                x = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.enable_grad():
                    y = ctx.fn(x)
                torch.autograd.backward(y, gradient)
                return None, x.grad, *(None,) * ctx.num_weights

        def train(make_step):
            torch.manual_seed(0)
            first, inside, last = (nn.Linear(4, 4).double() for _ in range(3))
            model = nn.ModuleList([first, inside, last])
            step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                step(torch.randn(8, 4, dtype=torch.float64))
            return list(model.parameters())

        def loss_fn(model, x):
            first, inside, last = model
            return last(Reversed.apply(inside, first(x), *inside.parameters())).square().mean()

        def plain(model, optimizer):
            def step(x):
                loss_fn(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        def wrapped(model, optimizer):
            trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, **settings)
            return lambda x: trainer.train_step(x, loss_fn)

        torch.testing.assert_close(train(wrapped), train(plain))

    def test_two_optimizers_are_clipped_jointly(self):
        torch.manual_seed(0)
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (a, b)]
        accumulator = mk.GradientAccumulator(optimizers, max_grad_norm=1.0)
        accumulator.backward((a(torch.ones(1, 2)) * 3 + b(torch.ones(1, 2)) * 4).sum())
        assert accumulator.step() is True
        torch.testing.assert_close(accumulator.grad_norm.item(), (6 * 9 + 6 * 16) ** 0.5)

    def test_sparse_gradients(self):
        torch.manual_seed(0)
        embed = nn.Embedding(10, 3, sparse=True)
        rows = torch.tensor([1, 2, 2, 5, 1])
        want = copy.deepcopy(embed)
        want(rows).pow(2).mean().backward()
        optimizer = torch.optim.SGD(embed.parameters(), lr=0.1)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(embed.weight.grad.to_dense()))
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        for part in rows.split(3):
            accumulator.backward(embed(part).pow(2).mean(), count=len(part))
            accumulator.step()
        torch.testing.assert_close(seen[0], want.weight.grad.to_dense())

    @pytest.mark.parametrize("max_norm", [0.1, math.inf])
    def test_sparse_gradients_are_clipped_as_dense_ones(self, max_norm):
        """A row that is read twice has two entries, and the norm is that of their sum."""
        rows, stepped = torch.tensor([1, 2, 2, 5, 1]), []
        for is_sparse in (False, True):
            torch.manual_seed(0)
            bag, head = nn.Embedding(10, 3, sparse=is_sparse), nn.Linear(3, 1)
            optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], lr=0.1)
            accumulator = mk.GradientAccumulator(optimizer, max_grad_norm=max_norm)
            accumulator.backward(head(bag(rows)).pow(2).mean())
            assert accumulator.step() is True
            stepped.append((accumulator.grad_norm, bag.weight.detach(), head.weight.detach()))
        torch.testing.assert_close(stepped[1], stepped[0])


class _FailsInBackward(torch.autograd.Function):
    """Stands for an allocation that fails in the middle of a backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        out_of_memory()


class TestInterruptedBackward:
    def run(self, *, all_or_nothing):
        """Fail in the second micro-batch after the last layer's gradient, then repeat what is lost."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
        x = torch.randn(5, 3).double()
        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2)
        first, second = x.split([3, 2])
        accumulator.backward(model(first).pow(2).mean(), count=3)
        before = flat_gradient(model).clone()
        with pytest.raises(torch.OutOfMemoryError):
            accumulator.backward(
                model[1](_FailsInBackward.apply(model[0](second))).pow(2).mean(), count=2, all_or_nothing=all_or_nothing
            )
        changed = not torch.equal(flat_gradient(model), before)
        if accumulator.is_torn:
            with pytest.raises(mk.errors.StateError, match=r"incomplete backward.*discard\(\)"):
                accumulator.backward(model(second).pow(2).mean(), count=2)
            assert_refused(lambda: accumulator.flush(), mk.errors.StateError, "incomplete backward")
            accumulator.discard()
            accumulator.backward(model(first).pow(2).mean(), count=3)
        accumulator.backward(model(second).pow(2).mean(), count=2, all_or_nothing=all_or_nothing)
        assert accumulator.step() is True
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(x).pow(2).mean().backward()
        optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-14, atol=1e-16)
        return changed

    def test_failed_step_leaves_the_group_unchanged(self):
        assert self.run(all_or_nothing=True) is False

    def test_half_a_backward_is_never_stepped_with(self):
        """Negative control and guard: plain backward does leave half of it behind, and the group says so."""
        assert self.run(all_or_nothing=False) is True

    @pytest.mark.parametrize("max_grad_norm", [None, 0.01])
    def test_aliased_gradients_are_separated(self, max_grad_norm):
        """autograd.grad may return one tensor for two parameters, the root itself, or a tensor that somebody holds."""

        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.a, self.b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
                self.shift = nn.Parameter(torch.ones(()))

            def forward(self, x):
                return (x @ (self.a + self.b)).pow(2).mean() + self.shift

        def run(all_or_nothing):
            model = Shared().double()
            accumulator = mk.GradientAccumulator(
                torch.optim.SGD(model.parameters(), lr=1.0), accumulation_steps=4, max_grad_norm=max_grad_norm
            )
            for _ in range(2):
                for part in torch.arange(24.0).double().view(8, 3).split(2):
                    accumulator.backward(model(part), count=len(part), all_or_nothing=all_or_nothing)
                    accumulator.step()
            return dict(model.state_dict())

        assert_same(run(True), run(False))

    @pytest.mark.parametrize("num_parts", [1, 3])
    @pytest.mark.parametrize("by_wrapper", [False, True])
    def test_hooks_on_the_sum_so_far_are_told_of(self, num_parts, by_wrapper):
        """What they change between two micro-batches is changed again after the next one."""
        torch.manual_seed(0)
        model, x, called = nn.Linear(3, 3), torch.randn(9, 3), []

        def halve(parameter):
            called.append(None)
            parameter.grad.mul_(0.5)

        model.weight.register_post_accumulate_grad_hook(halve)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train():
            if by_wrapper:
                mk.MemoryEfficientTrainingWrapper(
                    model, optimizer, accumulation_steps=num_parts, probe=False
                ).train_step(x, mean_square)
                return
            accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=num_parts)
            for part in x.chunk(num_parts):
                accumulator.backward(mean_square(model, part), count=len(part))
                accumulator.step()

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train()
        assert len(called) == num_parts
        assert [("on the sum so far" in str(each.message)) for each in told] == [True] * (num_parts > 1)

    def test_hooks_on_several_gradients_at_once_are_called(self):
        """Torch refuses them in torch.autograd.grad, by which a first step is all or nothing."""
        model, called = nn.Linear(2, 1), []
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda found: called.append(len(found)))
        trainer = mk.MemoryEfficientTrainingWrapper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.train_step(torch.ones(4, 2), mean_square)
        assert called == [2]

    @pytest.mark.filterwarnings("ignore:.*register_post_accumulate_grad_hook run after every micro-batch")
    def test_gradient_hooks_are_always_called(self):
        model = nn.Linear(2, 1)
        called = []
        model.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2)
        for all_or_nothing in (True, False):
            accumulator.backward(model(torch.ones(1, 2)).sum(), all_or_nothing=all_or_nothing)
        assert len(called) == 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_both_ways_give_the_same_bits(self, dtype):
        def run(all_or_nothing):
            torch.manual_seed(0)
            shared = nn.Linear(4, 4)
            model = nn.Sequential(shared, nn.ReLU(), shared, nn.Conv1d(1, 1, 1)).to(dtype)
            model[3].to(memory_format=torch.contiguous_format)
            accumulate_dtype = torch.float32 if dtype == torch.bfloat16 else None
            accumulator = mk.GradientAccumulator(
                torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3, accumulate_dtype=accumulate_dtype
            )
            for part in torch.randn(7, 1, 4).to(dtype).split(3):
                accumulator.backward(model(part).pow(2).mean(), count=len(part), all_or_nothing=all_or_nothing)
            return gradients(model)

        assert_same(run(True), run(False))


class TestState:
    def run(self, stop_after=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        data = torch.randn(22, 3)

        def make():
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            return optimizer, mk.GradientAccumulator(optimizer, accumulation_steps=3)

        optimizer, accumulator = make()
        for i, part in enumerate(data.split(3)):
            if i == stop_after:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), accumulator.state_dict()])
                model = nn.Linear(3, 2)
                optimizer, accumulator = make()
                for thing, state in zip((model, optimizer, accumulator), saved, strict=True):
                    thing.load_state_dict(state)
            accumulator.backward(model(part).pow(2).mean(), count=len(part))
            accumulator.step()
        accumulator.flush()
        return model.state_dict(), accumulator.num_steps

    @pytest.mark.parametrize("stop_after", range(8))
    def test_resume_anywhere_in_a_group_is_bit_identical(self, stop_after):
        assert_same(self.run(stop_after), self.run())

    def test_state_survives_a_weights_only_load(self, tmp_path):
        model = nn.Linear(3, 2)
        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3)
        accumulator.backward(model(torch.ones(2, 3)).sum(), count=torch.tensor(2))
        torch.save(accumulator.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert state["count"] == 2.0
        assert state["num_microbatches"] == 1

    def test_a_state_mends_a_torn_group(self):
        model = nn.Linear(3, 2)
        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1))
        state = accumulator.state_dict()
        broken = model(torch.ones(2, 3))
        broken.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            accumulator.backward(broken.sum())
        assert accumulator.is_torn
        accumulator.load_state_dict(state)
        accumulator.backward(model(torch.ones(2, 3)).sum())
        assert accumulator.step() is True

    @pytest.mark.parametrize("stop_after", [1, 2])
    def test_float32_gradients_of_a_bfloat16_model_go_on(self, stop_after):
        """In the middle of a group they are wider than what backward would give."""

        def run(stop_after):
            torch.manual_seed(0)
            model = nn.Linear(3, 2).bfloat16()
            make = lambda: mk.GradientAccumulator(  # noqa: E731
                torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3, accumulate_dtype=torch.float32
            )
            accumulator = make()
            for i, row in enumerate(torch.randn(3, 1, 3).bfloat16()):
                if i == stop_after:
                    saved = copy.deepcopy(accumulator.state_dict())
                    accumulator.discard()
                    accumulator.close()
                    accumulator = make()
                    accumulator.load_state_dict(saved)
                accumulator.backward(model(row).pow(2).mean())
            assert model.weight.grad.dtype == torch.float32
            assert accumulator.step()
            return model.weight

        assert_same(run(stop_after), run(None))

    @pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
    def test_resume_in_bfloat16_with_late_parameter(self, stop_after):
        def make():
            torch.manual_seed(0)
            model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]).bfloat16()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, mk.GradientAccumulator(optimizer, accumulation_steps=6, accumulate_dtype=torch.float32)

        def run(stop_after):
            model, accumulator = make()
            for i, x in enumerate(torch.randn(6, 8, 16).bfloat16()):
                if i == stop_after:
                    saved = copy.deepcopy(accumulator.state_dict())
                    model, accumulator = make()
                    accumulator.load_state_dict(saved)
                y = model[0](x) if i < 3 else model[1](model[0](x))
                accumulator.backward(y.float().pow(2).mean(), count=8)
            assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
            return gradients(model)

        for resumed, whole in zip(run(stop_after), run(None), strict=True):
            assert torch.equal(resumed, whole)

    def test_wide_gradients_go_into_an_accumulator_without_wide_sums(self):
        def make(**keywords):
            model = nn.Linear(3, 2).bfloat16()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return model, mk.GradientAccumulator(optimizer, accumulation_steps=3, **keywords)

        model, accumulator = make(accumulate_dtype=torch.float32)
        for _ in range(2):
            accumulator.backward(model(torch.ones(1, 3).bfloat16()).sum())
        other, loaded = make()
        loaded.load_state_dict(accumulator.state_dict())
        assert other.weight.grad.dtype == other.weight.grad_dtype == torch.bfloat16
        loaded.backward(other(torch.ones(1, 3).bfloat16()).sum())
        assert loaded.step()

    def test_state_of_another_model_is_refused(self):
        model = nn.Linear(3, 2)
        accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=3)
        accumulator.backward(model(torch.ones(2, 3)).sum())
        state = accumulator.state_dict()
        other = mk.GradientAccumulator(torch.optim.SGD(nn.Sequential(model, nn.Linear(2, 2)).parameters(), lr=0.1))
        with pytest.raises(mk.errors.FileFormatError, match="2 gradients; expected the gradients of 4"):
            other.load_state_dict(state)
        assert_refused(lambda: accumulator.load_state_dict({"version": 7}), mk.errors.FileFormatError, "version 7")
        del state["factor"]
        assert_refused(lambda: accumulator.load_state_dict(state), mk.errors.FileFormatError, "without factor")


class TestMisuse:
    def make(self, **keywords):
        model = nn.Linear(2, 1)
        return model, mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), **keywords)

    @pytest.mark.parametrize("then", ["backward", "step"])
    def test_a_zero_grad_left_in_the_loop_is_found(self, then):
        """Else the step would step nothing, and say no more than False."""
        model, accumulator = self.make(accumulation_steps=2 if then == "backward" else 1)
        accumulator.backward(model(torch.ones(1, 2)).sum())
        accumulator._sum.optimizers[0].zero_grad()
        arguments = [model(torch.ones(1, 2)).sum()] if then == "backward" else []
        call = functools.partial(getattr(accumulator, then), *arguments)
        assert_refused(call, mk.errors.StateError, r"remove optimizer\.zero_grad\(\) from the loop")

    @pytest.mark.filterwarnings("ignore:precision='fp16' on a CPU")
    @pytest.mark.parametrize("way", ["accumulator", "wrapper"])
    def test_a_scaler_over_complex_parameters_is_refused_and_its_way_out_trains(self, way):
        """Torch cannot unscale them."""
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        optimizer, loss_fn = torch.optim.SGD([model.weight], lr=0.25), lambda model, x: (model.weight * x).abs().mean()
        build = {
            "accumulator": lambda: mk.GradientAccumulator(optimizer, scaler=torch.amp.GradScaler("cpu")),
            "wrapper": lambda: mk.MemoryEfficientTrainingWrapper(model, optimizer, precision="fp16"),
        }
        assert_refused(build[way], mk.errors.ConfigError, r"shape \(5,\).*pass precision='bf16-mixed'")
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, precision="bf16-mixed")
        trainer.train_step(torch.ones(4, 1), loss_fn)
        torch.testing.assert_close(model.weight.detach(), torch.full((5,), 0.95, dtype=torch.complex64))

    @pytest.mark.parametrize("num_steps", [1, 2])
    def test_a_step_left_in_the_loop_is_refused_and_the_group_goes_on(self, num_steps):
        """Else the optimizer would step with the unfinished sum, and with the same gradients once more."""
        model, accumulator = self.make(accumulation_steps=num_steps)
        optimizer, same = accumulator._sum.optimizers[0], copy.deepcopy(model)
        for row in range(num_steps):
            accumulator.backward(model(torch.ones(1, 2) * row).square().mean())
            assert_refused(optimizer.step, mk.errors.StateError, r"accumulator\.step\(\) calls it")
            stepped = accumulator.step()
        assert stepped
        (sum(same(torch.ones(1, 2) * row).square().mean() for row in range(num_steps)) / num_steps).backward()
        torch.optim.SGD(same.parameters(), lr=0.1).step()
        torch.testing.assert_close(dict(model.named_parameters()), dict(same.named_parameters()))
        assert not has_step_hooks(optimizer)

    @pytest.mark.parametrize("end", ["discard", "close", "zero_grad"])
    def test_a_step_after_a_group_that_was_given_up_is_the_users_own(self, end, monkeypatch):
        monkeypatch.setattr(gradient_sum, "gradient_marks", lambda _: [])  # new gradients may get the old ones' marks
        model, accumulator = self.make(accumulation_steps=2)
        optimizer, before = accumulator._sum.optimizers[0], copy.deepcopy(model)
        accumulator.backward(model(torch.ones(1, 2)).square().mean())
        if end != "zero_grad":
            getattr(accumulator, end)()
        for net, stepping in ((model, optimizer), (before, torch.optim.SGD(before.parameters(), lr=0.1))):
            stepping.zero_grad()
            net(torch.ones(3, 2)).square().mean().backward()
            stepping.step()
        torch.testing.assert_close(dict(model.named_parameters()), dict(before.named_parameters()))

    def test_a_step_left_in_the_loop_is_refused_after_a_restart_inside_a_group(self):
        model, accumulator = self.make(accumulation_steps=2)
        accumulator.backward(model(torch.ones(1, 2)).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        other.load_state_dict(copy.deepcopy(accumulator.state_dict()))
        assert_refused(optimizer.step, mk.errors.StateError, r"accumulator\.discard\(\) first")

    def test_a_loss_of_other_parameters_is_no_lost_gradient(self):
        """A step whose branch this optimizer has no part in, before one that it has."""
        model, accumulator = self.make(accumulation_steps=2)
        accumulator.backward(nn.Linear(2, 1)(torch.ones(1, 2)).sum())
        accumulator.backward(model(torch.ones(1, 2)).sum())
        torch.testing.assert_close(model.weight.grad, torch.full((1, 2), 0.5))
        assert accumulator.step() is True

    @pytest.mark.parametrize("count", [float("nan"), -1.0, float("inf")])
    def test_device_count_is_checked_at_the_step(self, count):
        model, accumulator = self.make(accumulation_steps=3)
        for each in (2.0, count, 2.0):
            accumulator.backward(model(torch.ones(1, 2)).sum(), torch.tensor(each), reduction="sum")
        assert_refused(lambda: accumulator.step(), mk.errors.InputError, "expected a finite weight of zero or more")
        assert accumulator.num_microbatches == 0  # the next group starts clean

    def test_gradients_from_elsewhere_are_dropped_with_a_warning(self):
        model, accumulator = self.make()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.warns(mk.MemkitWarning, match="gradients that another backward") as caught:
            accumulator.backward(model(torch.ones(1, 2)).sum())
        assert caught[0].filename == __file__  # the line to change is the user's
        torch.testing.assert_close(model.weight.grad, torch.ones(1, 2))

    def test_steps_change_between_groups_only(self):
        model, accumulator = self.make(accumulation_steps=2)
        accumulator.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(mk.errors.StateError, match="1 of 2 micro-batches under way"):
            accumulator.accumulation_steps = 3
        assert accumulator.flush() is True
        accumulator.accumulation_steps = 1
        accumulator.backward(model(torch.ones(1, 2)).sum())
        assert accumulator.step() is True

    @pytest.mark.parametrize(
        ("loss", "error", "text"),
        [
            (1.5, mk.errors.InputTypeError, "not loss.item"),
            (torch.ones(3, requires_grad=True), mk.errors.InputError, r"shape \(3,\)"),
            (torch.tensor(1.0), mk.errors.InputError, "requires_grad=False"),
        ],
    )
    def test_rejects_unusable_loss(self, loss, error, text):
        assert_refused(lambda: self.make()[1].backward(loss), error, text)

    @pytest.mark.parametrize(
        ("count", "reduction"),
        [
            *product([-1, 10**400, float("nan"), float("inf"), True, "3", torch.ones(2)], ["mean", "sum"]),
            (None, "sum"),
        ],
    )
    def test_an_invalid_count(self, count, reduction):
        model, accumulator = self.make()
        call = lambda: accumulator.backward(model(torch.ones(1, 2)).sum(), count, reduction=reduction)  # noqa: E731
        assert_refused(call, mk.errors.InputError, "weight of zero or more|number of summed items|a single number")
        assert accumulator.num_microbatches == 0

    def test_counts_whose_sum_overflows_are_refused_at_the_step(self):
        model, accumulator = self.make(accumulation_steps=2)
        for _ in range(2):
            accumulator.backward(model(torch.ones(1, 2)).sum(), 1e308)
        assert_refused(accumulator.step, mk.errors.InputError, "weight of zero or more")

    @pytest.mark.parametrize(
        "settings",
        [
            {"accumulation_steps": 0},
            {"accumulation_steps": 2.0},
            {"accumulation_steps": True},
            {"max_grad_norm": 0.0},
            {"max_grad_norm": float("nan")},
            {"max_grad_norm": "1"},
            {"max_grad_norm": True},
            {"objective": "max"},
            {"accumulate_dtype": torch.float16},
        ],
    )
    def test_rejects_invalid_settings(self, settings):
        assert_refused(lambda: self.make(**settings), mk.errors.ConfigError, next(iter(settings)))

    @pytest.mark.parametrize(
        ("optimizer", "words"),
        [
            ([], "got an empty list"),
            (nn.Linear(2, 1), r"got a model \(Linear\)"),
            ([nn.Linear(2, 1)], r"got a model \(Linear\)"),
            (torch.optim.LBFGS(nn.Linear(2, 1).parameters()), r"LBFGS, whose step\(\) evaluates the loss again"),
        ],
    )
    def test_non_optimizers_and_optimizers_with_a_closure_are_refused(self, optimizer, words):
        error = mk.errors.ConfigError if isinstance(optimizer, torch.optim.LBFGS) else mk.errors.InputTypeError
        assert_refused(lambda: mk.GradientAccumulator(optimizer), error, words)


CHANGES = {
    "zeroed in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "zeroed in part": lambda model, optimizer: model[2].zero_grad(),
    "an inner backward": lambda model, optimizer: model(torch.ones(1, 4)).sum().backward(),
}


class TestChangedGradients:
    """Something else than the accumulator changes gradients between two micro-batches of a group."""

    @staticmethod
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    @pytest.mark.parametrize("way", CHANGES)
    def test_is_refused_in_a_loop(self, way):
        model, optimizer = self.make()
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        accumulator.backward(model(torch.ones(2, 4)).mean(), count=2)
        CHANGES[way](model, optimizer)
        loss = model(torch.ones(2, 4)).mean()
        assert_refused(lambda: accumulator.backward(loss, count=2), mk.errors.StateError, "remove zero_grad()")

    @pytest.mark.parametrize("way", CHANGES)
    def test_is_refused_in_a_loss_function(self, way):
        model, optimizer = self.make()
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=2, probe=False)

        def loss_fn(model, rows):
            if any(each.grad is not None for each in model.parameters()):
                CHANGES[way](model, optimizer)
            return model(rows).square().mean()

        assert_refused(
            lambda: trainer.train_step(torch.ones(4, 4), loss_fn), mk.errors.StateError, "since the last micro-batch"
        )

    def test_is_allowed_before_the_step(self):
        model, optimizer = self.make()
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        for _ in range(2):
            accumulator.backward(model(torch.ones(2, 4)).mean(), count=2)
        for each in model.parameters():
            each.grad.clamp_(-1, 1)
        assert accumulator.step()


def unfreeze_head(model, optimizer):
    model[2].requires_grad_(True)


def add_head(model, optimizer):
    optimizer.add_param_group({"params": list(model[2].parameters())})


def freeze_stem(model, optimizer):
    model[0].requires_grad_(False)


class TestParametersThatJoinOrLeave:
    """Parameters are unfrozen, added or frozen between two micro-batches: the group's step is the plain loop's."""

    @staticmethod
    def train(change, at, *, way, **settings):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        if change is unfreeze_head:
            model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters() if change is add_head else model.parameters(), lr=0.1)
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        for number, x in enumerate(torch.randn(4, 3, 6, dtype=torch.float64)):
            if number == at:
                change(model, optimizer)
                model[2].zero_grad() if change is add_head and way == "plain" else None
            loss = model(x).square().mean()
            if way == "plain":
                (loss / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                accumulator.backward(loss, count=3, **settings)
                accumulator.step()
        return dict(model.named_parameters())

    @pytest.mark.parametrize("settings", [{}, {"all_or_nothing": True}], ids=str)
    @pytest.mark.parametrize("at", [1, 2, None])  # in the middle of a group, at the start of one, never
    @pytest.mark.parametrize("change", [unfreeze_head, add_head, freeze_stem])
    def test_train_as_in_the_plain_loop(self, change, at, settings):
        found = self.train(change, at, way="memkit", **settings)
        torch.testing.assert_close(found, self.train(change, at, way="plain"), rtol=1e-12, atol=1e-14)

    def test_gradients_that_they_bring_are_dropped_with_a_warning(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
        x = torch.ones(1, 2, dtype=torch.float64)
        accumulator.backward(model(x).sum())
        model[1](x).sum().backward()
        optimizer.add_param_group({"params": list(model[1].parameters())})
        with pytest.warns(mk.MemkitWarning, match="gradients that another backward"):
            accumulator.backward(model(x).sum())
        torch.testing.assert_close(model[1].bias.grad, torch.full((1,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("num_more", [0, 1])
def test_code_before_the_step_sees_the_groups_mean(num_more):
    model, x, y, _ = make_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=3 - num_more)
    edges, whole = (0, 7, 15, ROWS), F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    right = torch.autograd.grad(whole, [each for each in model.parameters() if each is not model.unused])
    for start, stop in pairwise(edges):  # one more than announced, without a step between: still exact
        mean = F.cross_entropy(model(x[start:stop]).flatten(0, 1), y[start:stop].flatten())
        accumulator.backward(mean, count=(y[start:stop] != -100).sum())
    found = [each.grad for each in model.parameters() if each.grad is not None]
    if not num_more:
        assert max(relative_error(a, b) for a, b in zip(found, right, strict=True)) <= 1e-14
    before = gradients(model)
    state = copy.deepcopy(accumulator.state_dict())
    accumulator.discard()
    accumulator.load_state_dict(state)
    assert_same(gradients(model), before)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(each.grad.clone() for each in model.parameters() if each.grad is not None)
    )
    assert accumulator.step()
    assert max(relative_error(a, b) for a, b in zip(seen, right, strict=True)) <= 1e-14


@pytest.mark.parametrize("num_announced", [3, 2])  # with 2, one more micro-batch follows the normalized group
@pytest.mark.parametrize("goes_on", ["same", "loaded"])
def test_taking_a_state_changes_no_gradient(num_announced, goes_on):
    def train(takes_state):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=num_announced)
        for part in torch.randn(11, 64).split([5, 3, 3]):
            accumulator.backward(model(part).square().mean(), count=len(part))
            if takes_state:
                state = copy.deepcopy(accumulator.state_dict())
                if goes_on == "loaded":
                    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=num_announced)
                    accumulator.load_state_dict(state)
        assert accumulator.step()
        return model.weight

    assert torch.equal(train(takes_state=True), train(takes_state=False))


def test_a_whole_group_goes_on_with_the_other_objective():
    """Its gradients, in the state, are those of the mean."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=2)
    for count in (2, 4):
        accumulator.backward(model(torch.ones(1, 2)).sum(), count=count)
    state = copy.deepcopy(accumulator.state_dict())
    before = model.bias.item()
    other = mk.GradientAccumulator(optimizer, accumulation_steps=2, objective="sum")
    other.load_state_dict(state)
    assert other.step()
    assert before - model.bias.item() == pytest.approx(6.0)


def test_a_state_without_its_pending_group_starts_a_new_sum():
    model = nn.Linear(2, 1)
    accumulator = mk.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=1.0), accumulation_steps=2)
    for count in (2, 4):
        accumulator.backward(model(torch.ones(1, 2)).sum(), count=count)
    accumulator.load_state_dict(without_pending(accumulator.state_dict()))
    before = model.bias.item()
    for count in (2, 6):
        accumulator.backward(model(torch.ones(1, 2)).sum(), count=count)
    assert accumulator.step()
    assert before - model.bias.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("labels", "way", "reduction", "as_tensor", "num_parts"),
    one_in_product(
        5,
        [[0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 1]],
        ["accumulator", "wrapper", "SplitLoss"],
        ["sum", "mean"],
        [False, True],
        [1, 2, 8],
    ),
)
def test_a_part_in_which_nothing_counts_may_have_a_constant_loss(labels, way, reduction, as_tensor, num_parts):
    """As losses are written whose positives may be missing."""

    def loss_fn(model, batch):
        positive = batch[1] == 1
        count = positive.sum() if as_tensor else int(positive.sum())
        if not positive.any():
            return mk.Loss(**{reduction: torch.zeros((), dtype=torch.float64)}, count=count)
        total = model(batch[0])[positive].square().sum()
        return mk.Loss(**{reduction: total if reduction == "sum" else total / count}, count=count)

    torch.manual_seed(0)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.tensor(labels)
    model, plain = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
    plain.load_state_dict(model.state_dict())
    loss_fn(plain, (x, y)).average().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if way == "wrapper":
        trainer = mk.MemoryEfficientTrainingWrapper(model, optimizer, accumulation_steps=num_parts)
        trainer.train_step((x, y), loss_fn)
    elif way == "SplitLoss":
        mk.SplitLoss(model, num_microbatches=num_parts)((x, y), loss_fn).backward()
        optimizer.step()
    else:
        accumulator = mk.GradientAccumulator(optimizer, accumulation_steps=num_parts)
        for part in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            loss = loss_fn(model, part)
            accumulator.backward(loss.value, count=loss.count, reduction=reduction)
            accumulator.step()
    torch.testing.assert_close(model.weight, plain.weight)
