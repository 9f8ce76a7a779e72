"""The split check knows which modules and losses cannot be split, over a zoo with known answers; it leaves no trace."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memkit import Loss
from memkit._gradients.loss import read_loss
from memkit.train import sketches, split_ways
from memkit.train.split_check import Computation, Examination, check_split
from memkit.train.split_ways import ways_to_cut
from memkit.train.wrapper import MemoryEfficientTrainingWrapper
from tests.allocations import trace_allocations
from tests.helpers import assert_same
from tests.toys import classify, mean_square

ROWS = 12


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
    """A batch normalization that is no subclass of torch's."""

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


def labeled():
    return torch.randn(ROWS, 6), torch.arange(ROWS) % 5


def views():
    return torch.randn(ROWS, 6), torch.randn(ROWS, 6)


def fresh_spectral_norm(layer):
    """A spectral norm far from its fixed point, so that one power iteration more makes a difference."""
    layer = nn.utils.parametrizations.spectral_norm(layer)
    nn.init.normal_(layer.parametrizations.weight[0]._u)
    return layer


def evaluated(model, *names):
    for name in names:
        model.get_submodule(name).eval()
    return model


EXACT = {
    "linear": (net, rows(6), mean_square),
    "layer norm": (lambda: net(nn.LayerNorm(8)), rows(6), mean_square),
    "group norm": (lambda: conv(nn.GroupNorm(2, 8)), rows(2, 6, 6), mean_square),
    "instance norm": (lambda: conv(nn.InstanceNorm2d(8, affine=True)), rows(2, 6, 6), mean_square),
    "instance norm with statistics": (
        lambda: conv(nn.InstanceNorm2d(8, track_running_stats=True)),
        rows(2, 6, 6),
        mean_square,
    ),
    "attention with dropout": (Attention, rows(4, 8), mean_square),
    "GRU with dropout": (Recurrent, rows(4, 8), mean_square),
    "dropout": (lambda: net(nn.Dropout(0.5)), rows(6), mean_square),
    "functional dropout": (lambda: net(FunctionalDropout()), rows(6), mean_square),
    "float32 inside": (lambda: net(RowNorm32()), rows(6), mean_square),
    "batch norm in evaluation": (lambda: evaluated(net(nn.BatchNorm1d(8)), "1"), rows(6), mean_square),
    "hand-written norm in evaluation": (lambda: evaluated(net(HandWrittenNorm()), "1"), rows(6), mean_square),
    "complex weights": (
        lambda: nn.Sequential(nn.Linear(6, 4, dtype=torch.complex64)),
        lambda: torch.randn(ROWS, 6, dtype=torch.complex64),
        lambda model, x: model(x).abs().pow(2).mean(),
    ),
    "classification": (net, labeled, classify),
    "dice per sample": (net, rows(6), sample_dice),
    "tokens with count": (Words, make_tokens, token_sum),
    "sparse embedding": (lambda: Words(sparse=True), make_tokens, token_sum),
    "class weights with count": (net, labeled, class_weighted_sum),
    "sum with count": (net, rows(6), sum_with_count),
    "autocast": (net, rows(6), autocast_loss),
    "dict batch": (
        TwoInputs,
        lambda: {"x": torch.randn(ROWS, 6), "more": (torch.randn(ROWS, 1),), "y": torch.randn(ROWS, 5)},
        dict_loss,
    ),
    "frozen part": (lambda: nn.Sequential(net().requires_grad_(False), nn.Linear(5, 2)), rows(6), mean_square),
}

# what is at fault: modules, and what of the loss
INEXACT = {
    "batch norm": (lambda: net(nn.BatchNorm1d(8)), rows(6), mean_square, ("1",), None),
    "batch norm 2d": (lambda: conv(nn.BatchNorm2d(8)), rows(2, 6, 6), mean_square, ("1",), None),
    "batch norm 3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.Tanh()),
        rows(1, 4, 4, 4),
        mean_square,
        ("1",),
        None,
    ),
    "batch norm with cumulative statistics": (
        lambda: net(nn.BatchNorm1d(8, momentum=None)),
        rows(6),
        mean_square,
        ("1",),
        None,
    ),
    "batch norm without statistics, in evaluation": (
        lambda: evaluated(net(nn.BatchNorm1d(8, track_running_stats=False)), "1"),
        rows(6),
        mean_square,
        ("1",),
        None,
    ),
    "synchronized batch norm": (lambda: net(nn.SyncBatchNorm(8)), rows(6), mean_square, ("1",), None),
    "subclass of batch norm": (lambda: net(OwnBatchNorm(8)), rows(6), mean_square, ("1",), None),
    "two batch norms, one in evaluation": (
        lambda: evaluated(net(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), "2"),
        rows(6),
        mean_square,
        ("1",),
        None,
    ),
    "batch norm behind functional dropout": (
        lambda: net(FunctionalDropout(), nn.BatchNorm1d(8)),
        rows(6),
        mean_square,
        ("2",),
        None,
    ),
    "hand-written norm": (lambda: net(HandWrittenNorm()), rows(6), mean_square, ("1",), None),
    "hand-written norm and batch norm": (
        lambda: net(HandWrittenNorm(), nn.BatchNorm1d(8)),
        rows(6),
        mean_square,
        ("2", "1"),
        None,
    ),
    "centered over the batch": (lambda: net(AlwaysCentred()), rows(6), mean_square, (), "rows"),
    "InfoNCE": (Gram, views, info_nce, (), "rows"),
    "InfoNCE over batch norm": (lambda: Gram(nn.BatchNorm1d(8)), views, info_nce, ("encoder.1",), "rows"),
    "hard triplets": (net, labeled, hard_triplet, (), "rows"),
    "dice over the batch": (net, rows(6), batch_dice, (), "rows"),
    "pairwise ranking": (net, labeled, pairwise_ranking, (), "rows"),
    "correlation": (net, rows(6), correlation, (), "rows"),
    "divided by the batch's maximum": (net, rows(6), by_batch_maximum, (), "rows"),
    "small term over the batch": (net, rows(6), variance_regularised, (), "rows"),
    "tokens without count": (Words, make_tokens, token_mean, (), "weights"),
    "class weights without count": (net, labeled, class_weighted, (), "weights"),
    "sum without count": (net, rows(6), plain_sum, (), "sum"),
    "spectral norm": (
        lambda: nn.Sequential(fresh_spectral_norm(nn.Linear(6, 8)), nn.Tanh()),
        rows(6),
        mean_square,
        (),
        "state",
    ),
    "batch norm and class weights": (
        lambda: net(nn.BatchNorm1d(8)),
        labeled,
        class_weighted,
        ("1",),
        "weights",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_what_can_be_split(name, dtype):
    make_model, make_batch, loss_fn = EXACT[name]
    verdict = check_split(in_dtype(make_model(), dtype), in_dtype(make_batch(), dtype), loss_fn)
    assert verdict.exact is True, verdict
    assert (verdict.modules, verdict.state, verdict.loss, verdict.advice) == ((), (), None, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INEXACT)
def test_what_cannot_be_split_and_why(name, dtype):
    make_model, make_batch, loss_fn, modules, loss = INEXACT[name]
    verdict = check_split(in_dtype(make_model(), dtype), in_dtype(make_batch(), dtype), loss_fn)
    assert verdict.exact is False, verdict
    assert verdict.error > 1e-6
    assert (verdict.modules, verdict.loss) == (modules, loss)
    assert all(module in verdict.advice for module in modules)
    ways_out = {
        "rows": "cached_backward",
        "weights": "mk.Loss(mean=loss, count=n)",
        "sum": "mk.Loss(sum=loss, count=number of rows)",
        "state": "once per step",
        None: "",
    }
    assert ways_out[loss] in verdict.advice


def in_dtype(value, dtype):
    """Convert a model or a batch of float32 (or of complex numbers, which follow)."""
    if isinstance(value, nn.Module):
        is_complex = any(each.is_complex() for each in value.parameters())
        if is_complex:  # Module.to warns that complex modules are new
            for each in value.parameters():
                each.data = each.data.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
            return value
        return value.to(dtype)
    to = {torch.float32: dtype, torch.complex64: torch.complex128 if dtype == torch.float64 else torch.complex64}
    return pytree.tree_map(lambda leaf: leaf.to(to.get(leaf.dtype, leaf.dtype)), value)


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_half_precision_is_told_from_a_true_difference(name):
    """A small bfloat16 model is looked at in float32: no false alarm, and what is off by more than 2% is found."""
    make_model, make_batch, loss_fn = (EXACT.get(name) or INEXACT[name])[:3]
    if name in ("complex weights", "autocast"):
        pytest.skip("has a precision of its own")
    model, batch = in_dtype(make_model(), torch.bfloat16), in_dtype(make_batch(), torch.bfloat16)
    verdict = check_split(model, batch, loss_fn)
    if name in EXACT:
        assert verdict.exact is True, verdict
        return
    model, batch = in_dtype(make_model(), torch.float64), in_dtype(make_batch(), torch.float64)
    if check_split(model, batch, loss_fn).error > 0.02:
        assert verdict.exact is False, verdict


@pytest.mark.parametrize("num_rows", range(2, 8))
def test_few_rows_are_enough(num_rows):
    x = torch.randn(num_rows, 6)
    assert check_split(net(), x, mean_square).exact is True
    assert check_split(Gram(), (x, x + 1), info_nce).loss == "rows"


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_four_rows_tell_as_much_as_eight(monkeypatch, name):
    monkeypatch.setattr(split_ways, "_NUM_ROWS", 4)
    test = test_what_can_be_split if name in EXACT else test_what_cannot_be_split_and_why
    test(name, torch.float32)


def test_a_part_without_any_label_is_a_matter_of_weights():
    words, labels = make_tokens()
    labels[6:] = -100  # the second part's mean is 0 / 0
    assert check_split(Words(), (words, labels), token_mean).loss == "weights"
    assert check_split(Words(), (words, labels), token_sum).exact is True


def test_a_permutation_of_the_rows_is_named():
    def mixup(model, x):
        return mean_square(model, 0.7 * x + 0.3 * x[torch.randperm(len(x))])

    verdict = check_split(net(), torch.randn(12, 6), mixup)
    assert verdict.exact is None
    assert "draws a permutation of the rows (mixup, SMOTE)" in verdict.reason


def test_a_sum_has_a_way_out_of_its_own():
    x = torch.randn(12, 6)
    assert "mk.Loss(sum=loss, count=number of rows)" in check_split(net(), x, plain_sum).advice
    assert check_split(net(), x, lambda model, x: Loss(sum=plain_sum(model, x), count=len(x))).exact is True


def test_rows_that_differ_are_looked_at_whatever_their_place():
    """Padding in two rows of 200 is enough to see that the mean is over tokens."""
    words = torch.randint(1, 20, (200, 7))
    labels = words.clone()
    labels[[33, 150], 2:] = -100
    assert check_split(Words(), (words, labels), token_mean).loss == "weights"
    assert check_split(Words(), (words, words), token_mean).exact is True  # nothing is padded: rows weigh the same


def test_pairs_of_rows_stay_together_where_all_parts_hold_whole_pairs():
    def adjacent_pairs(model, x):
        z = model(x)
        return (z[0::2] - z[1::2]).pow(2).mean()

    def triplets(model, x):
        anchor, near, far = model(x).view(-1, 3, 5).unbind(1)
        return F.relu((anchor - near).norm(dim=1) - (anchor - far).norm(dim=1) + 1).mean()

    x = torch.randn(24, 6)
    assert check_split(net(), x, adjacent_pairs, num_parts=3).exact is True
    assert check_split(net(), x, triplets, num_parts=4).exact is True  # few rows refuse, or mix; real parts decide
    halves = check_split(net(), x, lambda model, x: (model(x)[::2] - model(x).flip(0)[::2]).pow(2).mean(), num_parts=4)
    assert halves.loss == "rows"


# ----------------------------------------------------------------------------------------------- what used to be silent


class Casting(nn.Module):
    """Casts to float32 inside, whatever comes, and then mixes the rows."""

    def __init__(self, mixes=True):
        super().__init__()
        self.net, self.mixes = net(), mixes

    def forward(self, x):
        out = self.net(x.float())
        return out - out.mean(0) if self.mixes else out


class Keeping(Casting):
    """Keeps its activation, which no deep copy takes: it is no leaf."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Noisy(Casting):
    """Adds noise of its own."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class NoisyFromGenerator(Casting):
    def __init__(self, mixes=True):
        super().__init__(mixes)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


class Checkpointed(Noisy):
    """Draws again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedReentrant(Noisy):
    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("kind", [Casting, Keeping, Noisy, NoisyFromGenerator, Checkpointed, CheckpointedReentrant])
def test_models_that_no_copy_in_float64_runs(kind, mixes):
    verdict = check_split(kind(mixes), torch.randn(ROWS, 6), lambda model, x: (model(x) - 0.3).pow(2).mean())
    assert (verdict.exact, verdict.loss) == ((False, "rows") if mixes else (True, None)), verdict


def test_float32_class_weights_and_teachers_in_the_loss():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 3.0, 1.0]))
    teacher = net().requires_grad_(False)
    x, y = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,))
    weighted = check_split(net(), (x, y), lambda model, batch: criterion(model(batch[0]), batch[1]))
    assert (weighted.exact, weighted.loss) == (False, "weights")
    distilled = check_split(net(), x, lambda model, x: F.mse_loss(model(x), teacher(x)))
    assert distilled.exact is True
    compared = check_split(net(), x, lambda model, x: F.mse_loss(model(x) @ model(x).T, teacher(x) @ teacher(x).T))
    assert (compared.exact, compared.loss) == (False, "rows")


class Queue(nn.Module):
    """MoCo's queue of keys, which each forward pushes on."""

    def __init__(self):
        super().__init__()
        self.encoder = net()
        self.register_buffer("queue", F.normalize(torch.randn(32, 5)))

    def forward(self, x):
        keys = F.normalize(self.encoder(x))
        logits = keys @ self.queue.clone().T
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys, self.queue])[:32])
        return logits


class Center(nn.Module):
    """DINO's center, a plain attribute that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.encoder, self.center = net(), torch.zeros(5)

    def forward(self, x):
        out = self.encoder(x) - self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return out


class Momentum(nn.Module):
    """A momentum encoder that forward moves."""

    def __init__(self):
        super().__init__()
        self.encoder = net()
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        with torch.no_grad():
            self.teacher[0].weight.add_(0.1)

    def forward(self, x):
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        return self.encoder(x) - self.teacher(x)


class Normalizer(nn.Module):
    """A running normalizer, a plain Python object outside of any buffer, as in reinforcement learning."""

    class Moments:
        def __init__(self):
            self.count, self.total = 1, 0.0

    def __init__(self):
        super().__init__()
        self.net, self.moments = net(), self.Moments()

    def forward(self, x):
        out = self.net(x * self.moments.count / (1 + self.moments.total))
        self.moments.count += len(x)
        self.moments.total += float(x.detach().abs().sum())
        return out


class Warmup(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.net, self.num_calls = net(), 0

    def forward(self, x):
        self.num_calls += 1
        return self.net(x) * min(1.0, self.num_calls / 100)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (Queue, "queue"),
        (Center, "center"),
        (Momentum, "teacher.0.weight"),
        (Normalizer, "Moments.count"),
        (Warmup, "num_calls"),
    ],
)
def test_state_that_a_forward_changes_and_that_reaches_the_gradient(kind, state):
    model = kind()
    before = copy.deepcopy(model.state_dict()), dict(vars(getattr(model, "moments", model)))
    verdict = check_split(model, torch.randn(ROWS, 6), lambda model, x: (model(x) - 0.3).pow(2).mean())
    assert (verdict.exact, verdict.loss) == (False, "state")
    assert state in verdict.advice
    assert_same(model.state_dict(), before[0])
    assert vars(getattr(model, "moments", model)) == before[1]


class Counting(nn.Module):
    """State that does not reach the gradient."""

    def __init__(self):
        super().__init__()
        self.net, self.num_calls, self.seen = net(), 0, []
        self.register_buffer("num_rows", torch.tensor(0))

    def forward(self, x):
        self.num_calls += 1
        self.seen.append(len(x))
        self.num_rows += len(x)
        return self.net(x)


def test_state_that_does_not_matter_is_no_alarm_and_is_put_back():
    model = Counting()
    losses = []

    def loss_fn(model, x):
        losses.append(len(x))
        return mean_square(model, x)

    assert check_split(model, torch.randn(ROWS, 6), loss_fn).exact is True
    assert (model.num_calls, model.seen, int(model.num_rows), losses) == (0, [], 0, [])


class Capacity(nn.Module):
    """Warms up as BetaVAE does: the count moves a target; only the sign of the distance has a slope."""

    def __init__(self):
        super().__init__()
        self.net, self.num_iter = net(), 0

    def loss(self, x):
        self.num_iter += 1
        return (self.net(x).pow(2).mean() + 1 - self.num_iter / 1000).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_that_reaches_the_loss_and_not_yet_its_gradient(dtype):
    model = Capacity().to(dtype)
    verdict = check_split(model, torch.randn(ROWS, 6, dtype=dtype), lambda model, x: model.loss(x))
    assert (verdict.exact, verdict.loss, verdict.state, model.num_iter) == (False, "state", ("num_iter",), 0)


def test_a_count_in_the_loss_function_itself():
    count = {"calls": 0}

    def loss_fn(model, x):
        count["calls"] += 1
        return mean_square(model, x) + 0.1 * count["calls"]

    verdict = check_split(net(), torch.randn(ROWS, 6), loss_fn)
    assert (verdict.exact, verdict.loss, count) == (False, "state", {"calls": 0})


@pytest.mark.parametrize("what", ["statistic", "draw", "count"])
def test_values_that_are_only_shown_are_no_alarm(what):
    """They differ in parts that start from one state too, so that state is not what makes them differ."""

    def loss_fn(model, x):
        model.num_calls += 1
        out = model(x)
        shown = {"statistic": out.detach().std(), "draw": torch.tensor(random.random()), "count": out.new_zeros(())}
        return out.pow(2).mean() + shown[what]

    assert check_split(Counting(), torch.randn(ROWS, 6), loss_fn).exact is True


def test_a_parameter_with_a_tiny_gradient_counts_as_much_as_a_huge_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.huge, self.tiny = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x):
            tiny = self.tiny(x)
            return self.huge(x) * 1e3, (tiny - tiny.mean(0)) * 1e-3

    verdict = check_split(Two(), torch.randn(ROWS, 6), lambda model, x: sum(out.pow(2).mean() for out in model(x)))
    assert (verdict.exact, verdict.loss) == (False, "rows")


# --------------------------------------------------------------------------------------------------- it leaves no trace


def test_nothing_of_the_users_changes():
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5))
    evaluated(model, "2")
    model(torch.randn(4, 6)).sum().backward()
    batch = torch.randn(ROWS, 6)
    torch.randn(3), np.random.rand(3), random.random()
    own = torch.Generator().manual_seed(5)
    before = (
        copy.deepcopy(model.state_dict()),
        [p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        batch.clone(),
        (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), own.get_state()),
        [(id(p), p.dtype) for p in model.parameters()],
    )

    def loss_fn(model, x):
        noise = random.random() + np.random.rand() + torch.rand(()) + torch.rand((), generator=own)
        return model(x.mul_(2)).pow(2).mean() + 0 * noise

    verdict = check_split(model, batch, loss_fn)
    assert (verdict.exact, verdict.modules) == (False, ("1",))
    state, gradients, training, kept_batch, random_state, parameters = before
    assert_same(model.state_dict(), state)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))
    assert [module.training for module in model.modules()] == training
    assert torch.equal(batch, kept_batch)
    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert np.array_equal(np.random.get_state()[1], random_state[1])
    assert random.getstate() == random_state[2]
    assert torch.equal(own.get_state(), random_state[3])
    assert [(id(p), p.dtype) for p in model.parameters()] == parameters


def test_it_works_where_gradients_are_off():
    with torch.no_grad():
        assert check_split(net(), torch.randn(ROWS, 6), mean_square).exact is True


def test_hooks_on_parameters_see_the_gradient_of_each_part():
    model = net()
    handle = model[0].weight.register_hook(lambda gradient: 2 * gradient)
    assert check_split(model, torch.randn(ROWS, 6), mean_square).exact is True
    handle.remove()
    model[0].weight.register_hook(lambda gradient: gradient / gradient.abs().max())
    verdict = check_split(model, torch.randn(ROWS, 6), mean_square)
    assert (verdict.exact, verdict.loss) == (False, "hooks")
    assert "max_grad_norm" in verdict.advice


def test_a_compiled_model_is_checked_without_compiling():
    model = torch.compile(net(nn.BatchNorm1d(8)), backend=lambda graph, inputs: pytest.fail("compiled"))
    assert check_split(model, torch.randn(8, 6), mean_square).modules == ("_orig_mod.1",)


# ---------------------------------------------------------------------------------------------- where it cannot be told


class NoiseByRow(nn.Module):
    """Draws one number of NumPy's for each row."""

    def forward(self, x):
        return x * torch.tensor([[np.random.rand()] for _ in x], dtype=x.dtype)


class NoiseByBatch(nn.Module):
    """Draws one number of Python's for all rows."""

    def forward(self, x):
        return x * random.random()


class Unrepeatable(nn.Module):
    """Draws for each row, twice."""

    def forward(self, x):
        return NoiseByRow()(NoiseByRow()(x))


@pytest.mark.parametrize("noise", [NoiseByRow, NoiseByBatch])
def test_numpys_and_pythons_numbers_are_repeated_where_they_can_be(noise):
    assert check_split(net(noise()), torch.randn(ROWS, 6), mean_square).exact is True
    assert check_split(net(noise(), AlwaysCentred()), torch.randn(ROWS, 6), mean_square).exact is not True


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn", "reason"),
    [
        (net(), torch.randn(1, 6), mean_square, "the batch has a single row"),
        (net(), [object()], mean_square, "splitting a batch: got a object in it"),
        (net().requires_grad_(False), torch.randn(4, 6), mean_square, "no parameter to train"),
        (net(Unrepeatable()), torch.randn(4, 6), mean_square, "random numbers that cannot be repeated"),
        (net(), torch.randn(4, 6), lambda model, x: x.mean(), "a loss without a graph"),
        (net(), torch.full((4, 6), torch.nan), mean_square, "is not finite"),
        (net(), torch.randn(4, 6), lambda model, x: 0 * model(x).mean(), "is zero"),
        (net(), torch.randn(4, 6), lambda model, x: model(x[:1]).mean() + x.view(4, 2, 3).mean(), "RuntimeError"),
        (net(), torch.randn(4, 6), lambda model, x: (model(x).mean(), 4), "InputError: loss_fn: got a tuple"),
    ],
)
def test_what_is_in_the_way_is_said_and_no_error(model, batch, loss_fn, reason):
    verdict = check_split(model, batch, loss_fn)
    assert verdict.exact is None
    assert reason in verdict.reason


@pytest.mark.parametrize("exchange", [dist.all_reduce, lambda x: dist.all_gather([torch.empty_like(x)], x)])
def test_nothing_is_exchanged_with_other_processes(exchange):
    """The others may not be there: the check stops before, and says so."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def loss_fn(model, x):
        out = model(x)
        exchange(out.detach().clone())
        return out.pow(2).mean()

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        verdict = check_split(net(nn.BatchNorm1d(8)), torch.randn(8, 6), loss_fn)
        alone = check_split(net(), torch.randn(8, 6), mean_square)
    finally:
        dist.destroy_process_group()
    assert verdict.exact is None
    assert "RanksError: c10d" in verdict.reason
    assert alone.exact is True


@pytest.mark.parametrize(("capacity", "exact"), [(8, True), (5, True), (2, True), (1, None)])
def test_out_of_memory_means_fewer_rows(capacity, exact):
    def loss_fn(model, x):
        if len(x) > capacity:
            raise MemoryError
        return mean_square(model, x)

    verdict = check_split(net(), torch.randn(16, 6), loss_fn)
    assert verdict.exact is exact
    assert exact or "MemoryError" in verdict.reason


def test_it_takes_few_runs_of_few_rows_where_all_is_well():
    seen = Seen()
    assert check_split(net(), torch.randn(100, 6), seen).exact is True
    assert seen.lengths == [8, 6, 2, 8, 6, 2]  # rows as they come, then in another order


@pytest.mark.parametrize("num_rows", [2, 3, 4, 8, 9, 16, 31, 64, 500])
@pytest.mark.parametrize("num_parts", [2, 3, 16])
def test_where_all_is_well_it_takes_no_longer_than_two_plain_steps(num_rows, num_parts):
    """Counted in rows that go forward and backward."""
    seen = Seen()
    labels = torch.arange(num_rows) % 2
    for is_first in (True, False):
        batch = torch.randn(num_rows, 6), labels
        ways = ways_to_cut(batch, num_parts=num_parts, is_first=is_first)
        model = net()
        examination = Examination(model, Computation(model.parameters), [seen], ways)
        seen.lengths.clear()
        for attempt in examination.attempts():
            with attempt as micro:
                attempt.backward(read_loss(seen(model, micro[0]), call="loss_fn"))
        assert examination.verdict.exact is True
        assert 0 < sum(seen.lengths) <= 2 * num_rows


class Seen:
    """Counts where the check cannot put the count back."""

    __slots__ = ("lengths",)

    def __init__(self):
        self.lengths = []

    def __call__(self, model, x):
        self.lengths = [*self.lengths, len(x)]
        return mean_square(model, x)


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("num_rows", [8, 16])
@pytest.mark.parametrize("parts", ["rows", "halves"])
def test_the_first_split_step_takes_no_more_than_the_whole_batch(num_rows, parts):
    def peak(**settings):
        torch.manual_seed(0)
        wide = [nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
        model = nn.Sequential(*wide, nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1))
        batch = torch.rand(num_rows, 1, 32, 32), torch.rand(num_rows, 9, 32, 32)
        trainer = MemoryEfficientTrainingWrapper(model, torch.optim.Adam(model.parameters()), **settings)
        return trace_allocations(lambda: trainer.train_step(batch, lambda m, b: F.mse_loss(m(b[0]), b[1]))).peak

    assert peak(accumulation_steps=num_rows if parts == "rows" else 2) <= peak(probe=False)


def test_large_parameters_are_compared_in_a_few_numbers_each():
    """The check of a model of 64 MiB takes no second set of gradients."""
    model = nn.Sequential(nn.Linear(2048, 4096), nn.Tanh(), nn.Linear(4096, 2048))
    batch = torch.randn(16, 2048)
    plain = trace_allocations(lambda: mean_square(model, batch).backward()).peak
    model.zero_grad()
    assert trace_allocations(lambda: check_split(model, batch, mean_square)).peak < 0.75 * plain
    with_mixing = check_split(nn.Sequential(model, AlwaysCentred()), batch, lambda m, x: (m(x) - 0.1).pow(2).mean())
    assert (with_mixing.exact, with_mixing.loss) == (False, "rows")


@pytest.mark.parametrize("shape", [(2047,), (2049,), (64, 33), (300, 400), (7, 513, 3)])
def test_a_sketch_is_linear_and_has_about_the_norm(shape):
    one, other = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(sketches._sketch(one - 3 * other), sketches._sketch(one) - 3 * sketches._sketch(other))
    assert 0.8 < float(sketches._sketch(one).norm() / one.norm()) < 1.2
    single = torch.zeros(shape, dtype=torch.float64)
    single.view(-1)[-1] = 2.0
    assert float(sketches._sketch(single).norm()) == 2.0


def test_a_large_sparse_gradient_is_folded():
    embedding = nn.Embedding(5000, 16, sparse=True)
    words = torch.randint(0, 5000, (32, 4))
    assert check_split(embedding, words, mean_square).exact is True
    assert check_split(embedding, words, lambda m, x: (m(x) - m(x).mean(0)).pow(2).mean()).loss == "rows"
