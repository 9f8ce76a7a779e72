"""The gradient in two passes is the whole batch's, with one chunk's activations; a split loss is not."""

import copy
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

import memkit as mk
from memkit.errors import ConfigError, InputError, InputTypeError
from memkit.train.contrastive import cached_backward
from tests.helpers import flat_gradient, gradient_of, one_in, relative_error
from tests.toys import mlp

ROWS = 24


class Towers(nn.Module):
    """Two encoders of a dict batch, with a temperature that belongs to no row."""

    def __init__(self):
        super().__init__()
        self.image = mlp(6, 32, 8)
        self.text = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(48, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        return {"image": self.image(batch["image"]), "text": (self.text(batch["text"]),)}


class Tower(nn.Module):
    """One encoder of a tensor, called on two views."""

    def __init__(self, *extra):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), *extra, nn.Linear(32, 8))

    def forward(self, views):
        return self.layers(views[0]), self.layers(views[1])


def info_nce(embeddings, scale=5.0):
    a, b = (F.normalize(each) for each in embeddings)
    logits = scale * a @ b.T
    return F.cross_entropy(logits, torch.arange(len(a)))


def make_views(dtype=torch.float64):
    return torch.randn(ROWS, 6, dtype=dtype), torch.randn(ROWS, 6, dtype=dtype)


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 23, 24, 100])
def test_every_chunk_size_gives_the_whole_batch_gradient(chunk_size):
    model, views = Tower().double(), make_views()
    want_loss = info_nce(model(views))
    want = gradient_of(want_loss, model, flat=True)
    loss = cached_backward(model, views, info_nce, chunk_size=chunk_size)
    assert relative_error(flat_gradient(model), want) <= 1e-14
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want_loss.detach(), rtol=1e-14, atol=0)


def test_a_split_loss_has_another_gradient():
    """Negative control: the same chunks, each with the loss over its own rows."""
    model, views = Tower().double(), make_views()
    want = gradient_of(info_nce(model(views)), model, flat=True)
    for part in zip(*(view.split(8) for view in views), strict=True):
        (info_nce(model(part)) / 3).backward()
    assert relative_error(flat_gradient(model), want) > 0.1


def test_two_towers_with_a_dict_batch_and_a_temperature():
    model = Towers().double()
    batch = {"image": torch.randn(ROWS, 6, dtype=torch.float64), "text": torch.randint(0, 20, (ROWS, 3))}

    def loss_on_embeddings(embeddings):
        return info_nce((embeddings["image"], embeddings["text"][0]), model.log_scale.exp())

    want = gradient_of(loss_on_embeddings(model(batch)), model, flat=True)
    cached_backward(model, batch, loss_on_embeddings, chunk_size=7)
    assert relative_error(flat_gradient(model), want) <= 1e-14


class RandomScale(nn.Module):
    """Draws from Python's random state, which torch's checkpoint does not replay."""

    def forward(self, x):
        return x * (1 + random.random())


def test_random_draws_are_the_same_in_both_passes():
    model, views = Tower(nn.Dropout(0.5), RandomScale()).double(), make_views()
    chunks = list(zip(*(view.split(8) for view in views), strict=True))
    torch.manual_seed(5)
    random.seed(5)
    encoded = [model(chunk) for chunk in chunks]  # draws chunk after chunk, as cached_backward does
    info_nce([torch.cat(column) for column in zip(*encoded, strict=True)]).backward()
    want, state = flat_gradient(model), (torch.get_rng_state(), random.getstate())
    model.zero_grad()
    torch.manual_seed(5)
    random.seed(5)
    cached_backward(model, views, info_nce, chunk_size=8, check=False)  # one draw for all rows of a call
    assert relative_error(flat_gradient(model), want) <= 1e-14
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_batch_statistics_are_those_of_the_chunks_and_change_once():
    model, views = Tower(nn.BatchNorm1d(32)).double(), make_views()
    twin = copy.deepcopy(model)
    encoded = [twin(chunk) for chunk in zip(*(view.split(8) for view in views), strict=True)]
    info_nce([torch.cat(column) for column in zip(*encoded, strict=True)]).backward()
    with pytest.warns(mk.MemkitWarning, match=r"in training mode layers\.2 would see the statistics of each chunk"):
        cached_backward(model, views, info_nce, chunk_size=8)
    assert relative_error(flat_gradient(model), flat_gradient(twin)) <= 1e-14
    for got, want in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(got, want)
    assert model.layers[2].num_batches_tracked == 6  # three chunks with two views each


def test_under_autocast_both_passes_run_in_half_precision():
    model, views = Tower(), make_views(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = [model(chunk) for chunk in zip(*(view.split(8) for view in views), strict=True)]
        loss = info_nce([torch.cat(column).float() for column in zip(*encoded, strict=True)])
    want = gradient_of(loss, model, flat=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = cached_backward(model, views, lambda e: info_nce([each.float() for each in e]), chunk_size=8)
    assert torch.equal(got, loss.detach())
    assert torch.equal(flat_gradient(model), want)
    model.zero_grad()
    cached_backward(model, views, info_nce, chunk_size=8)
    assert relative_error(flat_gradient(model), want) > 1e-4  # in float32 it would have been another gradient


def test_an_accumulator_takes_the_loss():
    """It tells autograd to stop at its own parameters, which a second backward by hand would never reach."""
    model, views = Tower().double(), make_views()
    more = make_views()
    want = gradient_of(((info_nce(model(views)) + 3 * info_nce(model(more))) / 4), model, flat=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(model)))
    with mk.GradientAccumulator(optimizer, accumulation_steps=2, check_weights=False) as accumulator:
        for batch, weight in ((views, 1), (more, 3)):
            cached_backward(
                model,
                batch,
                info_nce,
                chunk_size=5,
                backward=lambda loss, weight=weight: accumulator.backward(loss, count=weight),
            )
            accumulator.step()
    assert relative_error(seen[0], want) <= 1e-14


def live_peak_bytes(step):
    with profile(profile_memory=True) as recorded:
        step()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_memory_is_one_chunks_in_both_passes():
    depth, width, rows, chunk_size = 12, 128, 256, 32
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])
    x = torch.randn(rows, width)

    def loss_fn(embeddings):
        return info_nce((embeddings, embeddings.roll(1, 0)))

    for parameter in model.parameters():  # gradients are there before and after: they are not counted
        parameter.grad = torch.zeros_like(parameter)
    whole = live_peak_bytes(lambda: loss_fn(model(x)).backward())
    chunked = live_peak_bytes(lambda: cached_backward(model, x, loss_fn, chunk_size=chunk_size))
    row_bytes = depth * width * 4
    on_embeddings = live_peak_bytes(lambda: loss_fn(torch.randn(rows, width, requires_grad=True)).backward())
    assert whole > rows * row_bytes
    # a chunk's activations, the loss's own need, and temporaries of one layer's gradient
    assert chunked < chunk_size * row_bytes + on_embeddings + 2 * rows * width * 4 + 2 * width * width * 4
    assert chunked < 0.75 * whole


@pytest.mark.parametrize("chunk_size", [0, -3, 2.0, True])
def test_a_wrong_chunk_size(chunk_size):
    with pytest.raises(ConfigError, match=r"cached_backward.* got chunk_size=.*expected a whole number, 1 or more"):
        cached_backward(Tower(), make_views(torch.float32), info_nce, chunk_size=chunk_size)


def test_wrong_arguments():
    views = make_views(torch.float32)
    cached_backward = functools.partial(mk.train.cached_backward, check=False)  # the checks of each chunk
    with pytest.raises(InputTypeError, match="put the towers into one module"):
        cached_backward(lambda x: x, views, info_nce, chunk_size=4)
    with pytest.raises(InputError, match="got no rows"):
        cached_backward(Tower(), (torch.ones(0, 6), torch.ones(0, 6)), info_nce, chunk_size=4)

    class Pooled(Tower):
        def forward(self, views):
            return super().forward(views)[0].mean(0)

    with pytest.raises(InputError, match=r"a tensor of shape \(8,\) from the encoder for 4 rows"):
        cached_backward(Pooled(), views, info_nce, chunk_size=4)

    class Named(Tower):
        def forward(self, views):
            return super().forward(views)[0], 3.5

    with pytest.raises(InputTypeError, match="a float from the encoder"):
        cached_backward(Named(), views, info_nce, chunk_size=4)


# ---- encoders of which chunks do not give the whole batch's gradient


class ByHand(nn.Module):
    """A normalization over the batch that has no name of its own."""

    def __init__(self, *, in_training_only):
        super().__init__()
        self.in_training_only = in_training_only

    def forward(self, x):
        if self.in_training_only and not self.training:
            return x
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


class Normalizer(nn.Module):
    """Running statistics that reach the embeddings, and change with each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(32, dtype=torch.float64))

    def forward(self, x):
        before = self.running
        self.running = 0.5 * before + 0.5 * x.detach().mean(0)
        return x - before


class AttentionOverBatch(nn.Module):
    def forward(self, x):
        return (x @ x.T).softmax(-1) @ x


class Counting(nn.Module):
    """A buffer that each call changes and no embedding depends on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        self.seen *= 0.5
        return x


class Caching(nn.Module):
    """A buffer that the first call fills."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(32, dtype=torch.float64))

    def forward(self, x):
        self.table.copy_(torch.arange(32.0))
        return x + self.table


def whole_error(model, views, **settings):
    """How far the gradient in chunks is from the whole batch's."""
    twin = copy.deepcopy(model)
    info_nce(twin(views)).backward()
    cached_backward(model, views, info_nce, chunk_size=8, **settings)
    return relative_error(flat_gradient(model), flat_gradient(twin))


class FirstMean(nn.Linear):
    """It sets its bias from its first batch."""

    is_set = False

    def forward(self, x):
        if not self.is_set:
            self.bias.data.copy_(-F.linear(x, self.weight).detach().mean(0))
            self.is_set = True
        return super().forward(x)


class Centering(nn.Module):
    """Subtracts the batch's mean, or divides by its deviation, without a gradient."""

    def __init__(self, *, scales):
        super().__init__()
        self.scales = scales

    def forward(self, x):
        return x / x.detach().std(0) if self.scales else x - x.detach().mean(0)


class TestEncodersMixingRows:
    @pytest.mark.parametrize(
        ("layer", "text"),
        [
            (nn.BatchNorm1d(32), r"in training mode layers\.2 would see .*Use GroupNorm or LayerNorm .*, freeze"),
            (nn.BatchNorm1d(32, track_running_stats=False).eval(), r"in training mode layers\.2 would see"),
            (ByHand(in_training_only=True), r"in training mode layers\.2 would see"),
        ],
    )
    def test_are_warned_of(self, layer, text):
        model, views = Tower(layer).double(), make_views()
        with pytest.warns(mk.MemkitWarning, match=text):
            assert whole_error(model, views) > 1e-3
        model.zero_grad()
        cached_backward(model, views, info_nce, chunk_size=8)  # said once

    def test_names_state_reaching_the_embeddings(self):
        model, x = nn.Sequential(nn.Linear(6, 32), Normalizer(), nn.Tanh()).double(), make_views()[0]
        with pytest.warns(mk.MemkitWarning, match=r"state that the embeddings depend on \(.*1\.running"):
            cached_backward(model, x, lambda e: info_nce((e, e.roll(1, 0))), chunk_size=8)

    def test_tells_how_to_update_a_spectral_norm_before_the_call(self):
        layer, x = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 32)).double(), make_views()[0]
        encoder = nn.Sequential(layer)
        with pytest.warns(mk.MemkitWarning, match=r"once per step, outside of forward.*parametrizations\.eval\(\)"):
            cached_backward(encoder, x, lambda e: info_nce((e, e.roll(1, 0))), chunk_size=8)
        layer.parametrizations.train()
        layer.weight  # noqa: B018 - a step of power iteration
        layer.parametrizations.eval()
        cached_backward(encoder, x, lambda e: info_nce((e, e.roll(1, 0))), chunk_size=8)  # a warning is an error

    @pytest.mark.parametrize("layer", one_in(3, [AttentionOverBatch(), ByHand(in_training_only=False), Normalizer()]))
    def test_are_rejected_if_evaluation_mixes_rows(self, layer):
        model, views = Tower(layer).double(), make_views()
        with pytest.raises(
            ConfigError, match=r"depends on other rows.*move operations that mix rows .* into loss_on_embeddings"
        ):
            whole_error(model, views)
        with pytest.raises(ConfigError, match="depends on other rows"):  # each time
            cached_backward(model, views, info_nce, chunk_size=8)
        assert whole_error(model, views, check=False) > 1e-3

    @pytest.mark.parametrize("scales", [False, True])
    def test_are_rejected_if_they_center_without_a_gradient(self, scales):
        """A sum of the embeddings has the same gradient, whatever was added to them."""
        model, x = nn.Sequential(nn.Linear(6, 32), Centering(scales=scales)).double(), make_views()[0]
        with pytest.raises(ConfigError, match="depends on other rows"):
            cached_backward(model, x, lambda e: info_nce((e, e.roll(1, 0))), chunk_size=8)

    def test_an_encoder_that_its_first_forward_sets_has_a_way_out_of_its_own(self):
        encoder, x = nn.Sequential(FirstMean(6, 32)).double(), make_views()[0]
        how = {"loss_on_embeddings": lambda e: info_nce((e, e.roll(1, 0))), "chunk_size": 8}
        with pytest.raises(ConfigError, match=r"Way out: The first forward sets .*0\.bias.* run the model once"):
            cached_backward(encoder, x, **how)
        encoder(x)
        cached_backward(encoder, x, **how)

    def test_one_chunk_is_the_whole_batch(self):
        model, views = Tower(nn.BatchNorm1d(32)).double(), make_views()
        cached_backward(model, views, info_nce, chunk_size=ROWS)
        assert model.layers[2].num_batches_tracked == 2

    @pytest.mark.parametrize(
        "layer",
        [nn.LayerNorm(32), nn.Dropout(0.3), nn.BatchNorm1d(32).eval(), Caching(), nn.Dropout1d(0.2), nn.Identity()],
    )
    def test_others_are_not(self, layer):
        model, views = Tower(layer).double(), make_views()
        error = whole_error(model, views)
        assert error > 1e-3 if "Dropout" in type(layer).__name__ else error <= 1e-14  # chunks drop other units

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lower_precision_is_no_fault(self, dtype):
        model = Tower(nn.LayerNorm(32)).to(dtype)
        cached_backward(model, make_views(dtype), lambda e: info_nce([each.float() for each in e]), chunk_size=8)
        bad = Tower(nn.BatchNorm1d(32)).to(dtype)
        with pytest.warns(mk.MemkitWarning, match="would see the statistics"):
            cached_backward(bad, make_views(dtype), lambda e: info_nce([each.float() for each in e]), chunk_size=8)

    def test_another_mode_is_looked_at_again(self):
        model, views = Tower(nn.BatchNorm1d(32)).double().eval(), make_views()
        cached_backward(model, views, info_nce, chunk_size=8)
        model.train()
        with pytest.warns(mk.MemkitWarning, match="would see the statistics"):
            cached_backward(model, views, info_nce, chunk_size=8)

    def test_names_buffers_changed_by_each_chunk(self):
        model, views = Tower(Counting()).double(), make_views()
        with pytest.warns(mk.MemkitWarning, match=r"each chunk changes the buffers layers\.2\.seen"):
            assert whole_error(model, views) <= 1e-14
        cached_backward(model, views, info_nce, chunk_size=8)  # said once

    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_names_frozen_parameters_moved_by_each_chunk(self, is_replaced):
        """As momentum encoders do in their forward."""

        class Momentum(nn.Module):
            def __init__(self):
                super().__init__()
                self.query, self.key = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)

            @torch.no_grad()
            def forward(self, x):
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    if is_replaced:
                        key.data = 0.9 * key.data + 0.1 * query.data
                    else:
                        key.lerp_(query, 0.1)
                keys = self.key(x)
                with torch.enable_grad():
                    return self.query(x), keys

        model, x = Momentum().double(), make_views()[0]
        with pytest.warns(mk.MemkitWarning, match=r"moves frozen parameters \(key.weight, key.bias\)") as told:
            cached_backward(model, x, info_nce, chunk_size=8)
        assert len(told) == 1
        cached_backward(model, x, info_nce, chunk_size=8)  # said once
        cached_backward(Momentum().double(), x, info_nce, chunk_size=len(x))  # once, as without memkit

    def test_names_a_result_that_the_encoder_keeps(self):
        """As mixtures of experts keep their balancing loss."""

        class Balanced(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.expert, self.aux = nn.Linear(6, 3), nn.Linear(6, 8), None

            def forward(self, x):
                p = self.gate(x).softmax(-1)
                self.aux = p.var(0).sum()
                return p.amax(1, keepdim=True) * self.expert(x)

        model, x = Balanced().double(), make_views()[0]
        with pytest.warns(mk.MemkitWarning, match=r"keeps a result in the attribute 'aux'") as told:
            cached_backward(model, x, lambda z: z.square().mean() + model.aux.detach(), chunk_size=8)
        assert len(told) == 1
        cached_backward(Balanced().double(), x, lambda z: z.square().mean(), chunk_size=len(x))  # whole

    def test_runs_on_a_virtual_gpu_without_a_check(self):
        """There are no values to compare."""

        def center(embeddings):
            return (embeddings - embeddings.mean(0)).square().mean()

        with mk.VirtualGPU("T4"):
            model = nn.Sequential(nn.Linear(6, 8), nn.GELU()).cuda()
            cached_backward(model, make_views(torch.float32)[0].cuda(), center, chunk_size=8)
            assert model[0].weight.grad is not None

    def test_looking_leaves_no_trace(self):
        model, views = Tower(nn.Dropout(0.5), nn.BatchNorm1d(32)).double(), make_views()
        twin, state = copy.deepcopy(model), torch.get_rng_state()
        with pytest.warns(mk.MemkitWarning, match="would see the statistics"):
            cached_backward(model, views, info_nce, chunk_size=8)
        torch.set_rng_state(state)
        cached_backward(twin, views, info_nce, chunk_size=8, check=False)
        assert torch.equal(flat_gradient(model), flat_gradient(twin))
        for got, want in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(got, want)

    def test_a_frozen_encoder_needs_no_look(self):
        model, views = Tower(nn.BatchNorm1d(32)).double(), make_views()
        head = nn.Linear(8, 8).double()
        model.requires_grad_(False)
        with pytest.warns(mk.MemkitWarning, match=r"each chunk changes the buffers layers\.2\.running_mean"):
            cached_backward(model, views, lambda e: info_nce([head(each) for each in e]), chunk_size=8)
