"""The probe knows which modules and losses cannot be split, over a zoo with known answers, and leaves no trace."""

import copy
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit import ConfigError, Loss, MemkitWarning
from memkit.train import probe as probe_module
from memkit.train.probe import SplitVerdict, probe_split, warn_or_refuse
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.allocations import trace_allocations

ROWS = 12


def square_loss(model, batch):
    return model(batch).pow(2).mean()


def label_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def net(*layers):
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 5))


def conv(*layers):
    return nn.Sequential(nn.Conv2d(2, 8, 3), *layers, nn.SiLU(), nn.Conv2d(8, 3, 1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.block(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class RowNorm32(nn.Module):
    """As language models do: the norm in float32, whatever comes."""

    def forward(self, x):
        return (x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)


class Half(nn.Module):
    def forward(self, x):
        return x.bfloat16().tanh().to(x.dtype)


class HandWrittenNorm(nn.Module):
    """A batch normalisation that is no subclass of torch's."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-5) if self.training else x


class AlwaysCentred(nn.Module):
    """Mixes the rows in evaluation mode too."""

    def forward(self, x):
        return x - x.mean(0)


class OwnBatchNorm(nn.BatchNorm1d):
    """A user's subclass."""


class Words(nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0, **keywords)
        self.head = nn.Linear(8, 20)

    def forward(self, words):
        return self.head(self.embed(words))


class Gram(nn.Module):
    """A temperature beside an encoder."""

    def __init__(self, *layers):
        super().__init__()
        self.encoder = net(*layers)
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, views):
        a, b = (F.normalize(self.encoder(view)) for view in views)
        return self.log_scale.exp() * a @ b.T


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), nn.Linear(1, 5)

    def forward(self, x, s):
        return self.net(x) * self.scale(s)


def info_nce(model, views):
    logits = model(views)
    return F.cross_entropy(logits, torch.arange(len(logits)))


def hard_triplet(model, batch):
    distances = torch.cdist(model(batch[0]), model(batch[0]))
    same = batch[1][:, None] == batch[1]
    return F.relu(distances.where(same, 0).amax(1) - distances.where(~same, 9).amin(1) + 1).mean()


def batch_dice(model, batch):
    p, y = model(batch).sigmoid(), (batch > 0).to(batch.dtype)[..., :5]
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def sample_dice(model, batch):
    p, y = model(batch).sigmoid(), (batch > 0).to(batch.dtype)[..., :5]
    return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1))).mean()


def pairwise_ranking(model, batch):
    scores, y = model(batch[0])[:, 0], batch[1]
    wins = y[:, None] > y
    return (F.softplus(scores - scores[:, None]) * wins).sum() / wins.sum().clamp(min=1)


def correlation(model, batch):
    a, b = model(batch)[:, 0], batch[:, 0]
    return -torch.corrcoef(torch.stack([a, b]))[0, 1]


def by_batch_maximum(model, batch):
    out = model(batch)
    return (out / out.detach().abs().max()).pow(2).mean()


def variance_regularised(model, batch):
    out = model(batch)
    return out.pow(2).mean() + 0.01 * F.relu(1 - out.std(0)).mean()


def make_tokens():
    words = torch.randint(1, 20, (ROWS, 7))
    labels = words.clone()
    labels[torch.arange(7)[None] >= torch.arange(1, ROWS + 1)[:, None] % 7 + 1] = -100
    return words, labels


def token_mean(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def token_sum(model, batch):
    loss_sum = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Loss(sum=loss_sum, count=(batch[1] != -100).sum())


def class_weights(model):
    return torch.arange(1, 6, dtype=next(model.parameters()).dtype)


def class_weighted(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=class_weights(model))


def class_weighted_sum(model, batch):
    weight = class_weights(model)
    loss_sum = F.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="sum")
    return Loss(sum=loss_sum, count=weight[batch[1]].sum())


def plain_sum(model, batch):
    return model(batch).pow(2).sum()


def sum_with_count(model, batch):
    return Loss(sum=model(batch).pow(2).sum(), count=len(batch))


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).pow(2).mean()


def dict_loss(model, batch):
    return F.mse_loss(model(batch["x"], batch["more"][0]), batch["y"])


def rows(*shape):
    return lambda: torch.randn(ROWS, *shape)


def labelled():
    return torch.randn(ROWS, 6), torch.arange(ROWS) % 5


def views():
    return torch.randn(ROWS, 6), torch.randn(ROWS, 6)


def evaluated(model, *names):
    for name in names:
        model.get_submodule(name).eval()
    return model


EXACT = {
    "linear": (net, rows(6), square_loss),
    "layer norm": (lambda: net(nn.LayerNorm(8)), rows(6), square_loss),
    "group norm": (lambda: conv(nn.GroupNorm(2, 8)), rows(2, 6, 6), square_loss),
    "instance norm": (lambda: conv(nn.InstanceNorm2d(8, affine=True)), rows(2, 6, 6), square_loss),
    "instance norm with statistics": (
        lambda: conv(nn.InstanceNorm2d(8, track_running_stats=True)),
        rows(2, 6, 6),
        square_loss,
    ),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh()),
        rows(6),
        square_loss,
    ),
    "attention with dropout": (Attention, rows(4, 8), square_loss),
    "GRU with dropout": (Recurrent, rows(4, 8), square_loss),
    "dropout": (lambda: net(nn.Dropout(0.5)), rows(6), square_loss),
    "functional dropout": (lambda: net(FunctionalDropout()), rows(6), square_loss),
    "float32 inside": (lambda: net(RowNorm32()), rows(6), square_loss),
    "batch norm in evaluation": (lambda: evaluated(net(nn.BatchNorm1d(8)), "1"), rows(6), square_loss),
    "hand-written norm in evaluation": (lambda: evaluated(net(HandWrittenNorm()), "1"), rows(6), square_loss),
    "complex weights": (
        lambda: nn.Sequential(nn.Linear(6, 4, dtype=torch.complex64)),
        lambda: torch.randn(ROWS, 6, dtype=torch.complex64),
        lambda model, x: model(x).abs().pow(2).mean(),
    ),
    "classification": (net, labelled, label_loss),
    "dice per sample": (net, rows(6), sample_dice),
    "tokens with count": (Words, make_tokens, token_sum),
    "sparse embedding": (lambda: Words(sparse=True), make_tokens, token_sum),
    "class weights with count": (net, labelled, class_weighted_sum),
    "sum with count": (net, rows(6), sum_with_count),
    "autocast": (net, rows(6), autocast_loss),
    "dict batch": (
        TwoInputs,
        lambda: {"x": torch.randn(ROWS, 6), "more": (torch.randn(ROWS, 1),), "y": torch.randn(ROWS, 5)},
        dict_loss,
    ),
    "frozen part": (lambda: nn.Sequential(net().requires_grad_(False), nn.Linear(5, 2)), rows(6), square_loss),
}

# what is at fault: modules, and what of the loss
INEXACT = {
    "batch norm": (lambda: net(nn.BatchNorm1d(8)), rows(6), square_loss, ("1",), None),
    "batch norm 2d": (lambda: conv(nn.BatchNorm2d(8)), rows(2, 6, 6), square_loss, ("1",), None),
    "batch norm 3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.Tanh()),
        rows(1, 4, 4, 4),
        square_loss,
        ("1",),
        None,
    ),
    "batch norm with cumulative statistics": (
        lambda: net(nn.BatchNorm1d(8, momentum=None)),
        rows(6),
        square_loss,
        ("1",),
        None,
    ),
    "batch norm without statistics, in evaluation": (
        lambda: evaluated(net(nn.BatchNorm1d(8, track_running_stats=False)), "1"),
        rows(6),
        square_loss,
        ("1",),
        None,
    ),
    "synchronised batch norm": (lambda: net(nn.SyncBatchNorm(8)), rows(6), square_loss, ("1",), None),
    "subclass of batch norm": (lambda: net(OwnBatchNorm(8)), rows(6), square_loss, ("1",), None),
    "two batch norms, one in evaluation": (
        lambda: evaluated(net(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), "2"),
        rows(6),
        square_loss,
        ("1",),
        None,
    ),
    "batch norm behind functional dropout": (
        lambda: net(FunctionalDropout(), nn.BatchNorm1d(8)),
        rows(6),
        square_loss,
        ("2",),
        None,
    ),
    "hand-written norm": (lambda: net(HandWrittenNorm()), rows(6), square_loss, ("1",), None),
    "hand-written norm and batch norm": (
        lambda: net(HandWrittenNorm(), nn.BatchNorm1d(8)),
        rows(6),
        square_loss,
        ("2", "1"),
        None,
    ),
    "centred over the batch": (lambda: net(AlwaysCentred()), rows(6), square_loss, (), "rows"),
    "InfoNCE": (Gram, views, info_nce, (), "rows"),
    "InfoNCE over batch norm": (lambda: Gram(nn.BatchNorm1d(8)), views, info_nce, ("encoder.1",), "rows"),
    "hard triplets": (net, labelled, hard_triplet, (), "rows"),
    "dice over the batch": (net, rows(6), batch_dice, (), "rows"),
    "pairwise ranking": (net, labelled, pairwise_ranking, (), "rows"),
    "correlation": (net, rows(6), correlation, (), "rows"),
    "divided by the batch's maximum": (net, rows(6), by_batch_maximum, (), "rows"),
    "small term over the batch": (net, rows(6), variance_regularised, (), "rows"),
    "tokens without count": (Words, make_tokens, token_mean, (), "weights"),
    "class weights without count": (net, labelled, class_weighted, (), "weights"),
    "sum without count": (net, rows(6), plain_sum, (), "weights"),
    "batch norm and class weights": (
        lambda: net(nn.BatchNorm1d(8)),
        labelled,
        class_weighted,
        ("1",),
        "weights",
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_can_be_split(name):
    make_model, make_batch, loss_fn = EXACT[name]
    verdict = probe_split(make_model(), make_batch(), loss_fn)
    assert verdict.exact is True, verdict
    assert verdict.error <= (1e-6 if name == "float32 inside" else 1e-14)
    assert (verdict.modules, verdict.loss, verdict.advice) == ((), None, "")


@pytest.mark.parametrize("name", INEXACT)
def test_what_cannot_be_split_and_why(name):
    make_model, make_batch, loss_fn, modules, loss = INEXACT[name]
    verdict = probe_split(make_model(), make_batch(), loss_fn)
    assert verdict.exact is False, verdict
    assert verdict.error > 1e-3
    assert (verdict.modules, verdict.loss) == (modules, loss)
    assert all(module in verdict.advice for module in modules)
    assert {"rows": "cached_backward", "weights": "mk.Loss(mean=loss, count=n)", None: ""}[loss] in verdict.advice


@pytest.mark.parametrize("num_rows", range(2, 8))
def test_few_rows_are_enough(num_rows):
    x = torch.randn(num_rows, 6)
    assert probe_split(net(), x, square_loss).exact is True
    assert probe_split(Gram(), (x, x + 1), info_nce).loss == "rows"


def test_a_part_without_any_label_is_a_matter_of_weights():
    words, labels = make_tokens()
    labels[5:8] = -100  # the second part's mean is 0 / 0
    assert probe_split(Words(), (words, labels), token_mean).loss == "weights"
    assert probe_split(Words(), (words, labels), token_sum).exact is True


def test_nothing_of_the_users_changes():
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5))
    evaluated(model, "2")
    calls = []
    model[0].register_forward_hook(lambda module, args, out: calls.append(module))
    model(torch.randn(4, 6)).sum().backward()
    calls.clear()
    batch = torch.randn(ROWS, 6)
    torch.randn(3), np.random.rand(3), random.random()
    before = (
        copy.deepcopy(model.state_dict()),
        [p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        batch.clone(),
        (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        [(id(p), p.dtype) for p in model.parameters()],
    )

    def loss_fn(model, x):
        noise = random.random() + np.random.rand() + torch.rand(())
        return model(x.mul_(2)).pow(2).mean() + 0 * noise

    verdict = probe_split(model, batch, loss_fn)
    assert (verdict.exact, verdict.modules) == (False, ("1",))
    state, gradients, training, kept_batch, (torch_state, numpy_state, python_state), parameters = before
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))
    assert [module.training for module in model.modules()] == training
    assert torch.equal(batch, kept_batch)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert random.getstate() == python_state
    assert [(id(p), p.dtype) for p in model.parameters()] == parameters
    assert calls  # hooks run, on the copy only
    assert model[0] not in calls


def test_it_works_where_gradients_are_off():
    with torch.no_grad():
        assert probe_split(net(), torch.randn(ROWS, 6), square_loss).exact is True


class Noisy(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("this model holds a socket")


def refuses_float64(model, x):
    if x.dtype == torch.float64:
        raise RuntimeError("no kernel for Double")
    return model(x).mean()


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "reason"),
    [
        (net(), torch.randn(1, 6), square_loss, "the batch has a single row"),
        (net(), [object()], square_loss, "InputError: splitting a batch: got a object in it"),
        (net().requires_grad_(False), torch.randn(4, 6), square_loss, "no parameter that wants a gradient"),
        (net(Noisy()), torch.randn(4, 6), square_loss, "the gradient is random beyond dropout"),
        (net(Half()), torch.randn(4, 6), square_loss, "or computed in half precision"),
        (Uncopyable(6, 2), torch.randn(4, 6), square_loss, "TypeError: this model holds a socket"),
        (net(), torch.randn(4, 6), refuses_float64, "RuntimeError: no kernel for Double"),
        (net(), torch.randn(4, 6), lambda model, x: x.mean(), "does not require grad"),
        (net(), torch.full((4, 6), torch.nan), square_loss, "the gradient is zero or not finite"),
        (net(), torch.randn(4, 6), lambda model, x: 0 * model(x).mean(), "the gradient is zero or not finite"),
    ],
)
def test_what_is_in_the_way_is_said_and_no_error(model, batch, loss_fn, reason):
    verdict = probe_split(model, batch, loss_fn)
    assert verdict.exact is None
    assert reason in verdict.reason


def test_a_large_model_is_not_probed_but_scanned():
    model = net(nn.BatchNorm1d(8))
    num_bytes = sum(p.nbytes for p in model.parameters())
    assert probe_split(model, torch.randn(ROWS, 6), square_loss, max_parameter_bytes=num_bytes).exact is False
    verdict = probe_split(model, torch.randn(ROWS, 6), square_loss, max_parameter_bytes=num_bytes - 1)
    assert (verdict.exact, verdict.modules) == (None, ("1",))
    assert verdict.reason.startswith("the parameters take")


def test_short_host_memory_is_an_obstacle():
    model = nn.Linear(100, 100, bias=False)  # 80 KB in float64, six times
    assert probe_module._obstacle(model, 8, 2**20, 480_000) == ""
    assert probe_module._obstacle(model, 8, 2**20, 479_999).startswith("host memory is short: 1.83 MiB available")


def test_several_processes_are_an_obstacle():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        verdict = probe_split(net(nn.BatchNorm1d(8)), torch.randn(8, 6), square_loss)
    finally:
        torch.distributed.destroy_process_group()
    assert (verdict.exact, verdict.modules) == (None, ("1",))
    assert "could wait for ever" in verdict.reason


def test_a_compiled_model_is_probed_without_compiling():
    model = torch.compile(net(nn.BatchNorm1d(8)), backend=lambda graph, inputs: pytest.fail("compiled"))
    assert probe_split(model, torch.randn(8, 6), square_loss).modules == ("_orig_mod.1",)


def test_activations_over_the_limit_are_tried_with_fewer_rows_then_given_up(monkeypatch):
    """One row saves 2 x 8 KiB in float64 for backward, beside 1 KiB of weights."""
    model, batch = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Tanh()), torch.randn(8, 1, 1024)
    seen = []

    def loss_fn(model, x):
        seen.append(len(x))
        return model(x).square().mean()

    monkeypatch.setattr(probe_module, "_MAX_ACTIVATION_BYTES", 100 * 2**10)
    assert probe_split(model, batch, loss_fn).exact is True
    assert seen[:2] == [8, 4]
    seen.clear()
    monkeypatch.setattr(probe_module, "_MAX_ACTIVATION_BYTES", 10 * 2**10)
    verdict = probe_split(model, batch, loss_fn)
    assert verdict.exact is None
    assert "saves more than 10.00 KiB for backward" in verdict.reason
    assert set(seen) == {8, 4}


def upscaling_step(num_rows, **settings):
    """Four convolutions at 32 x 32, as of a network that enlarges pictures."""
    torch.manual_seed(0)
    wide = [nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
    model = nn.Sequential(*wide, nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3))
    batch = torch.rand(num_rows, 1, 32, 32), torch.rand(num_rows, 1, 96, 96)
    trainer = MemoryEfficientTrainingWrapper(model, torch.optim.Adam(model.parameters()), **settings)
    peak = trace_allocations(lambda: trainer.train_step(batch, upscaling_loss)).peak
    return peak, probe_split(model, batch, upscaling_loss)


def upscaling_loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize(("num_rows", "exact"), [(8, None), (16, True)])
def test_on_the_cpu_the_first_split_step_takes_no_more_than_the_whole_batch(monkeypatch, num_rows, exact):
    """Of 8 rows none are probed; of 16, four, which take as much in float64 as 8 of the batch."""
    monkeypatch.setattr(probe_module, "_SMALL_ACTIVATION_BYTES", 2 * 2**20)  # as 16 MiB are to pictures of 90 x 90
    whole, _ = upscaling_step(num_rows)
    first, verdict = upscaling_step(num_rows, accumulation_steps=num_rows)
    assert first <= whole
    assert verdict.exact is exact
    assert exact or "saves more than 2.00 MiB for backward" in verdict.reason


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(2, 4, 3, 2), nn.Conv2d(2, 4, 3, groups=2)])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
def test_convolutions_by_row_have_the_same_gradients(layer, frozen):
    layer = copy.deepcopy(layer).double()
    x = torch.randn(5, 2, 9, 9, dtype=torch.float64, requires_grad=bool(frozen))
    wanted = [each for name, each in layer.named_parameters() if name not in frozen] + [x] * bool(frozen)
    expected = torch.autograd.grad(layer(x).square().sum(), wanted)
    with probe_module._ConvolutionsByRow():
        found = torch.autograd.grad(layer(x).square().sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_what_can_be_split_takes_three_passes():
    """Noise is judged on the whole batch, whose gradient is then compared with its parts': 3 times 8 rows."""
    seen = []

    def loss_fn(model, x):
        seen.append(len(x))
        return square_loss(model, x)

    assert probe_split(net(), torch.randn(ROWS, 6), loss_fn).exact is True
    assert seen == [8, 8, 5, 3]


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_four_rows_tell_as_much_as_eight(monkeypatch, name):
    monkeypatch.setattr(probe_module, "_NUM_ROWS", (4,))
    (test_what_can_be_split if name in EXACT else test_what_cannot_be_split_and_why)(name)


def test_out_of_memory_in_the_loss_is_no_error():
    def loss_fn(model, x):
        if len(x) > 4:
            raise MemoryError
        return square_loss(model, x)

    assert probe_split(net(), torch.randn(8, 6), loss_fn).exact is True


WITH_NORM = SplitVerdict(exact=False, error=0.3, modules=("1", "body.2"))
COUPLED = SplitVerdict(exact=False, error=0.46, loss="rows")
UNEVEN = SplitVerdict(exact=False, error=0.5, loss="weights")
SUSPECTED = SplitVerdict(None, modules=("1",), reason="the parameters take 1.00 GiB, above 256.00 MiB")
UNKNOWN = SplitVerdict(None, reason="the batch has a single row")


@pytest.mark.parametrize(
    ("verdict", "expectation"),
    [
        (SplitVerdict(exact=True, error=0.0), nullcontext()),
        (UNKNOWN, nullcontext()),
        (WITH_NORM, pytest.warns(MemkitWarning, match=r"train_step: .* 1, body.2 .* GroupNorm .* \.eval\(\)")),
        (SUSPECTED, pytest.warns(MemkitWarning, match=r"In training mode 1 would see")),
        (UNEVEN, pytest.warns(MemkitWarning, match=r"return mk.Loss\(mean=loss, count=n\) from loss_fn")),
        (
            COUPLED,
            pytest.raises(ConfigError, match=r"off by 0.46 .* Way out: .*memkit.cached_backward .*on_oom='raise'"),
        ),
    ],
)
def test_a_verdict_becomes_nothing_a_warning_or_an_error(verdict, expectation):
    with warnings.catch_warnings(), expectation:
        warn_or_refuse(verdict, call="train_step")
